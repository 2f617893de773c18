"""What rounding explains is nobody's fault, and it hides no fault that is larger."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from cross_runs import (
    ACTOR,
    MODEL,
    ROLLOUT,
    Runs,
    differing,
    in_stage,
    lr_times_ten,
    mapped,
    of_stage,
    sampling,
    stale_weights,
)

from crossrl.batch import Batch, Ragged
from crossrl.cross.judge_rollout import compare_tokens, flips_allowed
from crossrl.cross.noise import numerics_of
from crossrl.tape.versions import DETERMINISTIC, versions


@pytest.fixture(scope="module")
def runs(demo_files, tmp_path_factory):
    return Runs(demo_files, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def clean(runs):
    return runs.record("clean")


def test_the_class_of_noise_is_what_the_sides_declare_for_each_kind_of_work(runs):
    same = {"torch": "1", "platform": "x", "crossrl": "1"}
    mine = runs.load("x").config
    exact = numerics_of(mine, mine, same, same, (1, 1))
    assert (exact.inference, exact.training, exact.host, exact.because) == ("exact", "exact", "exact", ())
    assert numerics_of(mine, mine, same, {**same, "crossrl": "2"}).loosest == "exact"
    threads = numerics_of(mine, mine, same, same, (1, 2))
    assert (threads.inference, threads.training, threads.host) == ("float32", "float32", "exact")
    version = numerics_of(mine, mine, same, {**same, "torch": "2"})
    assert {version.inference, version.training, version.host} == {
        "float32"
    } and "torch: 1 against 2" in version.because
    bf16 = numerics_of(mine, runs.load("x", f"{ROLLOUT}.dtype=bfloat16").config, same, same)
    assert (bf16.inference, bf16.training, bf16.host) == ("bfloat16", "exact", "exact")
    both = runs.load("x", f"{ROLLOUT}.dtype=bfloat16").config
    assert numerics_of(both, both, same, same).inference == "exact"
    trained = numerics_of(mine, runs.load("x", f"{ACTOR}.fsdp_config.model_dtype=bfloat16").config, same, same)
    assert trained.training == "bfloat16" and trained.host == "exact"


def test_a_few_sampled_tokens_may_flip_by_rounding_and_not_most_of_them():
    assert flips_allowed("exact", 10_000, 50_000) == 0
    assert flips_allowed("float32", 100, 13) == 1
    assert [flips_allowed(kind, 10_000, 13) for kind in ("float32", "bfloat16")] == [5, 354]
    assert flips_allowed("float32", 10_000, 50_000) == 73  # each entry of the vocabulary is a boundary that moves


def test_two_generations_are_compared_up_to_the_first_token_that_differs():
    def batch(ids, log_probs):
        columns = {"response_ids": Ragged.from_rows(ids, np.int32)}
        return Batch(("a", "b", "c"), columns | {"rollout_log_probs": Ragged.from_rows(log_probs, np.float32)})

    recorded = batch([[1, 2, 3], [4, 5], [6]], [[-1, -1, -1], [-2, -2], [-3]])
    again = batch([[1, 9, 3], [4, 5, 7], [6]], [[-1.5, -8, -8], [-2, -2, -8], [-3]])
    tokens = compare_tokens(recorded, again)
    assert (tokens.flipped, tokens.ended, tokens.compared) == ((("a", 1),), (("b", 2),), 5)
    assert tokens.gaps.tolist() == [0.5, 0, 0, 0] and tokens.where[0] == ("a", 0)


OWN_WEIGHTS = f"{ROLLOUT}.own_weights=True"
HARMLESS = {
    "threads": ["trainer.num_threads=2"],
    "micro-batches": [
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=3",
    ],
    "attention": [f"{MODEL}.use_remove_padding=False", f"{MODEL}.override_config={{_attn_implementation: eager}}"],
    "batch composition": [f"{ROLLOUT}.max_num_seqs=3", f"{ACTOR}.ppo_max_token_len_per_gpu=20"],
    "own weights, checkpoints, workers": [OWN_WEIGHTS, "trainer.save_freq=1", "reward.num_workers=2"],
    "checkpointing": [f"{MODEL}.enable_gradient_checkpointing=True"],
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_setting_never_makes_a_stage_differ(runs, clean, name):
    examined = runs.examine("clean", *HARMLESS[name])
    assert {f.judged for f in examined.findings} <= {"equal", "noise"}
    assert {s.part for s in examined.settings} <= {None, "weight sync"} and examined.settings
    if name in ("micro-batches", "attention"):
        assert examined.numerics == "float32" and of_stage(examined, "update", "noise")
        assert of_stage(examined, "reward")[0].judged == of_stage(examined, "advantage")[0].judged == "equal"


FAULTS = {
    "rollout": sampling(top_k=8),
    "old_log_prob": in_stage("old_log_prob", lambda out: mapped(out, "old_log_probs", lambda v: v - 0.001)),
    "advantage": in_stage("advantage", lambda out: mapped(out, "advantages", lambda v: v * np.float32(1.0001))),
    "update": lr_times_ten,
}


@pytest.mark.parametrize("stage", FAULTS)
def test_a_small_fault_is_found_through_the_noise_of_another_attention(runs, stage):
    runs.record(stage, plant=FAULTS[stage])
    examined = runs.examine(stage, *HARMLESS["attention"])
    assert examined.numerics == "float32" and differing(examined) == {stage: 1}


def test_a_step_without_signal_is_not_blamed_for_the_noise_that_adam_makes_a_step_of(runs):
    """All rewards equal and the policy still the reference: the gradient is rounding, and Adam divides by its size."""
    nothing = in_stage("reward", lambda out: mapped(out, "reward", lambda v: v * 0))
    runs.record("nothing", plant=nothing)
    examined = runs.examine("nothing", *HARMLESS["attention"], plant=nothing)
    [first, _] = of_stage(examined, "update")
    assert first.judged == "noise" and max(g.largest for g in first.gaps) > 0.1
    assert differing(examined) == {}
    runs.record("nothing_faulty", plant=lambda parts: (nothing(parts), lr_times_ten(parts)))
    assert differing(runs.examine("nothing_faulty", *HARMLESS["attention"], plant=nothing)) == {"update": 1}


SMALL = f"{ACTOR}.optim.lr=1e-5"


def test_a_fault_of_a_is_found_through_the_coarse_rounding_of_a_bfloat16_sampler_of_b(runs):
    """What B's sampler rounds says nothing about A's tokens, which B's trainer scores in float32."""
    runs.record("stale", OWN_WEIGHTS, SMALL, plant=stale_weights)
    examined = runs.examine("stale", OWN_WEIGHTS, SMALL, f"{ROLLOUT}.dtype=bfloat16")
    assert examined.numerics == "bfloat16" and differing(examined) == {"rollout": 2}
    [found] = of_stage(examined, "rollout", "differs")
    assert "weights of one step before" in found.hint
    assert (found.gaps[0].kind, found.gaps[0].field) == ("score", "rollout_log_probs")
    assert "where rounding (float32) explains 0.0002 and 2e-05" in found.sentence
    runs.record("fresh", OWN_WEIGHTS, SMALL)
    assert differing(runs.examine("fresh", OWN_WEIGHTS, SMALL, f"{ROLLOUT}.dtype=bfloat16")) == {}


