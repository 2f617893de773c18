"""update: run again from the recorded state on the recorded batch; the change of every tensor is compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from crossrl.batch import Batch
from crossrl.cross import noise
from crossrl.cross.case import Case
from crossrl.cross.findings import Finding, Gap
from crossrl.cross.measure import Measured, describe, judge, measure
from crossrl.cross.noise import Kind, Limit
from crossrl.engines.base import EngineState
from crossrl.stages.base import At
from crossrl.tape.record import Record

SHOWN = 4  # tensors of each kind
SAME_DIRECTION = 0.9  # cosine
# A tensor whose gradient is this much smaller than the average one, per entry, is moved by rounding alone: Adam divides
# by the gradient's own size (the bias of attention's keys has a gradient of zero in exact arithmetic).
ALIVE = 1e-4
METRICS = "info.metrics.actor"
FIRST = {f"{METRICS}/lr": 0, f"{METRICS}/grad_norm": 1, f"{METRICS}/loss": 2, "log_probs": 3}  # what to say first


@dataclass(frozen=True, slots=True)
class Change:
    """How a tensor's recorded value differs from the one found here. ``relative``: the norm of the difference over that
    of what was found (weights: of the change). ``unequal``: entries with other bits. ``cosine``: of the two changes."""

    name: str
    relative: float
    unequal: int
    total: int
    cosine: float = math.nan
    ratio: float = math.nan
    alive: bool = True


def judge_update(case: Case, record: Record) -> Finding:
    """Leaves the trainer in the state that its own update made. Raises ``NotJudged``."""
    case.need_state()
    before = case.states.now()
    _, found = case.again(record)
    kind = case.kind("update")
    recorded = record.only(n for n in record.header.fields if n == "log_probs")
    columns = measure(recorded, found, "update", At(case.step, record.header.call), _limits(kind, recorded))
    columns.sort(key=lambda m: (m.explained, FIRST.get(m.gap.field, len(FIRST))))
    theirs = case.states.after(case.step)
    if theirs is None:
        return _without_state(case, record, columns)
    mine = case.states.now()
    # What the run began with; where the data types differ, this side's trainer holds it rounded.
    start = before if case.states.same_types else case.states.after(case.step - 1) or before
    weights = changes((before.weights, start.weights), mine.weights, theirs.weights, mine.optimizer)
    moments = changes(None, mine.optimizer, theirs.optimizer)
    measured = [
        *_gaps("weights", weights, noise.CHANGE.get(kind, 0.0)),
        *_gaps("optimizer", moments, noise.MOMENTS.get(kind, 0.0)),
        *_steps(mine, theirs),
        *columns,
    ]
    if kind != "exact" and judge(measured) == "differs":
        measured = excused(measured, sensitivity(case, record, before, mine, found, kind))
    judged, count = judge(measured), len(mine.weights)
    if judged == "equal":
        sentence = f"weights, optimizer and metrics are the same after the update, bit for bit ({count} tensors)"
        return case.finding(record, "update", judged, sentence)
    whole = overall((before, start), mine, theirs)
    sentence = _sentence(whole, weights, moments, columns) + (": rounding explains that" if judged == "noise" else "")
    measured.sort(key=lambda m: m.explained)
    return case.finding(
        record, "update", judged, sentence, measured, hint=_hint(whole, columns) if judged == "differs" else ""
    )


def sensitivity(
    case: Case, record: Record, before: EngineState, mine: EngineState, found: Batch, kind: Kind
) -> dict[str, float]:
    """By how much this side's own update moves when the weights before it are changed by one rounding each: field of a
    gap to size, in the gap's unit.

    Where all rewards of a mini-batch are equal its gradient is rounding and nothing else, and Adam makes a whole step
    of it; no fixed limit knows that, so it is tried. Leaves the trainer in the state ``mine``.
    """
    draw = torch.Generator().manual_seed(case.step)

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, tensor.shape, generator=draw).to(tensor.dtype) * 2 - 1
        return tensor * (1 + noise.ROUNDING[kind] * signs)

    start = EngineState({n: rounded(t) for n, t in before.weights.items()}, before.optimizer, before.scalars)
    case.states.load(start)
    try:
        _, again = case.again(record)
        moved = case.states.now()
    finally:
        case.states.load(mine)
    at = At(case.step, record.header.call)
    sizes = {m.gap.field: m.gap.largest or 0.0 for m in measure(found, again, "update", at)}
    sizes |= {
        f"weights/{c.name}": c.relative for c in changes((before.weights, start.weights), mine.weights, moved.weights)
    }
    return sizes | {f"optimizer/{c.name}": c.relative for c in changes(None, mine.optimizer, moved.optimizer)}


def excused(measured: list[Measured], sizes: Mapping[str, float]) -> list[Measured]:
    """Gaps that are not much larger than ``sizes`` are noise."""
    out = []
    for each in measured:
        size = noise.SENSITIVITY * sizes.get(each.gap.field, 0.0)
        if not each.explained and each.gap.largest is not None and each.gap.largest <= size:
            each = Measured(replace(each.gap, allowed=size), True)
        out.append(each)
    return out


def _steps(mine: EngineState, theirs: EngineState) -> list[Measured]:
    """Optimizer steps done so far, where both sides count them."""
    recorded, found = (state.scalars.get("steps_done") for state in (theirs, mine))
    if recorded is None or recorded == found:
        return []
    return [Measured(Gap("optimizer steps", "value", 1, 1, recorded=recorded, found=found))]


def _sentence(whole: Change, weights: list[Change], moments: list[Change], columns: list[Measured]) -> str:
    if not weights and not moments:
        return f"weights and optimizer are the same after the update, what it reports is not: {describe(columns)}"
    parts = [
        f"the update changes the weights differently, by {whole.relative:.2g} of the change's own size"
        if weights
        else "the weights are the same after the update, the optimizer's state is not"
    ]
    parts += [text for text in (_tensors("most in", weights), _tensors("optimizer state:", moments)) if text]
    return "; ".join(parts + ([describe(columns)] if columns else []))


def changes(
    before: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] | None,
    mine: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
    moments: Mapping[str, torch.Tensor] | None = None,
) -> list[Change]:
    """Tensors with other bits, the largest difference first. ``before``: what ``mine`` and ``theirs`` began with; then
    changes since then are compared, not values.

    ``moments``: of the optimizer, to tell tensors that have a gradient from those that have none.
    """
    average = _rms([t for n, t in (moments or {}).items() if n.endswith(".exp_avg")])
    out = []
    for name in [*mine, *(n for n in theirs if n not in mine)]:
        if name not in mine or name not in theirs:
            out.append(Change(name, math.inf, 1, 1))
            continue
        if mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]):
            continue
        a, b = theirs[name].double(), mine[name].double()
        if before is not None:
            a, b = a - before[1][name].double(), b - before[0][name].double()
        gradient = (moments or {}).get(f"{name}.exp_avg")
        alive = gradient is None or _rms([gradient]) >= ALIVE * average
        out.append(_change(name, a, b, alive))
    return sorted(out, key=lambda c: -c.relative)


def overall(before: tuple[EngineState, EngineState], mine: EngineState, theirs: EngineState) -> Change:
    """All weights as one vector."""
    names = [n for n in mine.weights if n in theirs.weights]
    flat = [torch.cat([s.weights[n].double().flatten() for n in names]) for s in (*before, mine, theirs)]
    return _change("all weights", flat[3] - flat[1], flat[2] - flat[0], True)


def _change(name: str, a: torch.Tensor, b: torch.Tensor, alive: bool) -> Change:
    size, other, apart = float(b.norm()), float(a.norm()), float((a - b).norm())
    unequal = int((a != b).sum())
    relative = apart / size if size else (math.inf if apart else 0.0)
    product = size * other
    return Change(
        name, relative, unequal, a.numel(), float((a * b).sum()) / product if product else math.nan,
        other / size if size else math.inf, alive,
    )  # fmt: skip


def _rms(tensors: list[torch.Tensor]) -> float:
    count = sum(t.numel() for t in tensors)
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors) / count) if count else 0.0


def _limits(kind: Kind, recorded: Batch) -> dict[str, Limit]:
    if kind == "exact":
        return {}
    norm = abs(float(recorded.info.get("metrics", {}).get("actor/grad_norm", 0.0)))
    grad, loss = noise.GRAD_NORM[kind] * norm, noise.LOSS[kind]
    return {"log_probs": noise.LOG_PROBS[kind], f"{METRICS}/grad_norm": Limit(grad, grad),
            f"{METRICS}/loss": Limit(loss, loss), f"{METRICS}/lr": Limit(0.0, 0.0),
            f"{METRICS}/optimizer_steps": Limit(0.0, 0.0)}  # fmt: skip


def _gaps(what: str, found: list[Change], limit: float) -> list[Measured]:
    """A gap per tensor; the worst, and how many more."""
    unit = "of its change" if what == "weights" else "of its size"
    return [
        Measured(
            Gap(f"{what}/{c.name}", "change", c.unequal, c.total, largest=c.relative, allowed=limit or None, unit=unit),
            limit > 0 and (c.relative <= limit or not c.alive),
        )
        for c in sorted(found, key=lambda c: (not c.alive, -c.relative))
    ]


def _tensors(before: str, found: list[Change]) -> str:
    named = ", ".join(f"{c.name} ({c.relative:.2g})" for c in [c for c in found if c.alive][:SHOWN])
    return f"{before} {named}" if named else ""


def _hint(whole: Change, columns: list[Measured]) -> str:
    """What the learning rates and the two changes, as directions, say: only where it is clear."""
    rates = next((m.gap for m in columns if m.gap.field == f"{METRICS}/lr"), None)
    if rates is not None:
        return f"the run's learning rate was {rates.recorded:g}, here it is {rates.found:g}"
    if whole.cosine > SAME_DIRECTION and not 0.9 < whole.ratio < 1.1:
        return f"the run's change has nearly the same direction and {whole.ratio:.3g} times the size"
    if whole.cosine < -SAME_DIRECTION:
        return "the run's change has the opposite direction: look at the sign of the loss"
    return ""


def _without_state(case: Case, record: Record, columns: list[Measured]) -> Finding:
    """The tape has digests of the weights and no weights."""
    told = record.header.info.get("state", {}).get("after", {})
    differs = judge(columns) == "differs"
    case.states.walked(case.step, differs)
    if case.states.known.kind == "recorded":
        return case.finding(record, "update", judge(columns), "the weights after the update have the recorded digests"
                            + (f"; {describe(columns)}" if columns else ""), columns)  # fmt: skip
    size = "by how much is not on the tape: record with tape.state=True"
    if told and case.kind("update") == "exact":
        return case.finding(record, "update", "differs", f"other weights after the update, {size}"
                            + (f"; {describe(columns)}" if columns else ""), columns)  # fmt: skip
    sentence = (f"{describe(columns)}; " if columns else "") + f"weights after the update: {size}"
    judged = judge(columns)
    return case.finding(record, "update", "not judged" if judged == "equal" else judged, sentence, columns)
