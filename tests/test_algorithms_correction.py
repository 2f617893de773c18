"""Sampler against trainer: importance weights, rejection, and the gap, by hand; and what may not be compared (C07)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from crossrl.algorithms.correction import Correction, CorrectionConfig, correct, reject
from crossrl.algorithms.errors import AlgorithmError
from crossrl.algorithms.gap import gap_metrics, measure_gap, need_comparable
from crossrl.batch import Batch, Meaning, Ragged

TRAINER, SAMPLER = Meaning(engine="fsdp", weight_version=1), Meaning(engine="hf", weight_version=1)


def ratios(rows: list[list[float]]) -> tuple[Ragged, Ragged]:
    """Trainer and sampler log-probs whose ratios are ``rows``."""
    sampler = Ragged.from_rows([[-3.0] * len(row) for row in rows], np.float32)
    trainer = Ragged.from_rows([[-3.0 + math.log(r) for r in row] for row in rows], np.float32)
    return trainer, sampler


def run(config: CorrectionConfig, rows: list[list[float]], mask: list[list[int]] | None = None) -> Correction:
    trainer, sampler = ratios(rows)
    keep = Ragged.from_rows(mask, np.uint8) if mask else Ragged.full_like(trainer, 1, np.uint8)
    return correct(config, trainer, sampler, keep, TRAINER, SAMPLER)


def test_off_means_weight_one_and_the_mask_as_it_is() -> None:
    got = run(CorrectionConfig(), [[2, 0.5], [9]], [[1, 0], [1]])
    assert got.is_weights.values.tolist() == [1, 0, 1]
    assert got.mask.values.tolist() == [1, 0, 1]
    assert got.metrics == {} and got.warnings == ()


def test_truncated_importance_sampling_by_token() -> None:
    got = run(CorrectionConfig("token", 1.5), [[2, 0.5], [1.2, 100]], [[1, 1], [1, 0]])
    np.testing.assert_allclose(got.is_weights.values, [1.5, 0.5, 1.2, 0], rtol=1e-6)
    assert got.is_weights.dtype == np.float32
    assert got.mask.values.tolist() == [1, 1, 1, 0]
    # weights 1.5, 0.5, 1.2: mean 3.2 / 3; squares 2.25 + 0.25 + 1.44 = 3.94; (3.2 / 3)^2 / (3.94 / 3) = 0.86633
    assert got.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(3.2 / 3, rel=1e-6)
    assert got.metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(0.866328, rel=1e-5)
    assert got.metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    assert got.metrics["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(1 / 3)  # below 1 / 1.5


def test_truncated_importance_sampling_by_sequence() -> None:
    # products 2 * 0.5 = 1; without the masked token 1.2 * 2 = 2.4; 4, truncated at 3
    got = run(CorrectionConfig("sequence", "3.0"), [[2, 0.5], [1.2, 100, 2], [4]], [[1, 1], [1, 0, 1], [1]])
    np.testing.assert_allclose(got.is_weights.values, [1, 1, 2.4, 0, 2.4, 3], rtol=1e-6)


def test_masked_importance_sampling_zeroes_on_both_sides() -> None:
    got = run(CorrectionConfig("token", "0.6_1.5"), [[2, 0.5, 1.2, 0.7]])
    np.testing.assert_allclose(got.is_weights.values, [0, 0, 1.2, 0.7], rtol=1e-6)
    assert got.mask.values.tolist() == [1, 1, 1, 1]  # its place in the denominator stays
    assert got.metrics["rollout_corr/rollout_is_oob_ratio"] == 0.5


def test_weights_normalised_over_the_batch() -> None:
    # by token: 2, 0.25, 0.25, 0.5, mean 0.75; by sequence: 0.25 and 0.5, mean 0.375
    rows = [[4, 0.25, 0.25], [0.5]]
    by_token = run(CorrectionConfig("token", 2.0, True), rows)
    np.testing.assert_allclose(by_token.is_weights.values, np.array([2, 0.25, 0.25, 0.5]) / 0.75, rtol=1e-6)
    by_sequence = run(CorrectionConfig("sequence", 2.0, True), [*rows, []])  # an empty one is no part of the mean
    np.testing.assert_allclose(by_sequence.is_weights.values, np.array([0.25] * 3 + [0.5]) / 0.375, rtol=1e-6)
    assert by_sequence.metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(0.375)


@pytest.mark.parametrize(
    ("name", "limit", "keep"),
    [
        # ratios trainer/sampler of two sequences: (2, 0.5) and (1, 1.25); k1 limits are sampler/trainer: 0.5, 2; 1, 0.8
        ("token_k1", "0.6_1.5", [0, 0, 1, 1]),
        ("token_k1", 1.5, [0, 0, 1, 1]),
        ("token_k1", "0.9_2.1", [0, 1, 1, 0]),
        ("token_k2", 0.2, [0, 0, 1, 1]),  # ln(2)^2 / 2 = 0.24; ln(1.25)^2 / 2 = 0.025
        ("token_k3", 0.2, [0, 1, 1, 1]),  # 2 - 1 - ln 2 = 0.307; 0.5 - 1 + ln 2 = 0.193
        ("seq_sum_k1", "0.9_1.1", [1, 1, 0, 0]),  # products 1 and 1 / 1.25
        ("seq_mean_k1", "0.9_1.1", [1, 1, 0, 0]),  # geometric means 1 and 0.894
        ("seq_mean_k1", "0.85_1.1", [1, 1, 1, 1]),
        ("seq_sum_k3", 0.4, [0, 0, 1, 1]),  # 0.307 + 0.193 = 0.5
        ("seq_mean_k3", 0.3, [1, 1, 1, 1]),  # 0.25
        ("seq_max_k3", 0.3, [0, 0, 1, 1]),
        ("seq_max_k2", 0.02, [0, 0, 0, 0]),
    ],
)
def test_rejection_by_hand(name: str, limit: float | str, keep: list[int]) -> None:
    got = run(CorrectionConfig(rollout_rs=name, rollout_rs_threshold=limit), [[2, 0.5], [1, 1.25]])
    assert got.mask.values.tolist() == keep
    assert got.metrics[f"rollout_corr/rollout_rs_{name}_masked_fraction"] == 1 - sum(keep) / 4
    assert got.is_weights.values.tolist() == [1, 1, 1, 1]


def test_a_mean_is_over_the_tokens_that_count() -> None:
    config = CorrectionConfig(rollout_rs="seq_mean_k1", rollout_rs_threshold=1.5)
    got = run(config, [[2], [2, 1]], [[1], [1, 0]])  # log 2 each, not the half of it
    assert got.mask.values.tolist() == [0, 0, 0]


def test_limits_belong_to_what_is_kept() -> None:
    config = CorrectionConfig("token", "1.0_1.0", False, "token_k1", "1.0_1.0")
    got = run(config, [[1, 1.001, 0.999]])
    assert got.is_weights.values.tolist() == [1, 0, 0] and got.mask.values.tolist() == [1, 0, 0]


def test_several_rejections_must_all_pass() -> None:
    config = CorrectionConfig(rollout_rs="token_k3, seq_sum_k1", rollout_rs_threshold="0.2,1.1")
    got = run(config, [[2, 0.5], [1, 1.25]])
    assert got.mask.values.tolist() == [0, 1, 0, 0]
    assert got.metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.75
    assert got.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1.0


def test_masked_tokens_do_not_reject_their_sequence() -> None:
    config = CorrectionConfig(rollout_rs="seq_max_k3", rollout_rs_threshold=0.3)
    assert run(config, [[2, 1]], [[0, 1]]).mask.values.tolist() == [0, 1]


def test_nothing_to_correct_is_finite() -> None:
    config = CorrectionConfig("sequence", 2.0, True, "seq_mean_k1", 1.1)
    got = run(config, [[2, 2], []], [[0, 0], []])
    assert got.is_weights.values.tolist() == [0, 0] and got.mask.values.tolist() == [0, 0]
    assert all(math.isfinite(v) for v in got.metrics.values())


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"rollout_is": "batch"}, "rollout_is='batch'.*token, sequence"),
        ({"rollout_is": "token", "rollout_is_threshold": "2.0_0.5"}, "rollout_is_threshold='2.0_0.5'"),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, "rollout_is_threshold=0: want a number above 0"),
        ({"rollout_is": "token", "rollout_is_threshold": True}, "rollout_is_threshold=True"),
        ({"rollout_is": "token", "rollout_is_threshold": "nan"}, "rollout_is_threshold='nan'"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, "rollout_rs='token_k4'.*seq_max_k3"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold=None: want one limit"),
        ({"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "1,2"}, "or 3 separated"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"}, "token_k2: want one upper limit"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "token_k1: one number must be 1 or more"),
    ],
)
def test_a_bad_correction_is_refused_with_its_key(broken: dict, message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        CorrectionConfig(**broken)


def test_a_log_ratio_that_is_not_finite_is_an_error_unless_masked() -> None:
    sampler = Ragged.from_rows([[-1.0], [-np.inf]], np.float32)
    trainer = Ragged.from_rows([[-1.0], [-1.0]], np.float32)
    with pytest.raises(AlgorithmError, match="not finite at sample position 1"):
        correct(CorrectionConfig("token"), trainer, sampler, Ragged.full_like(trainer, 1, np.uint8), TRAINER, SAMPLER)
    mask = Ragged.from_rows([[1], [0]], np.uint8)
    assert correct(CorrectionConfig("token"), trainer, sampler, mask, TRAINER, SAMPLER).is_weights.values.tolist() == [
        1,
        0,
    ]


def test_columns_of_other_lengths_are_refused() -> None:
    trainer, sampler = ratios([[1, 1]])
    with pytest.raises(AlgorithmError, match="sampler log-probs has 2 values at sample position 0, mask has 1"):
        measure_gap(sampler, trainer, Ragged.from_rows([[1]], np.uint8), ["a"])


def test_another_temperature_is_an_error_and_no_policy_lag() -> None:
    """trl#4159: the engine's log-probs were made before dividing by the temperature, the trainer's after."""
    trainer, sampler = ratios([[1]])
    mask = Ragged.full_like(trainer, 1, np.uint8)
    with pytest.raises(
        AlgorithmError, match=r"hf at temperature 1.0, fsdp at temperature 0.6.*not an importance ratio"
    ):
        correct(CorrectionConfig("token"), trainer, sampler, mask, Meaning(0.6, engine="fsdp"), SAMPLER)


