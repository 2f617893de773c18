"""Whether a curve differs from the reference's by more than noise, by how much, and since when.

One difference per step: d[t] = arm[t] - reference[t], over the steps that both have. Then, in this order:

1. The noise floor q, per step (``noise_floor``).
2. The step since when d stays beyond q (``change_point``).
3. A 95 % interval for the mean of d from there on, by a moving-block bootstrap (Künsch, The jackknife and the
   bootstrap for general stationary observations, Annals of Statistics 17, 1989): blocks keep the autocorrelation that
   learning curves have, and with it the width that single steps drawn on their own would understate.
4. Beyond noise: the whole interval lies outside -q..q.

That the interval is looked at after its start was chosen makes it too narrow by itself; the floor, which is made of
the scatter of single steps and not that of a mean, makes up for it. What the procedure is worth is therefore measured
(tests/test_cross_effects.py repeats a part of it).

Simulated: 400 pairs of runs without a difference (logistic, flat and decaying courses; learning speed varying by 5 %;
scatter s of single steps with autocorrelation rho); 150 pairs with a drop at half way, of a flat metric by 4 s or 8 s,
of one that learns by 3/4 or all of what it had learned:

    steps   false alarms at rho 0.3, 0.7, 0.9   4 s, found   8 s, found   3/4, found   all, found
       20          0 %    1.5 %     10 %             94 %         100 %         98 %        100 %
       60          0 %    0.3 %      4 %             99 %         100 %        100 %        100 %
      160          0 %    0.5 %      2 %             99 %         100 %         99 %        100 %

The first step is exact in the median for 4 s, 8 s and a whole collapse, and some steps late (4 of 60, 12 of 160) for
3/4 of one. A drop by 2 s is found in 7 to 27 % of cases, one by half of what was learned in 0 to 5 %.

Real: 11 runs of the demo's task, 40 steps, other seeds (data order, sampling). In 1 of the 110 ordered pairs one of the
five metrics (entropy) is called different, in 3 of 100 triples with a repeat; a learning rate of ten times the size is
found against all 11. ``DRIFT`` was chosen on these runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from crossrl.cross.findings import Effect

Numerics = Literal["exact", "float32", "bfloat16"]

FEWEST_STEPS = 20
"""With fewer steps in common nothing is claimed."""
FEWEST_AFTER = 6
"""A difference counts when it has lasted for so many steps."""
RESAMPLES = 400
DRIFT = 0.5
"""Two healthy runs may come to be apart by so much of the way that the metric goes in the reference. Learning takes its
own course in each run: measured on 11 seeds of the demo, entropies are apart by up to 0.3 after 40 steps, far more than
the scatter of single steps."""
SCATTERS = 2.0
"""Standard deviations of single steps that count as noise: 1.4 since both runs scatter, and as much again since a local
trend follows part of what is autocorrelated, and hides it."""
ROUNDING: dict[Numerics, float] = {"exact": 1e-6, "float32": 1e-4, "bfloat16": 1e-2}
"""Relative size of differences that another order or width of arithmetic makes in any metric."""
GAP: dict[Numerics, float] = {"exact": 1e-6, "float32": 1e-4, "bfloat16": 2e-2}
"""The same for the sampler-trainer gap, absolute, in probability: it is made of rounding and has no other scale."""


@dataclass(frozen=True, slots=True)
class Floor:
    """``size``: what noise explains of a difference, per step, in the metric's unit; ``how``: where it comes from."""

    size: float
    how: str


def compare(
    metric: str, arm: str, curve: dict[int, float], reference: dict[int, float], floor: Floor, against: str = "BB"
) -> Effect:
    """The effect on one metric of ``arm``: finite values by step, against those of ``reference``.

    Fewer than ``FEWEST_STEPS`` common steps: an interval without bounds, unless the curves are the same bit for bit,
    which is a difference of exactly 0 at any length.
    """
    steps = sorted(curve.keys() & reference.keys())
    d = np.array([curve[s] - reference[s] for s in steps])
    if len(d) and not d.any():
        return Effect(metric, arm, against, len(d), 0.0, 0.0, 0.0, floor.size, False)
    if len(d) < FEWEST_STEPS:
        mean = float(d.mean()) if len(d) else math.nan
        return Effect(metric, arm, against, len(d), mean, -math.inf, math.inf, floor.size, False)
    if not np.isfinite(d).all():  # two numbers near the largest there is: no noise explains that
        odd = steps[int(np.flatnonzero(~np.isfinite(d))[0])]
        return Effect(metric, arm, against, len(d), math.inf, math.inf, math.inf, floor.size, True, odd)
    start = change_point(d, floor.size)
    mean, low, high = interval(d[start or 0 :])
    beyond = start is not None and (low > floor.size or high < -floor.size)
    if not beyond:
        mean, low, high = interval(d)
        start = None
    first = None if start is None else steps[start]
    return Effect(metric, arm, against, len(d) - (start or 0), mean, low, high, floor.size, beyond, first)


