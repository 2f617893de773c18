"""Promises of the embedded training engine."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from models_for_tests import CONFIGS, PLAIN_ONLY, batch, reference_log_probs, tiny, wide
from transformers import PreTrainedModel

from crossrl.batch import Batch, Ragged
from crossrl.engines.base import EngineError, EngineState, LossInput, StepResult
from crossrl.engines.train.fsdp import FsdpTrainEngine
from crossrl.engines.train.micro_batches import split
from crossrl.engines.train.optimizer import AdamWSettings

GROUPS = [(3, [5, 1, 9]), (11, [2, 7, 4, 4]), (1, [6]), (5, [1, 1])]


def engine(model: PreTrainedModel, **options: Any) -> FsdpTrainEngine:
    return FsdpTrainEngine(model, AdamWSettings(weight_decay=0.1), **options)


def policy_gradient(given: LossInput) -> tuple[torch.Tensor, dict[str, float]]:
    loss = -(given.log_probs * given.columns["advantages"] * given.columns["loss_weights"]).sum()
    if given.entropy is not None:
        loss = loss - 0.3 * (given.entropy * given.columns["loss_weights"]).sum()
    return loss, {"tokens": float(len(given.log_probs))}


def step(trainer: FsdpTrainEngine, data: Batch, **options: Any) -> StepResult:
    return trainer.step(data, policy_gradient, **{"lr": 1e-3, "temperature": 1.0, "entropy": False, **options})


def weights(trainer: FsdpTrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_weights()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("name", [*CONFIGS, *PLAIN_ONLY])
def test_log_probs_are_the_models_own(name: str) -> None:
    model, data = tiny(name), batch(GROUPS)
    trainer = engine(model)
    assert trainer.policy.packed == (name not in PLAIN_ONLY)
    values, entropy = trainer.log_probs(data, 0.7, entropy=True)
    with torch.no_grad():
        expected = torch.cat(reference_log_probs(model, data, 0.7)).numpy()
    np.testing.assert_allclose(values.values, expected, atol=1e-5, rtol=0)
    assert entropy is not None
    assert np.all((entropy.values > 0) & (entropy.values < np.log(64)))


def test_a_model_without_packed_attention_is_named_in_a_notice() -> None:
    trainer = engine(tiny("Bloom"))
    assert "BloomForCausalLM" in trainer.notice
    assert engine(tiny("Llama")).notice == ""


def reference_gradient(model: PreTrainedModel, data: Batch, temperature: float) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    advantages = torch.from_numpy(data.ragged("advantages").values)
    loss = -(torch.cat(reference_log_probs(model, data, temperature)) * advantages).sum() / len(advantages)
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def gradient(model: PreTrainedModel, data: Batch, **options: Any) -> dict[str, torch.Tensor]:
    """What the optimizer is given: with plain gradient descent of rate 1 in its place, the change of the weights."""
    temperature, entropy = options.pop("temperature", 1.0), options.pop("entropy", False)
    trainer = engine(copy.deepcopy(model), **options)
    before = weights(trainer)
    optimizer = trainer._trained()

    def descend(lr: float, grad_norm: float) -> None:
        with torch.no_grad():
            for parameter in optimizer.named.values():
                assert parameter.grad is not None
                parameter -= parameter.grad

    optimizer.step = descend  # type: ignore[method-assign]
    step(trainer, data, temperature=temperature, entropy=entropy)
    after = weights(trainer)
    return {name: before[name] - after[name] for name in before}


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma2", "Granite", "Bloom"])
def test_gradients_are_the_models_own(name: str) -> None:
    model, data = tiny(name), batch(GROUPS)
    expected = reference_gradient(model, data, 0.7)
    found = gradient(model, data, temperature=0.7)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=2e-6, rtol=1e-4, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("padding", [None, 5])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_the_faster_layers_are_pytorchs(tied: bool, padding: int | None) -> None:
    model = wide(tie_word_embeddings=tied, attention_bias=True, pad_token_id=padding)
    data = batch(GROUPS, vocabulary=12)
    expected = reference_gradient(model, data, 1.0)
    found = gradient(model, data, micro_batch_size=3)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=2e-6, rtol=1e-4, msg=lambda m, key=key: f"{key}: {m}")


def test_gradient_checkpointing_does_not_change_the_gradient() -> None:
    model, data = wide(), batch(GROUPS)
    plain = gradient(model, data)
    checkpointed = gradient(model, data, gradient_checkpointing=True)
    for key, value in plain.items():
        torch.testing.assert_close(checkpointed[key], value, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("entropy", [False, True])
def test_the_gradient_does_not_depend_on_the_split(entropy: bool) -> None:
    model, data = tiny(), batch([*GROUPS, (4, [3, 0, 8])])
    whole = gradient(model, data, entropy=entropy, max_tokens_per_micro_batch=10_000)
    by_size = [{"micro_batch_size": size} for size in (1, 2, 5)]
    for options in (*by_size, {"max_tokens_per_micro_batch": 20}):
        split = gradient(model, data, entropy=entropy, **options)
        for key, value in whole.items():
            torch.testing.assert_close(split[key], value, atol=1e-6, rtol=1e-5, msg=lambda m, o=options: f"{o}: {m}")


def test_entropy_has_the_right_gradient() -> None:
    model, data = tiny(), batch([(3, [4, 2])])
    reference = copy.deepcopy(model)
    total = torch.zeros(())
    for i in range(len(data)):
        prompt, response = data.ragged("prompt_ids").row(i), data.ragged("response_ids").row(i)
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        logits = reference(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        log_p = torch.log_softmax(logits, -1)
        total = total - (log_p.exp() * log_p).sum()
    (-0.3 * total / len(data.ragged("response_ids").values)).backward()
    no_advantage = Ragged.full_like(data.ragged("advantages"), 0.0, np.float32)
    data = data.only(["prompt_ids", "response_ids", "loss_weights"]).with_columns(advantages=no_advantage)
    found = gradient(model, data, entropy=True)
    for key, parameter in reference.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[key], parameter.grad, atol=1e-6, rtol=1e-4)


def test_equal_inputs_give_equal_bits() -> None:
    results = []
    for _ in range(2):
        trainer = engine(wide(), micro_batch_size=2)
        outcome = [step(trainer, batch(GROUPS, seed=i)) for i in range(3)]
        results.append((outcome[-1].loss, outcome[-1].grad_norm, weights(trainer)))
    assert results[0][:2] == results[1][:2]
    assert_same(results[0][2], results[1][2])


def test_three_steps_saved_loaded_and_three_more_are_six_steps() -> None:
    straight = engine(tiny())
    for i in range(6):
        step(straight, batch(GROUPS, seed=i), lr=1e-3 / (i + 1))
    first = engine(tiny())
    for i in range(3):
        step(first, batch(GROUPS, seed=i), lr=1e-3 / (i + 1))
    state = first.state()
    copies = [{n: t.clone() for n, t in tensors.items()} for tensors in (state.weights, state.optimizer)]
    saved = EngineState(copies[0], copies[1], state.scalars)
    second = engine(tiny(seed=9))  # other weights, fresh optimizer
    second.load_state(saved)
    assert second.weight_version == 3
    for i in range(3, 6):
        step(second, batch(GROUPS, seed=i), lr=1e-3 / (i + 1))
    assert_same(weights(second), weights(straight))
    assert_same(dict(second.state().optimizer), dict(straight.state().optimizer))
    assert second.state().scalars == straight.state().scalars


@pytest.mark.parametrize("part", ["weights", "optimizer"])
@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "dtype"])
def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(part: str, damage: str) -> None:
    trainer = engine(tiny())
    step(trainer, batch(GROUPS))
    state = trainer.state()
    tensors = {"weights": dict(state.weights), "optimizer": dict(state.optimizer)}
    name = next(iter(tensors[part]))
    if damage == "missing":
        del tensors[part][name]
    elif damage == "unknown":
        name = "made.up"
        tensors[part][name] = torch.zeros(3)
    else:
        tensors[part][name] = torch.zeros(7) if damage == "shape" else tensors[part][name].double()
    target = engine(tiny(seed=3))
    before = weights(target)
    with pytest.raises(EngineError, match=name.replace(".", r"\.")):
        target.load_state(EngineState(tensors["weights"], tensors["optimizer"], state.scalars))
    assert_same(weights(target), before)


def test_a_loss_that_is_not_finite_stops_before_the_weights_change() -> None:
    data = batch(GROUPS)
    poisoned = data.ragged("advantages").values.copy()
    poisoned[data.ragged("advantages").offsets[4]] = np.nan
    poison = Ragged(poisoned, data.ragged("advantages").lengths)
    data = data.only(["prompt_ids", "response_ids", "loss_weights"]).with_columns(advantages=poison)
    trainer = engine(tiny(), micro_batch_size=1)
    before = weights(trainer)
    with pytest.raises(EngineError, match=r"loss is nan.*s4"):
        step(trainer, data)
    assert_same(weights(trainer), before)
    assert trainer.weight_version == 0
    assert all(not t.any() for t in trainer.state().optimizer.values())
    assert np.isfinite(step(trainer, batch(GROUPS)).grad_norm)  # nothing of the failed step is left behind


def test_a_gradient_that_is_not_finite_stops_and_names_the_parameter() -> None:
    trainer = engine(tiny())
    before = weights(trainer)

    def explode(given: LossInput) -> tuple[torch.Tensor, dict[str, float]]:
        zero = (given.log_probs - given.log_probs.detach()).sum()
        return torch.sqrt(zero), {}  # the value is 0, the slope infinite

    with pytest.raises(EngineError, match=r"gradient norm is (nan|inf).*model\.embed_tokens\.weight"):
        trainer.step(batch(GROUPS), explode, lr=1e-3, temperature=1.0, entropy=False)
    assert_same(weights(trainer), before)
    assert trainer.weight_version == 0


def without_signal(data: Batch, samples: np.ndarray) -> Batch:
    """Advantages of ``samples`` set to 0."""
    advantages = data.ragged("advantages")
    values = np.where(samples[advantages.sample_index], 0.0, advantages.values).astype(np.float32)
    rest = data.only(["prompt_ids", "response_ids", "loss_weights"])
    return rest.with_columns(advantages=Ragged(values, advantages.lengths))


@pytest.mark.parametrize("share", ["some", "all"])
def test_skipping_samples_without_gradient_changes_nothing(share: str) -> None:
    skip = np.zeros(10, dtype=bool)
    skip[slice(3, 7) if share == "some" else slice(None)] = True
    computed, skipped = engine(tiny()), engine(tiny())
    for trainer in (computed, skipped):
        step(trainer, batch(GROUPS, seed=7))  # so that there is momentum
    data = without_signal(batch(GROUPS), skip)
    a, b = step(computed, data), step(skipped, data, skip=skip)
    assert b.skipped_samples == skip.sum()
    np.testing.assert_allclose(a.grad_norm, b.grad_norm, rtol=1e-5, atol=1e-9)
    for name, value in weights(computed).items():
        torch.testing.assert_close(weights(skipped)[name], value, atol=1e-6, rtol=0)
    lengths = data.ragged("response_ids").lengths
    np.testing.assert_array_equal(np.isnan(b.log_probs.values), np.repeat(skip, lengths))


def test_a_step_on_nothing_still_applies_decay_and_momentum() -> None:
    trainer = engine(tiny())
    step(trainer, batch(GROUPS))
    before = weights(trainer)
    outcome = step(trainer, batch(GROUPS), skip=np.ones(10, dtype=bool))
    assert (outcome.loss, outcome.grad_norm, outcome.tokens) == (0.0, 0.0, 0)
    assert any(not torch.equal(before[n], t) for n, t in weights(trainer).items())


def test_gradients_are_clipped_to_the_limit_and_the_norm_is_from_before() -> None:
    data = batch(GROUPS)
    moments = []
    for limit in (None, 0.01):
        trainer = FsdpTrainEngine(tiny(), AdamWSettings(max_grad_norm=limit))
        outcome = step(trainer, data)
        first = [t for n, t in trainer.state().optimizer.items() if n.endswith("exp_avg")]
        moments.append(float(torch.nn.utils.get_total_norm(first)) / 0.1)  # exp_avg = (1 - beta1) * gradient
        assert outcome.grad_norm > 0.01
    assert moments[0] == pytest.approx(outcome.grad_norm, rel=1e-4)
    assert moments[1] == pytest.approx(0.01, rel=1e-3)


def test_log_probs_of_the_step_are_those_before_it_in_the_order_of_the_batch() -> None:
    data = batch(GROUPS)
    trainer = engine(tiny(), micro_batch_size=2)
    before, _ = trainer.log_probs(data, 0.9, entropy=False)
    outcome = step(trainer, data, temperature=0.9)
    np.testing.assert_array_equal(outcome.log_probs.values, before.values)
    np.testing.assert_array_equal(outcome.log_probs.lengths, data.ragged("response_ids").lengths)
    assert outcome.sums == {"tokens": float(len(before.values))}


def test_an_empty_response_and_an_empty_batch_have_no_log_probs() -> None:
    trainer = engine(tiny())
    values, _ = trainer.log_probs(batch([(3, [0, 2])]), 1.0, entropy=False)
    assert values.lengths.tolist() == [0, 2]
    values, _ = trainer.log_probs(batch([]), 1.0, entropy=False)
    assert len(values) == 0


def test_an_engine_without_optimizer_scores_and_does_not_step() -> None:
    frozen = FsdpTrainEngine(tiny().requires_grad_(False), None)
    data = batch(GROUPS)
    expected, _ = engine(tiny()).log_probs(data, 1.0, False)
    np.testing.assert_array_equal(frozen.log_probs(data, 1.0, False)[0].values, expected.values)
    with pytest.raises(EngineError, match="without an optimizer"):
        step(frozen, data)


def test_log_probs_do_not_depend_on_the_rest_of_the_batch() -> None:
    """Bit for bit, in float32 on CPU."""
    data = batch([*GROUPS, (6, [12, 3])])
    for model in (tiny(), wide()):
        trainer = engine(model)
        together, _ = trainer.log_probs(data, 0.7, entropy=False)
        for i in range(len(data)):
            alone, _ = trainer.log_probs(data.take([i]), 0.7, entropy=False)
            np.testing.assert_array_equal(alone.values, together.row(i))


def test_micro_batches_keep_groups_together_and_within_the_limits() -> None:
    data = batch([(4, [3, 9, 5]), (2, [2, 2]), (30, [4, 4, 4, 4]), (1, [50])])
    prompts, responses = data.ragged("prompt_ids"), data.ragged("response_ids")
    everything = np.ones(10, dtype=bool)

    def parts(*limits: int | None) -> list[list[int]]:
        return [sorted(m.samples.tolist()) for m in split(prompts, responses, everything, *limits)]

    assert parts(None, None) == [list(range(10))]
    assert parts(4, None) == [[9], [5, 6, 7, 8], [0, 1, 2], [3, 4]]
    assert parts(2, None) == [[9], [5, 6], [7, 8], [1, 2], [0], [3, 4]]
    assert parts(None, 40) == [[9], [5, 6, 7], [8], [0, 1, 2, 3, 4]]  # 50 - 1 + 1 tokens are computed alone
    assert parts(None, None, 10) == [[9], [5, 6, 7, 8], [0, 1, 2], [3, 4]]
    one = split(prompts, responses, everything, None, None)[0]
    assert one.tokens == (4 + 2 + 8 + 4) + (2 + 1 + 1) + (30 + 12) + (1 + 49)


def test_rows_with_the_same_prompt_share_it_wherever_they_are() -> None:
    data = batch([(4, [3, 5]), (6, [2])]).take([0, 2, 1])
    prompts, responses = data.ragged("prompt_ids"), data.ragged("response_ids")
    assert [len(g.responses) for g in split(prompts, responses, np.ones(3, dtype=bool), None, None)[0].groups] == [2, 1]
