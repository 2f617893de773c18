"""Checks before anything runs: each bad combination is an error with the arithmetic and what to use instead."""

import pytest

from crossrl import settings
from crossrl.algorithms import advantages, aggregation, kl, losses, schedule
from crossrl.config import ConfigError, load_config
from crossrl.config.keys import leaves
from crossrl.config.ranges import RANGES

BASE = ["data.train_files=train.parquet", "data.val_files=val.parquet", "actor_rollout_ref.model.path=model"]
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([*BASE, *overrides])
    return str(caught.value)


def warnings(*overrides: str) -> str:
    return "\n".join(load_config([*BASE, *overrides]).warnings)


def test_what_must_be_set_is_asked_for_by_name():
    with pytest.raises(ConfigError) as caught:
        load_config([])
    assert [p.split()[0] for p in caught.value.problems] == ["data.train_files", "actor_rollout_ref.model.path"]


def test_a_mini_batch_that_does_not_divide_is_refused_with_the_sum_and_the_nearest_sizes():
    text = problem("data.train_batch_size=100", f"{A}.ppo_mini_batch_size=48")
    assert "100 = 2 x 48 + 4" in text
    assert f"{A}.ppo_mini_batch_size=50 or 25" in text and "data.train_batch_size=96 or 144" in text
    for good in (f"{A}.ppo_mini_batch_size=50", f"{A}.ppo_mini_batch_size=25"):
        load_config([*BASE, "data.train_batch_size=100", good])
    for good in (96, 144):
        load_config([*BASE, f"data.train_batch_size={good}", f"{A}.ppo_mini_batch_size=48"])


def test_a_mini_batch_above_the_batch_is_refused():
    text = problem("data.train_batch_size=16", f"{A}.ppo_mini_batch_size=256")
    assert "256 prompts is more than data.train_batch_size=16" in text
    load_config([*BASE, "data.train_batch_size=16", f"{A}.ppo_mini_batch_size=16"])


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_any_micro_batch_is_fine_because_it_does_not_change_the_gradient(size):
    load_config([*BASE, f"{A}.ppo_micro_batch_size_per_gpu={size}"])


def test_a_separate_generation_batch_needs_dynamic_sampling():
    assert "data.gen_batch_size=96 has no effect without" in problem("data.gen_batch_size=96")
    load_config([*BASE, "data.gen_batch_size=96", "algorithm.filter_groups.enable=True"])
    load_config([*BASE, "data.gen_batch_size=32"])


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_with_a_group_baseline_is_refused_with_what_to_use(name):
    text = problem(f"{R}.n=1", f"algorithm.adv_estimator={name}")
    assert "group of one" in text and f"{R}.n=2" in text and "remax" in text


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "remax"])
def test_a_group_of_one_is_fine_without_a_group_baseline(name):
    load_config([*BASE, f"{R}.n=1", f"algorithm.adv_estimator={name}"])
    assert "filter_groups" in problem(
        f"{R}.n=1", f"algorithm.adv_estimator={name}", "algorithm.filter_groups.enable=True"
    )


@pytest.mark.parametrize("path", sorted(RANGES))
def test_each_numeric_key_is_refused_outside_its_interval_and_taken_at_an_inclusive_bound(path):
    interval = RANGES[path]
    low, high = (float(x) for x in interval[1:-1].split(","))
    whole = leaves()[path].kind is int

    def text(x: float) -> str:
        return str(int(x)) if whole else repr(x)

    outside = [low - 1] + ([high + 1] if high != float("inf") else []) + ([low] if interval[0] == "(" else [])
    for value in outside:
        assert f"{path}={text(value)}: want" in problem(f"{path}={text(value)}")
    if interval[0] == "[":
        try:
            load_config([*BASE, f"{path}={text(low)}"])
        except ConfigError as error:  # another rule may forbid it, but not this one
            assert "want a number in" not in str(error)


def test_every_number_that_is_not_a_whole_one_has_an_interval():
    assert [path for path, leaf in leaves().items() if leaf.kind is float and path not in RANGES] == []


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_are_not_finite_are_refused(value):
    assert f"{A}.optim.lr" in problem(f"{A}.optim.lr={value}")


