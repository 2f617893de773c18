"""Token losses, KL and the objective: values and gradients worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from crossrl.algorithms.errors import AlgorithmError
from crossrl.algorithms.kl import KLController, kl_estimate, kl_rewards
from crossrl.algorithms.losses import cispo, gspo, ppo_clip
from crossrl.algorithms.objective import ObjectiveConfig, finish_metrics, has_gradient, make_objective
from crossrl.batch import Ragged
from crossrl.engines.base import LossInput

F64 = torch.float64


def leaf(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=F64, requires_grad=True)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def grad(loss: torch.Tensor, of: torch.Tensor) -> list[float]:
    return torch.autograd.grad(loss.sum(), of, retain_graph=True)[0].tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "side"),
    [
        # clip 0.2 / 0.28, c = 3; the slope by log-prob of -r A is -r A, and 0 where clipped
        (1.5, 1, -1.28, 0, "high"),  # max(-1.5, -1.28)
        (1.5, -1, 1.5, 1.5, ""),  # max(1.5, 1.28)
        (0.5, 1, -0.5, -0.5, ""),  # max(-0.5, -0.8)
        (0.5, -1, 0.8, 0, "low"),  # max(0.5, 0.8)
        (4.0, -1, 3.0, 0, "dual"),  # min(max(4, 1.28), 3)
        (1.1, 2, -2.2, -2.2, ""),
    ],
)
def test_ppo_clip_by_hand(ratio: float, advantage: float, loss: float, slope: float, side: str) -> None:
    log_probs = leaf([-1.0])
    got = ppo_clip(log_probs, tensor([-1.0 - math.log(ratio)]), tensor([advantage]), 0.2, 0.28, 3.0)
    assert got.loss.item() == pytest.approx(loss)
    assert grad(got.loss, log_probs) == pytest.approx([slope])
    assert got.dual is not None
    assert {"low": bool(got.low), "high": bool(got.high), "dual": bool(got.dual)} == {
        "low": side == "low",
        "high": side == "high",
        "dual": side == "dual",
    }


def test_ratios_are_limited_so_that_nothing_overflows() -> None:
    far, old, one = torch.tensor([0.0]), torch.tensor([-200.0]), torch.tensor([1.0])  # float32: exp(200) is infinite
    limit = math.exp(20)
    assert ppo_clip(far, old, -one, 0.2, 0.2, None).loss.item() == pytest.approx(limit, rel=1e-5)
    assert cispo(far - 1, old, one, 0.2, 1e12).loss.item() == pytest.approx(limit, rel=1e-5)
    sequence = torch.zeros(1, dtype=torch.long)
    assert gspo(far, old, -one, 0.2, 0.2, one, sequence, 1).loss.item() == pytest.approx(math.exp(10), rel=1e-5)


def test_without_dual_clip_a_negative_advantage_is_unlimited() -> None:
    got = ppo_clip(tensor([-1.0]), tensor([-1.0 - math.log(4)]), tensor([-1.0]), 0.2, 0.28, None)
    assert got.loss.item() == pytest.approx(4.0) and got.dual is None


def test_gspo_by_hand() -> None:
    # log ratios ln 2 and 0: s = exp(ln(2) / 2) = sqrt(2), for both tokens; second sequence ln 4, alone: s = 4
    log_probs = leaf([-1.0, -2.0, -1.0])
    old = tensor([-1.0 - math.log(2), -2.0, -1.0 - math.log(4)])
    mask, sequence = torch.ones(3, dtype=F64), torch.tensor([0, 0, 1])
    got = gspo(log_probs, old, tensor([1, 1, -1]), 0.5, 0.5, mask, sequence, 2)
    assert got.loss.tolist() == pytest.approx([-math.sqrt(2), -math.sqrt(2), 4.0])
    assert grad(got.loss, log_probs) == pytest.approx([-math.sqrt(2), -math.sqrt(2), 4.0])
    clipped = gspo(log_probs, old, tensor([1, 1, -1]), 0.2, 0.2, mask, sequence, 2)
    assert clipped.loss.tolist() == pytest.approx([-1.2, -1.2, 4.0])
    assert grad(clipped.loss, log_probs) == pytest.approx([0, 0, 4.0])
    assert clipped.high.tolist() == [True, True, False]
    assert not clipped.low.any()
    below = gspo(log_probs, old + 2, tensor([-1, 0, -1]), 0.2, 0.2, mask, sequence, 2)
    assert below.low.tolist() == [True, False, True] and not below.high.any()
    inside = gspo(log_probs, log_probs.detach() + 0.1, tensor([-1, 1, -1]), 0.2, 0.2, mask, sequence, 2)
    assert not inside.low.any() and not inside.high.any()
    assert not gspo(log_probs, old, tensor([0, 0, 0]), 0.2, 0.2, mask, sequence, 2).high.any()


def test_gspo_token_form_has_the_gradient_of_the_sequence_objective() -> None:
    log_probs, old = leaf([-1.0, -0.4, -2.0]), tensor([-1.1, -0.7, -1.9])
    sequence_ratio = (log_probs - old).mean().exp()
    want = torch.autograd.grad(-sequence_ratio * 0.7, log_probs)[0]
    got = gspo(
        log_probs, old, tensor([0.7] * 3), 0.5, 0.5, torch.ones(3, dtype=F64), torch.zeros(3, dtype=torch.long), 1
    )
    torch.testing.assert_close(torch.autograd.grad(got.loss.mean(), log_probs)[0], want)


def test_gspo_leaves_masked_tokens_out_of_the_ratio() -> None:
    mask, sequence = tensor([1, 0, 1]), torch.zeros(3, dtype=torch.long)
    got = gspo(tensor([-1.0, -9.0, -1.0]), tensor([-1.2, -1.0, -1.2]), tensor([1, 1, 1]), 0.5, 0.5, mask, sequence, 1)
    assert got.loss[0].item() == pytest.approx(-math.exp(0.2))


def test_cispo_by_hand() -> None:
    # weight clip(1.5) = 1.28: loss -1.28 * 2 * log-prob = 2.56 at -1; its slope is -2.56, although clipped
    log_probs = leaf([-1.0, -1.0, -1.0])
    old = tensor([-1.0 - math.log(r) for r in (1.5, 0.5, 1.1)])
    got = cispo(log_probs, old, tensor([2, 1, 1]), 0.2, 0.28)
    assert got.loss.tolist() == pytest.approx([2.56, 0.8, 1.1])
    assert grad(got.loss, log_probs) == pytest.approx([-2.56, -0.8, -1.1])
    assert (got.high.tolist(), got.low.tolist()) == ([True, False, False], [False, True, False])


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        # d = -1 - -1.5 = 0.5; k3 = exp(-0.5) - 1 + 0.5
        ("kl", 0.5, 1.0),
        ("k1", 0.5, 1.0),
        ("abs", 0.5, 1.0),
        ("mse", 0.125, 0.5),
        ("k2", 0.125, 0.5),
        ("low_var_kl", 0.1065306597, 1 - 0.6065306597),
        ("k3", 0.1065306597, 1 - 0.6065306597),
        ("k1+", 0.5, 0.5),
        ("k3+", 0.1065306597, 0.5),
    ],
)
def test_kl_by_hand(kind: str, value: float, slope: float) -> None:
    log_probs = leaf([-1.0])
    got = kl_estimate(log_probs, tensor([-1.5]), kind)
    assert got.item() == pytest.approx(value)
    assert grad(got, log_probs) == pytest.approx([slope])


def test_k3_is_limited_to_ten() -> None:
    log_probs = leaf([-4.0, -100.0, -1.0])  # exp(3) - 1 - 3 = 16.1; exp(20) - 21; exp(-99) - 1 + 99
    got = kl_estimate(log_probs, tensor([-1.0, -1.0, -100.0]), "k3")
    assert got.tolist() == [10.0, 10.0, 10.0]
    assert grad(got, log_probs) == [0.0, 0.0, 0.0]


def test_expected_gradients_of_the_estimators() -> None:
    """Over all tokens of a small vocabulary: k2's is that of the KL, k1's is zero, k3+'s is that of the KL."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=F64, requires_grad=True)
    reference = torch.log_softmax(tensor([0.0, 0.5, -0.5, 1.0]), 0)
    log_probs = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad((log_probs.exp() * (log_probs - reference)).sum(), logits, retain_graph=True)[0]

    def expected(kind: str) -> torch.Tensor:
        loss = (log_probs.detach().exp() * kl_estimate(log_probs, reference, kind)).sum()
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    torch.testing.assert_close(expected("k2"), exact)
    torch.testing.assert_close(expected("k3+"), exact)
    torch.testing.assert_close(expected("k1"), torch.zeros_like(exact))
    assert not torch.allclose(expected("k3"), exact, rtol=0.01)


