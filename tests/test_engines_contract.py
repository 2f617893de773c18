"""What every rollout engine promises, by the same tests over ``hf`` and ``vllm`` (skipped where there is no vLLM).

Tolerances, in float32: an engine's log-probs are within 1e-4 of the trainer's for the same tokens. vLLM's kernels
depend on what else is in the batch in the last bits, so "the same" is "within 1e-5" where the batch is another. The
engine ``hf`` promises bits there too, which ``test_engines_rollout.py`` tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from engines_cases import (
    BASE,
    EOS,
    POSITIONS,
    VOCABULARY,
    Case,
    bits,
    case,
    initial,
    llama,
    trainer_log_probs,
    weights_of,
)
from engines_cases import all_names as all_names_of
from transformers import GenerationConfig

from crossrl.batch import Ragged
from crossrl.engines.base import EngineError, Generation, Sampling
from crossrl.models.digest import combined, tensor_digests
from crossrl.models.loading import tied_names
from crossrl.sync.manifest import Manifest
from crossrl.sync.messages import SyncError

AGREE = 1e-4  # nat, between an engine's log-probs and the trainer's
TOGETHER = 1e-5  # nat, between a request alone and the same one in a batch

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(params=["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> Iterator[Case]:
    yield case(request.param).fresh()


def prompts(lengths: tuple[int, ...] = (3, 9, 1, 40), n: int = 3, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [p for k in lengths for p in [draw.integers(3, VOCABULARY, k).astype(np.int32)] for _ in range(n)]


def seeds_for(asked: list[np.ndarray]) -> list[int]:
    return [2**63 + 1000 * i for i in range(len(asked))]


def generated(engine: Case, asked: list[np.ndarray], sampling: Sampling) -> Generation:
    out: Generation = engine("generate", asked, seeds_for(asked), sampling)
    return out


def same(a: Generation, b: Generation) -> bool:
    return a.response_ids.values.tolist() == b.response_ids.values.tolist() and np.array_equal(
        bits(torch.from_numpy(a.log_probs.values)), bits(torch.from_numpy(b.log_probs.values))
    )


# Sampling


def test_greedy_tokens_are_those_of_transformers(engine: Case) -> None:
    asked = prompts(n=1)
    out = generated(engine, asked, Sampling(temperature=0.0, max_tokens=12))
    settings = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=EOS, pad_token_id=0)
    for i, prompt in enumerate(asked):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        expected = initial().generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)  # type: ignore[operator]
        assert out.response_ids.row(i).tolist() == expected[0, len(prompt) :].tolist()
    assert out.meaning.temperature == 1.0


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_log_probs_are_the_trainers_after_temperature(engine: Case, temperature: float) -> None:
    asked = prompts()
    out = generated(engine, asked, Sampling(temperature=temperature, max_tokens=16))
    expected = trainer_log_probs(initial(), asked, out.response_ids, temperature)
    np.testing.assert_allclose(out.log_probs.values, expected, atol=AGREE, rtol=0)
    assert (out.meaning.temperature, out.meaning.truncation) == (temperature, "none")
    assert out.meaning.engine == engine.kind and out.log_probs.dtype == np.float32


@pytest.mark.parametrize("rules", [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 20, "top_p": 0.6}])
def test_with_truncation_log_probs_are_of_the_distribution_that_was_sampled_from(engine: Case, rules: dict) -> None:
    asked, sampling = prompts(n=1), Sampling(temperature=0.8, max_tokens=8, **rules)
    out = generated(engine, asked, sampling)
    for i, prompt in enumerate(asked):
        response = out.response_ids.row(i)
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        with torch.no_grad():
            p = torch.softmax(initial()(ids).logits[0, len(prompt) - 1 : -1].double() / 0.8, -1)
        for row, token, found in zip(p, response, out.log_probs.row(i), strict=True):
            ordered = row.sort(descending=True).values[: rules.get("top_k", VOCABULARY)]
            inside = ordered.cumsum(0) - ordered < rules.get("top_p", 1.0) * ordered.sum()
            kept = ordered[inside]
            assert row[token] >= kept[-1] * (1 - 1e-6)
            assert float(torch.log(row[token] / kept.sum())) == pytest.approx(float(found), abs=AGREE)
    assert out.meaning.truncation == sampling.truncation != "none"


def test_equal_seeds_repeat_and_others_differ(engine: Case) -> None:
    asked = prompts(lengths=(5,), n=8)
    first, again = (generated(engine, asked, Sampling(max_tokens=12)) for _ in range(2))
    assert first.response_ids.values.tolist() == again.response_ids.values.tolist()
    np.testing.assert_allclose(first.log_probs.values, again.log_probs.values, atol=TOGETHER)
    assert len({tuple(r) for r in first.response_ids.rows()}) > 4


def test_a_response_does_not_depend_on_order_or_on_what_else_is_in_the_call(engine: Case) -> None:
    asked = prompts(lengths=(3, 9, 1, 40, 7), n=2)
    seeds, sampling = seeds_for(asked), Sampling(temperature=0.9, max_tokens=16)
    together = generated(engine, asked, sampling)
    order = np.random.default_rng(1).permutation(len(asked)).tolist()
    shuffled = engine("generate", [asked[i] for i in order], [seeds[i] for i in order], sampling)
    for i in range(len(asked)):
        alone = engine("generate", [asked[i]], [seeds[i]], sampling)
        for other, at in ((alone, 0), (shuffled, order.index(i))):
            assert other.response_ids.row(at).tolist() == together.response_ids.row(i).tolist()
            np.testing.assert_allclose(other.log_probs.row(at), together.log_probs.row(i), atol=TOGETHER)


def test_responses_end_with_the_end_token_or_at_the_limit(engine: Case) -> None:
    asked = prompts(lengths=(4,), n=200)
    out = generated(engine, asked, Sampling(max_tokens=15))
    for row, reason in zip(out.response_ids.rows(), out.finish_reason, strict=True):
        assert EOS not in row[:-1]
        assert reason == ("stop" if row[-1] == EOS else "length")
        assert reason == "stop" or len(row) == 15
    assert 0 < out.finish_reason.count("stop") < len(asked)
    ignoring = generated(engine, asked, Sampling(max_tokens=15, ignore_eos=True))
    assert set(ignoring.response_ids.lengths.tolist()) == {15} and EOS in ignoring.response_ids.values


def test_progress_counts_finished_responses_up_to_all(engine: Case) -> None:
    asked = prompts(n=10)
    seen = engine.run("seen_progress", asked, seeds_for(asked), Sampling(max_tokens=15))
    assert seen[-1] == (40, 40)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_no_requests_give_no_responses(engine: Case) -> None:
    assert len(engine("generate", [], [], Sampling(max_tokens=2)).response_ids) == 0
    assert len(engine("score", [], [], 1.0)) == 0


def test_requests_that_cannot_be_served_are_refused(engine: Case) -> None:
    def refused(asked: list[np.ndarray], seeds: list[int], sampling: Sampling, said: str) -> None:
        with pytest.raises(EngineError, match=said):
            engine("generate", asked, seeds, sampling)

    refused([np.array([3]), np.array([], dtype=np.int32)], [0, 1], Sampling(max_tokens=2), "prompt 1 has no tokens")
    refused([np.full(250, 3)], [0], Sampling(max_tokens=7), rf"250 tokens.*7 response tokens.*{POSITIONS} positions")
    refused([np.array([3])] * 2, [0], Sampling(max_tokens=2), "2 prompts, but 1 seeds")
    refused([np.array([3])], [0], Sampling(max_tokens=0), "max_tokens is 0")
    refused([np.array([3])], [0], Sampling(temperature=-1.0), "temperature -1.0")
    assert (
        len(engine("generate", [np.full(250, 3)], [0], Sampling(max_tokens=6, ignore_eos=True)).response_ids.row(0))
        == 6
    )


# Scoring


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_score_gives_the_samplers_log_probs_of_its_own_tokens(engine: Case, temperature: float) -> None:
    asked = prompts()
    out = generated(engine, asked, Sampling(temperature=temperature, max_tokens=16))
    found = engine("score", asked, out.response_ids.rows(), temperature)
    np.testing.assert_allclose(found.values, out.log_probs.values, atol=AGREE, rtol=0)
    assert found.lengths.tolist() == out.response_ids.lengths.tolist() and found.dtype == np.float32
    again = generated(engine, asked, Sampling(temperature=temperature, max_tokens=16))
    np.testing.assert_allclose(again.log_probs.values, out.log_probs.values, atol=TOGETHER)  # scoring left nothing


def test_any_tokens_are_scored_as_the_trainer_does_up_to_the_last_position(engine: Case) -> None:
    draw = np.random.default_rng(3)
    asked = [draw.integers(0, VOCABULARY, k).astype(np.int32) for k in (1, 30, 6, 200)]
    responses = [draw.integers(0, VOCABULARY, k).astype(np.int32) for k in (5, 1, 0, POSITIONS - 200)]
    found = engine("score", asked, responses, 0.5)
    expected = trainer_log_probs(initial(), asked, Ragged.from_rows(responses, np.int32), 0.5)
    np.testing.assert_allclose(found.values, expected, atol=AGREE, rtol=1e-5)
    assert found.lengths.tolist() == [5, 1, 0, 56]
    with pytest.raises(EngineError, match="257 tokens, more than the 256 positions"):
        engine("score", [asked[3]], [draw.integers(0, 9, 57)], 1.0)
    with pytest.raises(EngineError, match="temperature is 0"):
        engine("score", asked, responses, 0.0)


# Abort, sleep


def test_an_aborted_generation_says_so_and_the_engine_goes_on(engine: Case) -> None:
    asked, sampling = prompts(n=2), Sampling(max_tokens=12)
    before = generated(engine, asked, sampling)
    long = prompts(lengths=(5,), n=64)
    said = engine.run("abort_soon", 0.1, long, seeds_for(long), Sampling(max_tokens=240, ignore_eos=True))
    assert "was aborted when 0 of 64 responses were finished" in said
    assert generated(engine, asked, sampling).response_ids.values.tolist() == before.response_ids.values.tolist()
    assert engine("abort") == "nothing was running"
    assert len(generated(engine, asked, sampling).response_ids) == len(asked)  # an abort of nothing is not kept


def test_asleep_it_generates_and_receives_nothing_and_says_so(engine: Case) -> None:
    asked, sampling = prompts(n=1), Sampling(max_tokens=8)
    before = generated(engine, asked, sampling)
    assert engine("sleep") and engine("sleep") == "it was asleep already"
    for call in (
        ("generate", asked, [0] * 4, sampling),
        ("score", asked, asked, 1.0),
        ("receive", "ipc:///none", BASE, 1.0),
        ("begin_update", 9, {}),
    ):
        with pytest.raises(EngineError, match="the engine is asleep; call wake"):
            engine(*call)
    assert engine("wake") == "awake" and engine("wake") == "it was awake already"
    assert same(generated(engine, asked, sampling), before)


# Weights


def test_after_an_update_it_generates_with_the_new_weights_and_after_the_return_with_the_old(engine: Case) -> None:
    """The trainer's own log-probs on the new weights are the test; there and back alone would not see a stale head."""
    asked, sampling, new = prompts(), Sampling(max_tokens=16), llama(5)
    engine.send(weights_of(initial()))
    old = generated(engine, asked, sampling)
    engine.send(weights_of(new), changed=True)
    out = generated(engine, asked, sampling)
    expected = trainer_log_probs(new, asked, out.response_ids, 1.0)
    np.testing.assert_allclose(out.log_probs.values, expected, atol=AGREE, rtol=0)
    assert np.abs(expected - trainer_log_probs(initial(), asked, out.response_ids, 1.0)).max() > 0.1
    assert out.weight_version == out.meaning.weight_version == engine.version
    engine.send(weights_of(initial()), changed=True)
    assert same(generated(engine, asked, sampling), old)


