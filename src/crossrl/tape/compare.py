"""Two outputs of one stage, compared bit by bit; what differs, where, by how much and how widespread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from crossrl.batch import Batch, Ragged
from crossrl.stages.base import At
from crossrl.tape.values import encode_column, normal, plain

# Parts of a key that name what no rerun reproduces: times, speeds, memory, where the run lies.
VOLATILE = ("timing", "perf", "memory", "path")

Kind = Literal["ids", "order", "fields", "inputs", "meaning", "length", "value", "info"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a field differs, and how far the difference goes.

    ``position``: of the value within its sample (None: the sample's only value). ``differing`` of ``total`` values
    differ. ``max_abs``, ``max_rel``: the largest difference of two finite numbers (inf when one is not finite).

    >>> Difference("reward", At(1), "reward", "value", "s0", None, 1.0, 0.0, 1, 8).line()
    'reward, step 1, call 0: reward of sample s0: 1.0 against 0.0 (1 of 8 values differ)'
    """

    stage: str
    at: At
    field: str
    kind: Kind
    sample_id: str | None
    position: int | None
    recorded: Any
    found: Any
    differing: int = 1
    total: int = 1
    max_abs: float | None = None
    max_rel: float | None = None

    def line(self) -> str:
        split = ", validation" if self.at.split == "val" else ""
        where = f"{self.stage}, step {self.at.step}, call {self.at.call}{split}: {self.field}"
        if self.kind not in ("value", "info"):
            where += f" ({self.kind})"
        if self.sample_id is not None:
            where += f" of sample {self.sample_id}"
        if self.position is not None:
            where += f" at position {self.position}"
        size = f"{self.differing} of {self.total} values differ"
        if self.max_abs is not None and self.max_rel is not None:
            size += f", at most {self.max_abs:.3g} absolute, {self.max_rel:.3g} relative"
        return f"{where}: {self.recorded!r:.120} against {self.found!r:.120} ({size})"

    def as_json(self) -> dict[str, Any]:
        return plain(asdict(self), [])


def compare(
    recorded: Batch, found: Batch, stage: str, at: At, tolerance: Mapping[str, float] | None = None
) -> list[Difference]:
    """How ``found`` differs from ``recorded``: ids and order first, then fields, meanings, values, info.

    ``tolerance``: field name to the absolute difference that is let pass; without one, bits must be equal. Info
    keys are ``info.<key>``; keys with a part in ``VOLATILE`` are not compared. Samples are joined by id.
    """
    tolerance = tolerance or {}
    out: list[Difference] = []
    if ids := _ids(recorded, found, stage, at):
        return ids
    if recorded.sample_id != found.sample_id:
        out.append(_order(recorded, found, stage, at))
        found = found.take(found.index_of(recorded.sample_id))
    names = set(recorded.columns) | set(found.columns)
    both = set(recorded.columns) & set(found.columns)
    if names != both:
        missing, extra = sorted(names - set(found.columns)), sorted(names - set(recorded.columns))
        out.append(Difference(stage, at, (missing or extra)[0], "fields", None, None, missing, extra))
    for name in sorted(set(recorded.meanings) & both | set(found.meanings) & both):
        mine, theirs = recorded.meanings.get(name), found.meanings.get(name)
        if mine is None or theirs is None or not mine.comparable(theirs):
            out.append(Difference(stage, at, name, "meaning", None, None, mine, theirs))
    for name in sorted(both, key=lambda n: (_rank(recorded[n]), n)):
        if difference := compare_column(recorded, found, name, stage, at, tolerance.get(name)):
            out.append(difference)
    return out + _info(recorded.info, found.info, stage, at, tolerance)


def _rank(column: Any) -> int:
    """Token ids and texts before floats: what was compared before by how much it differs."""
    return 1 if not isinstance(column, list) and column.dtype.kind == "f" else 0


def _ids(recorded: Batch, found: Batch, stage: str, at: At) -> list[Difference]:
    mine, theirs = set(recorded.sample_id), set(found.sample_id)
    odd = [s for s in (*recorded.sample_id, *found.sample_id) if (s in mine) != (s in theirs)]
    if not odd:
        return []
    only = ("only here", "not here") if odd[0] in mine else ("not here", "only here")
    return [Difference(stage, at, "sample_id", "ids", odd[0], None, *only, len(odd), len(mine | theirs))]