def test_kl_in_the_reward_by_hand() -> None:
    # kl 0.5, (masked), 0.3; then -0.2: rewards -0.1 * kl; means per sequence 0.4 and -0.2, their mean 0.1
    log_probs = Ragged.from_rows([[-1.0, -3.0, -1.0], [-1.2], []], np.float32)
    reference = Ragged.from_rows([[-1.5, -1.0, -1.3], [-1.0], []], np.float32)
    mask = Ragged.from_rows([[1, 0, 1], [1], []], np.uint8)
    rewards, current = kl_rewards(log_probs, reference, mask, beta=0.1)
    np.testing.assert_allclose(rewards.values, [-0.05, 0.0, -0.03, 0.02], atol=1e-8)
    assert current == pytest.approx(0.1)
    nothing, current = kl_rewards(log_probs, reference, Ragged.full_like(mask, 0, np.uint8), beta=0.1)
    assert not nothing.values.any() and current == 0.0


def test_kl_in_the_reward_that_is_not_finite_is_an_error() -> None:
    one = Ragged.from_rows([[1]], np.uint8)
    with pytest.raises(AlgorithmError, match="not finite at sample position 0"):
        kl_rewards(Ragged.from_rows([[-1.0]], np.float32), Ragged.from_rows([[-np.inf]], np.float32), one, 0.1)


