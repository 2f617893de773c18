"""In what an arm goes wrong, compared with B alone: its curves beyond noise, and failures, which need no statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crossrl.cross.arms import MEANING, Arm
from crossrl.cross.curves import METRICS, below, common_name
from crossrl.cross.effects import FEWEST_STEPS, Floor, Numerics, compare, identical, noise_floor, too_short
from crossrl.cross.findings import Effect

FAILURE = "failure"
# The most telling first; other metrics come after these.
RANK = (FAILURE, *METRICS)


@dataclass(frozen=True, slots=True)
class Symptom:
    """``sign``: of the difference, 0 for a failure. ``step``: since when."""

    metric: str
    sign: int
    step: int | None
    sentence: str


@dataclass(frozen=True, slots=True)
class Reading:
    """One arm against BB. ``usable``: it can speak: it has a symptom, or enough steps to say that it has none."""

    arm: Arm
    effects: tuple[Effect, ...]
    symptoms: Mapping[str, Symptom]
    usable: bool

    @property
    def same(self) -> bool:
        """Every metric is that of BB, bit for bit."""
        return bool(self.effects) and all(identical(e) for e in self.effects)

    @property
    def short(self) -> int | None:
        """The number of steps in common with BB where that is too few to claim anything."""
        found = [e.steps for e in self.effects if too_short(e)]
        return max(found) if found else None


def read_arms(
    arms: Mapping[str, Arm], numerics: Numerics = "bfloat16", more: Sequence[str] = ()
) -> tuple[dict[str, Reading], dict[str, Floor]]:
    """Each arm that has curves against BB, which must have some; and the noise floor of each metric.

    ``more``: further metrics, by their own names.
    """
    base = arms["BB"]
    assert base.curves is not None
    repeat = arms["BB2"].curves if "BB2" in arms else None
    readings, floors = {}, {}
    for name in ("AA", "AB", "BA"):
        arm = arms.get(name)
        if arm is None or arm.state == "missing":
            continue
        effects = []
        for metric in (*METRICS, *more) if arm.curves else ():
            assert arm.curves is not None
            key = common_name(metric, [base.curves, arm.curves])
            if key is None:
                continue
            floor = noise_floor(
                base.curves.finite(key), repeat.finite(key) if repeat else None, numerics, metric == "gap"
            )
            floors[metric] = floor
            effects.append(compare(metric, name, arm.curves.finite(key), base.curves.finite(key), floor))
        readings[name] = _reading(arm, base, tuple(effects))
    return readings, floors


def _reading(arm: Arm, base: Arm, effects: tuple[Effect, ...]) -> Reading:
    symptoms = {}
    failed = failure(arm, base)
    if failed:
        symptoms[FAILURE] = failed
    # A gradient that is gone since the task is solved, on either side, is no symptom. (A reference that lost it
    # otherwise is none: ``scenario``.)
    solved = base.no_signal is not None or (arm.no_signal is not None and not lost(arm, base))
    for e in effects:
        if e.beyond and not (solved and e.metric == "gradient norm"):
            symptoms[e.metric] = Symptom(e.metric, 1 if e.mean > 0 else -1, e.first_step, effect_sentence(e))
    usable = bool(symptoms) or (bool(effects) and not any(too_short(e) for e in effects))
    ordered = sorted(symptoms, key=lambda m: RANK.index(m) if m in RANK else len(RANK))
    return Reading(arm, effects, {m: symptoms[m] for m in ordered}, usable)


def failure(arm: Arm, base: Arm) -> Symptom | None:
    """In what ``arm`` failed and ``base`` did not."""
    what = f"{arm.name} ({MEANING[arm.name]})"
    odd = {n: s for n, s in (arm.non_finite or {}).items() if n not in (base.non_finite or {})}
    if odd:
        name = min(odd, key=lambda n: odd[n])
        return Symptom(FAILURE, 0, odd[name], f"{what}: {name} is not finite since step {odd[name]}; BB's is.")
    if arm.no_signal is not None and base.no_signal is None and lost(arm, base):
        return Symptom(
            FAILURE,
            0,
            arm.no_signal,
            f"{what}: nothing to learn from since step {arm.no_signal}; BB has a gradient, and a higher reward.",
        )
    if arm.state == "failed" and base.state != "failed":
        step = arm.curves.last_step + 1 if arm.curves else 1
        return Symptom(FAILURE, 0, step, f"{what}: {arm.reason}; BB is {base.state}.")
    return None


def lost(arm: Arm, other: Arm) -> bool:
    """Whether ``arm``, which has nothing to learn from any more, has not just solved its task."""
    if arm.no_signal is None or arm.curves is None:
        return False
    return other.curves is None or below(arm.curves, other.curves, arm.no_signal)


def effect_sentence(e: Effect) -> str:
    """One effect in words.

    >>> effect_sentence(Effect("reward", "AA", "BB", 30, -0.31, -0.36, -0.26, 0.05, True, 11))
    'AA: reward is lower than in BB by 0.31 (0.26 to 0.36) since step 11; noise explains 0.05.'
    """
    if identical(e):
        return f"{e.arm}: {e.metric} is that of {e.against}, bit for bit, in all {e.steps} steps."
    if too_short(e):
        return f"{e.arm}: {e.metric}: {e.steps} steps in common with {e.against}; {FEWEST_STEPS} are needed."
    if not e.beyond:
        return f"{e.arm}: {e.metric} differs from {e.against} by {e.mean:.3g}: within the noise ({e.noise:.2g})."
    low, high = sorted((abs(e.low), abs(e.high)))
    way = "higher" if e.mean > 0 else "lower"
    since = f" since step {e.first_step}" if e.first_step is not None else ""
    return (
        f"{e.arm}: {e.metric} is {way} than in {e.against} by {abs(e.mean):.3g} ({low:.3g} to {high:.3g}){since}; "
        f"noise explains {e.noise:.2g}."
    )


def noise_sentence(floors: Mapping[str, Floor]) -> str:
    """The noise floor of all metrics.

    >>> noise_sentence({"reward": Floor(0.05, "the repeat of B")})
    'Curves, per step: reward 0.05 (the repeat of B).'
    """
    known = [f"{m} {f.size:.2g} ({f.how})" for m, f in floors.items() if math.isfinite(f.size)]
    return f"Curves, per step: {', '.join(known)}." if known else ""