def _order(recorded: Batch, found: Batch, stage: str, at: At) -> Difference:
    unequal = [i for i, (a, b) in enumerate(zip(recorded.sample_id, found.sample_id)) if a != b]
    first = unequal[0]
    return Difference(
        stage, at, "sample_id", "order", None, first, recorded.sample_id[first], found.sample_id[first],
        len(unequal), len(recorded),
    )  # fmt: skip


def compare_column(
    recorded: Batch, found: Batch, name: str, stage: str, at: At, tolerance: float | None = None
) -> Difference | None:
    """The first difference in column ``name`` of two batches with the same ids in the same order."""
    a, b = recorded[name], found[name]
    if type(a) is not type(b) or (not isinstance(a, list) and a.dtype != b.dtype):
        return Difference(stage, at, name, "fields", None, None, _type(a), _type(b))
    if isinstance(a, list):
        texts = [encode_column(name, c, recorded.sample_id, leave_out=True)[0] for c in (a, b)]
        unequal = [i for i, (x, y) in enumerate(zip(*texts, strict=True)) if x != y]
        if not unequal:
            return None
        i = unequal[0]
        return Difference(stage, at, name, "value", recorded.sample_id[i], None, a[i], b[i], len(unequal), len(a))
    if isinstance(a, Ragged) and not a.same_shape(b):
        unequal = np.flatnonzero(a.lengths != b.lengths).tolist()
        i = unequal[0]
        return Difference(
            stage, at, name, "length", recorded.sample_id[i], None, int(a.lengths[i]), int(b.lengths[i]),
            len(unequal), len(a),
        )  # fmt: skip
    values, others = (a.values, b.values) if isinstance(a, Ragged) else (a, b)
    wrong = np.flatnonzero(_unequal(values, others, tolerance))
    if not wrong.size:
        return None
    at_value = int(wrong[0])
    sample, position = at_value, None
    if isinstance(a, Ragged):
        sample = int(np.searchsorted(a.offsets, at_value, side="right")) - 1
        position = at_value - int(a.offsets[sample])
    absolute, relative = _size(values[wrong], others[wrong])
    return Difference(
        stage, at, name, "value", recorded.sample_id[sample], position, values[at_value].item(),
        others[at_value].item(), len(wrong), values.size, absolute, relative,
    )  # fmt: skip


def _type(column: Any) -> str:
    return type(column).__name__ if isinstance(column, list) else f"{type(column).__name__} of {column.dtype}"


def _unequal(a: np.ndarray, b: np.ndarray, tolerance: float | None) -> np.ndarray:
    bits = np.dtype(f"u{a.dtype.itemsize}")
    unequal = np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)
    if tolerance is None or not unequal.any():
        return unequal
    with np.errstate(invalid="ignore"):
        near = np.abs(a.astype(np.float64) - b.astype(np.float64)) <= tolerance
    return unequal & ~near & ~((a != a) & (b != b))


def _size(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        absolute = np.abs(x - y)
        relative = np.where(absolute == 0, 0.0, absolute / np.maximum(np.abs(x), np.abs(y)))
    if not np.isfinite(absolute).all():
        return math.inf, math.inf
    return float(absolute.max()), float(relative.max())


def same(a: Any, b: Any) -> bool:
    """Equal JSON-like values, types included (1 is not True); an int and a float of the same value are the same."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return set(a) == set(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and a != a and b != b)


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested maps as one, with dotted keys: ``{"a": {"b": 1}}`` gives ``{"a.b": 1}``. An empty map stays."""
    out: dict[str, Any] = {}
    for key, entry in value.items():
        if isinstance(entry, Mapping) and entry:
            out |= flatten(entry, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = entry
    return out


def volatile(key: str) -> bool:
    """Whether a key names something that no rerun reproduces (``timing/rollout``, ``perf.tokens_per_s``)."""
    return any(part.startswith(VOLATILE) for part in key.replace("/", ".").split("."))


def _info(
    a: Mapping[str, Any], b: Mapping[str, Any], stage: str, at: At, tolerance: Mapping[str, float]
) -> list[Difference]:
    mine, theirs = flatten(normal(a)), flatten(normal(b))
    keys = [k for k in sorted(set(mine) | set(theirs)) if not volatile(k)]
    out = []
    for key in keys:
        x, y, limit = mine.get(key, "(absent)"), theirs.get(key, "(absent)"), tolerance.get(f"info.{key}")
        numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (x, y))
        if same(x, y) or (numbers and limit is not None and abs(x - y) <= limit):
            continue
        size = _size(np.array([x], np.float64), np.array([y], np.float64)) if numbers else (None, None)
        out.append(Difference(stage, at, f"info.{key}", "info", None, None, x, y, 1, len(keys), *size))
    return out