def test_adaptive_kl_controller_by_hand() -> None:
    controller = KLController("adaptive", 0.1, target_kl=0.5, horizon=100)
    up = controller.updated(current_kl=5.0, samples=50)  # error 9, limited to 0.2: 0.1 * (1 + 0.2 * 50 / 100)
    assert up.kl_coef == pytest.approx(0.11)
    down = controller.updated(current_kl=0.45, samples=50)  # error -0.1: 0.1 * (1 - 0.1 * 0.5)
    assert down.kl_coef == pytest.approx(0.095)
    assert controller.restored(up.state()) == up
    with pytest.raises(AlgorithmError, match="kl_coef"):
        controller.restored({"value": 0.1})
    fixed = KLController("fixed", 0.1, target_kl=0)
    assert fixed.updated(9.0, 50) == fixed
    for broken in ({"horizon": 0}, {"target_kl": 0}):
        with pytest.raises(AlgorithmError, match="needs horizon > 0"):
            KLController("adaptive", 0.1, **broken)
    with pytest.raises(AlgorithmError, match=r"kl_ctrl\.type='linear'"):
        KLController("linear")  # type: ignore[arg-type]


def micro(
    log_probs: torch.Tensor,
    entropy: torch.Tensor | None = None,
    lengths: list[int] | None = None,
    **columns: list[float],
) -> LossInput:
    lengths = lengths or [len(log_probs)]
    given = {"loss_mask": [1.0] * len(log_probs), "loss_weights": [1.0] * len(log_probs), **columns}
    return LossInput(
        log_probs,
        entropy,
        {name: tensor(values) for name, values in given.items()},
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        len(lengths),
    )


