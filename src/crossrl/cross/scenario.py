"""The verdict of the four arms' curves alone: which half of A has to be in a run for it to go wrong.

In an exchange, the side that infers draws the prompts, generates, and brings the weights that it loads to its sampler
by its own sync; the side that trains scores, computes advantages and updates. So the arm AB holds A's data, inference
and weight sync, BA holds A's rewards and training:

| AA | AB | BA | |
| --- | --- | --- | --- |
| as BB | as BB | as BB | no difference |
| differs | differs | as BB | inference (or weight sync, or data, of A) |
| differs | as BB | differs | training (or reward of A) |
| differs | differs | differs | several |
| differs | as BB | as BB | not distinguishable: only both halves of A together go wrong. In AB the weights come as a loaded checkpoint and not from A's own update, so a sync that fails only after an update is in neither pair |
| as BB | any differs | | not distinguishable: the pairs themselves do not work |

An arm counts as different in what A alone is different in, in the same direction. What A alone shows first in the order
failure, reward, gap, entropy, gradient norm, response length decides; the others are asked when that leaves it open.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crossrl.cross.arms import MEANING, Arm
from crossrl.cross.curves import reached
from crossrl.cross.effects import FEWEST_STEPS, Numerics
from crossrl.cross.findings import Conclusion, Effect, Evidence, Part
from crossrl.cross.next_steps import NextSteps
from crossrl.cross.symptoms import FAILURE, Reading, effect_sentence, lost, noise_sentence, read_arms

INFERENCE_HALF: tuple[Part, ...] = ("inference", "weight sync", "data")
TRAINING_HALF: tuple[Part, ...] = ("training", "reward")


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the curves say. ``candidates``: all parts that would look the same, the conclusion's first. ``step``: since
    when A alone differs. ``differs``: whether A alone differs at all; None: not known."""

    conclusion: Conclusion
    candidates: tuple[Part, ...] = ()
    step: int | None = None
    differs: bool | None = None
    evidence: tuple[Evidence, ...] = ()
    effects: tuple[Effect, ...] = ()
    noise: str = ""
    notes: tuple[str, ...] = ()
    todo: tuple[str, ...] = ()


def scenario(
    arms: Mapping[str, Arm], steps: NextSteps, numerics: Numerics = "bfloat16", more: Sequence[str] = ()
) -> Scenario | None:
    """None when there is no curve of A and B to compare: then it cannot say anything, not even that."""
    base = arms.get("BB")
    others = [a for n in ("AA", "AB", "BA") if (a := arms.get(n)) and a.state != "missing"]
    if base is None or base.curves is None or not others:
        return None
    if base.state == "failed" or _lost_itself(base, others):
        why = base.reason or f"nothing to learn from since step {base.no_signal}"
        return Scenario(
            "not distinguishable",
            evidence=(Evidence("failure", f"BB, the healthy reference, failed itself: {why}."),),
            todo=(*steps.arm("BB"), steps.again("BB")),
        )
    readings, floors = read_arms(arms, numerics, more)
    found = _decide(arms, readings, steps)
    running = [a.name for a in (base, *others) if a.state == "running"]
    notes = [f"{name} is still running: this is how it looks so far." for name in running]
    if any(FAILURE in r.symptoms and r.arm.state == "failed" for r in readings.values()):
        notes.append("A run that somebody or the machine stopped looks failed, too: start it again, it goes on.")
    effects = tuple(e for r in readings.values() for e in r.effects)
    return Scenario(
        found.conclusion, found.candidates, found.step, found.differs, (*found.evidence, *_same(readings)), effects,
        noise_sentence(floors), (*found.notes, *notes), found.todo,
    )  # fmt: skip


def _lost_itself(base: Arm, others: Sequence[Arm]) -> bool:
    """Whether the reference has nothing to learn from any more and has not solved its task either."""
    if base.no_signal is None or base.curves is None:
        return False
    return not reached(base.curves, base.no_signal) or any(lost(base, other) for other in others if other.curves)


