"""What a launch script written for verl finds here: keys with, without and with another effect."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest

from crossrl import settings
from crossrl.config import ConfigError, LoadedConfig, load_config
from crossrl.config.describe import defaults
from crossrl.config.keys import is_verl_key, leaves, our_key, verl_keys
from crossrl.config.load import MUST_EQUAL
from crossrl.config.refusals import REFUSALS, refuse
from crossrl.config.spellings import ALIASES, VALUES

ROOT = Path(__file__).parent
BASE = ["data.train_files=train.parquet", "data.val_files=val.parquet", "actor_rollout_ref.model.path=model"]
# Keys of ours that verl does not have.
OWN_GROUPS = ("tape.", "cross.", "cluster.", "reward.overlong_buffer.")
OWN_KEYS = {
    "algorithm.mask_truncated",
    "actor_rollout_ref.actor.recompute_old_log_prob",
    "actor_rollout_ref.rollout.own_weights",
    "actor_rollout_ref.rollout.replicas",
    "reward.timeout_s",
    "trainer.seed",
    "trainer.num_threads",
    "trainer.share_data",
    "trainer.share_data_dir",
    "trainer.share_data_timeout",
    "trainer.share_data_heartbeat",
    "trainer.share_data_keep",
    "trainer.stop_after_steps",
}


def launch(script: str, tmp_path: Path, *extra: str) -> LoadedConfig:
    """Run a launch script with a ``python3`` that notes its arguments, and load what it passed."""
    stub = tmp_path / "bin" / "python3"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > "$ARGV_OUT"\n')
    stub.chmod(0o755)
    env = os.environ | {"PATH": f"{stub.parent}:{os.environ['PATH']}", "ARGV_OUT": str(tmp_path / "argv")}
    subprocess.run(["bash", str(ROOT / "data" / script), *extra], env=env, check=True, timeout=30)
    argv = (tmp_path / "argv").read_text().rstrip("\0").split("\0")
    assert argv[:2] == ["-m", "verl.trainer.main_ppo"]
    options = dict(word[2:].split("=", 1) for word in argv[2:] if word.startswith("--"))
    overrides = [word for word in argv[2:] if not word.startswith("--")]
    return load_config(overrides, options.get("config-name"), options.get("config-path"))


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([*BASE, *overrides])
    return str(caught.value)


# Launch scripts

HF = "actor_rollout_ref.rollout.name=hf"


def test_verls_grpo_launch_script_starts_with_one_override_for_the_engine(tmp_path):
    loaded = launch("verl_launch_grpo.sh", tmp_path, HF)
    cfg = loaded.config
    assert cfg.algorithm.adv_estimator == "grpo" and cfg.actor_rollout_ref.rollout.n == 5
    assert (cfg.data.train_batch_size, cfg.actor_rollout_ref.actor.ppo_mini_batch_size) == (1024, 256)
    assert cfg.actor_rollout_ref.actor.use_kl_loss and cfg.actor_rollout_ref.actor.kl_loss_coef == 0.001
    assert cfg.actor_rollout_ref.model.enable_gradient_checkpointing
    assert cfg.trainer.logger == ["console", "wandb"]
    assert dict(loaded.no_effect) == {
        "actor_rollout_ref.actor.fsdp_config.param_offload": False,
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": False,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 40,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
        "actor_rollout_ref.ref.fsdp_config.param_offload": True,
    }
    assert cfg.trainer.n_gpus_per_node == 8
    assert (settings.processes(cfg), settings.replicas(cfg), settings.launcher(cfg)) == (8, 8, "ray")


def test_every_argument_of_a_launch_script_is_either_applied_or_listed(tmp_path):
    for script in ("verl_launch_grpo.sh", "verl_launch_dapo.sh", "verl_launch_megatron.sh"):
        loaded = launch(script, tmp_path, HF)
        passed = (tmp_path / "argv").read_text().rstrip("\0").split("\0")[2:]
        keys = {word.partition("=")[0].lstrip("+") for word in passed if not word.startswith("--")}
        seen = {key for key, _ in (*loaded.applied, *loaded.no_effect)}
        unseen = keys - seen - set(ALIASES) - set(MUST_EQUAL)
        assert not unseen, f"{script}: {sorted(unseen)}"


def test_with_its_own_engine_a_launch_script_keeps_its_processes(tmp_path):
    cfg = launch("verl_launch_grpo.sh", tmp_path).config
    rollout = cfg.actor_rollout_ref.rollout
    assert (rollout.name, rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization) == ("vllm", 2, 0.6)
    assert (settings.processes(cfg), settings.replicas(cfg), settings.launcher(cfg)) == (8, 4, "ray")
    with pytest.raises(ConfigError, match=r"1 x .*n_gpus_per_node=7 = 7 processes are not a multiple .*=2"):
        launch("verl_launch_grpo.sh", tmp_path, "trainer.n_gpus_per_node=7")


def test_an_engine_that_is_not_here_is_an_error_with_the_override_to_add(tmp_path):
    with pytest.raises(ConfigError) as caught:
        launch("verl_launch_grpo.sh", tmp_path, "actor_rollout_ref.rollout.name=sglang")
    (text,) = caught.value.problems
    assert "actor_rollout_ref.rollout.name=sglang is not available" in text
    assert "add actor_rollout_ref.rollout.name=hf" in text


def test_verls_dapo_launch_script_keeps_its_meaning(tmp_path):
    loaded = launch("verl_launch_dapo.sh", tmp_path, HF)
    cfg, actor = loaded.config, loaded.config.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert actor.loss_agg_mode == "token-mean" and not actor.use_kl_loss
    assert (cfg.data.gen_batch_size, cfg.data.train_batch_size) == (1536, 512)
    groups = cfg.algorithm.filter_groups
    assert (groups.enable, groups.metric, groups.max_num_gen_batches) == (True, "acc", 10)
    buffer = cfg.reward.overlong_buffer
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 4096, 1.0)
    assert (actor.optim.lr_warmup_steps, actor.optim.weight_decay, actor.optim.clip_grad) == (10, 0.1, 1.0)
    assert cfg.actor_rollout_ref.model.override_config["attention_dropout"] == 0.0
    assert any("ppo_trainer" in w for w in loaded.warnings)


def test_verls_megatron_launch_script_keeps_its_schedule(tmp_path):
    loaded = launch("verl_launch_megatron.sh", tmp_path, HF)
    optim = loaded.config.actor_rollout_ref.actor.optim
    assert (optim.lr_scheduler_type, optim.clip_grad) == ("cosine", 0.5)
    assert loaded.config.trainer.total_training_steps == 500
    assert "actor_rollout_ref.actor.megatron.tensor_model_parallel_size" in dict(loaded.no_effect)


# Keys


def test_every_key_of_ours_is_one_of_verls_or_declared_as_our_own():
    own = {p for p in leaves() if not is_verl_key(p) and not p.startswith(OWN_GROUPS)}
    assert own == OWN_KEYS


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.rollout.log_prob_micro_batch_size",
        "actor_rollout_ref.rollout.skip_rollout",
        "actor_rollout_ref.rollout.free_cache_engine",
        "actor_rollout_ref.rollout.repetition_penalty",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.*",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
        "actor_rollout_ref.rollout.engine_kwargs.*",
        "algorithm.filter_groups.metric",
        "trainer.remove_previous_ckpt_in_save",
        "reward_model.reward_manager",
        "skip.rollout.enable",
        "critic.optim.lr",
        "global_profiler.tool",
    ],
)
def test_verl_keys_of_every_kind_are_listed(key):
    assert key in verl_keys()


def test_free_form_groups_take_anything_below_them():
    loaded = load_config(
        [*BASE, "+actor_rollout_ref.rollout.engine_kwargs.vllm.max_loras=3", "ray_kwargs.ray_init.num_cpus=4"]
    )
    assert dict(loaded.no_effect) == {
        "actor_rollout_ref.rollout.engine_kwargs.vllm.max_loras": 3,
        "ray_kwargs.ray_init.num_cpus": 4,
    }


def test_no_key_without_effect_is_silent():
    """Each verl key, given a harmless or odd value, is applied, listed, or an error. Never dropped."""
    for key in sorted(verl_keys()):
        path = key.replace("*", "anything")
        if our_key(path) or path in ALIASES or path in MUST_EQUAL or path.startswith("critic."):
            continue
        refused = refuse({path: "odd"})
        if refused:
            assert path in refused[0]
            continue
    some = [
        k for k in sorted(verl_keys()) if not our_key(k) and k not in (*ALIASES, *MUST_EQUAL) and not refuse({k: "odd"})
    ]
    plain = [
        k for k in some[::40] if not k.endswith("*") and not k.startswith(("critic.", "reward_model.reward_kwargs"))
    ]
    assert len(plain) > 20
    loaded = load_config([*BASE, *(f"{k}=odd" for k in plain)])
    assert [k for k, _ in loaded.no_effect] and {k for k, _ in loaded.no_effect} == set(plain)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size", 8),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", 8),
        ("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", True),
        ("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu", 9000),
        ("actor_rollout_ref.rollout.calculate_log_probs", False),
        ("actor_rollout_ref.actor.checkpoint.save_contents", ["model"]),
        ("trainer.balance_batch", False),
    ],
)
def test_what_changes_nothing_here_is_listed_and_not_among_our_keys(key, value):
    loaded = load_config([*BASE, f"{key}={value}"])
    assert dict(loaded.no_effect) == {key: value} and loaded.warnings == ()
    assert loaded.config == load_config(BASE).config
    assert our_key(key) is None


def test_a_resume_that_would_leave_something_out_is_refused():
    key = "actor_rollout_ref.actor.checkpoint.load_contents"
    text = problem(f"{key}=[model]")
    assert f"{key}=[model] would change the result" in text and "[model,optimizer,extra]" in text
    for everything in ("[optimizer,extra,model]", "[model,hf_model,optimizer,extra]"):
        assert key in dict(load_config([*BASE, f"{key}={everything}"]).no_effect)


# Older names


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_each_older_name_is_verls_and_sets_our_key(alias):
    assert is_verl_key(alias) and not our_key(alias)
    target = ALIASES[alias]
    value = {"lr_scheduler_type": "cosine", "enable": True, "log": True, "path": "f.py", "name": "f"}.get(
        target.rsplit(".", 1)[-1], 3
    )
    extra = ["reward.overlong_buffer.len=3"] if target.endswith("buffer.enable") else []
    loaded = load_config([*BASE, f"{alias}={value}", *extra])
    assert dict(loaded.applied)[target] == value
    assert loaded.no_effect == ()


def test_two_names_of_one_key_must_agree():
    old, new = "actor_rollout_ref.actor.grad_clip", "actor_rollout_ref.actor.optim.clip_grad"
    assert load_config([*BASE, f"{old}=0.5", f"{new}=0.5"]).config.actor_rollout_ref.actor.optim.clip_grad == 0.5
    text = problem(f"{old}=0.5", f"{new}=2.0")
    assert old in text and new in text and "two names of one setting" in text
    text = problem("custom_reward_function.path=a.py", "reward.custom_reward_function.path=b.py")
    assert "remove custom_reward_function.path" in text


def test_null_under_an_older_name_means_not_set():
    loaded = load_config([*BASE, "custom_reward_function.path=null", "reward.custom_reward_function.path=b.py"])
    assert loaded.config.reward.custom_reward_function.path == "b.py"


def test_other_spellings_of_values_give_ours():
    for path, table in VALUES.items():
        leaf = leaves()[path]
        for ours in table.values():
            assert not leaf.allowed or ours in leaf.allowed, path
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    loaded = load_config([*BASE, f"{fsdp}.model_dtype=fp32", "actor_rollout_ref.rollout.top_k=0"])
    assert loaded.config.actor_rollout_ref.actor.fsdp_config.model_dtype == "float32"
    assert loaded.config.actor_rollout_ref.rollout.top_k == -1


# Values that would change the result


def concrete(pattern: str) -> str:
    """A verl key that the pattern of a refusal catches."""
    from fnmatch import fnmatchcase

    keys = [k.replace("*", "x") for k in sorted(verl_keys())]
    caught = [k for k in [pattern.replace("*", "x"), *keys] if fnmatchcase(k, pattern) and is_verl_key(k)]
    assert caught, f"no verl key matches {pattern}: the rule is dead"
    return caught[0]


@pytest.mark.parametrize("rule", REFUSALS, ids=[r.key for r in REFUSALS])
def test_a_verl_setting_that_would_change_the_result_is_an_error_and_its_harmless_values_are_not(rule):
    key = concrete(rule.key)
    assert our_key(key) is None and key not in ALIASES
    text = problem(f"{key}=something_else")
    assert f"{key}=something_else" in text and rule.why in text
    for harmless in rule.harmless:
        if harmless is None or harmless == {}:
            continue
        extra = ["algorithm.adv_estimator=grpo"] if key.startswith("critic.") else []
        loaded = load_config([*BASE, *extra, f"{key}={harmless}"])
        assert key in dict(loaded.no_effect)
    assert not refuse({key: None})


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        "reward_model.enable=True",
        "reward.reward_model.enable=True",
        "algorithm.use_pf_ppo=True",
        "distillation.enabled=True",
        "actor_rollout_ref.actor.freeze_vision_tower=True",
        "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
        "actor_rollout_ref.actor.optim.optimizer=SGD",
        "algorithm.adv_estimator=gae",
        "algorithm.adv_estimator=opo",
        "actor_rollout_ref.rollout.repetition_penalty=1.1",
        "reward_model.reward_manager=batch",
        "critic.optim.lr=1e-5",
        "trainer.critic_warmup=10",
        "actor_rollout_ref.actor.kl_loss_type=full",
        "reward_model.reward_kwargs.max_resp_len=100",
        "reward_model.reward_kwargs.overlong_buffer_cfg.length=3",
        "actor_rollout_ref.actor.strategy=megatron",
    ],
)
def test_losing_this_verl_setting_silently_would_change_the_result(override):
    assert override.split("=")[0] in problem(override)


def test_a_critic_without_a_named_estimator_means_gae_and_with_one_means_nothing():
    assert "means gae" in problem("critic.model.path=m")
    loaded = load_config([*BASE, "critic.model.path=m", "algorithm.adv_estimator=rloo"])
    assert dict(loaded.no_effect) == {"critic.model.path": "m"}


def test_verls_composed_defaults_load_apart_from_what_they_ask_that_is_not_here(tmp_path):
    """A user's dump of verl's whole tree (here: every key of ours and verl's kind of values) is a valid file."""
    tree: dict = {}
    for path, value in defaults().items():
        node = tree
        *groups, name = path.split(".")
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    tree["trainer"] |= {"use_v1": True, "esi_redundant_time": 0, "default_hdfs_dir": None}
    tree["critic"] = {"optim": {"lr": 1e-5}, "enable": None}
    tree["custom_reward_function"] = {"path": None, "name": None}
    tree["_target_"] = "x"
    (tmp_path / "dump.yaml").write_text(json.dumps({k: v for k, v in tree.items() if k != "_target_"}))
    loaded = load_config(BASE, str(tmp_path / "dump.yaml"))
    assert loaded.config == load_config(BASE).config


# The list of verl's keys


def test_the_key_list_generator_reads_trees_and_dataclasses(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("gen_verl_keys", ROOT.parent / "tools" / "gen_verl_keys.py")
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    folder = tmp_path / "verl/trainer/config"
    folder.mkdir(parents=True)
    (folder / "_generated_ppo_trainer.yaml").write_text(
        "actor:\n  _target_: verl.workers.Actor\n  lr: 1.0\n  engine_kwargs: {vllm: {a: 1}}\n  extra: {}\n"
        "  optim: {eps: 1}\n"
    )
    (tmp_path / "verl/actor.py").write_text(
        "@dataclass\nclass Base:\n    shared: int = 1\n\n"
        "@dataclass\nclass Optim:\n    betas: list = None\n\n"
        "@dataclass(frozen=True)\nclass Actor(Base):\n    lr: float = 1\n    optim: Optional[Optim] = None\n"
        "    _private: int = 0\n"
    )
    assert tool.without_covered(tool.keys_of(tmp_path)) == [
        "actor.engine_kwargs.*",
        "actor.extra.*",
        "actor.lr",
        "actor.optim.betas",
        "actor.optim.eps",
        "actor.shared",
    ]
    with pytest.raises(SystemExit, match="unpacked verl wheel"):
        tool.keys_of(tmp_path / "nowhere")


def test_the_key_list_is_sorted_and_has_no_key_twice():
    text = (ROOT.parent / "src/crossrl/config/verl_keys.txt").read_text()
    assert text.splitlines() == sorted(verl_keys())
