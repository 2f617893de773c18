"""Older names of keys, and other spellings of values, that mean exactly what one of ours means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossrl.config.errors import ConfigError
from crossrl.config.keys import leaves

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_OVERLONG = ("enable", "len", "penalty_factor", "log")

# Name in (some version of) verl to the key here.
ALIASES: dict[str, str] = {
    f"{_ACTOR}.grad_clip": f"{_ACTOR}.optim.clip_grad",
    f"{_ACTOR}.optim.grad_clip": f"{_ACTOR}.optim.clip_grad",
    f"{_ACTOR}.optim.warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.lr_decay_style": f"{_ACTOR}.optim.lr_scheduler_type",
    # The batch size of all GPUs and that of one are the same thing in one process.
    f"{_ACTOR}.ppo_micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "reward_model.num_workers": "reward.num_workers",
    **{f"reward_model.overlong_buffer.{k}": f"reward.overlong_buffer.{k}" for k in _OVERLONG},
    **{f"reward_model.reward_kwargs.overlong_buffer_cfg.{k}": f"reward.overlong_buffer.{k}" for k in _OVERLONG},
    **{f"reward.reward_kwargs.overlong_buffer_cfg.{k}": f"reward.overlong_buffer.{k}" for k in _OVERLONG},
}

_DTYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16"}
# Key to {spelling: ours}. None stands for null.
VALUES: dict[str, dict[Any, Any]] = {
    f"{_ACTOR}.fsdp_config.model_dtype": _DTYPES,
    f"{_ACTOR}.fsdp_config.dtype": _DTYPES,
    f"{_ROLLOUT}.dtype": {**_DTYPES, None: "auto"},
    f"{_ROLLOUT}.top_k": {0: -1},  # verl's HF rollout turns it off with 0
    f"{_ROLLOUT}.val_kwargs.top_k": {0: -1},
    f"{_ACTOR}.optim.lr_warmup_steps": {None: -1},
    f"{_ACTOR}.optim.min_lr_ratio": {None: 0.0},
    "algorithm.adv_estimator": {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"},
    "algorithm.filter_groups.metric": {None: "reward", "seq_reward": "reward"},
    "algorithm.rollout_correction.rollout_rs": {"token": "token_k1", "sequence": "seq_sum_k1"},
    "reward.custom_reward_function.name": {None: "compute_score"},
}


def use_our_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` (dotted path to value) with aliases replaced by the keys that they stand for.

    A null under an older name is verl's "not set" and dropped. Raises ``ConfigError`` when two names of one key
    are given different values.
    """
    named: dict[str, tuple[str, Any]] = {}
    problems = []
    for path, value in given.items():
        target = ALIASES.get(path, path)
        if target != path and value is None:
            continue
        value = one_spelling(target, value)
        if target in named and named[target][1] != value:
            other, earlier = named[target]
            problems.append(
                f"{path}={value!r} and {other}={earlier!r} are two names of one setting ({target}) with different "
                f"values: remove {path if target != path else other}"
            )
        named.setdefault(target, (path, value))
    if problems:
        raise ConfigError(problems)
    return {target: value for target, (_, value) in named.items()}


def one_spelling(path: str, value: Any) -> Any:
    """``value`` of our key ``path`` as we write it: a single entry as a list of one, ``fp32`` as ``float32``."""
    leaf = leaves().get(path)
    if leaf is not None and leaf.is_list:
        if value is None:
            return []
        return list(value) if isinstance(value, (list, tuple)) else [value]
    if path == "tape.steps" and isinstance(value, list):
        return ",".join(str(step) for step in value)
    table = VALUES.get(path)
    if table is None or isinstance(value, (list, dict)):
        return value
    return table.get(value, value)