def _decide(arms: Mapping[str, Arm], readings: Mapping[str, Reading], steps: NextSteps) -> Scenario:
    aa, ab, ba = (r if (r := readings.get(n)) and r.usable else None for n in ("AA", "AB", "BA"))
    if aa is None and not (ab and ab.symptoms) and not (ba and ba.symptoms):
        return _cannot_read(readings, steps)
    if aa is not None and not aa.symptoms:
        return _alone_is_healthy(aa, ab, ba, steps)
    wanted = dict(aa.symptoms) if aa else {**(ba.symptoms if ba else {}), **(ab.symptoms if ab else {})}
    shown = [None if r is None else _shown(r, aa) for r in (ab, ba)]
    main = next(iter(wanted))
    in_ab, in_ba = (None if s is None else main in s for s in shown)
    if in_ab == in_ba and not in_ab:  # the first symptom leaves it open
        in_ab, in_ba = (None if s is None else bool(s) for s in shown)
    evidence = [Evidence("failure" if m == FAILURE else "curves", s.sentence) for m, s in wanted.items()] if aa else []
    for reading in (ab, ba):
        evidence += _arm_evidence(reading, main)
    step = min((s.step for s in wanted.values() if s.step is not None), default=None)
    return _halves(in_ab, in_ba, step, tuple(evidence), arms, readings, steps)


def _halves(
    in_ab: bool | None, in_ba: bool | None, step: int | None, evidence: tuple[Evidence, ...],
    arms: Mapping[str, Arm], readings: Mapping[str, Reading], steps: NextSteps,
) -> Scenario:  # fmt: skip
    """``in_ab``, ``in_ba``: whether the pair shows what A alone shows; None: not known."""
    lacking = [n for n, shows in (("AB", in_ab), ("BA", in_ba)) if shows is None]
    todo = [command for name in lacking for command in steps.arm(name)]
    notes = tuple(_lacking(name, arms, readings) for name in lacking)
    again = [steps.again(*lacking)] if todo else []
    if in_ab and in_ba:
        text = "Each half of A makes a run with the other half of B go wrong by itself."
        both: tuple[Part, ...] = ("inference", "training")
        return Scenario("several", both, step, True, (*evidence, Evidence("curves", text)))
    if in_ab:
        text = "It goes wrong with A's inference half (data, generation, A's own weight sync) and B's training."
        note = "The curves cannot tell A's inference from its weight sync or data: the examination of the tapes can."
        found = Scenario("inference", INFERENCE_HALF, step, True, (*evidence, Evidence("curves", text)), notes=(note,))
    elif in_ba:
        text = "It goes wrong with A's training half (rewards, advantages, update) and B's inference."
        note = "In an exchange the side that trains scores: A's reward would look the same. The examination can tell."
        found = Scenario("training", TRAINING_HALF, step, True, (*evidence, Evidence("curves", text)), notes=(note,))
    elif in_ab is False and in_ba is False:
        text = (
            "Neither half of A alone makes a run go wrong. It takes both together, or a sync that fails after A's own "
            "update: in AB the weights come as a loaded checkpoint."
        )
        return Scenario("not distinguishable", (), step, True, (*evidence, Evidence("curves", text)),
                        todo=steps.examine())  # fmt: skip
    else:
        points = {(False, None): "training", (None, False): "inference"}.get((in_ab, in_ba))
        text = f"What is there points to {points}, but nothing shows it yet." if points else "No pair has run yet."
        return Scenario("not distinguishable", (), step, True, (*evidence, Evidence("curves", text)), notes=notes,
                        todo=(*todo, *again))  # fmt: skip
    return Scenario(found.conclusion, found.candidates, step, True, found.evidence, notes=(*found.notes, *notes),
                    todo=(*todo, *again))  # fmt: skip


