"""Promises of the embedded rollout engine."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models_for_tests import CONFIGS, PLAIN_ONLY, VOCABULARY, reference_log_probs, tiny, wide
from transformers import GenerationConfig, PreTrainedModel

from crossrl.batch import Batch, Ragged
from crossrl.engines.base import EngineError, Generation, Sampling
from crossrl.engines.rollout.hf import HfRolloutEngine, chunks
from crossrl.engines.rollout.sampling import choose, uniforms
from crossrl.engines.rollout.transaction import manifest_of
from crossrl.engines.train.fsdp import FsdpTrainEngine
from crossrl.models.digest import combined, tensor_digests, weights_digest
from crossrl.models.loading import distinct_parameters, load_causal_lm, save_hf, tied_names
from crossrl.stages.base import At
from crossrl.stages.sync import Sync
from crossrl.sync.carriers import InProcess

EOS = 2


def prompts(seed: int = 0, lengths: tuple[int, ...] = (3, 9, 1, 20), n: int = 3) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    distinct = [draw.integers(3, VOCABULARY, length).astype(np.int32) for length in lengths]
    return [p for p in distinct for _ in range(n)]


def as_batch(asked: list[np.ndarray], out: Generation) -> Batch:
    columns = {"prompt_ids": Ragged.from_rows(asked, np.int32), "response_ids": out.response_ids}
    return Batch(tuple(f"s{i}" for i in range(len(asked))), columns)


@pytest.mark.parametrize("name", [*CONFIGS, *PLAIN_ONLY])
def test_greedy_is_what_generate_gives(name: str) -> None:
    model, asked = tiny(name), prompts(n=1)
    out = HfRolloutEngine(model, [EOS]).generate(asked, range(4), Sampling(temperature=0.0, max_tokens=12))
    settings = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=EOS, pad_token_id=0)
    for i, prompt in enumerate(asked):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        untouched: Any = tiny(name)
        expected = untouched.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        expected = expected[0, len(prompt) :]
        assert out.response_ids.row(i).tolist() == expected.tolist()
        assert out.finish_reason[i] == ("stop" if expected[-1] == EOS else "length")


@pytest.mark.parametrize("name", [*CONFIGS, *PLAIN_ONLY])
def test_log_probs_are_those_of_the_model_after_temperature(name: str) -> None:
    model, asked = tiny(name), prompts()
    out = HfRolloutEngine(model, [EOS]).generate(asked, range(12), Sampling(temperature=0.6, max_tokens=10))
    with torch.no_grad():
        expected = torch.cat(reference_log_probs(tiny(name), as_batch(asked, out), 0.6))
    np.testing.assert_allclose(out.log_probs.values, expected.numpy(), atol=1e-5, rtol=0)
    assert (out.meaning.temperature, out.meaning.truncation) == (0.6, "none")


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma3Text", "Granite", "wide"])
def test_sampler_and_trainer_agree_bit_for_bit(name: str) -> None:
    """In float32 on CPU; elsewhere, and with soft-capped attention, to rounding."""
    model, asked = wide() if name == "wide" else tiny(name), prompts()
    out = HfRolloutEngine(model, [EOS]).generate(asked, range(12), Sampling(temperature=0.7, max_tokens=14))
    values, _ = FsdpTrainEngine(model).log_probs(as_batch(asked, out), 0.7, entropy=False)
    np.testing.assert_array_equal(values.values, out.log_probs.values)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "wide"])
def test_a_response_does_not_depend_on_what_else_is_in_the_call(name: str) -> None:
    """Tokens and log-prob bits: alone, in another order, in chunks, with others that end earlier."""
    model, asked = wide() if name == "wide" else tiny(name), prompts(lengths=(3, 9, 1, 20, 9, 7))
    seeds = [1000 + i for i in range(len(asked))]
    sampling = Sampling(temperature=0.9, max_tokens=16)
    together = HfRolloutEngine(model, [EOS, 7, 8, 9]).generate(asked, seeds, sampling)
    assert 0 < together.finish_reason.count("stop") < len(asked)
    chunked = HfRolloutEngine(model, [EOS, 7, 8, 9], max_num_seqs=4).generate(asked, seeds, sampling)
    order = np.random.default_rng(1).permutation(len(asked))
    engine = HfRolloutEngine(model, [EOS, 7, 8, 9])
    shuffled = engine.generate([asked[i] for i in order], [seeds[i] for i in order], sampling)
    back = np.argsort(order)
    for i in range(len(asked)):
        alone = engine.generate([asked[i]], [seeds[i]], sampling)
        for other, at in ((alone, 0), (chunked, i), (shuffled, int(back[i]))):
            np.testing.assert_array_equal(other.response_ids.row(at), together.response_ids.row(i))
            np.testing.assert_array_equal(other.log_probs.row(at), together.log_probs.row(i))


def test_samples_of_one_prompt_differ_and_equal_seeds_repeat() -> None:
    engine, asked = HfRolloutEngine(tiny(), [EOS]), prompts(n=8, lengths=(5,))
    first = engine.generate(asked, range(8), Sampling(max_tokens=12))
    again = engine.generate(asked, range(8), Sampling(max_tokens=12))
    assert len({tuple(r) for r in first.response_ids.rows()}) > 4
    np.testing.assert_array_equal(first.response_ids.values, again.response_ids.values)


def test_a_longer_limit_continues_the_same_response() -> None:
    engine, asked = HfRolloutEngine(tiny(), [EOS]), prompts(n=1)
    short = engine.generate(asked, range(4), Sampling(max_tokens=4))
    long = engine.generate(asked, range(4), Sampling(max_tokens=9))
    for a, b in zip(short.response_ids.rows(), long.response_ids.rows(), strict=True):
        assert b[: len(a)].tolist() == a.tolist()


def test_responses_end_with_the_end_token_or_at_the_limit() -> None:
    engine, asked = HfRolloutEngine(tiny(), [EOS, 5, 6]), prompts(n=6)
    out = engine.generate(asked, range(24), Sampling(max_tokens=15))
    for row, reason in zip(out.response_ids.rows(), out.finish_reason, strict=True):
        inside, last = set(row[:-1].tolist()), int(row[-1])
        assert not inside & {EOS, 5, 6}
        assert reason == ("stop" if last in (EOS, 5, 6) else "length")
        assert reason == "stop" or len(row) == 15
    ignoring = engine.generate(asked, range(24), Sampling(max_tokens=15, ignore_eos=True))
    assert set(ignoring.response_ids.lengths.tolist()) == {15}


def test_progress_counts_finished_responses_up_to_all() -> None:
    seen: list[tuple[int, int]] = []
    engine = HfRolloutEngine(tiny(), [EOS, 5, 6], max_num_seqs=6)
    engine.generate(prompts(n=3), range(12), Sampling(max_tokens=9), lambda done, total: seen.append((done, total)))
    assert seen[-1] == (12, 12)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)


@pytest.mark.parametrize("packed", [None, False])
def test_the_fallback_draws_the_same_tokens(packed: bool | None) -> None:
    model, asked = tiny(), prompts()
    out = HfRolloutEngine(model, [EOS, 5], packed=packed).generate(asked, range(12), Sampling(max_tokens=8))
    expected = HfRolloutEngine(tiny(), [EOS, 5], packed=True).generate(asked, range(12), Sampling(max_tokens=8))
    np.testing.assert_array_equal(out.response_ids.values, expected.response_ids.values)
    np.testing.assert_allclose(out.log_probs.values, expected.log_probs.values, atol=1e-5)


# --- sampling --------------------------------------------------------------------------------------------------


def naive_distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """One row, in float64, straight from the definition."""
    p = np.exp(logits.astype(np.float64) / sampling.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if sampling.top_k > 0:
        p[order[sampling.top_k :]] = 0.0
        p /= p.sum()
    if sampling.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= sampling.top_p]] = 0.0
        p /= p.sum()
    return p


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.8),
        Sampling(temperature=1.3, top_k=5),
        Sampling(temperature=0.9, top_p=0.7),
        Sampling(temperature=1.1, top_k=20, top_p=0.6),
        Sampling(top_p=1e-6),
        Sampling(top_k=1),
    ],
)
def test_tokens_follow_the_distribution_and_log_probs_are_its(sampling: Sampling) -> None:
    logits = torch.randn(1, 400, generator=torch.Generator().manual_seed(3)) * 2
    p = naive_distribution(logits[0].numpy(), sampling)
    draws = 40_000
    u = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws  # evenly spaced: counts must be exact to rounding
    tokens, log_probs = choose(logits.expand(draws, -1).clone(), u, sampling)
    counts = np.bincount(tokens.numpy(), minlength=400) / draws
    np.testing.assert_allclose(counts, p, atol=2 / draws)
    np.testing.assert_allclose(log_probs.numpy(), np.log(p[tokens.numpy()]), atol=2e-5)


def test_the_nucleus_is_found_when_it_is_larger_than_the_first_look() -> None:
    logits = torch.zeros(2, 5000)
    logits[0] += torch.linspace(0, 1e-3, 5000)
    tokens, log_probs = choose(logits.clone(), torch.tensor([0.0, 0.999], dtype=torch.float64), Sampling(top_p=0.5))
    assert int(tokens[0]) == 2500 or abs(int(tokens[0]) - 2500) < 5
    assert float(log_probs[0]) == pytest.approx(-np.log(2500), abs=1e-2)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((3, 8), float("-inf"))
    logits[:, 2], logits[:, 5] = 0.0, 1.0
    u = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    tokens, log_probs = choose(logits, u, Sampling())
    assert tokens.tolist() == [2, 5, 5]
    assert torch.isfinite(log_probs).all()


def test_random_numbers_depend_on_their_seed_only_and_are_uniform() -> None:
    many = uniforms(range(2000), 50)
    assert torch.equal(uniforms([7], 10)[0], many[7, :10])
    assert torch.equal(uniforms([7, 2**64 + 7, 8], 3)[0], uniforms([7, 2**64 + 7, 8], 3)[1])
    assert bool((many >= 0).all() & (many < 1).all())
    cells = Counter((many.reshape(-1) * 20).long().tolist())
    expected = many.numel() / 20
    chi = sum((cells[i] - expected) ** 2 / expected for i in range(20))
    assert chi < 43.8  # 0.1 % of honest generators fail
    correlation = np.corrcoef(many[:-1].reshape(-1), many[1:].reshape(-1))[0, 1]
    assert abs(correlation) < 0.01  # neighbouring seeds


def test_chunks_end_at_groups_where_they_can() -> None:
    asked = prompts(lengths=(1, 2, 3), n=4)
    assert chunks(asked, 8) == [range(8), range(8, 12)]
    assert chunks(asked, 6) == [range(4), range(4, 8), range(8, 12)]
    assert chunks(asked, 3)[0] == range(3)
    assert [i for c in chunks(asked, 3) for i in c] == list(range(12))


# --- what is refused -------------------------------------------------------------------------------------------


def test_requests_that_cannot_be_served_are_refused() -> None:
    engine = HfRolloutEngine(tiny(), [EOS])
    with pytest.raises(EngineError, match="prompt 1 has no tokens"):
        engine.generate([np.array([3]), np.array([], dtype=np.int32)], [0, 1], Sampling(max_tokens=2))
    with pytest.raises(EngineError, match=r"100 tokens.*40 response tokens.*128 positions"):
        engine.generate([np.full(100, 3)], [0], Sampling(max_tokens=40))
    with pytest.raises(EngineError, match="2 prompts, but 1 seeds"):
        engine.generate([np.array([3])] * 2, [0], Sampling(max_tokens=2))
    with pytest.raises(EngineError, match="max_tokens is 0"):
        engine.generate([np.array([3])], [0], Sampling(max_tokens=0))


def test_no_requests_give_no_responses() -> None:
    assert len(HfRolloutEngine(tiny(), [EOS]).generate([], [], Sampling(max_tokens=2)).response_ids) == 0


# --- weights ---------------------------------------------------------------------------------------------------


def all_names(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Its weights, a tied one under each of its names."""
    return [(n, p.detach()) for n, p in model.named_parameters(remove_duplicate=False)]


