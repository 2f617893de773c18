"""One denominator per optimizer step: the gradient does not depend on how a mini-batch is split (report 37, C24)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crossrl.algorithms.advantages import Outcomes, grpo
from crossrl.algorithms.aggregation import MODES, loss_weights, mask_metrics
from crossrl.algorithms.errors import AlgorithmError
from crossrl.algorithms.losses import LOSS_MODES
from crossrl.algorithms.objective import ObjectiveConfig, make_objective
from crossrl.algorithms.shaping import overlong_filter
from crossrl.batch import Ragged
from crossrl.engines.base import LossInput

MASK = Ragged.from_rows([[1, 1, 0], [1], [0, 0], []], np.uint8)


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        # 3 tokens count, in 2 sequences (2 + 1); the third is masked as a whole, the fourth empty
        ("token-mean", [1 / 3, 1 / 3, 0, 1 / 3, 0, 0]),
        ("token-sum", [1, 1, 0, 1, 0, 0]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 0, 1 / 2, 0, 0]),
        ("seq-mean-token-mean", [1 / 4, 1 / 4, 0, 1 / 2, 0, 0]),
        ("seq-mean-token-sum-norm", [1 / 20, 1 / 20, 0, 1 / 20, 0, 0]),
    ],
)
def test_weights_by_hand(mode: str, want: list[float]) -> None:
    got = loss_weights(MASK, mode, loss_scale_factor=10)
    np.testing.assert_allclose(got.values, want, rtol=1e-6)
    assert got.dtype == np.float32 and got.same_shape(MASK)


def test_weights_need_a_known_mode_and_its_constant() -> None:
    with pytest.raises(AlgorithmError, match=r"loss_agg_mode='mean'.*token-mean"):
        loss_weights(MASK, "mean")
    for factor in (None, 0):
        with pytest.raises(AlgorithmError, match=f"loss_scale_factor > 0, found {factor}"):
            loss_weights(MASK, "seq-mean-token-sum-norm", factor)


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=6))
def test_means_add_up_to_one_unless_all_is_masked(rows: list[list[int]]) -> None:
    mask = Ragged.from_rows(rows, np.uint8)
    for mode in ("token-mean", "seq-mean-token-mean"):
        total = float(loss_weights(mask, mode).values.sum(dtype=np.float64))
        assert total == pytest.approx(1.0 if mask.values.any() else 0.0, abs=1e-6)


class Bigram(torch.nn.Module):
    """A policy with enough structure to have gradients: the next token given the last one."""

    def __init__(self, vocabulary: int = 7) -> None:
        super().__init__()
        values = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.logits = torch.nn.Parameter(values)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = torch.log_softmax(self.logits[torch.cat([tokens.new_zeros(1), tokens])[:-1]], -1)
        return log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


LENGTHS = np.array([9, 1, 4, 0, 7])  # one empty; the last is masked


def mini_batch() -> dict[str, Ragged]:
    rng = np.random.default_rng(0)
    total = int(LENGTHS.sum())
    mask = np.ones(total, np.uint8)
    mask[2:4] = 0  # tokens of the environment
    mask[-7:] = 0
    columns = {
        "tokens": rng.integers(0, 7, total),
        "advantages": rng.normal(size=total),
        "old_log_probs": -1.9 + 0.3 * rng.normal(size=total),
        "ref_log_probs": -1.9 + 0.3 * rng.normal(size=total),
        "is_weights": rng.uniform(0.5, 1.5, total),
        "loss_mask": mask,
    }
    return {name: Ragged(values, LENGTHS) for name, values in columns.items()}


def gradient(columns: dict[str, Ragged], weights: Ragged, config: ObjectiveConfig, split: int) -> torch.Tensor:
    """Summed over micro-batches of ``split`` samples, as an engine does it."""
    model, objective = Bigram(), make_objective(config)
    for start in range(0, len(LENGTHS), split):
        index = np.arange(start, min(start + split, len(LENGTHS)))
        part = {n: c.take(index) for n, c in {**columns, "loss_weights": weights}.items()}
        tokens = part.pop("tokens")
        rows = [model(torch.from_numpy(row)) for row in tokens.rows()]
        batch = LossInput(
            torch.cat([r[0] for r in rows]),
            torch.cat([r[1] for r in rows]),
            {name: torch.from_numpy(c.values) for name, c in part.items()},
            torch.from_numpy(tokens.sample_index),
            len(index),
        )
        objective(batch)[0].backward()
    assert model.logits.grad is not None
    return model.logits.grad


@pytest.mark.parametrize("loss_mode", LOSS_MODES)
@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_the_same_for_every_split(mode: str, loss_mode: str) -> None:
    columns = mini_batch()
    config = ObjectiveConfig(loss_mode, 0.2, 0.28, kl_coef=0.1, entropy_coeff=0.01)
    weights = loss_weights(columns["loss_mask"], mode, loss_scale_factor=9)
    whole = gradient(columns, weights, config, split=5)
    assert whole.abs().max() > 1e-3
    for split in (1, 2, 3):  # 3: what two ranks would each compute of 5 samples, added up
        torch.testing.assert_close(gradient(columns, weights, config, split), whole, rtol=0, atol=1e-12)


def test_a_denominator_per_micro_batch_would_not_do() -> None:
    """The control: weights made per micro-batch, averaged over micro-batches, give another gradient (trl#6369)."""
    columns = mini_batch()
    whole = gradient(columns, loss_weights(columns["loss_mask"], "token-mean"), ObjectiveConfig(), split=5)
    parts = [loss_weights(columns["loss_mask"].take(np.array([i])), "token-mean").values / 5 for i in range(5)]
    naive = gradient(columns, Ragged(np.concatenate(parts), LENGTHS), ObjectiveConfig(), split=1)
    assert (naive - whole).abs().max() > 1e-2 * whole.abs().max()


@pytest.mark.parametrize("mode", MODES)
def test_masked_samples_dilute_nothing(mode: str) -> None:
    """The gradient with a masked and an empty sample is the gradient without them."""
    columns = mini_batch()
    with_all = gradient(columns, loss_weights(columns["loss_mask"], mode, 9), ObjectiveConfig(), split=5)
    some = {name: c.take(np.array([0, 1, 2])) for name, c in columns.items()}
    weights = loss_weights(some["loss_mask"], mode, 9)
    padded = Ragged(np.concatenate([weights.values, np.zeros(7, np.float32)]), LENGTHS)
    torch.testing.assert_close(gradient(columns, padded, ObjectiveConfig(), split=5), with_all, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_all_truncated_gives_loss_zero_finite_and_counted(mode: str) -> None:
    columns = mini_batch()
    mask, cut = overlong_filter(columns["loss_mask"], ["length"] * 5)
    weights = loss_weights(mask, mode, 9)
    assert cut == 5 and (weights.values == 0).all()
    slope = gradient({**columns, "loss_mask": mask}, weights, ObjectiveConfig(kl_coef=0.1), split=2)
    assert torch.isfinite(slope).all() and (slope == 0).all()
    assert mask_metrics(mask) == {"actor/loss_tokens": 0, "actor/loss_sequences": 0, "actor/masked_sequences": 5}


def test_mask_metrics_by_hand() -> None:
    assert mask_metrics(MASK) == {"actor/loss_tokens": 3, "actor/loss_sequences": 2, "actor/masked_sequences": 2}


def test_dr_grpo_is_no_std_and_a_constant_denominator() -> None:
    """arXiv:2503.20783: each token weighs the same, whatever the length of its response or the spread of rewards."""
    mask = Ragged.from_rows([[1] * 4, [1]], np.uint8)
    outcome = Outcomes(["a/0", "a/1"], np.array([1.0, 0.0]), ["a", "a"], mask)
    advantages = grpo(outcome, norm_by_std=False)
    weights = loss_weights(mask, "seq-mean-token-sum-norm", loss_scale_factor=8)
    columns = {
        "advantages": torch.from_numpy(advantages.values),
        "loss_mask": torch.from_numpy(mask.values),
        "loss_weights": torch.from_numpy(weights.values),
    }
    log_probs = torch.full((5,), -1.0, dtype=torch.float64, requires_grad=True)
    batch = LossInput(log_probs, None, columns, torch.from_numpy(mask.sample_index), 2)
    make_objective(ObjectiveConfig())(batch)[0].backward()
    # centred rewards +-0.5, over 2 sequences and a constant of 8: 0.5 / 16
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-0.03125] * 4 + [0.03125]
