"""Verification: run the recorded stages of a run again, here, on their recorded inputs, and compare."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crossrl.batch import Batch
from crossrl.checkpoint import CheckpointStore, Saved
from crossrl.config import load_config
from crossrl.report import Reporter
from crossrl.stages.base import ORDER, At
from crossrl.stages.checkpoint import Checkpoint
from crossrl.tape.compare import Difference
from crossrl.tape.layout import RunLayout
from crossrl.tape.taped import Comparison, Taped
from crossrl.trainer import Trainer

# These look at nothing but their input; the others also depend on the weights.
WEIGHTLESS = ("reward", "advantage")


class VerifyError(RuntimeError):
    """There is nothing to compare, or it cannot be compared; the message says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """``run``: the run's folder (``trainer.default_local_dir``). ``stages``: empty for all. ``steps``: None for all.

    ``tolerance``: field to absolute difference that passes. ``overrides``: configuration keys that differ here, such as
    ``actor_rollout_ref.model.path`` on another machine. ``go_on``: compare later steps though one has differed.
    """

    run: Path
    stages: tuple[str, ...] = ()
    steps: frozenset[int] | None = None
    tolerance: Mapping[str, float] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    go_on: bool = False


@dataclass(frozen=True, slots=True)
class Verified:
    """``comparisons``: one per call that was compared, in the order of the run. ``stopped``: the step after which
    nothing more was compared because something differed, or None."""

    comparisons: tuple[Comparison, ...]
    stopped: int | None

    @property
    def first(self) -> Difference | None:
        return next((c.differences[0] for c in self.comparisons if c.differences), None)


def verify(request: Request, reporter: Reporter) -> Verified:
    """Compare as asked; a difference is a result, not an error.

    The run's stages are fed what was recorded, so that each is judged by its own work; update runs on the weights
    that the updates before it made here (or on the nearest checkpoint of the run before the first step compared).
    Raises ``VerifyError`` when there is nothing to compare, and what the tape raises when a record is refused.
    """
    config = request.run / "config.yaml"
    if not config.is_file():
        raise VerifyError(f"{request.run} holds no config.yaml: not the folder of a run (trainer.default_local_dir)")
    recorded, asked = (load_config(keys, str(config)).config for keys in ((), request.overrides))
    source = RunLayout(Path(recorded.tape.dir) if recorded.tape.dir else request.run / "tape")
    wanted = _steps(source, request.steps)
    weightless = bool(request.stages) and set(request.stages) <= set(WEIGHTLESS)
    # Then no update runs here, so what is loaded for the others belongs to other weights, which is fine.
    accept = [*recorded.tape.accept, *asked.tape.accept, *(["weights"] if weightless else [])]
    with tempfile.TemporaryDirectory(prefix="crossrl-verify-") as scratch:
        overrides = [
            "tape.mode=verify", f"tape.replay_from='{source.root}'",
            f"tape.steps='{','.join(map(str, sorted(wanted)))}'", "tape.dir=null", "tape.keep=null",
            "tape.max_bytes=null", "tape.stages=[all]", f"trainer.default_local_dir='{scratch}'",
            "actor_rollout_ref.rollout.skip_rollout=False", "trainer.resume_mode=disable", "trainer.logger=[]",
            "trainer.share_data=null", "trainer.share_data_keep=null",
            "trainer.rollout_data_dir=null", "trainer.validation_data_dir=null", *request.overrides,
            f"tape.accept={list(dict.fromkeys(accept))}",
        ]  # fmt: skip
        trainer = Trainer(load_config(overrides, str(config)), reporter, tolerance=request.tolerance)
        with trainer.open():
            chosen = _choose(trainer, source, request.stages)
            return _walk(trainer, CheckpointStore(request.run), wanted, chosen, request.go_on)


def _steps(source: RunLayout, steps: frozenset[int] | None) -> frozenset[int]:
    there = frozenset(source.steps())
    if not there:
        raise VerifyError(f"{source.root} holds no records: record a run with tape.mode=record first")
    found = there if steps is None else there & steps
    if not found:
        raise VerifyError(f"none of the steps asked for is recorded; {source.root} holds {_ranges(sorted(there))}")
    return found


def _choose(trainer: Trainer, source: RunLayout, names: Sequence[str]) -> tuple[str, ...]:
    """Leave out of the run what need not run: stages that are not asked for are loaded, or dropped."""
    stages = trainer.parts.stages
    recorded = {stage for step in source.steps() for stage, _ in source.calls(step)}
    wrong = [n for n in names if n not in recorded]
    if wrong:
        known = [s for s in ORDER if s in recorded]
        raise VerifyError(f"stage {wrong[0]!r} is not recorded in {source.root}; there are: {', '.join(known)}")
    chosen = tuple(n for n in ORDER if n in (names or recorded))
    for name, stage in list(stages.items()):
        if name in chosen:
            continue
        inner = stage.inner if isinstance(stage, Taped) else stage
        if name in ("checkpoint", "sync") or (name == "update" and set(chosen) <= set(WEIGHTLESS)):
            del stages[name]
        elif name in recorded and name != "update" and trainer.tape is not None:
            stages[name] = trainer.tape.tape.wrap(inner, "replay", source)
        else:
            stages[name] = inner
    _do_not_save(trainer)
    return chosen


def _do_not_save(trainer: Trainer) -> None:
    """A checkpoint is verified by the digests of what it would hold; nothing is written."""
    stage = trainer.parts.stages.get("checkpoint")
    inner = stage.inner if isinstance(stage, Taped) else stage
    if isinstance(inner, Checkpoint):
        inner.save = lambda step: trainer.state.digests()


def _walk(
    trainer: Trainer, checkpoints: CheckpointStore, wanted: frozenset[int], chosen: tuple[str, ...], go_on: bool
) -> Verified:
    tape = trainer.tape
    assert tape is not None  # the mode is verify
    before = [s for s in checkpoints.steps() if s < min(wanted)]
    saved: Saved | None = checkpoints.load(checkpoints.path(before[-1])) if before else None
    if saved:
        trainer.restore(saved)
    trainer.announce(None)
    if "sync" in trainer.parts.stages:
        trainer.first_sync(saved)
    else:
        trainer.parts.sync(Batch(()), At(trainer.done))
    keys = trainer.cfg.trainer
    if keys.val_before_train and 0 in wanted and trainer.done == 0 and "rollout" in chosen:
        trainer.validate()
    sampler, stopped = trainer.sampler(), None
    while trainer.done < max(wanted) and trainer.step(sampler):
        if trainer.done in wanted and keys.test_freq > 0 and "rollout" in chosen and _validated(trainer, tape.source):
            trainer.validate()
        if any(c.differences for c in tape.tape.comparisons) and not go_on:
            stopped = trainer.done
            break
    if not tape.tape.comparisons:
        raise VerifyError(
            f"nothing was compared: {tape.source.root} has no record of {', '.join(chosen)} in these steps"
        )
    return Verified(tuple(tape.tape.comparisons), stopped)


def _validated(trainer: Trainer, source: RunLayout) -> bool:
    return any(at.split == "val" for _, at in source.calls(trainer.done))


def _ranges(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
