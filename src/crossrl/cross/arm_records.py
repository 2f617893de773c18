"""The verdict of the arms' tapes alone, without any examination: which half of A makes other records than B's.

Runs that repeat bit for bit need no statistics. The records of an arm are walked along those of BB in the order in
which they were made (``arm_walk``). All before the first that differs are equal, so its stage was given the same
weights, prompts and responses: what differs is what it made of them. So

| first record that differs from BB | at fault |
| --- | --- |
| of AB: a rollout | A's inference (its weight sync would look the same) |
| of BA: reward; log-probs, advantages, update | A's reward; A's training |
| of AA: any | its stage's part; the pairs show what may be hidden behind it |
| of AA a rollout after step 1, of AB none | A's weight sync, which only an update of A's own needs |

provided that B repeats itself there: BB2, or an arm in which B does that half (BA infers with B, AB trains with B), is
BB bit for bit at that record and before. Where nothing shows that, or where B's own half differs from itself, nothing
is claimed; nor where the sides declare a difference that rounds otherwise (``arm_numerics``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from crossrl.cross.arm_numerics import declared
from crossrl.cross.arm_walk import Place, Walk, sampler_gap, walk
from crossrl.cross.arms import MEANING
from crossrl.cross.findings import Conclusion, Evidence, Gap, Part
from crossrl.cross.located import step_range
from crossrl.cross.scenario import INFERENCE_HALF, TRAINING_HALF
from crossrl.tape import RecordMissing, open_run

HALF: dict[Part, str] = {**dict.fromkeys(INFERENCE_HALF, "inference"), **dict.fromkeys(TRAINING_HALF, "training")}
# In which arms, besides BB2, B does this half; and A.
BY_B = {"inference": "BA", "training": "AB"}
BY_A = {"inference": "AB", "training": "BA"}
# A pair tells A's inference from its weight sync, if A's inference does the same twice.
ONCE = (
    "A by itself was run once: an inference of A that does not repeat itself, and happened to in AB, would look the "
    "same. A second run of A alone that equals AA rules that out."
)


@dataclass(frozen=True, slots=True)
class Claim:
    """``part`` of A made a record that B's did not, on the same inputs. ``by``: the arms that show it."""

    part: Part
    walk: Walk
    by: tuple[str, ...]

    @property
    def place(self) -> Place:
        assert self.walk.place is not None
        return self.walk.place


@dataclass(frozen=True, slots=True)
class ArmRecords:
    """``conclusion``: None where the records alone tell nothing. ``claims``: the earliest first. ``repeat``: whether a
    second run of B is needed to tell."""

    conclusion: Conclusion | None
    claims: tuple[Claim, ...]
    evidence: tuple[Evidence, ...]
    noise: str
    repeat: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(dict.fromkeys(c.part for c in self.claims))

    @property
    def candidates(self) -> tuple[Part, ...]:
        """With what would look the same: what a sampler makes depends on what arrived in it."""
        late = any(c.part == "inference" and c.place[0] > 1 for c in self.claims)
        return tuple(dict.fromkeys((*self.parts, *(("weight sync",) if late else ()))))

    @property
    def gaps(self) -> tuple[Gap, ...]:
        return self.claims[0].walk.gaps if self.claims else ()


def judge_arms(runs: Mapping[str, Path]) -> ArmRecords | None:
    """``runs``: arm to its recorded run, of a pair the one that trains. None where BB, or any other arm, has no tape.

    Raises ``CorruptRecord`` for damaged records.
    """
    walks = _walks(runs)
    if not walks:
        return None
    evidence = [_told(w) for w in walks.values()]
    unstable = _unstable(walks)
    evidence += [Evidence("records", text) for text in unstable.values()]
    claims, doubts, repeat = [], [], False
    for claim in _claims(walks):
        half = HALF[claim.part]
        witness = _witness(walks, half, claim.place)
        rounding = declared(runs.get("AA", runs[claim.walk.name]), runs["BB"], claim.walk.stage, claim.place[0])
        if rounding and claim.part != "data":
            doubts.append(
                f"A and B differ in {'; '.join(rounding[:3])}: rounding alone may make another {claim.walk.stage}, so "
                f"nothing is blamed on A's {half} by unequal bits. Make them equal, or let the curves decide."
            )
        elif half in unstable:
            doubts.append(f"What A's {claim.part} makes differs too, but no more can be said by equal bits.")
        elif witness is None:
            repeat = True
            doubts.append(
                f"Nothing shows that B itself makes the same {claim.walk.stage} of step {claim.place[0]} twice, so the "
                f"difference is not blamed on A's {half}: a second run of B would (BB2)."
            )
        else:
            claims.append(claim)
            evidence.append(_confirmed(claim, walks[witness]))
            evidence += _own_gap(claim, runs)
            if claim.part == "weight sync":
                evidence.append(Evidence("records", ONCE))
    evidence += [Evidence("records", text) for text in doubts]
    return ArmRecords(_conclusion(walks, claims, bool(doubts)), tuple(claims), tuple(evidence), _noise(walks), repeat)


def _walks(runs: Mapping[str, Path]) -> dict[str, Walk]:
    found = {}
    for name in ("AA", "AB", "BA", "BB2"):
        if name in runs and "BB" in runs:
            try:
                found[name] = walk(name, runs[name], runs["BB"])
            except RecordMissing:
                continue
    return found if set(found) - {"BB2"} else {}


