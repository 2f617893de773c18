"""Groups, overlong responses and the learning rate, by hand."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from crossrl.algorithms.errors import AlgorithmError
from crossrl.algorithms.groups import groups_with_signal, pass_at_k
from crossrl.algorithms.schedule import SCHEDULES, lr_factor, warmup_steps
from crossrl.algorithms.shaping import overlong_filter, overlong_penalty
from crossrl.batch import Ragged

NAN = float("nan")


def test_groups_with_signal_are_those_whose_values_differ() -> None:
    groups = ["mixed", "equal", "mixed", "equal", "one", "gap", "gap", "none", "last", "last"]
    values = np.array([0, 1, 1, 1, 5, NAN, 1, NAN, 0.3, 0.1])
    assert groups_with_signal(values, groups) == ["mixed", "last"]
    assert groups_with_signal(np.array([1, 1, 1, 0]), ["a", "b", "b", "a"]) == ["a"]
    assert groups_with_signal(np.array([True, False]), ["a", "a"]) == ["a"]
    with pytest.raises(AlgorithmError, match="1 values for 2 group names"):
        groups_with_signal(np.zeros(1), ["a", "b"])


def test_pass_at_k_is_the_share_of_subsets_with_a_hit() -> None:
    for n, c, k in [(4, 1, 2), (5, 2, 3), (6, 0, 2), (6, 6, 1), (5, 4, 2), (10, 3, 5)]:
        subsets = list(combinations(range(n), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(min(s) < c for s in subsets) / len(subsets))
    # the plug-in estimate 1 - (1 - c/n)^k is biased: 1 - 0.75^2 = 0.4375 for the first
    assert pass_at_k(4, 1, 2) == 0.5
    with pytest.raises(AlgorithmError, match="pass@5 from 4 samples"):
        pass_at_k(4, 1, 5)


def test_overlong_penalty_by_hand() -> None:
    # limit 20, buffer 4: free up to 16; 17 -> -1/4, 18 -> -2/4, 20 -> -1, and no more beyond
    lengths = np.array([0, 16, 17, 18, 20, 25])
    np.testing.assert_allclose(overlong_penalty(lengths, 20, 4), [0, 0, -0.25, -0.5, -1, -1])
    np.testing.assert_allclose(overlong_penalty(lengths, 20, 4, penalty_factor=0.5), [0, 0, -0.125, -0.25, -0.5, -0.5])
    for buffer in (0, 21):
        with pytest.raises(AlgorithmError, match=f"overlong_buffer.len={buffer}"):
            overlong_penalty(lengths, 20, buffer)


def test_overlong_filter_masks_what_was_cut_off() -> None:
    mask = Ragged.from_rows([[1, 0], [1, 1], []], np.uint8)
    got, cut = overlong_filter(mask, ["stop", "length", "length"])
    assert got.values.tolist() == [1, 0, 0, 0] and got.dtype == np.uint8 and cut == 2
    assert mask.values.tolist() == [1, 0, 1, 1]
    with pytest.raises(AlgorithmError, match="1 finish reasons for 3 samples"):
        overlong_filter(mask, ["stop"])


def test_learning_rate_by_hand() -> None:
    def rates(schedule: str, **options: float) -> list[float]:
        return [lr_factor(s, schedule, warmup=2, total_steps=6, **options) for s in range(8)]  # type: ignore[arg-type]

    assert rates("constant") == [0, 0.5, 1, 1, 1, 1, 1, 1]
    assert rates("linear") == [0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0]
    assert rates("linear", min_lr_ratio=0.1) == pytest.approx([0, 0.5, 1, 0.775, 0.55, 0.325, 0.1, 0.1])
    half = math.sqrt(0.5) / 2  # (1 + cos(pi p)) / 2 at p = 0, 1/4, 1/2, 3/4, 1; and it does not rise again
    assert rates("cosine") == pytest.approx([0, 0.5, 1, 0.5 + half, 0.5, 0.5 - half, 0, 0], abs=1e-12)
    assert rates("cosine", min_lr_ratio=0.5)[4] == pytest.approx(0.75)
    assert rates("cosine", num_cycles=1.0)[2:7] == pytest.approx([1, 0.5, 0, 0.5, 1], abs=1e-12)


def test_learning_rate_counted_from_one_is_shifted_by_a_step() -> None:
    for schedule in SCHEDULES:
        later = [lr_factor(s, schedule, warmup=2, total_steps=6, zero_indexed=False) for s in range(6)]
        assert later == [lr_factor(s + 1, schedule, warmup=2, total_steps=6) for s in range(6)]
        assert later[0] == 0.5


def test_a_run_of_one_step_has_its_full_rate() -> None:
    assert [lr_factor(0, schedule, total_steps=1) for schedule in SCHEDULES] == [1, 1, 1]


def test_warmup_may_take_all_of_the_run() -> None:
    assert [lr_factor(s, "linear", warmup=3, total_steps=3, zero_indexed=False) for s in range(3)] == pytest.approx(
        [1 / 3, 2 / 3, 1]
    )


def test_warmup_steps_come_from_the_count_or_the_ratio() -> None:
    assert warmup_steps(5, 0.5, 100) == 5
    assert warmup_steps(-1, 0.05, 50) == 2
    assert warmup_steps(None, 0.0, 50) == 0
    assert warmup_steps(0, 0.5, 10) == 5


def test_a_bad_schedule_is_refused() -> None:
    with pytest.raises(AlgorithmError, match="lr_scheduler_type='wsd'"):
        lr_factor(0, "wsd")
    with pytest.raises(AlgorithmError, match="cosine needs the number of training steps, found -1"):
        lr_factor(0, "cosine")
    with pytest.raises(AlgorithmError, match="min_lr_ratio"):
        lr_factor(0, "constant", min_lr_ratio=2.0)
