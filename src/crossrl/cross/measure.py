"""A stage's recorded output against the one found here: what differs, by how much, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossrl.batch import Batch, Meaning, Ragged
from crossrl.cross.findings import Gap, Judgement
from crossrl.cross.noise import Limit
from crossrl.schema import FIELDS
from crossrl.stages.base import At
from crossrl.tape.compare import Difference, compare

SHOWN = 8  # sample ids per gap


@dataclass(frozen=True, slots=True)
class Measured:
    """A gap, and whether noise explains it."""

    gap: Gap
    explained: bool = False


def measure(
    recorded: Batch,
    found: Batch,
    stage: str,
    at: At,
    limits: Mapping[str, Limit] | None = None,
    info: bool = True,
) -> list[Measured]:
    """What differs between two outputs of one stage; nothing when all bits are equal.

    ``limits``: per field what noise explains; a field without one must be equal. ``info``: compare what the stage says
    of the call as a whole too, its ``metrics`` alone; where there are limits, only the numbers that have one, since the
    others follow from the fields.
    """
    limits = limits or {}
    recorded, found = (
        Batch(b.sample_id, b.columns, b.meanings, {"metrics": b.info.get("metrics", {})} if info else {})
        for b in (recorded, found)
    )
    differences = compare(recorded, found, stage, at)
    if set(recorded.sample_id) == set(found.sample_id):
        found = found.take(found.index_of(recorded.sample_id))
    out = []
    for each in differences:
        if each.kind == "info" and limits and each.field not in limits:
            continue
        out.append(_measured(each, recorded, found, limits.get(each.field)))
    return out


def judge(measured: Sequence[Measured]) -> Judgement:
    if not measured:
        return "equal"
    return "noise" if all(m.explained for m in measured) else "differs"


def describe(measured: Sequence[Measured], limit: int = 3) -> str:
    """The gaps in words, those that noise does not explain first."""
    ordered = sorted(measured, key=lambda m: m.explained)
    parts = [describe_gap(m) for m in ordered[:limit]]
    return "; ".join(parts) + (f"; and {len(ordered) - limit} more" if len(ordered) > limit else "")


def describe_gap(measured: Measured) -> str:
    """One gap.

    >>> gap = Gap("reward", "value", 2, 8, "s0", None, 1.0, 0.0, ("s0", "s1"), 1.0, 1.0)
    >>> describe_gap(Measured(gap))
    'reward differs in 2 of 8 values, by up to 1 (mean 1), first in sample s0: recorded 1, here 0'
    """
    gap = measured.gap
    first = f", first in sample {gap.sample_id}" if gap.sample_id is not None else ""
    first += f" at position {gap.position}" if gap.position is not None else ""
    values = f": recorded {_short(gap.recorded)}, here {_short(gap.found)}"
    if gap.kind == "meaning":
        return f"{gap.field} means something else: recorded {_meaning(gap.recorded)}, here {_meaning(gap.found)}"
    if gap.kind in ("ids", "order", "length", "fields"):
        what = {"ids": "other samples", "order": "another order", "length": "other lengths", "fields": "other fields"}
        return f"{gap.field}: {what[gap.kind]} ({gap.differing} of {gap.total}{first}){values}"
    size = ""
    if gap.largest is not None:
        size = f", by up to {gap.largest:.3g}{' ' + gap.unit if gap.unit else ''}"
        size += f" (mean {gap.mean:.2g})" if gap.mean is not None else ""
        size += f", of which noise explains {gap.allowed:.2g}" if gap.allowed is not None else ""
    if gap.kind == "info":
        return f"{gap.field.removeprefix('info.')}{values}"
    if gap.total == 1:
        return f"{gap.field}{values}{size}"
    return f"{gap.field} differs in {gap.differing} of {gap.total} values{size}{first}{values}"


def _meaning(value: Any) -> str:
    if not isinstance(value, Meaning):
        return "nothing that is stated"
    return f"at temperature {value.temperature:g}, truncation {value.truncation}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _measured(d: Difference, recorded: Batch, found: Batch, limit: Limit | None) -> Measured:
    largest, mean = d.max_abs, None
    samples: tuple[str, ...] = () if d.sample_id is None else (d.sample_id,)
    if d.kind in ("value", "length") and d.field in recorded.columns:
        samples = unequal_samples(recorded, found, d.field)
    if d.kind == "value" and d.field in recorded.columns and not isinstance(recorded[d.field], list):
        mean = mean_gap(recorded[d.field], found[d.field])
    if d.kind == "info":
        mean = largest
    explained = limit is not None and largest is not None and mean is not None and limit.explains(largest, mean)
    allowed = None
    if limit is not None and largest is not None:
        allowed = limit.mean if largest <= limit.largest and not explained else limit.largest
    field = FIELDS.get(d.field)
    gap = Gap(
        d.field, d.kind, d.differing, d.total, d.sample_id, d.position, d.recorded, d.found, tuple(samples[:SHOWN]),
        largest, mean, allowed, "nat" if field and field.meaning.startswith("nat;") else "",
    )  # fmt: skip
    return Measured(gap, explained)


def unequal_samples(recorded: Batch, found: Batch, name: str) -> tuple[str, ...]:
    """Ids of the samples whose value in column ``name`` differs, of two batches with equal ids in equal order."""
    a, b = recorded[name], found[name]
    if isinstance(a, Ragged) and isinstance(b, Ragged):
        unequal = [x.tobytes() != y.tobytes() for x, y in zip(a.rows(), b.rows(), strict=True)]
    else:
        unequal = [not (x == y or (x != x and y != y)) for x, y in zip(a, b, strict=True)]
    return tuple(s for s, odd in zip(recorded.sample_id, unequal, strict=True) if odd)


def mean_gap(a: Ragged | np.ndarray, b: Ragged | np.ndarray) -> float | None:
    """Mean of the absolute difference over the values that are numbers in both; None if there are none."""
    x, y = ((c.values if isinstance(c, Ragged) else c).astype(np.float64) for c in (a, b))
    both = np.isfinite(x) & np.isfinite(y)
    return float(np.abs(x[both] - y[both]).mean()) if both.any() else None