def _claims(walks: Mapping[str, Walk]) -> list[Claim]:
    """What differs in a half that A does, by part, at its first place; the earliest first."""
    found: dict[Part, Claim] = {}
    for name in ("AB", "BA", "AA"):
        each = walks.get(name)
        if each is None or each.place is None or each.part is None:
            continue
        if name != "AA" and BY_A[HALF[each.part]] != name:  # B's half: no claim about A (``_unstable``)
            continue
        part = _or_sync(each.part, each, walks) if name == "AA" else each.part
        if part is None:
            continue
        before = found.get(part)
        if before is None or each.place < before.place:
            found[part] = Claim(part, each, (name, *(before.by if before else ())))
        else:
            found[part] = Claim(part, before.walk, (*before.by, name))
    return sorted(found.values(), key=lambda c: c.place)


def _or_sync(part: Part, aa: Walk, walks: Mapping[str, Walk]) -> Part | None:
    """Of A alone: ``part``, unless the pair in which A does the same half is as BB there. None: that contradicts it."""
    pair = walks.get(BY_A[HALF[part]])
    assert aa.place is not None
    if pair is None or not pair.covers(aa.place):
        return part
    return "weight sync" if part == "inference" and aa.place[0] > 1 else None


def _unstable(walks: Mapping[str, Walk]) -> dict[str, str]:
    """Halves in which B differs from itself on equal inputs, and how that was seen."""
    found: dict[str, str] = {}
    for name in ("BB2", "BA", "AB"):
        each = walks.get(name)
        if each is None or each.part is None or (name != "BB2" and BY_B[HALF[each.part]] != name):
            continue
        half = HALF[each.part]
        found.setdefault(
            half,
            f"B does not repeat itself: in {name} ({MEANING[name]}) its own {each.stage} of step {each.step} differs "
            f"from BB's on equal inputs. So nothing is claimed about {half} by equal bits.",
        )
    return found


def _witness(walks: Mapping[str, Walk], half: str, place: Place) -> str | None:
    """An arm in which B did ``half`` as in BB, at ``place`` and all before it."""
    return next((n for n in (BY_B[half], "BB2") if n in walks and walks[n].covers(place)), None)


def _conclusion(walks: Mapping[str, Walk], claims: list[Claim], doubted: bool) -> Conclusion | None:
    aa = walks.get("AA")
    if claims:
        if aa is not None and all(aa.covers(c.place) for c in claims):  # A by itself is as B: the halves do not fit
            return "not distinguishable"
        parts = {c.part for c in claims}
        return "several" if len(parts) > 1 else claims[0].part
    if doubted or aa is None or any(w.place is not None for w in walks.values()):
        return None
    return "no difference" if aa.whole and aa.pairs else None


def _told(w: Walk) -> Evidence:
    what = f"{w.name} ({MEANING[w.name]})"
    if not w.steps or (not w.pairs and w.place is None):
        return Evidence("records", f"{what} and BB have no recorded step in common: nothing was compared.")
    if w.place is None:
        half = {"AB": ": A's inference half changes nothing", "BA": ": A's training half changes nothing"}
        few = "" if w.whole else "; it has fewer steps than BB"
        text = f"{what} is BB bit for bit in all {w.pairs} records of {step_range(w.steps)}{half.get(w.name, '')}{few}."
        return Evidence("records", text)
    if w.unclear:
        return Evidence("records", f"{what} against BB: {w.unclear}. Nothing is concluded from it.")
    held = f", given the same weights ({w.weights[:12]})" if w.weights else ""
    some = f"is BB bit for bit in {w.pairs} record{'s' * (w.pairs != 1)}, up to" if w.pairs else "begins with"
    text = f"{what} {some} {w.stage} of step {w.step}{held}"
    return Evidence("records", f"{text}, which differs: {w.more}. The first value is {w.name}'s.")


def _confirmed(claim: Claim, witness: Walk) -> Evidence:
    half = HALF[claim.part]
    return Evidence(
        "records",
        f"B's {half} repeats: in {witness.name} ({MEANING[witness.name]}) it made the same {claim.walk.stage} of step "
        f"{claim.place[0]} as in BB, and everything before. So the difference is A's {claim.part}, shown by "
        f"{' and '.join(claim.by)}.",
    )


def _own_gap(claim: Claim, runs: Mapping[str, Path]) -> list[Evidence]:
    if HALF[claim.part] != "inference":
        return []
    step = claim.place[0]
    mine, theirs = (sampler_gap(open_run(runs[name]), step) for name in (claim.walk.name, "BB"))
    if mine is None or theirs is None:
        return []
    return [
        Evidence(
            "records",
            f"Sampler and trainer give the tokens of step {step} log-probs {mine:.2g} nat apart in the mean in "
            f"{claim.walk.name}, {theirs:.2g} in BB.",
        )
    ]


def _noise(walks: Mapping[str, Walk]) -> str:
    same = [n for n in ("AA", "BB2", "AB", "BA") if n in walks and walks[n].place is None and walks[n].pairs]
    if same:
        return f"Records: none; {' and '.join(same)} repeated BB bit for bit."
    return "Records: no arm has repeated all of BB; what was repeated of it stands in the evidence."
