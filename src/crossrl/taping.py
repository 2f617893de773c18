"""A run's tape: which stage is recorded, replayed or verified, from the keys ``tape.*`` and ``rollout.skip_*``."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from crossrl import settings
from crossrl.assemble import Parts
from crossrl.config.root import RunConfig
from crossrl.engines.base import EngineState
from crossrl.report import Reporter
from crossrl.sharing import IGNORE, OWN, open_exchange
from crossrl.stages.base import At, Stage
from crossrl.tape import session
from crossrl.tape.api import Split
from crossrl.tape.errors import ExchangeError
from crossrl.tape.exchange import WRITER, Exchange
from crossrl.tape.layout import RunLayout, SkipLayout
from crossrl.tape.modes import STATEFUL
from crossrl.tape.record import Record
from crossrl.tape.session import step_range
from crossrl.tape.space import estimate_bytes
from crossrl.tape.tape import Tape, TapeOptions
from crossrl.tape.texts import template_digest, tokenizer_digest
from crossrl.tape.wait import wait_for


class RunTape:
    """Wraps the stages of one run as its configuration says; a run without a tape has none of these.

    ``tolerance``: for mode verify, field to absolute difference that passes.
    """

    def __init__(
        self,
        cfg: RunConfig,
        parts: Parts,
        folder: Path,
        tolerance: Mapping[str, float] | None = None,
        show: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.cfg, self.parts = cfg, parts
        self.own = RunLayout(Path(cfg.tape.dir) if cfg.tape.dir else folder / "tape")
        self.source = RunLayout(Path(cfg.tape.replay_from)) if cfg.tape.replay_from else self.own
        self.digests = Digests(parts)
        self.recording = cfg.tape.mode == "record" or (cfg.tape.mode == "replay" and self.source != self.own)
        options = TapeOptions(
            accept=tuple(cfg.tape.accept),
            steps=step_range(cfg.tape.steps),
            keep=cfg.tape.keep,
            max_bytes=cfg.tape.max_bytes,
            unstorable="refuse" if cfg.tape.unstorable == "refuse" else "leave_out",
            wait_s=cfg.trainer.share_data_timeout,
            tolerance=dict(tolerance or {}),
        )
        facts = {**self._data(), **self._text(), "model": model_config(parts)}
        self.exchange = open_exchange(cfg, parts, folder, facts, show)
        self.tape = Tape(
            self.own, uuid.uuid4().hex, self.fingerprint, options, lambda: parts.trainer.weight_version,
            self.exchange.wait if self.exchange else wait_for, parts.trainer.facts.device,
        )  # fmt: skip

    def wrap(self, stage: Stage) -> Stage:
        """``stage`` as this run has it taped. Refuses at once where a record has other settings than this run."""
        mode, rollout = self.cfg.tape.mode, self.cfg.actor_rollout_ref.rollout
        first = self.first_validation() if stage is self.parts.val_rollout else At(1)
        if stage.name == "rollout" and rollout.skip_rollout:
            stage = self.tape.wrap(stage, "cache", self.skip_layout())
            if first:
                self.tape.preflight(stage, first)
        if self.exchange and stage.name in WRITER and stage is not self.parts.val_rollout:
            stage = self._shared(stage, self.exchange)
        if not {"all", stage.name} & set(self.cfg.tape.stages):
            return stage
        if mode == "verify" or (mode == "replay" and stage.name not in STATEFUL):
            stage = self.tape.wrap(stage, mode, self.source)
            if first:
                self.tape.preflight(stage, first)
        state = self.engine_state if stage.name == "update" and self.cfg.tape.state else None
        return self.tape.wrap(stage, "record", state=state) if self.recording else stage

    def _shared(self, stage: Stage, exchange: Exchange) -> Stage:
        """``stage`` published to the other side of an exchange, or taken from there."""
        mode = "publish" if WRITER[stage.name] == exchange.role else "follow"
        state, bring = (self.engine_state, self.bring_state) if stage.name == "update" else (None, None)
        ignore = IGNORE[stage.name] if mode == "follow" else OWN[stage.name]
        return self.tape.wrap(stage, mode, exchange, restore=bring, state=state, ignore=ignore)

    def bring_state(self, record: Record, at: At) -> None:
        """Put the state of a loaded update into the trainer. Raises ``ExchangeError`` if another one arrives."""
        facts = record.header.info["state"]
        self.parts.trainer.load_state(EngineState.from_named(record.state(), facts["engine"]))
        self.digests.forget()
        for kind, found in self.digests.update("after").items():
            if found != facts["after"][kind]:
                raise ExchangeError(
                    f"{record.path}: after loading it the digest of the {kind} is {found[:16]}..., its run had "
                    f"{facts['after'][kind][:16]}...: this is not the state that was published"
                )

    def engine_state(self) -> dict[str, torch.Tensor]:
        """What goes along with the record of an update."""
        return self.parts.trainer.state().named()

    def first_validation(self) -> At | None:
        """Of the recorded run, before training where it did not validate; None if this run will not validate."""
        trainer = self.cfg.trainer
        if self.parts.val_data is None or not (trainer.val_before_train or trainer.val_only or trainer.test_freq > 0):
            return None
        steps = [step for step in self.source.steps() if self.source.find("rollout", At(step, 0, "val"), 0)]
        return At(steps[0] if steps else 0, 0, "val")

    def skip_layout(self) -> SkipLayout:
        cfg, rollout = self.cfg, self.cfg.actor_rollout_ref.rollout
        size = cfg.data.gen_batch_size or cfg.data.train_batch_size
        return SkipLayout(
            Path(rollout.skip_dump_dir), cfg.trainer.experiment_name, cfg.trainer.project_name, size, rollout.n
        )

    def start(self, done: int) -> None:
        """Check that there is room, and set aside what a run recorded here before, after the step that this one
        resumes at (all of it, when it starts anew): moved, never overwritten."""
        if self.recording:
            self.tape.start(self.estimate(self.parts.total_steps - done))
            self.tape.set_aside(done or -1)
        if self.exchange:
            counted = self.exchange.open(done)
            self.tape.run_id = self.exchange.mine.run_id  # the one that the other side knows
            if not counted:
                self.tape.forget_calls(self.exchange.label)
            self.saved()

    def saved(self) -> None:
        """There is a checkpoint: what was before it will not be needed again."""
        if self.exchange:
            self.exchange.done_with({stage: self.tape.calls(self.exchange.label, stage) for stage in WRITER})

    def close(self, error: BaseException | None, how: str) -> None:
        """See ``crossrl.tape.session.close``."""
        session.close(self.tape, self.exchange, error, how)

    def set_aside_validation(self, step: int) -> None:
        """Move the records of a validation that a kill interrupted; it is done again."""
        self.tape.flush()
        records = list(self.own.step_path(step).glob("val.*")) if self.recording else []
        if records:
            number = sum(1 for _ in self.own.root.glob("superseded-*"))
            target = self.own.root / f"superseded-{number}" / self.own.step_path(step).name
            target.mkdir(parents=True)
            for record in records:
                record.rename(target / record.name)

    def lacks(self, stage: str, step: int) -> bool:
        """Whether this run records ``stage`` and its record of ``step`` is not there."""
        named = bool({"all", stage} & set(self.cfg.tape.stages))
        return self.recording and named and self.own.find(stage, At(step), 0) is None

    def estimate(self, steps: int) -> int:
        """Bytes that the records of ``steps`` steps will take, responses taken at their limit."""
        cfg = self.cfg
        named = [s for s in self.parts.stages.values() if {"all", s.name} & set(cfg.tape.stages)]
        samples = cfg.data.train_batch_size * cfg.actor_rollout_ref.rollout.n
        prompt = float(self.parts.train_data.prompt_ids.lengths.mean())
        fields = [[*s.writes, *(("prompt_ids", "prompt") if s.name == "rollout" else ())] for s in named]
        step = sum(estimate_bytes(f, samples, prompt, cfg.data.max_response_length) for f in fields)
        chosen = step_range(cfg.tape.steps)
        count = steps if chosen is None else min(steps, len(chosen))
        return step * (min(count, cfg.tape.keep) if cfg.tape.keep else count)

    def fingerprint(self, stage: str, split: Split) -> Mapping[str, Any]:
        """What ``stage`` depends on besides its input; what is downstream of it is left out on purpose."""
        cfg, arr = self.cfg, self.cfg.actor_rollout_ref
        model = {"config": model_config(self.parts), "dtype": arr.actor.fsdp_config.dtype}
        if stage == "rollout":
            split_settings = self._training() if split == "train" else self._validation()
            return {**split_settings, **self._text(), "model": model, "weights": self.digests.weights()}
        if stage == "reward":
            return {"reward": {"code": self.parts.scorer.digest, "overlong_buffer": asdict(cfg.reward.overlong_buffer)}}
        if stage in ("old_log_prob", "ref_log_prob"):
            weights = self.digests.weights() if stage == "old_log_prob" else self.digests.reference()
            return {"temperature": arr.rollout.temperature, "model": model, "weights": weights}
        if stage == "advantage":
            config = asdict(settings.advantage_config(cfg))
            return {"advantage": config, "kl_coef": self.parts.advantage.controller.kl_coef}
        if stage == "update":
            return {
                "objective": asdict(settings.objective_config(cfg)), "plan": asdict(settings.update_plan(cfg)),
                "optim": asdict(arr.actor.optim), "model": model,
            }  # fmt: skip
        return {}

    def _training(self) -> Mapping[str, Any]:
        cfg, rollout = self.cfg, self.cfg.actor_rollout_ref.rollout
        seed, sampling = settings.seed_of(rollout.seed, cfg), asdict(settings.training_sampling(cfg))
        return {
            "rollout": {**self._engine(), "seed": seed, "n": rollout.n, **sampling},
            **self._data(),
        }

    def _engine(self) -> dict[str, Any]:
        rollout = self.cfg.actor_rollout_ref.rollout
        return {"engine": rollout.name, "dtype": rollout.dtype}

    def _data(self) -> dict[str, Any]:
        return {"data": {"train_batch_size": self.cfg.data.train_batch_size, "digest": self.parts.train_data.digest}}

    def _text(self) -> dict[str, Any]:
        return {
            "tokenizer": {"digest": tokenizer_digest(self.parts.tokenizer)},
            "chat_template": {"digest": template_of(self.parts, self.cfg)},
        }

    def _validation(self) -> Mapping[str, Any]:
        cfg, rollout, data = self.cfg, self.cfg.actor_rollout_ref.rollout, self.parts.val_data
        seed, sampling = settings.seed_of(rollout.seed, cfg), asdict(settings.validation_sampling(cfg))
        return {
            "rollout": {**self._engine(), "seed": seed, "val": {"n": rollout.val_kwargs.n, **sampling}},
            "data": {"val_digest": data.digest if data else None},
        }


class Digests:
    """Digests of the weights, made once per weight version."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._weights: tuple[int, str] | None = None
        self._reference: str | None = None

    def weights(self) -> str:
        trainer = self._parts.trainer
        if self._weights is None or self._weights[0] != trainer.weight_version:
            self._weights = trainer.weight_version, trainer.digests("weights")["weights"]
        return self._weights[1]

    def update(self, when: str) -> dict[str, str]:
        """For the record of an update. Hashing gigabytes is most of what a tape costs, so nothing is hashed twice:
        the weights before an update are those after the last one, and so is the optimizer state."""
        if when == "before":
            return {"weights": self.weights()}
        return {"weights": self.weights(), **self._parts.trainer.digests("optimizer")}

    def forget(self) -> None:
        """The weights were replaced without a new version of their own."""
        self._weights = None

    def reference(self) -> str:
        """Of the reference weights, which never change."""
        engine = self._parts.reference
        if self._reference is None and engine is not None:
            self._reference = engine.digests("weights")["weights"]
        return self._reference or ""


def wanted(cfg: RunConfig) -> bool:
    """Whether this run needs a tape at all."""
    skips, shares = cfg.actor_rollout_ref.rollout.skip_rollout, cfg.trainer.share_data is not None
    return cfg.tape.mode != "off" or skips or shares


def model_config(parts: Parts) -> dict[str, Any]:
    """The model's architecture; what says how it was loaded is left out."""
    config = parts.trainer.facts.config
    return {
        k: v for k, v in config.items() if k not in ("_name_or_path", "transformers_version", "dtype", "name_or_path")
    }


def template_of(parts: Parts, cfg: RunConfig) -> str:
    """Digest of the chat template that prompts are made with."""
    own = cfg.actor_rollout_ref.model.custom_chat_template
    template = own or getattr(parts.tokenizer, "chat_template", None) or ""
    return template_digest(template, cfg.data.apply_chat_template_kwargs)


class ReporterHandler(logging.Handler):
    def __init__(self, reporter: Reporter) -> None:
        super().__init__(logging.INFO)
        self.reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "raised", False):  # the error ends the run, and is shown then
            return
        say = self.reporter.warn if record.levelno >= logging.WARNING else self.reporter.message
        say(record.getMessage())
