"""From the rows of two dumps to the module at fault: the first whose output differs though its inputs agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from crossrl.cross.probe.hooks import TOKENS
from crossrl.cross.probe.rows import Numerics, Row
from crossrl.cross.probe.weights import Weight

# equal: bit for bit. rounding: by no more than rounding explains. tokens: other ids or positions go into the model.
# weights, module: at fault. drift: beyond rounding, but no module stands out. log-probs: all modules agree.
Judgement = Literal["equal", "rounding", "tokens", "weights", "module", "drift", "log-probs"]


@dataclass(frozen=True, slots=True)
class WeightGap:
    """A parameter or buffer that differs: by ``values`` or ``shape``, or it is ``missing in A`` or ``missing in B``."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Judged:
    """``module``: the one at fault. ``at``: the row at which the difference shows first. ``sentence``: for people."""

    judgement: Judgement
    sentence: str
    module: str | None = None
    at: int | None = None


def weight_gaps(one: Sequence[Weight], two: Sequence[Weight]) -> list[WeightGap]:
    """In the order of the model. Where the data types differ, values are compared as bfloat16 has them."""
    other, gaps = {w.name: w for w in two}, []
    for w in one:
        o = other.pop(w.name, None)
        if o is None or w.shape != o.shape:
            gaps.append(WeightGap(w.name, "missing in B" if o is None else "shape"))
        elif (w.digest != o.digest) if w.dtype == o.dtype else (w.rounded != o.rounded):
            gaps.append(WeightGap(w.name, "values"))
    return [*gaps, *(WeightGap(name, "missing in A") for name in other)]


def judge(rows: Sequence[Row], gaps: Sequence[WeightGap], buffers: Sequence[WeightGap], numerics: Numerics) -> Judged:
    """Tokens before weights, weights before modules: what comes later would follow from what came before."""
    tokens = next((r for r in rows if r.module == TOKENS and (r.returned or 0.0) > 0.0), None)
    if tokens is not None:
        sentence = f"the sides feed other {tokens.output} to the model: look at how the path makes its inputs"
        return Judged("tokens", sentence, TOKENS, tokens.order)
    found = first_module(rows, buffers, numerics)
    if gaps:
        sentence = f"other weights: {gaps[0].name} is the first of {len(gaps)} parameters that differ ({gaps[0].kind})"
        return Judged("weights", sentence, gaps[0].name.rpartition(".")[0], found.at if found else None)
    if found is not None:
        return found
    largest = max((_size(r) for r in rows), default=0.0)
    if largest > numerics.limit:
        at = next(r for r in rows if _size(r) > numerics.limit)
        return Judged(
            "drift",
            f"no module stands out: differences grow little by little to {largest:.1e}, beyond {numerics.limit:.0e} "
            f"from {at.module} on. Look for other numerics in all modules: data type, TF32, kernels",
            at.module,
            at.order,
        )
    if largest > 0.0:
        return Judged("rounding", f"no module differs by more than rounding explains: {largest:.1e} at most")
    return Judged("equal", f"all {len(rows)} calls of modules are equal bit for bit")


def first_module(rows: Sequence[Row], buffers: Sequence[WeightGap], numerics: Numerics) -> Judged | None:
    """The module at which a difference comes in; None when none stands out.

    Calls are in the order in which they ended, so what is inside a module comes before it. When a module is given
    something else though everything before it agrees, the fault is in code between modules: it belongs to the
    innermost module around that was itself given the same (attention scores, residual sums).
    """
    before = 0.0
    for row in rows:
        given, returned = row.given or 0.0, row.returned or 0.0
        if given > max(numerics.limit, numerics.jump * before):
            owner, what = _enclosing(rows, row, numerics.limit), f" ({row.input})" if row.input.strip("0") else ""
            sentence = (
                f"{owner}: its inputs agree, and so do all modules before, but what it hands to {row.module}{what} "
                f"differs by {given:.1e} of its norm"
            )
            return Judged("module", sentence, owner, row.order)
        if returned > max(numerics.limit, numerics.jump * max(before, given)):
            what = f" {row.output}" if row.output else ""
            sentence = (
                f"{row.module} ({row.kind}): its inputs agree, its output{what} differs by {returned:.1e} of its norm"
            )
            table = next((g.name for g in buffers if g.name.rpartition(".")[0] == row.module), None)
            return Judged(
                "module", sentence + (f"; so does its buffer {table}" if table else ""), row.module, row.order
            )
        before = max(before, given, returned)
    return None


def _enclosing(rows: Sequence[Row], row: Row, limit: float) -> str:
    given = {r.module: r.given or 0.0 for r in rows}
    name = row.module
    while "." in name:
        name = name.rpartition(".")[0]
        if given.get(name, limit + 1) <= limit:
            return name
    return "the model"


def _size(row: Row) -> float:
    return max(row.given or 0.0, row.returned or 0.0)