def test_what_it_holds_is_what_was_sent_under_all_names_bit_for_bit(engine: Case) -> None:
    new = llama(6)
    with torch.no_grad():
        for name in ("embed_tokens.weight", "layers.1.self_attn.k_proj.weight", "layers.0.mlp.up_proj.weight"):
            flat = new.get_parameter(f"model.{name}").view(-1)
            flat[:4] = torch.tensor([-0.0, 0.0, 1e-42, -1e-42])  # signs of zero, and numbers below the normal ones
            flat[-3:] = torch.tensor([-0.0, 3e38, 1.17e-38])
    engine.send(weights_of(new))
    found, wanted = engine.run("held"), {n: bits(t) for n, t in all_names_of(new).items()}
    assert found.keys() == wanted.keys() and "lm_head.weight" in found
    assert [n for n in wanted if not np.array_equal(found[n], wanted[n])] == []


def test_keys_and_values_of_old_weights_are_not_used_with_new_ones(engine: Case) -> None:
    """C15: a prompt that was cached (more than a block of it) is computed afresh."""
    asked, sampling, new = prompts(lengths=(100,), n=2), Sampling(max_tokens=4, ignore_eos=True), llama(7)
    generated(engine, asked, sampling)
    sent = engine.send(weights_of(new))
    assert sent.prefix_caches == {BASE: "none is kept" if engine.kind == "hf" else "reset_prefix_cache: True"}
    out = generated(engine, asked, sampling)
    np.testing.assert_allclose(
        out.log_probs.values, trainer_log_probs(new, asked, out.response_ids, 1.0), atol=AGREE, rtol=0
    )


