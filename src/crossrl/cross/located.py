"""What the examinations of the tapes locate: differences of stages on equal inputs, without noise and consequences.

Each stage is run again on its own recorded inputs, so a difference in it does not carry over to the stages after it.
What does carry over is told apart here (``_consequence``). A difference is not blamed on a side when

- it is judged ``noise`` (the rounding that declared settings explain);
- B, the reference, differs from itself about as much when it runs its own tape again: that is the noise floor. A's own
  is none: an examination starts afresh, so a fault that lies in what A's process did before does not repeat either.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from crossrl.cross.findings import PART, Evidence, Examination, Finding, Gap, Part, Side
from crossrl.cross.noise import FLOOR

# Fields that the loader makes and a rollout passes on.
PROMPT_FIELDS = frozenset(
    ("sample_id", "group_id", "prompt_ids", "prompt", "data_source", "ground_truth", "extra_info")
)  # fmt: skip
STAGES = tuple(PART)


@dataclass(frozen=True, slots=True)
class Located:
    """``blamed``: findings that are a fault's own, the earliest first; all of them harmless, or none. ``harmless``:
    besides, those that change nothing that training sees. ``unstable``: parts whose difference is about as large as
    that of B from itself. ``repeated``: sides that examined their own tape. ``crossed``: sides whose tape the other
    side examined. ``steps``: those examined. ``judged``, ``unjudged``: stages of A's tape that B could judge at some
    step, and that it could not judge at some step: a stage may be in both.
    ``unseen``: what B's examination of A's tape could not have seen."""

    blamed: tuple[Finding, ...]
    harmless: tuple[Finding, ...]
    side: Side | None
    evidence: tuple[Evidence, ...]
    consequences: tuple[str, ...]
    unstable: tuple[Part, ...]
    repeated: frozenset[Side]
    crossed: frozenset[Side]
    noise: str
    steps: tuple[int, ...]
    judged: frozenset[str]
    unjudged: tuple[str, ...]
    unseen: tuple[str, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(dict.fromkeys(f.part for f in self.blamed))

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f.stage for f in self.blamed))


def locate(examinations: Sequence[Examination]) -> Located | None:
    """None when there is no examination."""
    if not examinations:
        return None
    findings = [f for e in examinations for f in e.findings]
    itself = [f for f in findings if f.of == f.by and f.judged == "differs"]
    between = [f for f in findings if f.of != f.by and f.judged == "differs"]
    floor = [f for f in itself if f.of == "B"]
    within = [f for f in between if within_floor(f, floor)]
    beyond = _in_order(f for f in between if not within_floor(f, floor))
    harmful = [f for f in beyond if not f.harmless]
    good = {(f.of, f.step) for f in findings if f.stage == "sync" and f.judged == "equal"}
    why = [(f, text) for f in harmful if (text := _consequence(f, harmful, good))]
    explained = [f for f, _ in why]
    blamed = [f for f in harmful if f not in explained]
    harmless = [f for f in beyond if f.harmless]
    if not blamed:
        blamed, harmless = harmless, []
    side = _side(blamed)
    unstable = tuple(dict.fromkeys(f.part for f in within))
    # Of A's tape alone: that B's is judged says nothing about what A did.
    by_other = [f for f in findings if (f.of, f.by) == ("A", "B")]
    judged = frozenset(f.stage for f in by_other if f.judged != "not judged")
    unjudged = [f for f in by_other if f.judged == "not judged"]
    stages = tuple(s for s in STAGES if any(f.stage == s for f in unjudged))
    repeated = frozenset(e.of for e in examinations if e.of == e.by)
    crossed = frozenset(e.of for e in examinations if e.of != e.by)
    return Located(
        tuple(blamed), tuple(harmless), side, tuple(_evidence(blamed, itself, side, examinations, unjudged)),
        _said(why), unstable, repeated, crossed, _noise(examinations, itself, within),
        tuple(sorted({s for e in examinations for s in e.steps})), judged, stages,
        tuple(text for e in examinations if (e.of, e.by) == ("A", "B") for text in e.unseen),
    )  # fmt: skip


def within_floor(finding: Finding, itself: Iterable[Finding]) -> bool:
    """Whether each gap of ``finding`` is about as large as one that a side has from itself in the same field, or
    smaller. Records that contradict each other do so whatever the noise."""
    if finding.by is None:
        return False
    own = [g for f in itself if f.stage == finding.stage for g in f.gaps]
    return bool(finding.gaps) and all(any(_no_larger(gap, other) for other in own) for gap in finding.gaps)


def _no_larger(gap: Gap, other: Gap) -> bool:
    """By the mean, which one odd value moves less than the largest, up to ``noise.FLOOR`` times. Values that are no
    numbers, and responses whose tokens flip, by how many differ: a count scatters by its root, here of two counts."""
    if gap.field != other.field or gap.kind != other.kind:
        return False
    if gap.unit != "responses":
        for mine, theirs in ((gap.mean, other.mean), (gap.largest, other.largest)):
            if mine is not None or theirs is not None:
                return mine is not None and theirs is not None and mine <= FLOOR * theirs
    expected = other.differing * max(gap.total, 1) / max(other.total, 1)
    return gap.differing <= expected + 3.0 * math.sqrt(2.0 * expected)


def _consequence(finding: Finding, among: Sequence[Finding], good: Collection[tuple[Side, int]]) -> str:
    """Why ``finding`` follows from another one of ``among``, of the same side; "" if it does not. ``good``: the syncs
    that delivered: what an earlier one left behind is gone after them."""
    for cause in among:
        if cause.of != finding.of:
            continue
        stale = cause.step < finding.step and not any(
            (cause.of, s) in good for s in range(cause.step + 1, finding.step)
        )
        if finding.stage == "rollout" and cause.stage == "sync" and stale:
            return f"it was drawn with what the sync of step {cause.step} left behind"
        earlier = cause.step <= finding.step
        if finding.stage == "rollout" and cause.stage == "data" and earlier and _only_prompts(finding):
            return "it was given other prompts"
        if finding.stage == "checkpoint" and cause.stage == "update" and earlier:
            return f"it holds what the update of step {cause.step} made"
    return ""


def _only_prompts(finding: Finding) -> bool:
    return bool(finding.gaps) and all(g.field in PROMPT_FIELDS or g.kind in ("ids", "order") for g in finding.gaps)


def _said(why: Sequence[tuple[Finding, str]]) -> tuple[str, ...]:
    """One sentence per stage, with the first step and its cause."""
    first: dict[str, str] = {}
    for finding, text in why:
        first.setdefault(finding.stage, f"{finding.stage} differs since step {finding.step}: {text}.")
    return tuple(first.values())


def _in_order(findings: Iterable[Finding]) -> list[Finding]:
    """By step, then in the order of stages; a run's own contradiction and A's tape before B's."""
    return sorted(findings, key=lambda f: (f.step, STAGES.index(f.stage), f.call, f.by is not None, f.of))


