"""Effects on curves: how often noise is taken for a difference, how often a difference is found, and since when."""

from __future__ import annotations

import math

import numpy as np
import pytest

from crossrl.cross.effects import (
    FEWEST_STEPS,
    Floor,
    change_point,
    compare,
    identical,
    interval,
    noise_floor,
    too_short,
)

SCATTER = 0.03
SHAPES = ("learning", "flat", "decaying")


def learning_curve(rng: np.random.Generator, steps: int, rho: float, shape: str) -> np.ndarray:
    """A run's metric: a course whose speed varies by 5 % from run to run, and scatter that is autocorrelated."""
    t = np.arange(steps) / steps * (1 + 0.05 * rng.standard_normal())
    course = {
        "learning": 0.3 + 0.6 / (1 + np.exp(-8 * (t - 0.4))),
        "flat": 0.5 + 0 * t,
        "decaying": 0.05 + 0.75 * np.exp(-3 * t),
    }[shape]
    noise, last = np.zeros(steps), rng.standard_normal()
    for i in range(steps):
        last = rho * last + math.sqrt(1 - rho**2) * rng.standard_normal()
        noise[i] = last
    return course + SCATTER * noise


def by_step(values: np.ndarray) -> dict[int, float]:
    return dict(enumerate(map(float, values), 1))


def alarms(steps: int, rho: float, pairs: int, repeat: bool = False, seed: int = 0) -> float:
    """Share of pairs of runs with no difference that are called different."""
    rng, found = np.random.default_rng(seed), 0
    for i in range(pairs):
        a, b, again = (learning_curve(rng, steps, rho, SHAPES[i % 3]) for _ in range(3))
        floor = noise_floor(by_step(b), by_step(again) if repeat else None)
        found += compare("reward", "AA", by_step(a), by_step(b), floor).beyond
    return found / pairs


def detections(steps: int, shape: str, size: float, pairs: int, seed: int = 1) -> tuple[float, float]:
    """(share found, median error of the first step) of a drop at half way: of a flat metric by ``size`` scatters, of
    one that learns by the share ``size`` of what it had learned."""
    rng, errors = np.random.default_rng(seed), []
    for _ in range(pairs):
        a, b = (learning_curve(rng, steps, 0.3, shape) for _ in range(2))
        half = steps // 2
        a[half:] -= size * (SCATTER if shape == "flat" else a[half:] - a[:3].mean())
        effect = compare("reward", "AA", by_step(a), by_step(b), noise_floor(by_step(b)))
        if effect.beyond and effect.first_step is not None:
            errors.append(abs(effect.first_step - (half + 1)))
    return len(errors) / pairs, float(np.median(errors)) if errors else math.nan


@pytest.mark.parametrize("repeat", [False, True], ids=["alone", "with a repeat"])
def test_false_alarms_on_curves_without_a_difference_are_as_documented(repeat):
    assert alarms(60, rho=0.3, pairs=200, repeat=repeat) <= 0.01
    assert alarms(FEWEST_STEPS, rho=0.3, pairs=200, repeat=repeat) <= 0.02


def test_shifts_are_detected_as_documented_and_at_the_right_step():
    for shape, size, least in (("flat", 4, 0.6), ("flat", 8, 0.98), ("learning", 1, 0.9)):
        found, error = detections(60, shape, size, pairs=60)
        assert found >= least and error <= 3, (shape, size, found, error)
    for shape, size in (("flat", 1), ("learning", 0.3)):  # as large as the scatter, or as runs differ: not claimed
        assert detections(60, shape, size, pairs=60)[0] <= 0.05