def _shown(reading: Reading, aa: Reading | None) -> set[str]:
    """Which symptoms of A alone the pair has; all of its own when there is no run of A alone. What fails at all fails
    in the same way, whether it stops, loses its signal or only its reward."""
    if aa is None:
        return set(reading.symptoms)
    found = {m for m, s in reading.symptoms.items() if m in aa.symptoms and aa.symptoms[m].sign == s.sign}
    if FAILURE in aa.symptoms and {FAILURE, "reward"} & set(reading.symptoms):
        found.add(FAILURE)
    if FAILURE in reading.symptoms and "reward" in aa.symptoms and aa.symptoms["reward"].sign < 0:
        found.add("reward")
    return found


def _arm_evidence(reading: Reading | None, main: str) -> list[Evidence]:
    if reading is None:
        return []
    if reading.symptoms:
        return [Evidence("failure" if m == FAILURE else "curves", s.sentence) for m, s in reading.symptoms.items()]
    effect = next((e for e in reading.effects if e.metric == main), None)
    if effect is not None:
        return [Evidence("curves", effect_sentence(effect))]
    return [Evidence("curves", f"{reading.arm.name} ({MEANING[reading.arm.name]}) is as BB in everything measured.")]


def _alone_is_healthy(aa: Reading, ab: Reading | None, ba: Reading | None, steps: NextSteps) -> Scenario:
    pairs = [r for r in (ab, ba) if r is not None and r.symptoms]
    own = tuple(Evidence("curves", effect_sentence(e)) for e in aa.effects)
    if not pairs:
        return Scenario("no difference", differs=False, evidence=own)
    found = [Evidence("curves", s.sentence) for r in pairs for s in r.symptoms.values()]
    names = " and ".join(r.arm.name for r in pairs)
    text = f"A alone is as B alone, but {names} is not: the halves do not fit together, or the exchange is at fault."
    return Scenario("not distinguishable", differs=False, evidence=(*own, *found, Evidence("curves", text)),
                    todo=steps.examine())  # fmt: skip


def _cannot_read(readings: Mapping[str, Reading], steps: NextSteps) -> Scenario:
    evidence, todo = [], list(steps.arm("AA")) if "AA" not in readings else []
    for name, reading in readings.items():
        if reading.short is not None:
            text = f"{name} and BB have {reading.short} steps in common: too short. {FEWEST_STEPS} are needed."
            evidence.append(Evidence("curves", text))
            todo = list(steps.longer(2 * FEWEST_STEPS))
        elif not reading.effects:
            state = "has no metrics" if reading.arm.curves is None else "and BB have no metric in common"
            evidence.append(Evidence("curves", f"{name} {state}; --metric NAME compares others."))
            todo = todo or [f"{steps.again()} --metric NAME"]
    if not evidence:
        evidence.append(Evidence("curves", "The pairs show no difference, and there is no run of A alone."))
    return Scenario("not distinguishable", evidence=tuple(evidence), todo=(*todo, steps.again()))


def _lacking(name: str, arms: Mapping[str, Arm], readings: Mapping[str, Reading]) -> str:
    reading, arm = readings.get(name), arms.get(name)
    if reading is not None and reading.short is not None:
        return f"{name} ({MEANING[name]}) has {reading.short} steps in common with BB; {FEWEST_STEPS} are needed."
    why = arm.reason if arm and arm.reason else "it has no metrics in common with BB"
    return f"{name} ({MEANING[name]}) is missing: {why}."


def _same(readings: Mapping[str, Reading]) -> list[Evidence]:
    """Pairs that are BB bit for bit say more than any statistics, at any length."""
    half = {"AB": "inference half", "BA": "training half"}
    return [
        Evidence("curves", f"{n} is BB bit for bit in {r.effects[0].steps} steps: A's {half[n]} changes nothing.")
        for n, r in readings.items()
        if n in half and r.same
    ]
