"""How far two calls of one module are apart, measured on the module's own scale: the norm of a token's row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from crossrl.cross.probe.dump import Opened
from crossrl.cross.probe.sketch import Seen

# A token whose row is nearly zero is measured on this share of the usual norm.
SMALL_ROW = 0.1


@dataclass(frozen=True, slots=True)
class Numerics:
    """What rounding explains. ``limit``: a relative difference that passes. ``jump``: a module stands out when its
    difference is so many times what was there before it, as rounding grows through the layers. ``share``: of a
    call's tokens, the one at this quantile counts. ``nats``: a difference of log-probs that equal modules explain."""

    name: Literal["float32", "bfloat16"]
    limit: float
    jump: float
    share: float
    nats: float


# Measured with SmolLM2-135M (30 layers) on CPU, 149 tokens of text, packed against eager attention. float32: the worst
# token of any module 1e-5, the largest jump 3.5. bfloat16 (also against float32): 0.05 and 2.0 at the quantile 0.9, but
# 0.3 and 6 for the worst token (9.6 with random tokens), since a few tokens have activations that dwarf all others:
# the worst one says nothing there. Log-probs: 1.2e-5 and 0.28 nat.
FLOAT32 = Numerics("float32", limit=1e-4, jump=8.0, share=1.0, nats=1e-4)
BFLOAT16 = Numerics("bfloat16", limit=0.15, jump=4.0, share=0.9, nats=1.0)


@dataclass(frozen=True, slots=True)
class Row:
    """One call of one module on both sides. ``given``, ``returned``: the relative difference of its inputs and outputs
    (0.0: equal bit for bit); None: nothing to compare. ``positions``: tokens of the sample, from 0, at which the output
    differs by more than the limit; ``worst``: where most. ``input``, ``output``: which tensor differs most ("": the one
    that there is)."""

    order: int
    module: str
    kind: str
    occurrence: int
    given: float | None
    returned: float | None
    positions: tuple[int, ...]
    worst: int | None
    input: str
    output: str


def rows_of(a: Opened, b: Opened, numerics: Numerics) -> list[Row]:
    """The calls that both dumps have, in the order of A."""
    theirs = {(c.module, c.occurrence): c for c in b.dump.calls}
    rows: list[Row] = []
    for mine in a.dump.calls:
        other = theirs.get((mine.module, mine.occurrence))
        if other is None:
            continue
        given, of_input, _ = _largest(a, b, mine.inputs, other.inputs, numerics)
        returned, of_output, errors = _largest(a, b, mine.outputs, other.outputs, numerics)
        # The head has a row for each token that predicts one of the response.
        first = len(a.dump.prompt_ids) - 1 if len(errors) == len(a.dump.response_ids) else 0
        rows.append(
            Row(
                len(rows), mine.module, mine.kind, mine.occurrence, given, returned,
                tuple((np.flatnonzero(errors > numerics.limit) + first).tolist()),
                int(errors.argmax()) + first if errors.any() else None,
                of_input, of_output,
            )
        )  # fmt: skip
    return rows


def error(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float64 ``[rows]``: the norm of each row's difference over the norm of the row in ``a``. Infinite where one has
    a number and the other has none."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = a.astype(np.float64) - b
    difference[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    difference[~np.isfinite(difference)] = np.inf
    norm = np.linalg.norm(np.where(np.isfinite(a), a, 0.0).astype(np.float64), axis=1)
    scale = np.maximum(norm, SMALL_ROW * np.sqrt(np.mean(norm**2)) if len(norm) else 0.0)
    apart = np.linalg.norm(difference, axis=1)
    return np.divide(apart, scale, out=np.where(apart > 0, np.inf, 0.0), where=scale > 0)


def _largest(
    a: Opened, b: Opened, mine: Sequence[Seen], other: Sequence[Seen], numerics: Numerics
) -> tuple[float | None, str, np.ndarray]:
    """Over the tensors that both have: the largest difference, of which, and that tensor's errors per row."""
    pairs = [(s, o) for s in mine for o in other if s.label == o.label]
    if not pairs and mine and other:  # a keyword on one side, an argument by position on the other
        pairs = [(mine[0], other[0])]
    best: tuple[float | None, str, np.ndarray] = (None, "", np.zeros(0))
    for s, o in pairs:
        errors = _errors(a.kept, b.kept, s, o)
        value = float(np.quantile(errors, numerics.share, method="higher")) if errors.size else 0.0
        value = value or (float(np.finfo(np.float64).tiny) if errors.any() else 0.0)  # 0.0 means equal bits in all rows
        if best[0] is None or value > best[0]:
            best = (value, s.label, errors)
    return best


def _errors(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], one: Seen, two: Seen) -> np.ndarray:
    if one.digest == two.digest:
        return np.zeros(one.rows)
    if (one.shape, one.rows) != (two.shape, two.rows):
        return np.full(one.rows, np.inf)
    errors = error(a[one.digest], b[two.digest])
    if not errors.any() and one.dtype == two.dtype:  # other bits all the same, by less than a sketch shows
        errors = np.full(one.rows, np.finfo(np.float64).tiny)
    return errors