def too_short(effect: Effect) -> bool:
    return effect.steps < FEWEST_STEPS and math.isinf(effect.high)


def identical(effect: Effect) -> bool:
    """The two curves are the same, bit for bit."""
    return effect.steps > 0 and effect.mean == effect.low == effect.high == 0.0


def change_point(d: np.ndarray, q: float) -> int | None:
    """Index since when ``d`` ``[n]`` stays beyond ``q`` on one side, for ``FEWEST_AFTER`` steps or more; None if never.

    The cumulative sum of (d - q) falls while d is below q and rises while it is above (Page, Continuous inspection
    schemes, Biometrika 41, 1954); its lowest point is where the change began (Hinkley, Inference about the change-point
    from cumulative sum tests, Biometrika 58, 1971). By construction the mean of d from there to any later step is
    above q. Of both signs, the one that rises higher.
    """
    best, found = 0.0, None
    for sign in (1.0, -1.0):
        total = np.concatenate([[0.0], np.cumsum(sign * d - q)])
        start = int(np.argmin(total[: len(d) - FEWEST_AFTER + 1]))
        if total[-1] - total[start] > best:
            best, found = float(total[-1] - total[start]), start
    return found


def interval(d: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """Mean of ``d`` ``[n]`` and its 95 % interval by a moving-block bootstrap; the same for the same ``d``."""
    n = len(d)
    block = min(max(2, math.ceil(2 * n ** (1 / 3))), max(1, n // 2))
    starts = np.random.default_rng(seed).integers(0, n - block + 1, size=(RESAMPLES, math.ceil(n / block)))
    rows = (starts[:, :, None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :n]
    mean = float(d.mean())
    # Around the bootstrap's own centre: blocks take the ends less often than the middle.
    means = d[rows].mean(axis=1)
    shift = np.quantile(means - means.mean(), [0.025, 0.975])
    return mean, float(mean - shift[1]), float(mean - shift[0])


def noise_floor(
    reference: dict[int, float],
    repeat: dict[int, float] | None = None,
    numerics: Numerics = "bfloat16",
    gap: bool = False,
) -> Floor:
    """How large a difference between two healthy runs may be, per step; the largest of what applies.

    - the scatter of the reference's own steps around its local trend, ``SCATTERS`` of it, plus ``DRIFT`` of the way
      that the trend goes. It counts with a repeat, too: one repeat is one draw; and one that is equal bit for bit says
      nothing about two runs that differ by a rounding and so, before long, draw other tokens.
    - ``repeat`` (another run of the reference): its largest mean difference over any ``FEWEST_AFTER`` steps in a row.
    - rounding (``ROUNDING``, ``GAP``).

    ``gap``: the metric is the sampler-trainer gap.
    """
    values = np.array([reference[s] for s in sorted(reference)])
    if not len(values):
        return Floor(math.inf, "the reference has no values")
    rounding = GAP[numerics] if gap else ROUNDING[numerics] * float(np.median(np.abs(values)))
    steps = sorted(reference.keys() & repeat.keys()) if repeat else []
    d = np.array([repeat[s] - reference[s] for s in steps]) if repeat else np.zeros(0)
    sources = [
        (SCATTERS * scatter_of(values) + drift_of(values), "B's own steps"),
        (rounding, f"rounding ({numerics})"),
    ]
    if len(d) >= FEWEST_AFTER:
        means = np.convolve(d, np.ones(FEWEST_AFTER) / FEWEST_AFTER, mode="valid")
        sources.append((float(np.abs(means).max()), "the repeat of B"))
    return Floor(*max(sources))


def trend(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Running median over an eighth of the curve, at least 5 steps (fewer at the ends)."""
    x = np.asarray(values, float)
    half = max(2, len(x) // 16)
    return np.array([np.median(x[max(0, i - half) : i + half + 1]) for i in range(len(x))])


def scatter_of(values: np.ndarray) -> float:
    """Standard deviation of single steps around the trend, from the median absolute deviation, which a few spikes or
    one jump do not move."""
    rest = values - trend(values)
    mad = 1.4826 * float(np.median(np.abs(rest - np.median(rest))))
    return mad if mad else float(np.quantile(np.abs(rest), 0.9))


def drift_of(values: np.ndarray) -> float:
    """``DRIFT`` of the way between the lowest and the highest point of the trend."""
    return DRIFT * float(np.ptp(trend(values)))