def held_digest(named: Any) -> str:
    return combined(tensor_digests(named))


def test_an_update_moves_version_and_weights() -> None:
    engine, other = HfRolloutEngine(tiny(), [EOS]), tiny(seed=5)
    named = [(n, p.detach()) for n, p in distinct_parameters(other)]
    engine.begin_update(7, manifest_of(named))
    engine.load(named[:3])
    assert engine.weight_version == 0
    engine.load(named[3:])
    engine.finish_update()
    assert held_digest(engine.held()) == held_digest(all_names(other))
    out = engine.generate(prompts(), range(12), Sampling(max_tokens=6))
    expected = HfRolloutEngine(other, [EOS]).generate(prompts(), range(12), Sampling(max_tokens=6))
    assert (out.weight_version, out.meaning.weight_version) == (7, 7)
    np.testing.assert_array_equal(out.log_probs.values, expected.log_probs.values)


def test_a_shared_model_is_updated_without_copying() -> None:
    model = tiny()
    engine, trainer = HfRolloutEngine(model, [EOS]), FsdpTrainEngine(model)
    before = held_digest(all_names(model))
    engine.begin_update(1, manifest_of(trainer.named_weights()))
    engine.load(trainer.named_weights())
    engine.finish_update()
    assert held_digest(engine.held()) == before and engine.shares(dict(all_names(model)))