def without(name: str) -> dict[str, torch.Tensor]:
    return {n: t for n, t in weights_of(llama(8)).items() if n != name}


K_PROJ = "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype", "twice", "announced without it"])
def test_c13_an_update_that_is_not_whole_fails_names_the_tensor_and_leaves_it_refusing(
    engine: Case, fault: str
) -> None:
    tied, whole = tied_names(initial()), Manifest.of(weights_of(llama(8)).items(), tied_names(initial()))
    key = weights_of(llama(8))[K_PROJ]
    payload, announced, said = {
        "missing": (list(without(K_PROJ).items()), whole, f"{K_PROJ} did not come"),
        "unknown": ([*weights_of(llama(8)).items(), ("extra.weight", key)], whole, "extra.weight came without being"),
        "shape": ([*without(K_PROJ).items(), (K_PROJ, key.t())], whole, rf"{K_PROJ} came as \(64, 64\)|announced"),
        "dtype": ([*without(K_PROJ).items(), (K_PROJ, key.double())], whole, f"{K_PROJ} came as .* float64"),
        "twice": ([*weights_of(llama(8)).items(), (K_PROJ, key)], whole, f"{K_PROJ} came twice"),
        "announced without it": (
            list(without(K_PROJ).items()), Manifest.of(without(K_PROJ).items(), tied), f"{K_PROJ} was not announced"),
    }[fault]  # fmt: skip
    if fault == "shape":
        payload = [*without(K_PROJ).items(), (K_PROJ, key[:32])]
        said = rf"{K_PROJ} came as \(32, 64\)"
    before = engine.run("version")
    with pytest.raises(SyncError, match=said):
        engine.send(payload, announced)
    assert engine.run("version") == before
    with pytest.raises(EngineError, match=f"may be a mixture .*{said}"):
        generated(engine, prompts(n=1), Sampling(max_tokens=2))
    with pytest.raises(EngineError, match="may be a mixture"):
        engine("score", prompts(n=1), prompts(n=1), 1.0)
    new = llama(9)
    engine.send(weights_of(new))  # a full transfer mends it
    out = generated(engine, prompts(), Sampling(max_tokens=8))
    expected = trainer_log_probs(new, prompts(), out.response_ids, 1.0)
    np.testing.assert_allclose(out.log_probs.values, expected, atol=AGREE, rtol=0)