def test_without_a_noise_floor_the_same_curves_would_raise_alarms():
    """The control: what keeps the alarms away is the floor, and the test above would see it gone."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(100):
        a, b = (learning_curve(rng, 60, 0.3, "learning") for _ in range(2))
        found += compare("reward", "AA", by_step(a), by_step(b), Floor(0.0, "none")).beyond
    assert found > 20


def test_bit_equal_curves_differ_by_exactly_0_at_any_length():
    for steps in (1, 3, 60):
        curve = by_step(learning_curve(np.random.default_rng(0), steps, 0.3, "flat"))
        effect = compare("reward", "AB", curve, dict(curve), noise_floor(curve))
        assert identical(effect) and not effect.beyond
        assert (effect.mean, effect.low, effect.high, effect.steps) == (0.0, 0.0, 0.0, steps)


def test_one_unequal_bit_is_not_identical():
    curve = dict.fromkeys(range(1, 41), 0.5)
    other = {**curve, 7: math.nextafter(0.5, 1)}
    effect = compare("reward", "AB", other, curve, noise_floor(curve))
    assert not identical(effect) and not effect.beyond


def test_too_few_steps_claim_nothing_however_large_the_difference():
    short = dict.fromkeys(range(1, FEWEST_STEPS), 1.0)
    effect = compare("reward", "AA", short, dict.fromkeys(short, 0.0), Floor(0.1, ""))
    assert too_short(effect) and not effect.beyond and effect.steps == FEWEST_STEPS - 1
    enough = dict.fromkeys(range(1, FEWEST_STEPS + 1), 1.0)
    assert compare("reward", "AA", enough, dict.fromkeys(enough, 0.0), Floor(0.1, "")).beyond


def test_only_steps_in_common_are_compared():
    a, b = dict.fromkeys(range(1, 31), 0.0), dict.fromkeys(range(21, 61), 0.0)
    assert compare("reward", "AA", a, b, Floor(0.1, "")).steps == 10
    assert too_short(compare("reward", "AA", {1: 0.0}, {2: 0.0}, Floor(0.1, "")))


def test_a_difference_that_goes_away_is_not_since_a_step():
    d = np.zeros(60)
    d[20:26] = 0.2
    assert change_point(d, 0.1) is None
    d[40:] = 0.5
    assert change_point(d, 0.1) == 40


def test_the_first_step_of_a_growing_difference_is_where_it_leaves_the_noise():
    d = np.concatenate([np.zeros(30), -0.05 * np.arange(1, 31)])
    assert change_point(d, 0.12) == 32  # 0.05, 0.10, 0.15: the third step of the slope


def test_the_interval_is_that_of_the_mean_and_always_the_same():
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(100):
        d = learning_curve(rng, 100, 0.3, "flat") - 0.5
        mean, low, high = interval(d)
        assert low <= mean <= high and (mean, low, high) == interval(d)
        covered += low <= 0.0 <= high
    assert covered >= 85  # of 95; blocks of 10 in 100 steps make it somewhat narrow


def test_autocorrelation_widens_the_interval():
    rng = np.random.default_rng(0)
    white, slow = (interval(learning_curve(rng, 200, rho, "flat")) for rho in (0.0, 0.9))
    assert slow[2] - slow[1] > 1.5 * (white[2] - white[1])


def test_the_repeat_is_the_floor_where_it_differs_more_than_steps_scatter():
    b = by_step(np.full(40, 0.5))
    again = by_step(np.concatenate([np.full(20, 0.5), np.full(20, 0.7)]))
    floor = noise_floor(b, again)
    assert floor.how == "the repeat of B" and floor.size == pytest.approx(0.2)
    assert noise_floor(b, dict(b)).how.startswith("rounding")


def test_the_gap_between_sampler_and_trainer_has_a_floor_of_its_own():
    none = dict.fromkeys(range(1, 41), 0.0)
    for numerics, size in (("exact", 1e-6), ("float32", 1e-4), ("bfloat16", 2e-2)):
        assert noise_floor(none, None, numerics, gap=True).size == size
    rounding = dict.fromkeys(none, 3e-07)
    floor = noise_floor(none, None, "float32", gap=True)
    assert not compare("gap", "AA", rounding, none, floor).beyond
    assert compare("gap", "AA", dict.fromkeys(none, 0.05), none, floor).beyond


def test_a_difference_that_is_not_finite_is_beyond_any_noise():
    a, b = (dict.fromkeys(range(1, 31), v) for v in (1e308, -1e308))
    found = compare("reward", "AA", a, b, Floor(0.1, "x"))
    assert found.beyond and found.first_step == 1