def test_a_declared_cast_is_done_and_any_other_is_refused() -> None:
    sender = tiny(seed=5)
    named = [(n, p.detach()) for n, p in distinct_parameters(sender)]
    engine = HfRolloutEngine(tiny().bfloat16(), [EOS], receives=torch.float32)
    engine.begin_update(1, manifest_of(named))
    engine.load(named)
    engine.finish_update()
    held = held_digest(engine.held())
    assert held == held_digest([(n, t.bfloat16()) for n, t in all_names(sender)])
    assert held == held_digest(engine.as_held(dict(all_names(sender))).items())
    assert engine.cast == "float32 to bfloat16" and not engine.shares(dict(all_names(sender)))
    already = [(n, t.bfloat16()) for n, t in named]
    undeclared = HfRolloutEngine(tiny().bfloat16(), [EOS])
    assert undeclared.cast is None
    for other, wrong, message in ((engine, already, "bfloat16, the model takes.*float32"),
                                  (undeclared, named, "float32, the model takes.*bfloat16")):  # fmt: skip
        other.begin_update(2, manifest_of(wrong))
        other.load(wrong)
        with pytest.raises(EngineError, match=message):
            other.finish_update()


def synced(trainer: FsdpTrainEngine, engine: HfRolloutEngine, digest: bool = True) -> dict[str, Any]:
    return Sync(InProcess(trainer, engine, tied_names(trainer.model), digest))(Batch(()), At(1)).info