def test_c13_the_old_weights_after_a_real_update_are_refused_and_pass_without_one(engine: Case) -> None:
    engine.send(weights_of(llama(8)), changed=True)
    before = engine.run("version")
    with pytest.raises(SyncError, match="the old weights were sent"):
        engine.send(weights_of(llama(8)), changed=True)
    assert engine.run("version") == before
    engine.send(weights_of(llama(8)), changed=False)


def test_c13_sending_nothing_changes_nothing(engine: Case) -> None:
    asked, sampling = prompts(n=1), Sampling(max_tokens=8)
    out, before = generated(engine, asked, sampling), engine.run("version")
    engine.start("receive", "ipc:///tmp/crossrl-test-nobody", BASE, 0.2)
    with pytest.raises(SyncError, match=r"waited 0.2 s for weights .*no transfer began"):
        engine.result()
    assert engine.run("version") == before
    engine.send(weights_of(initial()))  # to the sender that it knows, after one that it did not find
    assert same(generated(engine, asked, sampling), out)


def test_in_one_process_the_same_transaction_is_begin_load_finish(engine: Case) -> None:
    new = llama(11)
    digest = engine.run("updated_in_place", {n: t.numpy() for n, t in weights_of(new).items()}, engine.version + 1)
    engine.version += 1
    assert digest == combined(tensor_digests(all_names_of(new).items()))
    out = generated(engine, prompts(n=1), Sampling(max_tokens=8))
    expected = trainer_log_probs(new, prompts(n=1), out.response_ids, 1.0)
    np.testing.assert_allclose(out.log_probs.values, expected, atol=AGREE, rtol=0)
    with pytest.raises(EngineError, match="no weight update was begun"):
        engine("finish_update")