@pytest.mark.parametrize(
    ("override", "near"),
    [
        (f"{A}.loss_agg_mode=token_mean", "token-mean"),
        ("algorithm.adv_estimator=grpoo", "grpo"),
        (f"{A}.policy_loss.loss_mode=gpso", "gspo"),
        ("data.truncation=centre", "center"),
        ("trainer.logger=[console,tensorbord]", "tensorboard"),
        (f"{R}.name=vlm", "vllm"),
        ("trainer.device=gpu", "cpu"),
        ("tape.mode=rec", "record"),
    ],
)
def test_a_value_outside_a_closed_set_is_refused_with_the_nearest_and_all_allowed(override, near):
    text = problem(override)
    assert override.split("=")[0] in text and "allowed:" in text
    if near != "center":
        assert near in text


def test_off_or_positive():
    for key in ("data.train_max_samples", f"{R}.top_k"):
        load_config([*BASE, f"{key}=-1"])
        load_config([*BASE, f"{key}=5"])
        assert "want -1 (off) or a number from 1" in problem(f"{key}=-2")
    assert "want -1" in problem("data.train_max_samples=0")


def test_betas_are_two_numbers_below_one():
    for bad in ("[0.9]", "[0.9,1.0]", "[0.9,-0.1]", "[]"):
        assert f"{A}.optim.betas" in problem(f"{A}.optim.betas={bad}")


def test_engine_lengths_must_be_those_of_the_data():
    assert "rollout.response_length=100 but data.max_response_length=512" in problem(f"{R}.response_length=100")
    load_config([*BASE, f"{R}.response_length=100", "data.max_response_length=100"])


def test_overlong_buffer_must_fit_the_response():
    on = "reward.overlong_buffer.enable=True"
    assert "overlong_buffer.len=0: want 1 to" in problem(on)
    assert "overlong_buffer.len=600" in problem(on, "reward.overlong_buffer.len=600")
    assert "penalty_factor" in problem(on, "reward.overlong_buffer.len=6", "reward.overlong_buffer.penalty_factor=0")
    load_config([*BASE, on, "reward.overlong_buffer.len=512"])


def test_greedy_training_and_repeated_greedy_validation_are_refused():
    assert "do_sample=False" in problem(f"{R}.do_sample=False")
    assert "4 times the same" in problem(f"{R}.val_kwargs.n=4")
    assert "temperature" in problem(f"{R}.val_kwargs.do_sample=True")
    load_config([*BASE, f"{R}.val_kwargs.n=4", f"{R}.val_kwargs.do_sample=True", f"{R}.val_kwargs.temperature=0.6"])


def test_validation_without_data_is_refused():
    for ask in ("trainer.test_freq=5", "trainer.val_only=True"):
        assert "data.val_files is empty" in problem("data.val_files=null", ask)
    load_config([*BASE, "data.val_files=null"])


def test_engines_that_are_not_here_say_what_to_do():
    assert f"add {R}.name=hf" in problem(f"{R}.name=sglang")


def test_processes_that_do_not_go_together_are_refused():
    assert "several machines need Ray" in problem("trainer.nnodes=2", "cluster.launcher=local")
    spread = (f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=2")
    assert "use one of 1, 3" in problem(*spread, "trainer.n_gpus_per_node=3")
    load_config([*BASE, *spread, "trainer.n_gpus_per_node=3", f"{R}.replicas=1"])
    assert "max_model_len=100 is less than" in problem(f"{R}.name=vllm", f"{R}.max_model_len=100")
    assert "want the name of an engine first" in problem(f"+{R}.engine_kwargs.block_size=3")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((), ("none", 1, 1, False)),
        ((f"{R}.name=vllm",), ("local", 1, 1, False)),
        ((f"{R}.replicas=2",), ("ray", 1, 2, True)),
        (("trainer.n_gpus_per_node=2",), ("ray", 2, 2, True)),
        (
            ("trainer.n_gpus_per_node=2", "trainer.nnodes=3", f"{R}.replicas=1"),
            ("ray", 6, 1, True),
        ),
        (("cluster.launcher=ray",), ("ray", 1, 1, True)),
        (("cluster.launcher=local",), ("local", 1, 1, False)),
    ],
)
def test_where_a_run_has_its_processes(keys, expected):
    cfg = load_config([*BASE, *keys]).config
    found = settings.launcher(cfg), settings.processes(cfg), settings.replicas(cfg), settings.trains_apart(cfg)
    assert found == expected


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ([f"{R}.skip_rollout=True"], "both say where responses come from"),
        (["tape.mode=replay"], "both say where the output of a stage comes from"),
        (["trainer.val_only=True"], "there is nothing to share"),
        (["trainer.share_data_keep=1"], "needs trainer.save_freq"),
    ],
)
def test_an_exchange_is_refused_with_what_contradicts_it(keys, why):
    assert why in problem("trainer.share_data=ckpt", *keys)


