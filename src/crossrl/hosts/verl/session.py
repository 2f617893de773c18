"""One run of verl's trainer with a tape or an exchange: from the start of its ``fit`` to the end."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from crossrl.batch import Batch, Meaning
from crossrl.hosts.verl.adapter import Adapter
from crossrl.hosts.verl.checkpoints import FACTS, Checkpoints
from crossrl.hosts.verl.curves import Rows, row_of
from crossrl.hosts.verl.errors import HostError
from crossrl.hosts.verl.facts import IGNORE, OWN, Facts
from crossrl.hosts.verl.installation import installation, of_all
from crossrl.hosts.verl.meanings import computed, sampled
from crossrl.hosts.verl.options import exchange_of, options_of, skip_layout
from crossrl.hosts.verl.settings import Settings
from crossrl.hosts.verl.stages import Generate, Update, computed_stages
from crossrl.hosts.verl.unseen import Unseen
from crossrl.hosts.verl.versions import installed
from crossrl.hosts.verl.weights import actor_digest
from crossrl.stages.base import At, Stage
from crossrl.tape import session
from crossrl.tape.api import Split
from crossrl.tape.errors import ExchangeError
from crossrl.tape.exchange import WRITER
from crossrl.tape.layout import RunLayout
from crossrl.tape.record import Record
from crossrl.tape.tape import Tape
from crossrl.tape.wait import wait_for

log = logging.getLogger("crossrl.tape")
WORKERS_LIMIT_S = 1800.0  # of a question to verl's workers; they answer it between two of verl's own calls


class Session:
    """``version``: of the actor's weights, as training steps done."""

    def __init__(self, trainer: Any, settings: Settings) -> None:
        self.trainer, self.settings, self.config = trainer, settings, trainer.config
        self.facts, self.version = Facts(trainer, settings), 0
        self._digest: tuple[int, str] | None = None
        self._unseen = Unseen()
        self._begun = self._attached = False
        self.own, self.rows = RunLayout(settings.tape_dir), Rows(settings.home)
        source = settings.tape.replay_from
        self.source = RunLayout(Path(source).expanduser()) if source else self.own
        self.recording = settings.tape.mode == "record" or (
            settings.tape.mode == "replay" and self.source != self.own
        )  # fmt: skip
        self.exchange = exchange_of(settings, self.facts.agreement, self.weights)
        self.checkpoints = Checkpoints(settings.share_dir.expanduser().absolute(), trainer.actor_rollout_wg, self.ask)
        self.tape = Tape(
            self.own, uuid.uuid4().hex, self._fingerprint, options_of(settings), lambda: self.version,
            self.exchange.wait if self.exchange else wait_for, f"verl's {self.config.trainer.device}",
        )  # fmt: skip
        self.adapter = self._adapter()
        self.generate, self.updater = (
            Generate(bool(self.config.actor_rollout_ref.rollout.calculate_log_probs)),
            Update(),
        )
        self._rollout, self._update = self._wrapped_rollout(), self._wrapped_update()

    # -- what the patches call ----------------------------------------------------------------------------------------

    def attach(self, *args: Any) -> tuple[Any, ...]:
        self._attached, self._save = True, self.trainer._save_checkpoint
        self.trainer._save_checkpoint = self._saving
        return self.adapter.attach(*args)

    def update(self, original: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """verl's ``_update_actor``, recorded, or done by the other side of an exchange."""
        if not self.recording and self.exchange is None:  # rollout skip alone: nothing to look at, nothing to hash
            return original()
        at = At(self.trainer.global_steps)
        whole = self.adapter.visible(args, kwargs)
        for stage in computed_stages(whole):
            if self.recording and self.settings.covers(stage.name):
                self.tape.wrap(stage, "record")(whole.only(stage.reads), at)

        def run(at: At) -> tuple[Any, dict[str, Any]]:
            before = self.weights() if self._compared(at) else ""
            native = original()
            self.version = at.step
            info: dict[str, Any] = {"metrics": self.adapter.metrics(native, kwargs), "verl": {"version": installed()}}
            if self._compared(at):
                info["state"] = self._state(at, before, info["metrics"])
            if self.exchange and WRITER["update"] == self.exchange.role:
                index = self.tape.calls(self.exchange.label, "update") - 1  # counted already
                info[FACTS] = self.checkpoints.save(index, at.step)
            return native, info

        self.updater.run, self.updater.native = run, None
        out = self._update(Batch(whole.sample_id), at)
        self.version = at.step
        if self.recording:
            self.rows.add(row_of(at.step, whole, dict(out.info["metrics"])))
        if self.updater.native is not None:
            return self.updater.native
        return self.adapter.stand_in(args, kwargs, dict(out.info["metrics"]))

    # -- what the adapters call ---------------------------------------------------------------------------------------

    def rollout(
        self, given: Batch, ask: Callable[[], tuple[Any, Batch]], rebuild: Callable[[Batch], Any]
    ) -> Any:  # fmt: skip
        """verl's own result of generation: as it came, or rebuilt from a record."""
        at = At(self.trainer.global_steps)
        if not self._begun:
            self._begin(at.step - 1)
        self.version = at.step - 1
        self.generate.ask, self.generate.native = ask, None
        out = self._rollout(given, at)
        if self.generate.native is not None:
            return self.generate.native
        if out.info.get("unlike"):
            raise HostError(
                f"the record of step {at.step} lacks {', '.join(out.info['unlike'])}: it cannot be replayed"
            )
        return rebuild(out.take(out.index_of(given.sample_id)))

    def refuse_unlike(self, odd: Sequence[str]) -> None:
        """What verl generated has tensors that a record cannot give back bit for bit."""
        if not odd:
            return
        what = f"{', '.join(odd)} of verl's rollout cannot be rebuilt from a record"
        if self.settings.skip_dir or self.settings.share:
            raise HostError(
                f"{what}: runs with images, routed experts or teachers are only recorded (tape.mode=record)"
            )
        log.warning("tape: %s; it is recorded, but will not be replayed", what)

    @property
    def epoch(self) -> int:
        """Passes over the data before this step."""
        steps = getattr(self.trainer, "steps_per_epoch", None) or len(self.trainer.train_dataloader)
        return int(self.trainer.global_steps - 1) // int(steps)

    def reading(self) -> tuple[Callable[[list[int]], str], frozenset[int], int, Meaning]:
        """How to read responses: decoder, end tokens, longest length, what their log-probs are."""
        end = self.trainer.tokenizer.eos_token_id
        ends = frozenset(end if isinstance(end, list) else [end] if end is not None else [])
        return (
            self.decode,
            ends,
            int(self.config.actor_rollout_ref.rollout.response_length),
            sampled(self.config, self.version),
        )

    def decode(self, ids: list[int]) -> str:
        return str(self.trainer.tokenizer.decode(ids, skip_special_tokens=True))

    def versions_of(self, reported: Sequence[Any]) -> list[int]:
        """The weights' version of each sample: as the engine reported it, else the trainer's."""
        return [int(v) if v is not None else self.version for v in reported]

    def computed(self, *parts: Any) -> Batch:
        """What the step has computed before the update: see ``meanings.computed``."""
        return computed(self.config, self.version, *parts)

    # -- the parts ----------------------------------------------------------------------------------------------------

    def ask(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(worker, *args)`` in each of verl's workers at once; raises what it raises there."""
        import ray

        workers = self.trainer.actor_rollout_wg.workers
        return list(ray.get([w.__ray_call__.remote(function, *args) for w in workers], timeout=WORKERS_LIMIT_S))

    def _compared(self, at: At) -> bool:
        """Whether somebody will see the weights of this update: hashing them is most of what a record costs."""
        steps = self.tape.options.steps
        recorded = self.recording and self.settings.covers("update") and (steps is None or at.step in steps)
        return recorded or self.exchange is not None

    def _state(self, at: At, before: str, metrics: Mapping[str, float]) -> dict[str, Any]:
        after, engine = self.weights(), {"steps_done": at.step, "weight_version": at.step}
        self._unseen.look(at.step, before, after, metrics)
        return {"before": {"weights": before}, "after": {"weights": after}, "engine": engine}

    def weights(self) -> str:
        """Digest of the actor's weights; asked for once for each version."""
        if self._digest is None or self._digest[0] != self.version:
            found = set(self.ask(actor_digest))
            if len(found) != 1:
                raise HostError(f"verl's workers hold different weights of the actor: {sorted(found)}")
            self._digest = self.version, found.pop()
        return self._digest[1]

    def close(self, error: BaseException | None) -> None:
        """The run ends: bring all records to the disk, tell the other side of an exchange."""
        if self._attached:
            self.adapter.detach()
            self.trainer._save_checkpoint = self._save
        try:
            session.close(self.tape, self.exchange, error, f"ended at step {self.version}")
        finally:
            self.rows.close()
        if error is None and self.recording and not self.own.steps():
            tape = self.settings.tape
            raise HostError(
                f"nothing was recorded: the run ended at step {self.version}, and none of its steps was among "
                f"tape.steps={tape.steps or 'all'} with a stage of tape.stages={list(tape.stages)}. Stages that need "
                f"more than a trained step: ref_log_prob (a reference), old_log_prob (not in bypass mode)"
            )

    def preflight(self) -> None:
        """Refuse before anything is generated where the first record has other settings than this run."""
        if self.exchange is None:  # whose entries are looked at once it is known who the two sides are
            self.tape.preflight(self._rollout if not self.recording else getattr(self._rollout, "inner", self._rollout))
        self._digest = None  # of a moment before verl loaded its checkpoint

    def _begin(self, done: int) -> None:
        """Before the first generation. ``done``: training steps that this run has behind it."""
        self._begun, self.version, counts = True, done, {}
        if self.exchange and done >= self.facts.total_steps:
            raise HostError(
                f"all {self.facts.total_steps} steps of this run were done before it was started again: it has nothing "
                f"to exchange. If the other side has not ended, start that one alone: it finds here what it needs"
            )
        if self.recording:
            self.rows.lock()  # before anything of another run is moved
            self.tape.start()
            self.rows.start(done, self.config, self.facts.total_steps, self.tape.set_aside(done or -1))
        self.tape.declare(of_all(self.ask(installation, str(self.config.trainer.device))))
        if self.settings.skip_dir:
            counts["rollout skip/cache/rollout/train"] = done
        if self.exchange:
            self.exchange.open(done)
            self.tape.run_id = self.exchange.mine.run_id  # the one that the other side knows
            first = int(self.exchange.mine.agreement["first_step"])
            for stage, role in WRITER.items():
                mode = "publish" if role == self.exchange.role else "follow"
                counts[f"{self.exchange.label}/{mode}/{stage}/train"] = done - first
            if WRITER["update"] == self.exchange.role:
                self.checkpoints.clean()
        self.tape.load_state(counts)
        self._saved()

    def _saving(self, *args: Any, **kwargs: Any) -> Any:
        """verl's ``_save_checkpoint``. A run that resumes there must find the records of all steps before it, and so
        must the other side of an exchange, for which nobody would make them again."""
        self.tape.flush()
        out = self._save(*args, **kwargs)
        self._saved()
        return out

    def _saved(self) -> None:
        """There is a checkpoint: entries before it will not be needed again by this side."""
        if self.exchange is None:
            return
        calls = {stage: self.tape.calls(self.exchange.label, stage) for stage in WRITER}
        self.exchange.done_with(calls)
        if WRITER["update"] == self.exchange.role:
            self.checkpoints.remove(calls["update"])

    def _bring(self, record: Record, at: At) -> None:
        """The state after an update that another run made (or this one, before it was started again)."""
        self.checkpoints.load(record)
        self.version, self._digest = at.step, None
        want, found = record.header.info["state"]["after"]["weights"], self.weights()
        if found != want:
            raise ExchangeError(
                f"{record.path}: after verl loaded its checkpoint the digest of the weights is {found[:16]}..., its "
                f"run had {want[:16]}...: this is not the state that was published"
            )

    def _adapter(self) -> Adapter:
        if self.settings.v1:
            from crossrl.hosts.verl.v1 import V1

            return V1(self.trainer, self)
        from crossrl.hosts.verl.v0 import V0

        return V0(self.trainer, self)

    def _wrapped_rollout(self) -> Stage:
        stage: Stage = self.generate
        if skip := skip_layout(self.settings, self.config):
            stage = self.tape.wrap(stage, "cache", skip)
        stage = self._shared(stage)
        if self.settings.tape.mode == "replay":
            stage = self.tape.wrap(stage, "replay", self.source)
        return self._recorded(stage)

    def _wrapped_update(self) -> Stage:
        return self._recorded(self._shared(self.updater))

    def _recorded(self, stage: Stage) -> Stage:
        return self.tape.wrap(stage, "record") if self.recording and self.settings.covers(stage.name) else stage

    def _shared(self, stage: Stage) -> Stage:
        if self.exchange is None:
            return stage
        mode = "publish" if WRITER[stage.name] == self.exchange.role else "follow"
        ignore = (OWN if mode == "publish" else IGNORE)[stage.name]
        return self.tape.wrap(
            stage, mode, self.exchange, restore=self._bring if stage.name == "update" else None, ignore=ignore
        )  # fmt: skip

    def _fingerprint(self, stage: str, split: Split) -> dict[str, Any]:
        seen = self.recording or self.exchange is not None  # rollout skip alone does not compare them
        return self.facts.of(stage, self.weights() if seen and stage in ("rollout", "old_log_prob") else "")