def test_the_record_of_a_sync_says_what_was_sent_and_what_is_held() -> None:
    model = tiny()
    trainer = FsdpTrainEngine(model, weight_version=3)
    expected = held_digest(all_names(model))
    count = len(list(distinct_parameters(model)))
    facts = {"weight_version": 3, "tensors": count, "sent": expected, "held": expected, "cast": None}
    facts |= {"prefix_cache": "none is kept", "digest": "xxh3-128"}
    assert synced(trainer, HfRolloutEngine(model, [EOS])) == {"sync": facts}
    assert synced(trainer, HfRolloutEngine(tiny(seed=5), [EOS])) == {"sync": facts}
    half = synced(trainer, HfRolloutEngine(tiny(seed=5).bfloat16(), [EOS], receives=torch.float32))["sync"]
    assert half["sent"] == half["held"] != expected and half["cast"] == "float32 to bfloat16"


@pytest.mark.parametrize("fault", ["tensor", "untied"])
def test_what_an_engine_holds_instead_of_what_was_sent_is_in_the_record(fault: str) -> None:
    trainer, engine = FsdpTrainEngine(tiny()), HfRolloutEngine(tiny(seed=5), [EOS])
    head: Any = engine.policy.model.get_output_embeddings()
    if fault == "untied":
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    else:
        wrong = dict(trainer.named_weights())
        name = next(n for n in wrong if n.endswith("q_proj.weight"))
        wrong[name] = wrong[name].T.contiguous()
        load = engine.load
        engine.load = lambda named: load(wrong.items())  # type: ignore[method-assign]
    info = synced(trainer, engine)
    assert info["sync"]["sent"] == held_digest(all_names(trainer.model)) != info["sync"]["held"]
    assert "does not hold" in info["warnings"][0]


def test_shared_weights_are_hashed_once_and_without_a_record_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []

    def count(named: Any) -> dict[str, str]:
        hashed.append(1)
        return tensor_digests(named)

    monkeypatch.setattr("crossrl.sync.carriers.tensor_digests", count)
    model = tiny()
    trainer = FsdpTrainEngine(model)
    synced(trainer, HfRolloutEngine(model, [EOS]))
    assert len(hashed) == 1
    facts = synced(trainer, HfRolloutEngine(tiny(seed=5), [EOS]), digest=False)["sync"]
    assert (facts["sent"], facts["held"], len(hashed)) == ("", "", 1)
    synced(trainer, HfRolloutEngine(tiny(seed=5), [EOS]))
    assert len(hashed) == 3