def test_objective_by_hand() -> None:
    # token 0: ratio 1.1, A = 2: pg -2.2, times is_weight 0.5; kl (k2) of d = 0.5: 0.125; entropy 0.7
    # loss = 0.25 * (-2.2 * 0.5 + 0.1 * 0.125 - 0.01 * 0.7); the second token has weight 0
    log_probs, entropy = leaf([-1.0, -5.0]), leaf([0.7, 3.0])
    batch = micro(
        log_probs,
        entropy,
        advantages=[2, 9],
        old_log_probs=[-1.0 - math.log(1.1), -1.0],
        ref_log_probs=[-1.5, -1.0],
        is_weights=[0.5, 7],
        loss_weights=[0.25, 0],
        loss_mask=[1, 0],
    )
    config = ObjectiveConfig(kl_coef=0.1, kl_type="mse", entropy_coeff=0.01)
    loss, sums = make_objective(config)(batch)
    assert loss.item() == pytest.approx(0.25 * (-1.1 + 0.0125 - 0.007))
    assert grad(loss, log_probs) == pytest.approx([0.25 * (-2.2 * 0.5 + 0.1 * 0.5), 0])
    assert grad(loss, entropy) == pytest.approx([-0.25 * 0.01, 0])
    metrics = finish_metrics(sums)
    assert metrics["actor/computed_tokens"] == 1
    assert metrics["actor/pg_loss"] == pytest.approx(0.25 * -1.1)
    assert metrics["actor/kl_loss"] == pytest.approx(0.25 * 0.125)
    assert metrics["actor/kl"] == pytest.approx(0.125)
    assert metrics["actor/entropy"] == pytest.approx(0.7)
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(1.1))
    assert metrics["actor/pg_clipfrac"] == 0


def test_objective_matches_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    old, advantages = torch.randn(6, generator=generator, dtype=F64) - 2, torch.randn(6, generator=generator, dtype=F64)
    columns = {"advantages": advantages.tolist(), "old_log_probs": old.tolist(), "ref_log_probs": (old + 0.1).tolist()}
    config = ObjectiveConfig(clip_c=3.0, kl_coef=0.3, kl_type="k3", entropy_coeff=0.1)

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return make_objective(config)(micro(log_probs, entropy, **columns))[0]

    start = (old + torch.tensor([0.05, -0.1, 0.5, -0.5, 1.3, -1.3], dtype=F64)).requires_grad_()
    assert torch.autograd.gradcheck(loss, (start, torch.rand(6, generator=generator, dtype=F64).requires_grad_()))


@pytest.mark.parametrize("mode", ["vanilla", "gspo"])
def test_without_old_log_probs_the_ratio_is_one(mode: str) -> None:
    log_probs = leaf([-1.0, -2.0])
    loss, sums = make_objective(ObjectiveConfig(mode))(micro(log_probs, advantages=[2, -3], loss_weights=[0.5, 0.5]))
    assert loss.item() == 0.5
    assert grad(loss, log_probs) == [-1.0, 1.5]
    assert finish_metrics(sums)["actor/ppo_kl"] == 0


def test_clip_fractions_are_counted_by_side() -> None:
    old = [-1 - math.log(r) for r in (1.5, 0.5, 4.0, 1.0, 1.5)]
    batch = micro(leaf([-1.0] * 5), advantages=[1, -1, -1, 1, 1], old_log_probs=old, loss_mask=[1, 1, 1, 1, 0])
    metrics = finish_metrics(make_objective(ObjectiveConfig())(batch)[1])
    assert metrics["actor/pg_clipfrac_at_high"] == 0.25  # the fifth is masked
    assert metrics["actor/pg_clipfrac_at_low"] == 0.25
    assert metrics["actor/pg_clipfrac"] == 0.5
    assert metrics["actor/pg_clipfrac_lower"] == 0.25


