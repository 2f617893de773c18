"""A run from start to end: assemble, resume, train, validate, save. The step itself is ``loop.train_step``."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

import crossrl
from crossrl import taping
from crossrl.assemble import Parts, assemble
from crossrl.batch import Batch
from crossrl.checkpoint import CheckpointError, CheckpointStore, Saved
from crossrl.config import LoadedConfig, flatten, to_yaml
from crossrl.data.loader import validation_batches
from crossrl.engines.base import EngineState
from crossrl.files import publish_folder, publish_text
from crossrl.loop import Sampler, StepLog, train_step
from crossrl.metrics import batch_metrics, speed_metrics
from crossrl.models.digest import weights_digest
from crossrl.models.loading import save_hf
from crossrl.report import Reporter, Sample
from crossrl.stages.base import At, Stage, apply
from crossrl.stages.checkpoint import Checkpoint
from crossrl.taping import RunTape
from crossrl.validation import validate

NO_SIGNAL_STEPS = 5  # so many steps in a row without any advantage are worth a warning


class TrainingError(RuntimeError):
    """The run cannot start or go on; the message says why and what to do."""


class Trainer:
    """One run of ``loaded``; ``fit`` returns the exit code.

    ``reporter`` is told everything that a person should see. ``wrap`` is put around every stage: the seam at which
    a stage is watched, replaced or interrupted from outside. A run is determined by its configuration and its
    input files: killed at any point and started again, it ends with the same weights, bit for bit.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        reporter: Reporter,
        wrap: Callable[[Stage], Stage] = lambda stage: stage,
        tolerance: Mapping[str, float] | None = None,
    ) -> None:
        self.loaded, self.cfg, self.reporter, self.wrap = loaded, loaded.config, reporter, wrap
        self.tolerance = tolerance
        self.folder = Path(self.cfg.trainer.default_local_dir)
        self.store = CheckpointStore(self.folder, self.cfg.trainer.max_actor_ckpt_to_keep)
        self.parts: Parts
        self.done, self.resumed = 0, 0
        self.log = StepLog()
        self.without_signal = 0
        self.tape: RunTape | None = None

    def fit(self) -> int:
        """Train to the planned end. 0: every planned step was done; 1: fewer were (and the last line says so)."""
        with self._lock():
            self.store.clean()
            self.parts = assemble(self.cfg, self.reporter.stage)
            try:
                with self._taped():
                    return self._fit()
            finally:
                self.parts.scorer.close()

    @contextlib.contextmanager
    def _taped(self) -> Iterator[None]:
        """Open the tape, where there is one, and wrap the stages; at the end wait until it is on the disk."""
        stages = {**self.parts.stages, "checkpoint": Checkpoint(self._save, self._save_due)}
        wraps = [self.wrap]
        if taping.wanted(self.cfg):
            self.tape = RunTape(self.cfg, self.parts, self.folder, self.tolerance)
            self.parts.update.digest = self.tape.digests.both
            wraps.insert(0, self.tape.wrap)
        with taping.log_to(self.reporter):
            for wrap in wraps:
                stages = {name: wrap(stage) for name, stage in stages.items()}
                self.parts.val_rollout = wrap(self.parts.val_rollout)
            self.parts.stages = stages
            yield
            if self.tape:
                self.tape.tape.close()

    def _fit(self) -> int:
        saved = self._find_checkpoint()
        if saved:
            self._restore(saved)
        if self.tape:
            self.tape.start(self.done)
        self._announce(saved)
        self._first_sync(saved)
        if self.cfg.trainer.val_only:
            self._validate()
            return self._end(0, "validation done")
        if self.done >= self.parts.total_steps:
            return self._end(0, f"nothing to do: all {self.parts.total_steps} steps were done before")
        if self.cfg.trainer.val_before_train and self.done == 0:
            self._validate()
        sampler = self._sampler()
        while self.done < self.parts.total_steps and self._step(sampler):
            if self._due(self.cfg.trainer.test_freq):
                self._validate()
        return self._finish()

    def _first_sync(self, saved: Saved | None) -> None:
        """Bring the weights to the rollout engine; and record what a killed run may not have come to after saving."""
        if saved is None:
            apply(self.parts.stages["sync"], Batch(()), At(0))
            return
        self.parts.sync(Batch(()), At(self.done))
        for name in ("checkpoint", "sync"):
            if self.tape and self.tape.lacks(name, self.done):
                apply(self.parts.stages[name], Batch(tuple(saved.state["sample_id"])), At(self.done))

    def _step(self, sampler: Sampler) -> bool:
        """One training step; False when the data are used up."""
        self.log, start = StepLog(), time.perf_counter()
        step = self.done + 1
        batch = train_step(self.parts.stages, sampler, step, self.log)
        if batch is None:
            return False
        self.done = step
        metrics = self._metrics(batch) | speed_metrics(batch, self.log.seconds, time.perf_counter() - start)
        self.reporter.step(step, metrics)
        if self.reporter.wants_samples():
            self.reporter.samples(step, self._samples(batch))
        self._warn(batch)
        return True

    def _metrics(self, batch: Batch) -> dict[str, float]:
        epoch = {"training/epoch": float(self.parts.loader.epoch)}
        return {**batch_metrics(batch), **self.log.metrics, **epoch}

    def _sampler(self) -> Sampler:
        """Prompts from the loader: one draw a step, or as many as dynamic sampling needs."""
        loader, cfg = self.parts.loader, self.cfg

        def draw(groups: int) -> Batch | None:
            draws = loader.draw(groups)
            return loader.batch(draws) if draws else None

        size, filtering = cfg.data.train_batch_size, cfg.algorithm.filter_groups
        if not filtering.enable:
            return Sampler(draw, size)
        return Sampler(draw, cfg.data.gen_batch_size or size, size, filtering.max_num_gen_batches, filtering.metric)

    # Checkpoints

    def _due(self, every: int) -> bool:
        return every > 0 and (self.done % every == 0 or self.done == self.parts.total_steps)

    def _save_due(self, step: int) -> bool:
        every = self.cfg.trainer.save_freq
        return every > 0 and (step % every == 0 or step == self.parts.total_steps)

    def _save(self, step: int) -> Path:
        if step == self.resumed:  # it is there; only its record was lost
            return self.store.path(step)
        if self.tape:
            self.tape.tape.flush()  # a run resumed here must find the records of all steps before
        trainer = self.parts.trainer
        state = trainer.state()
        size = sum(t.numel() * t.element_size() for t in (*state.weights.values(), *state.optimizer.values()))
        return self.store.save(
            step,
            functools.partial(save_hf, self.parts.trainer.model, self.parts.tokenizer),
            state.optimizer,
            {
                "engine": dict(state.scalars),
                "loader": self.parts.loader.state(),
                "advantage": dict(self.parts.advantage.state()),
                "without_signal": self.without_signal,
                "metrics": self._metrics(self.log.batch) if self.log.batch is not None else {},
                "sample_id": list(self.log.batch.sample_id) if self.log.batch is not None else [],
                "tape": self.tape.tape.state() if self.tape else {},
                "config": flatten(self.cfg),
                "crossrl": crossrl.__version__,
            },
            {"weights": weights_digest(state.weights.items()), "optimizer": weights_digest(state.optimizer.items())},
            need_bytes=int(size * 1.05) + 10_000_000,
        )

    def _find_checkpoint(self) -> Saved | None:
        trainer = self.cfg.trainer
        if trainer.resume_mode == "resume_path":
            if not trainer.resume_from_path:
                raise TrainingError("trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N")
            saved = self.store.load(Path(trainer.resume_from_path))
            later = [step for step in self.store.steps() if step > saved.step]
            if later:
                raise TrainingError(
                    f"{self.folder} holds later checkpoints ({later}) than {saved.path}, which this run would have to "
                    "overwrite. Choose another trainer.default_local_dir, or move them away"
                )
            return saved
        latest = self.store.latest()
        if latest is None:
            return None
        if trainer.resume_mode == "disable":
            raise TrainingError(
                f"{self.folder} holds checkpoints up to step {latest}, and trainer.resume_mode=disable would start "
                "over them. Choose another trainer.default_local_dir, or move them away"
            )
        return self.store.load(self.store.path(latest))

    def _restore(self, saved: Saved) -> None:
        """Bring everything back, and check that what is now held is what was saved."""
        trainer = self.parts.trainer
        trainer.load_state(EngineState(saved.weights, saved.optimizer, saved.state["engine"]))
        self.parts.loader.load_state(saved.state["loader"])
        self.parts.advantage.load_state(saved.state["advantage"])
        self.without_signal = int(saved.state["without_signal"])
        if self.tape:
            self.tape.tape.load_state(saved.state["tape"])
        self.done = self.resumed = saved.step
        held = trainer.state()
        for name, tensors in (("weights", held.weights), ("optimizer", held.optimizer)):
            found = weights_digest(tensors.items())
            if found != saved.manifest[name]:
                raise CheckpointError(
                    f"{saved.path}: {name} digest after loading is {found[:16]}..., saved was "
                    f"{saved.manifest[name][:16]}...: this is not the state that was saved"
                )

    def _announce(self, saved: Saved | None) -> None:
        cfg, parts = self.cfg, self.parts
        self.folder.mkdir(parents=True, exist_ok=True)
        publish_text(self.folder / "config.yaml", to_yaml(cfg))
        names = [name for name in ORDER if name in parts.stages]
        summary = {
            "model": f"{cfg.actor_rollout_ref.model.path} ({count(parts.trainer.model)} parameters)",
            "stages": " -> ".join(names),
            "steps": f"{parts.total_steps}, {cfg.data.train_batch_size} prompts x {cfg.actor_rollout_ref.rollout.n}",
            "folder": str(self.folder),
        }
        notes = list(parts.notes)
        if saved:
            tensors = len(saved.weights) + len(saved.optimizer)
            notes.append(f"resumed from {saved.path}: step {saved.step}, {tensors} tensors, digests as saved")
            notes += changed_keys(saved.state["config"], flatten(cfg))
        no_effect = [f"{key}={value}" for key, value in self.loaded.no_effect]
        self.reporter.start(parts.total_steps, summary, no_effect, notes, saved.step if saved else None)
        for warning in self.loaded.warnings:
            self.reporter.warn(warning)
        if saved and saved.state["metrics"] and not self._logged(saved.step):
            self.reporter.step(saved.step, saved.state["metrics"])

    def _logged(self, step: int) -> bool:
        """Whether the step of the checkpoint reached metrics.jsonl before the run was killed."""
        path = self.folder / "metrics.jsonl"
        if "file" not in self.cfg.trainer.logger or not path.is_file():
            return True
        from crossrl.report.metrics_file import read_metrics

        return any(row["step"] == step and "actor/grad_norm" in row for row in read_metrics(path))

    # Validation and samples

    def _validate(self) -> None:
        data = self.parts.val_data
        if data is None:
            return
        n = self.cfg.actor_rollout_ref.rollout.val_kwargs.n
        batches = list(validation_batches(data, self.cfg.data.val_batch_size, n))
        metrics, samples = validate(self.parts.val_rollout, self.parts.stages["reward"], batches, self.done)
        self.reporter.validation(self.done, metrics, self._samples(samples))

    def _samples(self, batch: Batch) -> list[Sample]:
        decode = self.parts.tokenizer.decode
        rows = zip(
            batch.sample_id,
            batch.ragged("prompt_ids").rows(),
            batch["response"],
            batch["ground_truth"],
            batch.array("score").tolist(),
            batch["finish_reason"],
            batch["reward_extra"],
            strict=True,
        )
        return [
            Sample(decode(ids.tolist()), response, answer, score, {"sample_id": i, "finish_reason": reason, **extra})
            for i, ids, response, answer, score, reason, extra in rows
        ]

    def _warn(self, batch: Batch) -> None:
        for note in self.log.notes:
            self.reporter.warn(note)
        for info in self.log.infos.values():
            for warning in info.get("warnings", ()):
                self.reporter.warn(f"step {self.done}: {warning}")
            for status, error in info.get("errors", {}).items():
                self.reporter.warn(f"step {self.done}: a reward {status}: {error}")
        signal = bool(np.any(batch.ragged("advantages").values))
        self.without_signal = 0 if signal else self.without_signal + 1
        if self.without_signal and self.without_signal % NO_SIGNAL_STEPS == 0:
            self.reporter.warn(
                f"no group had different rewards for {self.without_signal} steps: there is nothing to learn from. "
                "Easier or harder prompts, more samples per prompt or a finer reward would help"
            )

    # The end

    def _finish(self) -> int:
        planned, explicit = self.parts.total_steps, self.cfg.trainer.total_training_steps is not None
        if self.done < planned and (explicit or not self.cfg.algorithm.filter_groups.enable):
            return self._end(1, f"stopped after {self.done} of {planned} planned steps: the data are used up")
        if self.done == 0:
            return self._end(1, "no step was done: the data hold no batch")
        target = self.folder / "huggingface"
        shutil.rmtree(target, ignore_errors=True)
        with publish_folder(target) as folder:
            save_hf(self.parts.trainer.model, self.parts.tokenizer, folder)
        return self._end(0, f"{self.done} steps done; the trained model is in {target}")

    def _end(self, code: int, status: str) -> int:
        self.reporter.close(ok=code == 0, status=status)
        return code

    def _lock(self) -> TextIO:
        """Two runs in one folder would overwrite each other; the lock goes with the process, even a killed one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = (self.folder / ".lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise TrainingError(
                f"another run is writing to {self.folder}; wait for it, or set trainer.default_local_dir"
            ) from None
        file.write(str(os.getpid()))
        return file


ORDER = ("rollout", "reward", "old_log_prob", "ref_log_prob", "advantage", "update", "checkpoint", "sync")


def count(model: Any) -> str:
    number = sum(p.numel() for p in model.parameters())
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each key that differs from the run that made the checkpoint."""
    keys = sorted(k for k in {*before, *now} if before.get(k) != now.get(k))
    return [f"changed since the checkpoint: {k}: {before.get(k)} -> {now.get(k)}" for k in keys]
