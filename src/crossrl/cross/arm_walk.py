"""Two arms' tapes, record by record, to the first that differs: what came before is equal, so its inputs were."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crossrl.cross.findings import PART, Gap, Part
from crossrl.cross.located import PROMPT_FIELDS
from crossrl.stages.base import At
from crossrl.tape.api import RunTape, open_run, stage_rank
from crossrl.tape.compare import Difference, compare, volatile
from crossrl.tape.record import Record

Place = tuple[int, tuple[int, str], int]
"""Step, rank of the stage in a step, call: compares in the order in which things happen."""
NEEDED = ("rollout", "reward", "update")
# Columns that say again what another record holds: verl's agent loop hands on the scores with the responses.
REPEATED = frozenset(("verl",))
_NEEDS = "a comparison needs the records of rollout, reward and update"


@dataclass(frozen=True, slots=True)
class Walk:
    """The arm ``name`` against BB. ``pairs``: of records that were compared and are equal; ``steps``: those that both
    have. ``place``, ``stage``: of the first record that differs, None and "" if none does. ``part``: whose work it is;
    None where that cannot be said, ``unclear`` says why. ``gaps``: the fields that differ, the arm's value as
    ``recorded``; ``more``: the first of them in words. ``weights``: digest of those that the stage was given, where
    both runs say it. ``whole``: it has all steps of BB."""

    name: str
    steps: tuple[int, ...]
    whole: bool
    pairs: int = 0
    place: Place | None = None
    stage: str = ""
    part: Part | None = None
    unclear: str = ""
    gaps: tuple[Gap, ...] = ()
    weights: str = ""
    more: str = ""

    @property
    def step(self) -> int | None:
        return self.place[0] if self.place else None

    def covers(self, place: Place) -> bool:
        """Whether this arm is BB bit for bit at ``place`` and everything before it."""
        return bool(self.pairs) and place[0] in self.steps and (self.place is None or self.place > place)


def walk(name: str, arm: Path, base: Path) -> Walk:
    """Compare two recorded runs. Raises ``RecordMissing`` where there is no tape, and ``CorruptRecord``."""
    mine, theirs = open_run(arm), open_run(base)
    steps = tuple(sorted({*mine.steps()} & {*theirs.steps()}))
    pairs = 0
    whole = set(theirs.steps()) <= set(mine.steps())
    before = ""  # digest of the weights after the last update that was equal
    for step in steps:
        calls, others = mine.calls(step), theirs.calls(step)
        if calls != others or not set(NEEDED) <= {stage for stage, _ in calls}:
            text = f"step {step}: the same records are not there in both; {_NEEDS}"
            return Walk(name, steps, False, pairs, (step, (-1, ""), 0), "", None, text)
        for stage, at in calls:
            pair = mine.record(step, stage, at.call), theirs.record(step, stage, at.call)
            for record in pair:
                record.check()
            found = differences(stage, at, *pair)
            if found:
                place = (step, stage_rank(stage), at.call)
                given = tuple(_given(run, step, record) or before for run, record in zip((mine, theirs), pair))
                return _ended(Walk(name, steps, whole, pairs, place, stage, weights=given[0]), given[1], found)
            pairs += 1
            if stage == "update":
                before = weights_of(pair[0], "after")
    return Walk(name, steps, whole and bool(pairs), pairs)


def differences(stage: str, at: At, a: Record, b: Record) -> list[Difference]:
    """What differs, token ids first; without what no rerun reproduces, and what another record says again."""
    if a.header.content == b.header.content and a.header.info == b.header.info:
        return []
    found = compare(a.batch, b.batch, stage, at)
    kept = [d for d in found if d.field not in REPEATED and not volatile(d.field)]
    order = ("sample_id", "prompt_ids", "response_ids", "response_mask", "info.state.before.weights",
             "info.state.after.weights")  # fmt: skip
    return sorted(kept, key=lambda d: order.index(d.field) if d.field in order else len(order))


def _ended(walk: Walk, theirs: str, found: Sequence[Difference]) -> Walk:
    """``theirs``: digest of the weights with which BB did the same."""
    stage, fields = walk.stage, {d.field for d in found}
    part: Part | None = PART.get(stage)
    why = "" if part else f"{stage} is no stage that is known"
    if stage == "rollout" and fields & (PROMPT_FIELDS | {"sample_id"}):
        part = "data"
    elif walk.weights != theirs:
        part, why = None, f"{stage} of step {walk.step} was done with other weights: the runs begin with different ones"
    elif not theirs:
        part, why = None, f"{stage} of step {walk.step} differs, but no record says with which weights it was done"
    elif any(d.kind in ("ids", "order") for d in found):
        part, why = None, f"{stage} of step {walk.step} worked on other samples, or in another order"
    return replace(walk, part=part, unclear=why, gaps=tuple(_gap(d) for d in found[:4]), more=_line(found[0]))


def _given(run: RunTape, step: int, record: Record) -> str:
    """Digest of the weights with which the trainer began ``step``; "" if no record says it."""
    own = str(record.header.fingerprints.get("weights", "")) or weights_of(record, "before")
    return own or weights_of(run.record(step, "update"), "before")


def weights_of(record: Record, when: str) -> str:
    """Digest of the weights ``before`` or ``after`` an update, as its record says; "" if it does not."""
    state = record.header.info.get("state")
    held = state.get(when) if isinstance(state, dict) else None
    return str(held.get("weights", "")) if isinstance(held, dict) else ""


def _line(d: Difference) -> str:
    """What differs, in words; of digests the first digits."""
    return re.sub(r"\b[0-9a-f]{64}\b", lambda found: found[0][:12], d.line())


def _gap(d: Difference) -> Gap:
    unit = "nat" if d.field.endswith("log_probs") else ""
    largest = d.max_abs if d.kind == "value" and d.field not in ("response_ids", "prompt_ids") else None
    return Gap(d.field, d.kind, d.differing, d.total, d.sample_id, d.position, _short(d.recorded), _short(d.found),
               (d.sample_id,) if d.sample_id else (), largest, unit=unit)  # fmt: skip


def _short(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float, bool)) else str(value)[:200]


def sampler_gap(run: RunTape, step: int) -> float | None:
    """Mean of |sampler's log-prob - trainer's| at ``step``, in nat, over the tokens that both have; None without any.

    Both are of the same tokens and, in a sound run, of the same weights: a run's own measure of its inference.
    """
    found = []
    for view in run.samples(step):
        a, b = view.sampler_log_probs, view.trainer_log_probs
        if a is not None and b is not None and len(a) == len(b):
            d = np.abs(a.astype(np.float64) - b.astype(np.float64))
            found.append(d[np.isfinite(d)])
    values = np.concatenate(found) if found else np.zeros(0)
    return float(values.mean()) if values.size else None
