"""A run from start to end: open, resume, train, validate, save. The step itself is ``loop.train_step``."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from crossrl import taping
from crossrl.assemble import Parts, assemble
from crossrl.batch import Batch
from crossrl.checkpoint import CheckpointStore, Saved
from crossrl.config.load import LoadedConfig
from crossrl.config.resolved import to_yaml
from crossrl.data.loader import validation_batches
from crossrl.engines.rollout.replicas import Replicas
from crossrl.files import LOCK_S, FolderInUse, lock_folder, publish_folder, publish_text
from crossrl.loop import NoSignal, Sampler, StepLog, train_step
from crossrl.metrics import batch_metrics, outcomes, speed_metrics
from crossrl.report import Reporter, Sample
from crossrl.resume import RunState
from crossrl.stages.base import ORDER, At, Stage, apply
from crossrl.stages.checkpoint import Checkpoint
from crossrl.tape.session import log_to
from crossrl.taping import RunTape
from crossrl.validation import validate

NO_SIGNAL_STEPS = 5  # so many steps in a row without any advantage are worth a warning


class TrainingError(RuntimeError):
    """The run cannot start or go on; the message says why and what to do."""


class Trainer:
    """One run of ``loaded``; ``fit`` returns the exit code.

    ``reporter`` is told everything that a person should see. ``wrap`` is put around every stage: the seam at which
    a stage is watched, replaced or interrupted from outside. ``plant``: changes the parts before the stages are taped
    (``crossrl.cross.faults``). ``tolerance``: for tape mode verify, field to absolute
    difference that passes. A run is determined by its configuration and its input files: killed at any point and
    started again, it ends with the same weights, bit for bit.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        reporter: Reporter,
        wrap: Callable[[Stage], Stage] = lambda stage: stage,
        tolerance: Mapping[str, float] | None = None,
        plant: Callable[[Parts], None] = lambda parts: None,
    ) -> None:
        self.plant = plant
        self.loaded, self.cfg, self.reporter, self.wrap = loaded, loaded.config, reporter, wrap
        self.tolerance = tolerance or {}
        self.folder = Path(self.cfg.trainer.default_local_dir).expanduser().absolute()
        self.export = self.folder / "huggingface"
        self.done, self.resumed, self.without_signal = 0, 0, 0
        self.log, self.status = StepLog(), ""
        self.tape: RunTape | None = None
        self.parts: Parts
        self.state: RunState

    def fit(self) -> int:
        """Train to the planned end. 0: every planned step was done; 1: fewer were (and the last line says so)."""
        with self.open():
            saved = self.state.find()
            if saved:
                self.restore(saved)
            if self.tape:
                self.tape.start(self.done)
            self.announce(saved)
            self.first_sync(saved)
            total = self.parts.total_steps
            if self.cfg.trainer.val_only:
                self.validate()
                return self._end(0, "validation done")
            if saved and self._due(self.cfg.trainer.test_freq, self.done) and not self.reporter.validated(self.done):
                if self.tape:
                    self.tape.set_aside_validation(self.done)
                self.validate()  # a kill between saving and validating must not cost a point of the curve
            if self.done >= total and self.export.is_dir():
                return self._end(0, f"nothing to do: all {total} steps were done before")
            if self.cfg.trainer.val_before_train and self.done == 0:
                self.validate()
            sampler = self.sampler()
            stop = min(total, self.cfg.trainer.stop_after_steps or total)
            while self.done < stop and self.step(sampler):
                if self._due(self.cfg.trainer.test_freq, self.done):
                    self.validate()
            if self.done == stop < total:
                if self.done not in self.state.store.steps():
                    self.save(self.done)
                return self._end(0, f"stopped after {stop} of {total} planned steps (trainer.stop_after_steps)")
            return self._finish()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Lock the folder, load data and models, wrap the stages; at the end, wait until the tape is on the disk."""
        with self._lock(), log_to(taping.ReporterHandler(self.reporter)):
            store = CheckpointStore(self.folder, self.cfg.trainer.max_actor_ckpt_to_keep)
            store.clean()
            self.parts = parts = assemble(self.cfg, self.reporter.stage, self.folder / "workers")
            try:
                self.plant(parts)
                self.state = RunState(self.cfg, parts, store)
                stages = {**parts.stages, "checkpoint": Checkpoint(self.save, self._save_due)}
                wraps = [self.wrap]
                if taping.wanted(self.cfg):
                    self.tape = RunTape(self.cfg, parts, self.folder, self.tolerance, self.reporter.stage)
                    parts.update.digest = self.tape.digests.update
                    wraps.insert(0, self.tape.wrap)
                for wrap in wraps:
                    stages = {name: wrap(stage) for name, stage in stages.items()}
                    parts.val_rollout, parts.val_reward = wrap(parts.val_rollout), wrap(parts.val_reward)
                parts.stages = stages
                yield
            except BaseException as error:
                if self.tape:
                    self.tape.close(error, "")
                raise
            else:
                if self.tape:
                    self.tape.close(None, self.status)
            finally:
                try:
                    parts.close()
                except Exception as error:  # what ended the run is the error to tell
                    self.reporter.warn(f"while ending other processes: {error}")

    def step(self, sampler: Sampler) -> bool:
        """One training step; False when the data are used up."""
        before, self.log, start = self.log, StepLog(), time.perf_counter()
        step = self.done + 1
        try:
            batch = train_step(self.parts.stages, sampler, step, self.log)
        except NoSignal:
            self._warn_of_rewards(step)
            raise
        if batch is None:
            self.log = before
            return False
        self.done = step
        metrics = self._metrics(batch) | speed_metrics(batch, self.log.seconds, time.perf_counter() - start)
        self.reporter.step(step, metrics)
        if self.reporter.wants_samples():
            self.reporter.samples(step, self._samples(batch))
        self._warn(batch)
        return True

    def sampler(self) -> Sampler:
        """Prompts from the loader: one draw a step, or as many as dynamic sampling needs."""
        loader, cfg = self.parts.loader, self.cfg

        def draw(groups: int) -> Batch | None:
            draws = loader.draw(groups)
            return loader.batch(draws) if draws else None

        size, filtering = cfg.data.train_batch_size, cfg.algorithm.filter_groups
        if not filtering.enable:
            return Sampler(draw, size)
        signal = functools.partial(outcomes, name=filtering.metric)
        groups = cfg.data.gen_batch_size or size
        # Without a limit of its own a step goes through the data once at most, or it might never end.
        draws = filtering.max_num_gen_batches or -(-len(loader.dataset) // groups)
        return Sampler(draw, groups, size, draws, signal)

    def save(self, step: int) -> dict[str, str]:
        """What the checkpoint stage does."""
        if step == self.resumed:  # it is there, and only its record was lost
            return {"path": str(self.state.store.path(step)), **self.state.digests()}
        if self.tape:
            self.tape.tape.flush()  # a run that resumes here must find the records of all steps before
        facts = {
            "without_signal": self.without_signal,
            "metrics": self._metrics(self.log.batch) if self.log.batch is not None else {},
            "tape": self.tape.tape.state() if self.tape else {},
        }
        found = self.state.save(step, self.log.batch, facts)
        if self.tape:
            self.tape.saved()
        return found

    def restore(self, saved: Saved) -> None:
        self.state.restore(saved)
        self.without_signal = int(saved.state["without_signal"])
        if self.tape:
            self.tape.tape.load_state(saved.state["tape"])
        self.done = self.resumed = saved.step

    def announce(self, saved: Saved | None) -> None:
        """Say what will run, and complete the metrics of a run that was killed between saving and writing them."""
        cfg, parts = self.cfg, self.parts
        if not cfg.trainer.val_only:  # which leaves the run that is there as it was
            publish_text(self.folder / "config.yaml", to_yaml(cfg))
        summary = {
            "model": f"{cfg.actor_rollout_ref.model.path} ({_count(parts.trainer.facts.num_parameters)} parameters)",
            "stages": " -> ".join(name for name in ORDER if name in parts.stages),
            "steps": f"{parts.total_steps}, {cfg.data.train_batch_size} prompts x {cfg.actor_rollout_ref.rollout.n}",
            "folder": shown(self.folder),
        }
        notes = list(parts.notes)
        if saved:
            tensors = parts.trainer.facts.state_tensors
            notes.append(f"resumed from {shown(saved.path)}: step {saved.step}, {tensors} tensors, digests as saved")
            notes += self.state.changes(saved)
        no_effect = [f"{key}={value}" for key, value in self.loaded.no_effect]
        self.reporter.start(parts.total_steps, summary, no_effect, notes, saved.step if saved else None)
        for warning in self.loaded.warnings:
            self.reporter.warn(warning)
        if saved and saved.state["metrics"]:
            self.reporter.complete(saved.step, saved.state["metrics"])

    def first_sync(self, saved: Saved | None) -> None:
        """Bring the weights to the rollout engine; and record what a killed run may not have come to after saving."""
        if saved is None:
            apply(self.parts.stages["sync"], Batch(()), At(0))
            return
        self.parts.sync(Batch(()), At(self.done))
        for name in ("checkpoint", "sync"):
            if self.tape and self.tape.lacks(name, self.done):
                apply(self.parts.stages[name], Batch(tuple(saved.state["sample_id"])), At(self.done))

    def validate(self) -> None:
        data = self.parts.val_data
        if data is None:
            return
        n = self.cfg.actor_rollout_ref.rollout.val_kwargs.n
        batches = list(validation_batches(data, self.cfg.data.val_batch_size, n))
        metrics, samples = validate(self.parts.val_rollout, self.parts.val_reward, batches, self.done)
        self._warn_of_engines()
        self.reporter.validation(self.done, metrics, self._samples(samples))

    def _metrics(self, batch: Batch) -> dict[str, float]:
        return {**self.log.metrics, **batch_metrics(batch), "training/epoch": float(self.parts.loader.epoch)}

    def _due(self, every: int, step: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.parts.total_steps)

    def _save_due(self, step: int) -> bool:
        return self._due(self.cfg.trainer.save_freq, step)

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
            batch["prompt"],
            strict=True,
        )
        return [
            Sample(
                decode(ids.tolist()), response, answer, score, {"sample_id": i, "finish_reason": reason, **extra},
                question=str(messages[-1]["content"]),
            )
            for i, ids, response, answer, score, reason, extra, messages in rows
        ]  # fmt: skip

    def _warn(self, batch: Batch) -> None:
        for note in self.log.notes:
            self.reporter.warn(note)
        self._warn_of_engines()
        for info in self.log.infos.values():
            for warning in info.get("warnings", ()):
                self.reporter.warn(f"step {self.done}: {warning}")
        self._warn_of_rewards(self.done)
        signal = bool(np.any(batch.ragged("advantages").values))
        self.without_signal = 0 if signal else self.without_signal + 1
        if self.without_signal and self.without_signal % NO_SIGNAL_STEPS == 0:
            self.reporter.warn(
                f"no group had different rewards for {self.without_signal} steps: there is nothing to learn from. "
                "Easier or harder prompts, more samples per prompt or a finer reward would help"
            )

    def _warn_of_engines(self) -> None:
        if isinstance(self.parts.engine, Replicas):
            for note in self.parts.engine.take_notes():
                self.reporter.warn(f"step {self.done}: {note}")

    def _warn_of_rewards(self, step: int) -> None:
        for status, error in self.log.errors.items():
            self.reporter.warn(f"step {step}: a reward {status}: {error}")

    def _finish(self) -> int:
        if self.resumed < self.done < self.parts.total_steps:  # fewer steps than planned: this one was the last
            if self.cfg.trainer.save_freq > 0 and self.done not in self.state.store.steps():
                self.save(self.done)
            if self.cfg.trainer.test_freq > 0 and self.done % self.cfg.trainer.test_freq:
                self.validate()
        planned, explicit = self.parts.total_steps, self.cfg.trainer.total_training_steps is not None
        if self.done < planned and (explicit or not self.cfg.algorithm.filter_groups.enable):
            return self._end(1, f"stopped after {self.done} of {planned} planned steps: the data are used up")
        if self.done == 0:
            return self._end(1, "no step was done: no group of the data had samples that score differently")
        self._export()
        return self._end(0, f"{self.done} steps done; the trained model is in {shown(self.export)}")

    def _export(self) -> None:
        """Write the trained model as a Hugging Face folder; an earlier one goes only when the new one is complete."""
        new, old = (self.export.with_name(f"{self.export.name}.{what}") for what in ("new", "old"))
        try:
            shutil.rmtree(new, ignore_errors=True)
            with publish_folder(new) as folder:
                self.parts.trainer.save_hf(folder, self.parts.tokenizer)
            if self.export.is_dir():
                self.export.rename(old)
            new.rename(self.export)
            shutil.rmtree(old, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            raise TrainingError(
                f"all {self.done} steps are done, but the trained model cannot be written to {new}: {error}. Make room "
                "and start again: the run goes on from its last checkpoint"
            ) from error

    def _end(self, code: int, status: str) -> int:
        self.status = status
        self.reporter.close(ok=code == 0, status=status)
        return code

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """See ``files.lock_folder``."""
        try:
            file = lock_folder(self.folder, LOCK_S)
        except FolderInUse as error:
            raise TrainingError(str(error)) from None
        with file:
            yield


def shown(path: Path) -> str:
    """As a user would type it: relative to the working directory where it is in there."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