def test_resume_settings_belong_together():
    assert "needs trainer.resume_from_path" in problem("trainer.resume_mode=resume_path")
    assert "has no effect" in problem("trainer.resume_from_path=x")
    load_config([*BASE, "trainer.resume_mode=resume_path", "trainer.resume_from_path=x"])


def test_correction_settings_are_checked_by_the_algorithm_itself():
    assert "rollout_rs_threshold" in problem(f"{CORRECTION}.rollout_rs=token")
    assert "rollout_rs='geo' is not known" in problem(f"{CORRECTION}.rollout_rs=geo")
    assert "rollout_is_threshold" in problem(f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=5_1")
    load_config([*BASE, f"{CORRECTION}.rollout_rs=sequence", f"{CORRECTION}.rollout_rs_threshold=0.5_2.0"])
    load_config([*BASE, f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=2.0"])


def test_correction_needs_two_different_log_probs():
    assert "every importance weight is 1" in problem(f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.bypass_mode=True")
    load_config([*BASE, f"{CORRECTION}.bypass_mode=True"])


def test_tape_steps_are_numbers_and_ranges():
    assert "tape.steps=a-b" in problem("tape.steps=a-b")
    for good in ("5", "1-10,20", "[1,2,3]"):
        load_config([*BASE, f"tape.steps={good}"])


def test_warnings_for_what_is_legal_and_rarely_meant():
    assert warnings() == ""
    assert "counts twice" in warnings(f"{A}.use_kl_loss=True", "algorithm.use_kl_in_reward=True")
    assert "not part of the loss" in warnings(f"{A}.use_kl_loss=True", f"{A}.kl_loss_coef=0")
    assert "gamma=0.9 has no effect" in warnings("algorithm.gamma=0.9")
    assert warnings("algorithm.gamma=0.9", "algorithm.adv_estimator=reinforce_plus_plus") == ""
    assert "loss_scale_factor" in warnings(f"{A}.loss_scale_factor=100")
    assert "truncated distribution" in warnings(f"{R}.top_p=0.8", f"{CORRECTION}.rollout_is=token")
    assert "greedy" in warnings(f"{R}.val_kwargs.temperature=1.0")


def test_bfloat16_on_a_cpu_is_warned_about_with_the_reason_and_float32_is_not():
    cpu = "trainer.device=cpu"
    text = warnings(cpu, f"{A}.fsdp_config.dtype=bf16")
    assert "times slower" in text.replace("times backward", "") and f"{A}.fsdp_config.dtype=float32" in text
    assert warnings(cpu) == "" and warnings(cpu, f"{A}.fsdp_config.dtype=float32") == ""
    assert warnings("trainer.device=cuda", f"{A}.fsdp_config.dtype=bfloat16") == ""


@pytest.mark.parametrize(
    ("path", "known", "refused"),
    [
        ("algorithm.adv_estimator", advantages.ESTIMATORS, {"gae"}),
        (f"{A}.loss_agg_mode", aggregation.MODES, set()),
        (f"{A}.policy_loss.loss_mode", losses.LOSS_MODES, set()),
        (f"{A}.optim.lr_scheduler_type", schedule.SCHEDULES, set()),
    ],
)
def test_the_values_offered_are_the_ones_that_the_algorithms_have(path, known, refused):
    assert set(leaves()[path].allowed) == set(known) | refused


def test_every_kl_estimator_offered_exists():
    for path in (f"{A}.kl_loss_type", "algorithm.kl_penalty"):
        for name in leaves()[path].allowed:
            kl.need_kl_type(path, name)