def test_another_truncation_is_a_warning() -> None:
    trainer, sampler = ratios([[1]])
    mask = Ragged.full_like(trainer, 1, np.uint8)
    got = correct(CorrectionConfig("token"), trainer, sampler, mask, TRAINER, Meaning(truncation="top_p=0.8"))
    assert len(got.warnings) == 1 and "top_p=0.8 against none" in got.warnings[0]
    assert need_comparable(SAMPLER, TRAINER) == ()


def test_gap_by_hand() -> None:
    # d = trainer - sampler: 0, 0.5 and (masked) 9; then -0.25
    sampler = Ragged.from_rows([[-1.0, -1.5, -10.0], [-0.5]], np.float32)
    trainer = Ragged.from_rows([[-1.0, -1.0, -1.0], [-0.75]], np.float32)
    gap = measure_gap(sampler, trainer, Ragged.from_rows([[1, 1, 0], [1]], np.uint8), ["a/0", "b/0"])
    assert gap is not None
    assert (gap.tokens, gap.uncomputed) == (3, 0)
    assert gap.mean_abs == pytest.approx(0.25) and gap.max_abs == 0.5
    assert (gap.max_sample, gap.max_token) == ("a/0", 1)
    assert gap.kl == pytest.approx(-0.25 / 3)
    # exp(0.5) - 1.5 = 0.148721; exp(-0.25) - 0.75 = 0.028801
    assert gap.k3 == pytest.approx((0.148721 + 0.028801) / 3, rel=1e-4)
    # exp(-1) - exp(-1.5) = 0.144749; exp(-0.5) - exp(-0.75) = 0.134164
    assert gap.prob_max == pytest.approx(0.144749, rel=1e-4)
    assert gap.prob_mean == pytest.approx((0.144749 + 0.134164) / 3, rel=1e-4)
    assert gap.share_above == pytest.approx(2 / 3)