def _side(blamed: Sequence[Finding]) -> Side | None:
    """B is the reference: what both judge differently is A's, unless only B's own records contradict each other. That B
    does not repeat itself is a floor, and no more: A's fault may be far above it. None: not the same side for all
    parts."""
    sides: set[Side] = set()
    for part in {f.part for f in blamed}:
        contradicted: set[Side] = {f.of for f in blamed if f.part == part and f.by is None}
        sides |= contradicted or {"A"}
    return next(iter(sides)) if len(sides) == 1 else None


def _evidence(
    blamed: Sequence[Finding],
    itself: Sequence[Finding],
    side: Side | None,
    examinations: Sequence[Examination],
    unjudged: Sequence[Finding],
) -> Iterable[Evidence]:
    for stage in dict.fromkeys(f.stage for f in blamed):
        mine = [f for f in blamed if f.stage == stage]
        steps = sorted({f.step for f in mine})
        first = mine[0]
        often = f" So in {len(steps)} of the examined steps." if len(steps) > 1 else ""
        hint = f" {_sentence(first.hint)}" if first.hint else ""
        yield Evidence("stages", f"{place(first)}: {_sentence(first.sentence)}{hint}{often}")
        if any(f.of == "A" and f.stage == stage for f in itself):
            yield Evidence(
                "stages",
                f"{stage}: A, started afresh on its own tape, differs from it as well: the fault is random, or lies in "
                "what A's process did before.",
            )
    if side == "B":
        yield Evidence("stages", "B's own records contradict each other.")
    for e in examinations:
        of_stage = {s: {f.judged for f in e.findings if f.stage == s} for s in STAGES}
        same = [s for s, found in of_stage.items() if found == {"equal"}]
        if e.of != e.by and same:
            yield Evidence(
                "stages", f"{whose(e.of, e.by)}, {step_range(e.steps)}: {', '.join(same)} equal bit for bit."
            )
    if unjudged:
        yield Evidence("stages", f"Not judged of A's tape: {_not_judged(unjudged)}.")


def _not_judged(unjudged: Sequence[Finding]) -> str:
    said = []
    for stage in dict.fromkeys(f.stage for f in unjudged):
        mine = [f for f in unjudged if f.stage == stage]
        steps = ", ".join(str(s) for s in sorted({f.step for f in mine}))
        said.append(f"{stage}, step{'s' * (',' in steps)} {steps} ({mine[0].sentence.rstrip('.')})")
    return "; ".join(said)


def place(finding: Finding) -> str:
    call = f", call {finding.call}" if finding.call else ""
    return f"{finding.stage}, step {finding.step}{call} ({whose(finding.of, finding.by)})"


def whose(of: Side, by: Side | None) -> str:
    if by is None:
        return f"{of}'s own records"
    return f"{of}'s tape by {by}" if of != by else f"{of}'s tape by itself"


def _noise(examinations: Sequence[Examination], itself: Sequence[Finding], within: Sequence[Finding]) -> str:
    parts = []
    for e in examinations:
        if e.of == e.by:
            continue
        why = f" ({'; '.join(e.because)})" if e.because else ""
        parts.append(f"{whose(e.of, e.by)}: {e.numerics}{why}")
        small = [f for f in e.findings if f.judged == "noise"]
        for stage in dict.fromkeys(f.stage for f in small):
            parts[-1] += _small(stage, [f for f in small if f.stage == stage])
    said = [f"Stages, rounding to be expected: {'. '.join(parts)}."] if parts else []
    for side in sorted({f.of for f in itself}):
        stages = ", ".join(dict.fromkeys(f.stage for f in itself if f.of == side))
        floor = ": that is the floor there" if side == "B" else ""
        said.append(f"{side} does not repeat itself in {stages}{floor}.")
    for stage in dict.fromkeys(f.stage for f in within):
        said.append(f"{stage} differs between the sides by about as much as B from itself: not blamed.")
    return " ".join(said)


def _small(stage: str, findings: Sequence[Finding]) -> str:
    gaps = [g for f in findings for g in f.gaps if g.largest is not None]
    if not gaps:
        return f", {stage} within it"
    worst = max(gaps, key=lambda g: g.largest or 0.0)
    return f", {stage} within it (at most {worst.largest:.2g} {worst.unit}".rstrip() + ")"


def step_range(steps: Sequence[int]) -> str:
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _sentence(text: str) -> str:
    """With a capital letter and a full stop."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