def test_a_fault_of_a_s_trainer_does_not_make_b_s_inference_look_guilty_by_its_score(runs, clean):
    def off(parts):
        log_probs = parts.trainer.log_probs

        def wrong(batch, temperature, entropy):
            values, more = log_probs(batch, temperature, entropy)
            return Ragged(values.values - np.float32(0.01), values.lengths), more

        parts.trainer.log_probs = wrong

    examined = runs.examine("clean", *HARMLESS["attention"], of="B", by="A", plant=off)
    assert differing(examined) == {"old_log_prob": 1} and of_stage(examined, "rollout", "noise")


def test_a_cuda_device_is_never_exact_unless_its_algorithms_are_deterministic(runs):
    mine = runs.load("x").config
    loose = {"device": "cuda:0 (x)", DETERMINISTIC: "False"}
    found = numerics_of(mine, mine, loose, loose)
    assert (found.inference, found.training, found.host) == ("float32", "float32", "exact")
    assert "deterministic" in found.because[0]
    strict = {**loose, DETERMINISTIC: "True"}
    assert numerics_of(mine, mine, strict, strict).loosest == "exact"


def test_a_processor_of_the_same_name_with_other_kernels_is_a_declared_difference(runs):
    """ATEN_CPU_CAPABILITY and virtual machines restrict what the same model of processor does."""
    mine, here = runs.load("x").config, versions()
    assert here["processor kernels"] == torch.backends.cpu.get_cpu_capability()
    other = {**here, "processor kernels": "something else"}
    assert numerics_of(mine, mine, here, here).loosest == "exact"
    assert numerics_of(mine, mine, other, here).loosest == "float32"
    kernels = "import torch, crossrl.tape.versions as v; print(v.versions()['processor kernels'])"
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    told = subprocess.run([sys.executable, "-c", kernels], env=env, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "DEFAULT"


def test_what_would_not_have_been_seen_is_said_for_each_kind_of_work_and_only_where_it_is_not_exact(runs, clean):
    assert runs.examine("clean", by="A").unseen == ()
    [inference] = runs.examine("clean", f"{ROLLOUT}.dtype=bfloat16").unseen
    assert inference.startswith("inference (bfloat16): log-probs of the sampler off by 0.6 nat (0.1 in the mean)")
    assert "by 0.0002 nat (2e-05 in the mean) from the trainer's" in inference
    training = runs.examine("clean", *HARMLESS["micro-batches"]).unseen
    assert [text.partition(":")[0] for text in training] == ["training (float32)"]


def test_trained_weights_in_bfloat16_on_one_side_are_another_training_and_the_setting_is_named(runs, clean):
    """Updates that a bfloat16 weight cannot take up are lost: no rounding that a limit could allow for."""
    key = f"{ACTOR}.fsdp_config.model_dtype"
    examined = runs.examine("clean", f"{key}=bfloat16")
    assert differing(examined) == {"update": 1}
    assert f"{key} (A: auto, B: bfloat16)" in of_stage(examined, "update", "differs")[0].sentence


def test_inference_in_bfloat16_loosens_inference_and_nothing_else(runs):
    bf16 = f"{ROLLOUT}.dtype=bfloat16"
    runs.record("bf16", bf16)
    examined = runs.examine("bf16")
    assert examined.numerics == "bfloat16" and differing(examined) == {}
    assert of_stage(examined, "rollout", "noise")
    assert {f.judged for f in examined.findings if f.stage not in ("rollout",)} == {"equal"}
    slightly = in_stage("old_log_prob", lambda out: mapped(out, "old_log_probs", lambda v: v + 1e-3))
    runs.record("bf16_faulty", bf16, plant=slightly)
    assert differing(runs.examine("bf16_faulty")) == {"old_log_prob": 1}
