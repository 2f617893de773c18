"""Loading: override grammar, config files, unknown keys, types, what comes out."""

import dataclasses
import doctest
import importlib
import math
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hypothesis import given, settings
from hypothesis import strategies as st

import crossrl.config
from crossrl.config import ConfigError, LoadedConfig, describe, digest, flatten, load_config, to_yaml
from crossrl.config.describe import defaults, field_docs
from crossrl.config.keys import leaves, nearest

BASE = ["data.train_files=train.parquet", "data.val_files=val.parquet", "actor_rollout_ref.model.path=model"]
ACTOR = "actor_rollout_ref.actor"
COMMAND = """
    algorithm.adv_estimator=grpo data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=16
    data.max_prompt_length=128 data.max_response_length=64 actor_rollout_ref.model.path=DIR
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.temperature=1.0 trainer.logger=[console,file,tensorboard] trainer.save_freq=5
    trainer.test_freq=5 trainer.total_epochs=1 trainer.project_name=p trainer.experiment_name=e
    trainer.default_local_dir=OUT"""


def load(*overrides: str) -> LoadedConfig:
    return load_config([*BASE, *overrides])


def problem(*overrides: str, config_name: str | None = None, config_path: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([*BASE, *overrides], config_name, config_path)
    return str(caught.value)


# Defaults


def test_defaults_make_a_valid_run_and_resolve_every_interpolation():
    loaded = load()
    assert loaded.no_effect == () and loaded.warnings == ()
    assert not [v for v in flatten(loaded.config).values() if "${" in str(v)]
    assert loaded.config.actor_rollout_ref.actor.ppo_mini_batch_size == loaded.config.data.train_batch_size


def test_the_command_of_the_documentation_loads_with_nothing_left_over():
    loaded = load_config(COMMAND.split())
    assert loaded.no_effect == () and loaded.warnings == ()
    cfg = loaded.config
    assert cfg.actor_rollout_ref.actor.optim.lr == 1e-6
    assert cfg.trainer.logger == ["console", "file", "tensorboard"]
    assert cfg.actor_rollout_ref.rollout.response_length == 64
    assert (
        cfg.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
        == cfg.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    )


def test_the_config_is_frozen_all_the_way_down():
    cfg = load().config
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.trainer.seed = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.actor_rollout_ref.actor.optim.lr = 1.0


# Grammar


def test_plain_plus_and_plusplus_set_and_tilde_goes_back_to_the_default():
    for prefix in ("", "+", "++"):
        assert load(f"{prefix}trainer.seed=7").config.trainer.seed == 7
    assert load("trainer.seed=7", "~trainer.seed").config.trainer.seed == load().config.trainer.seed
    assert load("~trainer.seed").config.trainer.seed == load().config.trainer.seed


def test_the_last_override_wins():
    assert load("trainer.seed=7", "trainer.seed=8").config.trainer.seed == 8


def test_lists_dicts_quotes_and_interpolations():
    cfg = load(
        "data.train_files=[a.parquet,'b c.parquet']",
        f"{ACTOR}.optim.betas=[0.9,0.95]",
        "data.apply_chat_template_kwargs={enable_thinking:false,depth:{a:1}}",
        "++actor_rollout_ref.model.override_config.attn_implementation=eager",
        "trainer.experiment_name=run",
        "trainer.rollout_data_dir=${trainer.default_local_dir}/samples",
        "trainer.default_local_dir='out/${trainer.experiment_name}'",
    ).config
    assert cfg.data.train_files == ["a.parquet", "b c.parquet"]
    assert cfg.actor_rollout_ref.actor.optim.betas == [0.9, 0.95]
    assert cfg.data.apply_chat_template_kwargs == {"enable_thinking": False, "depth": {"a": 1}}
    assert cfg.actor_rollout_ref.model.override_config == {"attn_implementation": "eager"}
    assert cfg.trainer.rollout_data_dir == "out/run/samples"


@pytest.mark.parametrize(
    "spec",
    [
        "reasoning_gym:chain_sum?min_terms=2&max_terms=3&size=500&seed=1",
        "reasoning_gym:chain_sum/min_terms:2/max_terms:3",
        "~/data/train.parquet",
    ],
)
def test_file_specs_need_no_quotes_alone_or_as_the_only_file(spec):
    assert load(f"data.train_files={spec}").config.data.train_files == [spec]


def test_several_specs_with_special_characters_are_a_quoted_list():
    spec = "reasoning_gym:chain_sum?size=5&seed=1"
    assert load(f"data.train_files=['{spec}',b.jsonl]").config.data.train_files == [spec, "b.jsonl"]
    assert "quotes" in problem(f"data.train_files=[{spec},b.jsonl]")


def test_one_entry_of_a_list_needs_no_brackets():
    cfg = load("trainer.logger=console", "tape.stages=rollout", "data.val_files=null").config
    assert (cfg.trainer.logger, cfg.tape.stages, cfg.data.val_files) == (["console"], ["rollout"], [])


@pytest.mark.parametrize("name", ["1e5", "20251129", "True", "007", "1_000", "0.5_2"])
def test_a_name_that_looks_like_a_number_stays_as_typed(name):
    assert load(f"trainer.experiment_name={name}").config.trainer.experiment_name == name


def test_thresholds_with_two_bounds_are_not_read_as_one_number():
    key = "algorithm.rollout_correction"
    loaded = load(f"{key}.rollout_is=token", f"{key}.rollout_is_threshold=2_10")
    assert loaded.config.algorithm.rollout_correction.rollout_is_threshold == "2_10"


def test_sweeps_are_refused_with_the_list_spelling():
    assert "sweep" in problem("trainer.seed=1,2") and "trainer.seed=[1,2]" in problem("trainer.seed=1,2")


@pytest.mark.parametrize("text", ["trainer.seed", "=3", "trainer.seed=[1", "--flag"])
def test_arguments_that_cannot_be_read_are_named(text):
    assert repr(text) in problem(text)


# Unknown keys and wrong types


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("actor_rollout_ref.actor.ppo_minibatch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("trainer.lr", "actor_rollout_ref.actor.optim.lr"),
        ("algorithm.kl_loss_coef", "actor_rollout_ref.actor.kl_loss_coef"),
        ("data.batch_size", "data.train_batch_size"),
        ("trainer.total_step", "trainer.total_training_steps"),
        ("actor_rollout_ref.rollout.gpu_memory_utilisation", "actor_rollout_ref.rollout.gpu_memory_utilization"),
        ("seed", "trainer.seed"),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_valid_name(key, near):
    for prefix in ("", "+", "++"):
        text = problem(f"{prefix}{key}=1")
        assert f"unknown key {key}" in text and near in text


def test_a_key_with_nothing_near_points_to_the_list_of_keys():
    assert nearest("zzzzqqqq") == []
    assert "crossrl train --keys" in problem("zzzzqqqq=1")


def test_all_unknown_keys_are_reported_at_once():
    text = problem("trainer.sed=1", "data.shufle=False")
    assert "2 problems" in text and "trainer.sed;" in text and "data.shufle;" in text


def test_a_group_cannot_be_set_to_a_value():
    assert "data is a group of keys" in problem("data=3")
    assert "unknown key trainer.seed.x" in problem("trainer.seed.x=3")


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        (f"{ACTOR}.optim.lr=abc", "want a number"),
        ("trainer.seed=1.5", "want a whole number"),
        ("trainer.seed=null", "want a whole number"),
        ("actor_rollout_ref.rollout.n=True", "want a whole number"),
        ("data.shuffle=3", "want True or False"),
        ("data.shuffle=maybe", "want True or False"),
        (f"{ACTOR}.optim.betas=[a,b]", "want a list of numbers"),
        ("trainer.project_name=[a]", "want text"),
        ("trainer.num_threads=many", "want a whole number or null"),
        ("data.apply_chat_template_kwargs=3", "want a mapping"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_with_key_value_and_type(override, wanted):
    text = problem(override)
    assert override.split("=")[0] in text and wanted in text


def test_an_interpolation_to_nothing_names_the_key_that_holds_it():
    assert "trainer.default_local_dir: Interpolation key 'nope.x' not found" in problem(
        "trainer.default_local_dir='${nope.x}'"
    )


# Files


def test_a_packaged_config_is_found_by_name():
    cfg = load_config([], "demo").config
    assert cfg.trainer.experiment_name == "demo"
    assert load_config(["trainer.seed=9"], "demo").config.trainer.seed == 9


def test_a_users_file_is_found_by_folder_or_by_path_and_builds_on_a_packaged_one(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [demo, _self_]\ntrainer: {seed: 5}\n")
    for loaded in (
        load_config([], "mine", str(tmp_path)),
        load_config([], "mine.yaml", str(tmp_path)),
        load_config([], str(tmp_path / "mine.yaml")),
    ):
        assert loaded.config.trainer.seed == 5
        assert loaded.config.trainer.experiment_name == "demo"


def test_a_file_that_extends_verls_own_config_extends_our_defaults(tmp_path):
    text = "hydra: {searchpath: ['file://verl/trainer/config']}\ndefaults: [ppo_trainer, _self_]\ndata: {seed: 3}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    assert load_config(BASE, str(tmp_path / "recipe.yaml")).config.data.seed == 3


def test_unset_values_of_a_file_are_the_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text("actor_rollout_ref:\n  rollout:\n    name: ???\n")
    assert load_config(BASE, str(tmp_path / "c.yaml")).config.actor_rollout_ref.rollout.name == "hf"


def test_an_unknown_key_in_a_file_is_an_error_too(tmp_path):
    (tmp_path / "c.yaml").write_text("trainer: {sed: 3}\n")
    assert "unknown key trainer.sed; nearest: trainer.seed" in problem(config_name=str(tmp_path / "c.yaml"))


def test_a_missing_or_broken_file_is_named_with_what_there_is(tmp_path):
    (tmp_path / "there.yaml").write_text("trainer: {seed: 3}\n")
    text = problem(config_name="absent", config_path=str(tmp_path))
    assert str(tmp_path / "absent.yaml") in text and "there" in text
    assert "demo" in problem(config_name="demoo")
    (tmp_path / "broken.yaml").write_text("trainer: [\n")
    assert "broken.yaml" in problem(config_name="broken", config_path=str(tmp_path))
    assert "--config-name" in problem(config_path=str(tmp_path))


# What comes out


def test_saved_yaml_loads_to_an_equal_config(tmp_path):
    cfg = load(
        f"{ACTOR}.clip_ratio_high=0.28",
        f"{ACTOR}.optim.lr=3e-7",
        "trainer.experiment_name=1e5",
        "data.apply_chat_template_kwargs={a:null}",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=2_10",
    ).config
    (tmp_path / "resolved.yaml").write_text(to_yaml(cfg))
    again = load_config([], str(tmp_path / "resolved.yaml")).config
    assert again == cfg and digest(again) == digest(cfg)


def test_the_digest_is_the_same_in_another_process_and_whatever_the_spelling():
    code = f"from crossrl.config import *;print(digest(load_config({[*BASE, 'trainer.logger=console']!r}).config))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == digest(load("+trainer.logger=[console]").config)


@given(st.sampled_from(sorted(p for p, leaf in leaves().items() if leaf.kind in (int, float))), st.data())
@settings(max_examples=25, deadline=None)
def test_any_change_of_a_number_changes_the_digest_or_is_refused(path, data):
    before = load()
    value = data.draw(st.integers(-3, 40) | st.floats(0, 1, allow_nan=False).map(lambda x: round(x, 3)))
    try:
        after = load(f"{path}={value}")
    except ConfigError as error:
        assert any(word in str(error) for word in (path, path.rsplit(".", 1)[-1]))
        return
    same = flatten(after.config) == flatten(before.config)
    assert same == (digest(after.config) == digest(before.config))
    got = flatten(after.config)[path]
    assert math.isclose(got, value) or (path, value) in after.no_effect or value == 0  # top_k=0 is spelled -1


@pytest.mark.filterwarnings("error")
def test_loading_twice_gives_equal_results_and_does_not_leak_between_calls(tmp_path):
    plain, store = digest(load().config), dict(ConfigStore.instance().repo)
    load("trainer.seed=7", "trainer.logger=[console]")
    (tmp_path / "mine.yaml").write_text("defaults: [demo, _self_]\n")
    load_config([], str(tmp_path / "mine.yaml"))
    load_config([], "demo")
    assert digest(load().config) == plain
    assert ConfigStore.instance().repo == store


# Help


def test_help_names_every_key_with_default_and_meaning():
    text = describe()
    for path, leaf in leaves().items():
        assert f"  {path}=" in text
        assert len(field_docs(leaf.owner).get(leaf.name, "")) > 10, f"{path} has no text under it"
    assert "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}" in text
    assert "trainer." not in describe("data.").replace("trainer.seed", "")


def test_every_default_is_one_of_the_allowed_values():
    for path, leaf in leaves().items():
        default = defaults()[path]
        if leaf.allowed and default is not None and "${" not in str(default):
            assert set(default if leaf.is_list else [default]) <= set(leaf.allowed), path


def test_examples_in_the_docstrings_hold():
    ran = 0
    for module in pkgutil.iter_modules(crossrl.config.__path__):
        result = doctest.testmod(importlib.import_module(f"crossrl.config.{module.name}"))
        assert result.failed == 0, module.name
        ran += result.attempted
    assert ran >= 5


def test_loading_needs_no_pytorch():
    code = f"import sys; from crossrl.config import *; load_config({BASE!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parent)
