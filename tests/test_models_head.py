"""Promises of the output head, the faster linear layers and the packed layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from crossrl.models import head as head_module
from crossrl.models.head import Head, log_probs
from crossrl.models.layout import MIN_ROWS, Group, lay_out
from crossrl.models.linear import FastEmbedding, FastLinear, accumulating, linear, speed_up


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HEADS = {
    "plain": {},
    "bias": {"bias": random(50, seed=3)},
    "scale": {"scale": 0.4},
    "softcap": {"softcap": 1.5, "scale": 2.0},
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "recomputed"])
@pytest.mark.parametrize("count", [3, 70])
def test_values_and_gradients_are_those_of_full_logits(
    kind: str, keep: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 20 * 50 * 4)  # several chunks
    if not keep:
        monkeypatch.setattr(head_module, "KEEP_BYTES", 0)
    temperature = 0.7
    slope, entropy_slope = random(count, seed=4), random(count, seed=5)
    targets = torch.from_numpy(np.random.default_rng(0).integers(0, 50, count))
    results = []
    for chunked in (True, False):
        leaves = {"hidden": random(count, 8, seed=1), "weight": random(50, 8, seed=2)}
        if "bias" in HEADS[kind]:
            leaves["bias"] = HEADS[kind]["bias"].clone()  # type: ignore[attr-defined]
        for leaf in leaves.values():
            leaf.requires_grad_()
        head = Head(leaves["weight"], leaves.get("bias"), HEADS[kind].get("scale", 1.0), HEADS[kind].get("softcap"))  # type: ignore[arg-type]
        if chunked:
            values, entropies = log_probs(head, leaves["hidden"], targets, temperature, entropy=True)
            assert entropies is not None
        else:
            logits = F.linear(leaves["hidden"], leaves["weight"], leaves.get("bias")) * head.scale
            if head.softcap is not None:
                logits = head.softcap * torch.tanh(logits / head.softcap)
            log_p = torch.log_softmax(logits / temperature, -1)
            values, entropies = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        ((values * slope).sum() + (entropies * entropy_slope).sum()).backward()
        results.append({"values": values, "entropies": entropies, **{n: t.grad for n, t in leaves.items()}})
    for name, found in results[0].items():
        torch.testing.assert_close(found, results[1][name], atol=2e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["autocast", "bfloat16"])
def test_half_precision_gives_float32_log_probs_and_gradients_of_each_dtype(weights: torch.dtype) -> None:
    hidden = random(40, 8, seed=1).bfloat16().requires_grad_()
    weight = random(50, 8, seed=2).to(weights).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
        values, _ = log_probs(Head(weight), hidden, torch.arange(40), 1.0, entropy=False)
    exact = torch.log_softmax(hidden.detach().float() @ weight.detach().float().t(), -1)
    expected = exact.gather(1, torch.arange(40)[:, None])[:, 0]
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected, atol=0.1, rtol=0.02)
    values.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == weights
    one_hot = F.one_hot(torch.arange(40), 50).float()
    torch.testing.assert_close(
        weight.grad.float(), (one_hot - exact.exp()).t() @ hidden.detach().float(), atol=0.1, rtol=0.05
    )


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    class Odd:
        class config:
            get_text_config = staticmethod(lambda: None)

        def get_output_embeddings(self) -> None:
            return None

    with pytest.raises(ValueError, match="Odd has no output embeddings"):
        Head.of(Odd())


@pytest.mark.parametrize("shape", [(192, 256), (512, 96)])
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(shape: tuple[int, int]) -> None:
    """Measured on AVX2 with MKL from 12 rows on; where this fails, sampler and trainer agree to rounding only."""
    weight, x = random(*shape), random(400, shape[1], seed=1)
    whole = F.linear(x, weight)
    for rows in (MIN_ROWS, 17, 31, 64, 129, 255, 300):
        assert torch.equal(F.linear(x[:rows], weight), whole[:rows])
        assert torch.equal(linear(x[:rows], weight, None), whole[:rows])


def test_faster_layers_add_their_gradients_to_what_is_there() -> None:
    model = nn.Sequential(nn.Embedding(300, 128), nn.Linear(128, 300))
    ids = torch.arange(24).view(2, 12)
    model(ids).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    speed_up(model)
    assert [type(m) for m in model] == [FastEmbedding, FastLinear]
    with accumulating():
        model(ids).square().sum().backward()
    for parameter, once in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * once)


def test_outside_of_a_training_step_the_layers_are_pytorchs() -> None:
    model = nn.Sequential(nn.Embedding(300, 128), nn.Linear(128, 300))
    speed_up(model)
    weights = list(model.parameters())
    found = torch.autograd.grad(model(torch.arange(5)).sum(), weights)
    assert all(g is not None for g in found)
    assert all(p.grad is None for p in weights)


def test_subclasses_of_linear_are_left_alone() -> None:
    class Odd(nn.Linear):
        pass

    model = nn.Sequential(Odd(256, 256), nn.Linear(8, 8))
    speed_up(model)
    assert [type(m) for m in model] == [Odd, nn.Linear]  # the second is too small to gain


def test_the_layout_puts_each_prompt_once_and_leaves_the_last_token_out() -> None:
    groups = [
        Group(np.array([10, 11, 12]), [np.array([20, 21]), np.array([30]), np.array([], dtype=int)]),
        Group(np.array([13] * 9), [np.array([40, 41, 42])]),
    ]
    layout = lay_out(groups)
    assert layout.input_ids[0].tolist() == [10, 11, 12, *[13] * 9, 0, 20, 40, 41]  # one row is added: 16 at least
    assert layout.position_ids[0].tolist() == [0, 1, 2, *range(9), 0, 3, 9, 10]
    assert layout.targets.tolist() == [20, 21, 30, 40, 41, 42]
    assert layout.predict.tolist() == [2, 13, 2, 11, 14, 15]
    assert layout.sequence.tolist() == [0, 0, 1, 3, 3, 3]
    assert layout.prompt_last.tolist() == [2, 11]
    assert layout.responses is not None
    assert layout.responses.keys[0, :4].tolist() == [0, 1, 2, 13]
    assert layout.responses.keys[1, :11].tolist() == [*range(3, 12), 14, 15]
    with pytest.raises(ValueError, match="prompt has no tokens"):
        lay_out([Group(np.array([], dtype=int))])
