"""A stage on a tape: itself a stage, which runs the inner one, loads its record, or does both and compares."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from crossrl.batch import Batch
from crossrl.stages.base import At, Stage
from crossrl.tape.compare import Difference, compare, volatile
from crossrl.tape.errors import RecordExists, RecordMissing
from crossrl.tape.layout import Layout
from crossrl.tape.modes import STEPPED, Rule
from crossrl.tape.record import Record

if TYPE_CHECKING:
    from crossrl.tape.tape import Tape

logger = logging.getLogger("crossrl.tape")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What ``verify`` found for one call: equal when ``differences`` is empty. ``fields``: how many were compared."""

    stage: str
    at: At
    path: Path
    differences: tuple[Difference, ...]
    fields: int


@dataclass(slots=True)
class Taped:
    """Made by ``Tape.wrap``. ``reads``: what the inner stage reads, and ``carry``."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    tape: Tape
    inner: Stage
    mode: str
    rule: Rule
    layout: Layout
    carry: tuple[str, ...]
    restore: Callable[[Record, At], None] | None
    state: Callable[[], Mapping[str, torch.Tensor]] | None
    ignore: tuple[str, ...]

    def __call__(self, batch: Batch, at: At) -> Batch:
        """The stage's output, from the stage or from its record. Raises ``TapeError`` of the kind that fits."""
        self.tape.check()
        given, own = batch.only(self.reads), batch.only(self.inner.reads)
        index = self.tape.count(self, at)
        steps = self.tape.options.steps
        if self.mode in STEPPED and steps is not None and at.step not in steps:
            return self.inner(own, at)
        target = self.layout.path(self.name, at, index)
        path = self.layout.find(self.name, at, index)
        if path is None and self.rule.missing == "wait":
            self.tape.wait(target, self.tape.options.wait_s, f"{self.name} of step {at.step}, call {index} of the run")
            path = self.layout.find(self.name, at, index)
        if path is None:
            return self._without_record(target, given, own, at, index)
        if self.rule.found == "refuse":
            raise RecordExists(
                f"mode {self.mode} of stage {self.name!r}: {path} is already there, and a record is never overwritten. "
                f"Record into another folder (tape.dir), move this one away, or load it (tape.mode=replay, "
                f"tape.replay_from={self.layout.root})"
            )
        return self._with_record(path, given, own, at, index)

    def _without_record(self, target: Path, given: Batch, own: Batch, at: At, index: int) -> Batch:
        if self.rule.missing != "store":
            raise RecordMissing(
                f"mode {self.mode} of stage {self.name!r}: no record of step {at.step}, call {at.call} ({at.split}) at "
                f"{target}. Record it first (tape.mode=record), or leave it out: tape.steps and tape.stages say to "
                f"what tape.mode={self.mode} applies"
            )
        if self.mode == "cache":
            logger.info("%s: no data found at %s: call %d runs and is stored", self.layout.label, target, index)
        seen = self.tape.look(self, given)
        out = self.inner(own, at)
        self.tape.store(self, target, at, index, seen, out)
        return out

    def _with_record(self, path: Path, given: Batch, own: Batch, at: At, index: int) -> Batch:
        loading = self.rule.found == "load"
        record = self.tape.load(self, path, given, at, loading)
        stored = record.only(self.writes)
        info = {k: v for k, v in stored.info.items() if not volatile(k)}  # times of that run are not those of this one
        recorded = Batch(stored.sample_id, stored.columns, stored.meanings, info)
        if not loading:
            found = self.inner(own, at)
            differences = compare(recorded, found, self.name, at, self.tape.options.tolerance)
            self.tape.comparisons.append(Comparison(self.name, at, path, tuple(differences), len(recorded.columns)))
            # The next stage gets what was recorded, so that each one is judged by its own work.
            return recorded
        if self.restore is not None:
            self.restore(record, at)
        level = logging.DEBUG if self.layout.label == "tape" else logging.INFO
        logger.log(level, "%s: loaded from %s (call %d, %d samples)", self.layout.label, path, index, len(recorded))
        return recorded