def test_gap_leaves_out_what_the_trainer_did_not_compute() -> None:
    sampler = Ragged.from_rows([[], [-1.0, -1.0], [-2.0]], np.float32)
    trainer = Ragged.from_rows([[], [np.nan, np.nan], [-2.5]], np.float32)
    mask = Ragged.full_like(sampler, 1, np.uint8)
    gap = measure_gap(sampler, trainer, mask, ["a", "b", "c"])
    assert gap is not None
    assert (gap.tokens, gap.uncomputed, gap.max_sample, gap.max_token) == (1, 2, "c", 0)
    assert gap.prob_std == 0.0
    for broken in (np.nan, -np.inf):
        bad = Ragged.from_rows([[], [-1.0, -1.0], [broken]], np.float32)
        with pytest.raises(AlgorithmError, match="in sample 'c' at token 0"):
            measure_gap(bad, trainer, mask, ["a", "b", "c"])


def gap_batch(sampler: Meaning | None, rows: list[list[float]]) -> Batch:
    trainer_column, sampler_column = ratios(rows)
    meanings = {"old_log_probs": TRAINER, **({"rollout_log_probs": sampler} if sampler else {})}
    return Batch(
        tuple(str(i) for i in range(len(rows))),
        {
            "rollout_log_probs": sampler_column,
            "old_log_probs": trainer_column,
            "response_mask": Ragged.full_like(trainer_column, 1, np.uint8),
        },
        meanings,
    )


def test_gap_metrics_say_whether_they_mean_something() -> None:
    columns = ("rollout_log_probs", "old_log_probs")
    good = gap_metrics(gap_batch(SAMPLER, [[1, 1], [2]]), *columns)
    assert good["training/rollout_probs_diff_valid"] == 1
    assert good["training/rollout_log_probs_diff_max"] == pytest.approx(math.log(2), rel=1e-6)
    assert (
        gap_metrics(gap_batch(Meaning(truncation="top_k=5"), [[1]]), *columns)["training/rollout_probs_diff_valid"] == 0
    )
    assert gap_metrics(gap_batch(SAMPLER, [[], []]), *columns) == {"training/rollout_probs_diff_valid": 0.0}
    with pytest.raises(AlgorithmError, match="different meaning"):
        gap_metrics(gap_batch(Meaning(temperature=0.6), [[1]]), *columns)
    with pytest.raises(AlgorithmError, match="'rollout_log_probs' does not say what"):
        gap_metrics(gap_batch(None, [[1]]), *columns)


def test_rejecting_twice_changes_nothing() -> None:
    config = CorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=1.5)
    trainer, sampler = ratios([[2, 1, 0.9]])
    log_ratio = Ragged(trainer.values - sampler.values, trainer.lengths)
    once, _ = reject(config, log_ratio, Ragged.full_like(trainer, 1, np.uint8))
    twice, _ = reject(config, log_ratio, once)
    assert once.values.tolist() == twice.values.tolist() == [0, 1, 1]