def test_limited_kl_is_counted() -> None:
    batch = micro(leaf([-9.0, -1.0]), advantages=[0, 0], ref_log_probs=[-1.0, -1.0])
    metrics = finish_metrics(make_objective(ObjectiveConfig(kl_coef=0.1))(batch)[1])
    assert metrics["actor/kl_limited_frac"] == 0.5


def test_metric_sums_add_up_over_micro_batches() -> None:
    values = {"advantages": [1.0, -1, 2, 0.5], "old_log_probs": [-1.0, -2, -1, -1], "ref_log_probs": [-1.0, -1, -1, -2]}
    log_probs, entropy = [-1.3, -0.9, -1.0, -2.0], [0.1, 0.2, 0.3, 0.4]
    run = make_objective(ObjectiveConfig(kl_coef=0.1))
    whole = run(micro(leaf(log_probs), tensor(entropy), **values))[1]
    parts = [
        run(micro(leaf(log_probs[s]), tensor(entropy[s]), **{k: v[s] for k, v in values.items()}))[1]
        for s in (slice(0, 1), slice(1, 4))
    ]
    assert {k: parts[0][k] + parts[1][k] for k in whole} == pytest.approx(whole)
    twice = finish_metrics({k: 2 * v for k, v in whole.items()}, optimizer_steps=2)
    once = finish_metrics(whole)
    assert twice.pop("actor/computed_tokens") == 2 * once.pop("actor/computed_tokens")
    assert twice == pytest.approx(once)


def test_metrics_of_nothing_are_absent_and_not_zero() -> None:
    assert finish_metrics({}) == {"actor/computed_tokens": 0.0}


def test_missing_inputs_of_the_objective_are_named() -> None:
    with pytest.raises(AlgorithmError, match="ref_log_probs"):
        make_objective(ObjectiveConfig(kl_coef=0.1))(micro(leaf([-1.0]), advantages=[1]))
    with pytest.raises(AlgorithmError, match="entropy"):
        make_objective(ObjectiveConfig(entropy_coeff=0.1))(micro(leaf([-1.0]), advantages=[1]))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"loss_mode": "ppo"}, "policy_loss.loss_mode='ppo'.*vanilla, gspo, cispo"),
        ({"kl_type": "full"}, "kl_loss_type='full'"),
        ({"clip_low": -0.1}, "clip_ratio_low=-0.1"),
        ({"clip_c": 1.0}, "clip_ratio_c=1.0"),
        ({"entropy_coeff": float("nan")}, "entropy_coeff=nan"),
    ],
)
def test_a_bad_objective_is_refused_with_its_key(broken: dict, message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        ObjectiveConfig(**broken)


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo"])
@pytest.mark.parametrize("kl_coef", [None, 0.1])
def test_has_gradient_is_exact(mode: str, kl_coef: float | None) -> None:
    """Samples that it names have gradient zero, to the bit, and no others have."""
    lengths = [2, 3, 1, 2, 0]
    advantages = Ragged(np.array([1, 0, 0, 0, 0, -1, 2, 2], np.float32), np.array(lengths))
    mask = Ragged(np.array([1, 1, 1, 1, 1, 1, 0, 0], np.uint8), np.array(lengths))
    config = ObjectiveConfig(mode, kl_coef=kl_coef)
    log_probs = leaf([-1.0] * 8)
    batch = micro(
        log_probs,
        lengths=lengths,
        advantages=advantages.values.tolist(),
        old_log_probs=[-1.05] * 8,
        ref_log_probs=[-1.2] * 8,
        loss_mask=mask.values.tolist(),
        loss_weights=(mask.values / 6).tolist(),
    )
    slopes = grad(make_objective(config)(batch)[0], log_probs)
    moved = [any(slopes[start : start + n]) for start, n in zip(np.cumsum([0, *lengths]), lengths)]
    assert has_gradient(advantages, mask, config).tolist() == moved
    assert moved == ([True, False, True, False, False] if kl_coef is None else [True, True, True, False, False])