def test_a_tied_weight_is_hashed_once_and_counts_under_each_name() -> None:
    model = tiny()
    copies = [(n, t.clone()) for n, t in all_names(model)]
    assert weights_digest(all_names(model)) == weights_digest(copies)
    other = [(n, t + 1 if n == "lm_head.weight" else t) for n, t in copies]
    assert weights_digest(other) != weights_digest(copies)


@pytest.mark.parametrize("fault", ["missing", "unannounced", "unknown", "twice", "shape", "dtype"])
def test_a_faulty_update_names_the_tensor_and_leaves_the_version(fault: str) -> None:
    engine, other = HfRolloutEngine(tiny(), [EOS]), tiny(seed=5)
    named = [(n, p.detach()) for n, p in distinct_parameters(other)]
    manifest = manifest_of(named)
    name, tensor = named[2]
    if fault == "missing":
        del named[2]
    elif fault == "unannounced":
        del manifest[name]
    elif fault == "unknown":
        name = "model.made_up"
        named.append((name, tensor))
        manifest[name] = manifest_of([(name, tensor)])[name]
    elif fault == "twice":
        named.append((name, tensor))
    else:
        named[2] = (name, tensor.reshape(-1)[:-1] if fault == "shape" else tensor.half())
    engine.begin_update(1, manifest)
    engine.load(named)
    with pytest.raises(EngineError, match=f"{name}.*The version has not moved"):
        engine.finish_update()
    assert engine.weight_version == 0
    with pytest.raises(EngineError, match="has not succeeded"):
        engine.generate(prompts(), range(12), Sampling(max_tokens=2))


def test_a_good_update_after_a_faulty_one_makes_the_engine_usable_again() -> None:
    engine = HfRolloutEngine(tiny(), [EOS])
    named = [(n, p.detach()) for n, p in distinct_parameters(tiny(seed=5))]
    engine.begin_update(1, manifest_of(named))
    with pytest.raises(EngineError, match="did not come"):
        engine.finish_update()
    engine.begin_update(1, manifest_of(named))
    engine.load(named)
    engine.finish_update()
    assert engine.generate(prompts(), range(12), Sampling(max_tokens=2)).weight_version == 1


def test_a_sender_that_overwrites_its_buffer_at_once_does_no_harm() -> None:
    engine, other = HfRolloutEngine(tiny(), [EOS]), tiny(seed=5)
    named = [(n, p.detach()) for n, p in distinct_parameters(other)]
    expected = held_digest(all_names(other))
    engine.begin_update(1, manifest_of(named))
    for name, tensor in named:
        buffer = tensor.clone()
        engine.load([(name, buffer)])
        buffer.fill_(float("nan"))
    engine.finish_update()
    assert held_digest(engine.held()) == expected


def test_a_copy_of_a_model_in_use_is_independent_of_it() -> None:
    model = wide()
    HfRolloutEngine(model, [EOS])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    out = HfRolloutEngine(twin, [EOS]).generate(prompts(), range(12), Sampling(max_tokens=3))
    expected = HfRolloutEngine(wide(), [EOS]).generate(prompts(), range(12), Sampling(max_tokens=3))
    np.testing.assert_array_equal(out.log_probs.values, expected.log_probs.values)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_a_model_in_use_still_works_by_itself_and_as_an_export(name: str, tmp_path: Path) -> None:
    """Engines leave a model's own forward pass, generate and saved config as they were."""
    model, untouched = tiny(name), tiny(name)
    HfRolloutEngine(model, [EOS], packed=True)
    ids = torch.tensor([[5, 9, 3, 8, 8, 1, 4, 7]])
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, untouched(input_ids=ids).logits, atol=1e-5, rtol=0)
    settings = GenerationConfig(do_sample=False, max_new_tokens=6, pad_token_id=0)
    mask = torch.ones_like(ids)
    found = model.generate(ids, attention_mask=mask, generation_config=settings)  # type: ignore[operator]
    expected = untouched.generate(ids, attention_mask=mask, generation_config=settings)  # type: ignore[operator]
    assert found.tolist() == expected.tolist()
    save_hf(model, None, tmp_path)
    assert load_causal_lm(tmp_path).config._attn_implementation == untouched.config._attn_implementation
