"""Advantages, against values worked out by hand, and what happens to odd groups (case C21)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrl.algorithms.advantages import (
    ESTIMATORS,
    Outcomes,
    estimate,
    grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from crossrl.algorithms.errors import AlgorithmError
from crossrl.batch import Ragged

NAN = float("nan")


def outcomes(
    rewards: list[float],
    groups: list[str],
    mask: list[list[int]] | None = None,
    token_rewards: list[list[float]] | None = None,
    baseline: list[float] | None = None,
) -> Outcomes:
    mask = mask or [[1]] * len(rewards)
    return Outcomes(
        sample_id=[f"{g}/{i}" for i, g in enumerate(groups)],
        rewards=np.array(rewards, np.float64),
        groups=groups,
        mask=Ragged.from_rows(mask, np.uint8),
        token_rewards=None if token_rewards is None else Ragged.from_rows(token_rewards, np.float64),
        baseline_rewards=None if baseline is None else np.array(baseline),
    )


def test_grpo_by_hand() -> None:
    # mean (1 + 2 + 6) / 3 = 3; centred -2, -1, 3; variance (4 + 1 + 9) / 2 = 7; deviation sqrt(7) = 2.6457513
    got = grpo(outcomes([1, 2, 6], ["a"] * 3)).values
    np.testing.assert_allclose(got, np.array([-2, -1, 3]) / (2.6457513110645906 + 1e-6), rtol=1e-12)


def test_grpo_without_std_is_the_centred_reward() -> None:
    np.testing.assert_allclose(grpo(outcomes([1, 2, 6], ["a"] * 3), norm_by_std=False).values, [-2, -1, 3])


def test_grpo_sums_token_rewards_to_an_outcome_first() -> None:
    # outcomes 1 - 0.1 - 0.2 = 0.7 and 0 - 0.3 = -0.3: mean 0.2
    o = outcomes([1, 0], ["a", "a"], [[1, 1], [1]], token_rewards=[[-0.1, -0.2], [-0.3]])
    np.testing.assert_allclose(grpo(o, norm_by_std=False).values, [0.5, 0.5, -0.5])


def test_rloo_by_hand() -> None:
    # minus the mean of the others: 1 - (2 + 6) / 2 = -3; 2 - (1 + 6) / 2 = -1.5; 6 - (1 + 2) / 2 = 4.5
    np.testing.assert_allclose(rloo(outcomes([1, 2, 6], ["a"] * 3)).values, [-3, -1.5, 4.5])


def test_reinforce_plus_plus_by_hand() -> None:
    # gamma 0.5: returns 0.5, 1 and 4; mean 5.5 / 3; squared deviations 1.77778 + 0.69444 + 4.69444 = 7.16667;
    # variance 7.16667 / 2 = 3.58333, deviation 1.892969
    got = reinforce_plus_plus(outcomes([1, 4], ["a", "a"], [[1, 1], [1]]), gamma=0.5).values
    np.testing.assert_allclose(got, (np.array([0.5, 1, 4]) - 5.5 / 3) / 1.892969448, rtol=1e-6)


def test_reinforce_plus_plus_skips_tokens_of_the_environment() -> None:
    # returns over the policy's tokens alone: 0.5 * 0.5 * 8 = 2, 4, 8; the reward sits on the last of them
    o = outcomes([8, 0], ["a", "a"], [[1, 0, 1, 1, 0], [1]])
    returns = np.array([2.0, 4.0, 8.0, 0.0])
    want = (returns - returns.mean()) / returns.std(ddof=1)
    got = reinforce_plus_plus(o, gamma=0.5)
    np.testing.assert_allclose(got.values[[0, 2, 3, 5]], want, rtol=1e-6)
    assert got.values[1] == got.values[4] == 0.0


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    # centred -1 (two tokens) and 1 (one): mean -1/3, squared deviations 4/9 + 4/9 + 16/9 = 24/9, variance 4/3
    got = reinforce_plus_plus_baseline(outcomes([1, 3], ["a", "a"], [[1, 1], [1]])).values
    np.testing.assert_allclose(got, np.array([-2 / 3, -2 / 3, 4 / 3]) / np.sqrt(4 / 3), rtol=1e-6)


def test_reinforce_plus_plus_baseline_subtracts_each_groups_own_mean() -> None:
    # centred -1, 1 and -3, 3: mean 0, squared deviations 20, variance 20 / 3
    got = reinforce_plus_plus_baseline(outcomes([0, 2, 94, 100], ["a", "a", "b", "b"])).values
    np.testing.assert_allclose(got, np.array([-1, 1, -3, 3]) / np.sqrt(20 / 3), rtol=1e-6)


def test_remax_by_hand() -> None:
    # return from each token on, 3 - 0.1 - 0.2 = 2.7 and 3 - 0.2 = 2.8, minus the greedy response's 1
    o = outcomes([3], ["a"], [[1, 1]], token_rewards=[[-0.1, -0.2]], baseline=[1])
    np.testing.assert_allclose(remax(o).values, [1.7, 1.8])


def test_remax_without_baseline_says_what_is_missing() -> None:
    with pytest.raises(AlgorithmError, match="baseline_reward"):
        remax(outcomes([3], ["a"]))


def test_equal_rewards_give_exactly_zero() -> None:
    rewards = np.array([0.1, 0.1, 0.1])
    residue = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert (residue != 0).all()  # what the formula alone would give
    for name in ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        got = estimate(name, outcomes([0.1] * 3, ["a"] * 3))
        assert (got.advantages.values == 0.0).all(), name
        assert got.metrics["advantage/groups_all_equal"] == 1


def test_odd_groups_c21() -> None:
    """Same text in two rows; a group all equal; a single; a group with two missing rewards; a mixed group."""
    groups = ["row0"] * 2 + ["row1"] * 2 + ["equal"] * 4 + ["single"] + ["missing"] * 4 + ["mixed"] * 4
    rewards = [1, 0, 5, 9, 0.7, 0.7, 0.7, 0.7, 1, NAN, 1, NAN, 0, 1, 0, 0, 0]
    got = estimate("grpo", outcomes(rewards, groups), group_size=4)
    adv = got.advantages.values
    # rows of the same text are two groups, each normalised by itself: +-0.5 / sqrt(0.5), +-2 / sqrt(8)
    np.testing.assert_allclose(adv[:4], [0.7071058, -0.7071058, -0.7071065, 0.7071065], atol=1e-6)
    assert (adv[4:8] == 0.0).all()
    assert adv[8] == 0.0
    np.testing.assert_allclose(adv[9:13], [0, 0.7071058, 0, -0.7071058], atol=1e-6)
    # mixed: mean 0.25, squared deviations 0.5625 + 3 * 0.0625 = 0.75, deviation sqrt(0.25) = 0.5
    np.testing.assert_allclose(adv[13:], [1.5, -0.5, -0.5, -0.5], atol=1e-5)
    assert np.isfinite(adv).all()
    assert np.flatnonzero(got.excluded).tolist() == [9, 11]
    assert got.metrics == {
        "advantage/groups": 6,
        "advantage/groups_of_one": 1,
        "advantage/groups_all_equal": 1,
        "advantage/excluded_samples": 2,
        "advantage/groups_of_other_size": 3,
    }
    text = "\n".join(got.warnings)
    assert "2 of 17 samples have no score" in text and "missing/9" in text
    assert "first: single" in text and "rollout.n" in text
    assert "3 of 6 groups do not have n=4 samples (first: row0 has 2)" in text


def test_a_group_key_per_trajectory_is_seen() -> None:
    """Groups that all have one member would else train on the plain reward (rllm#605)."""
    got = estimate("grpo", outcomes([1, 0, 1], ["a", "b", "c"]), group_size=3)
    assert (got.advantages.values == 0).all()
    assert len(got.warnings) == 2


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_missing_reward_changes_nothing_for_the_others(name: str) -> None:
    rewards, groups, mask = [1, 0, 3, 2, 2, 5], ["a", "a", "a", "b", "b", "b"], [[1, 1], [1], [1], [1, 1, 1], [1], [1]]
    whole = estimate(name, outcomes(rewards, groups, mask, baseline=[0.5] * 6))
    gappy = estimate(
        name,
        outcomes([*rewards, NAN], [*groups, "b"], [*mask, [1, 1]], baseline=[0.5] * 7),
    )
    np.testing.assert_array_equal(gappy.advantages.values[:-2], whole.advantages.values)
    assert gappy.advantages.row(6).tolist() == [0, 0]
    assert gappy.excluded.tolist() == [False] * 6 + [True]


def test_remax_excludes_a_sample_without_baseline() -> None:
    got = estimate("remax", outcomes([1, 1], ["a", "b"], baseline=[NAN, 0.25]))
    assert got.excluded.tolist() == [True, False]
    assert got.advantages.values.tolist() == [0.0, 0.75]
    assert not estimate("grpo", outcomes([1, 1], ["a", "b"], baseline=[NAN, 0.25])).excluded.any()


def test_all_rewards_missing_is_finite_and_reported() -> None:
    for name in ESTIMATORS:
        got = estimate(name, outcomes([NAN, NAN], ["a", "a"], baseline=[0, 0]))
        assert (got.advantages.values == 0).all() and got.excluded.all() and got.warnings


def test_an_empty_response_keeps_its_reward_in_the_statistics() -> None:
    # mean (0 + 1 + 2) / 3 = 1; the empty response's 0 counts although it has no token
    got = estimate("grpo", outcomes([0, 1, 2], ["a"] * 3, [[], [1], [1]]), norm_adv_by_std_in_grpo=False)
    assert got.advantages.lengths.tolist() == [0, 1, 1]
    assert got.advantages.values.tolist() == [0.0, 1.0]
    plus = reinforce_plus_plus(outcomes([0, 1, 2], ["a"] * 3, [[], [1], [1]]))
    np.testing.assert_allclose(plus.values, np.array([-0.5, 0.5]) / np.sqrt(0.5), rtol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_masked_tokens_get_zero(name: str) -> None:
    got = estimate(name, outcomes([1, 3], ["a", "a"], [[1, 0, 1], [0, 1]], baseline=[0, 0]))
    assert got.advantages.values[[1, 3]].tolist() == [0.0, 0.0]
    assert (got.advantages.values[[0, 2, 4]] != 0).all()
    assert got.advantages.dtype == np.float32


def test_an_advantage_that_is_not_finite_names_its_sample() -> None:
    with pytest.raises(AlgorithmError, match=r"advantage: .*'a/0' at token 0"):
        estimate("grpo", outcomes([1e39, -1e39], ["a", "a"]), norm_adv_by_std_in_grpo=False)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"rewards": [1, float("inf")], "groups": ["a", "a"]}, r"reward of sample 'a/1' is inf"),
        ({"rewards": [1, 2], "groups": ["a", "a"], "mask": [[1], [1], [1]]}, "mask has 3 entries for 2 samples"),
        (
            {"rewards": [1], "groups": ["a"], "token_rewards": [[1, 1]]},
            "token_rewards has 2 values at sample position 0",
        ),
        ({"rewards": [1], "groups": ["a"], "token_rewards": [[NAN]]}, "token reward: nan in sample 'a/0' at token 0"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(broken: dict, message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        outcomes(**broken)


def test_an_unknown_estimator_lists_the_known_ones() -> None:
    with pytest.raises(AlgorithmError, match=r"adv_estimator='gae'.*grpo, rloo"):
        estimate("gae", outcomes([1], ["a"]))


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.1, 0.3, 1.0, NAN])), min_size=1, max_size=20),
    st.sampled_from(["grpo", "rloo"]),
)
def test_advantages_of_a_group_add_up_to_zero(rows: list[tuple[str, float]], name: str) -> None:
    groups, rewards = [g for g, _ in rows], [r for _, r in rows]
    got = estimate(name, outcomes(rewards, groups))
    assert np.isfinite(got.advantages.values).all()
    for group in set(groups):
        members = [a for a, g in zip(got.advantages.values, groups) if g == group]
        assert abs(sum(members)) < 1e-5
