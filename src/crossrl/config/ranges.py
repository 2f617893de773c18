"""Checks of single values: numbers within their range, texts among those allowed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from crossrl.config.keys import leaves

# Intervals of single keys; "[" and "]" include the bound. null is always in.
RANGES = {
    "data.max_prompt_length": "[1, inf)",
    "data.max_response_length": "[1, inf)",
    "data.train_batch_size": "[1, inf)",
    "data.gen_batch_size": "[1, inf)",
    "data.val_batch_size": "[1, inf)",
    "data.seed": "[0, inf)",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "[1, inf)",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "[1, inf)",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "[1, inf)",
    "actor_rollout_ref.actor.ppo_epochs": "[1, inf)",
    "actor_rollout_ref.actor.data_loader_seed": "[0, inf)",
    "actor_rollout_ref.actor.clip_ratio": "(0, inf)",
    "actor_rollout_ref.actor.clip_ratio_low": "(0, inf)",
    "actor_rollout_ref.actor.clip_ratio_high": "(0, inf)",
    "actor_rollout_ref.actor.clip_ratio_c": "(1, inf)",
    "actor_rollout_ref.actor.loss_scale_factor": "(0, inf)",
    "actor_rollout_ref.actor.entropy_coeff": "[0, inf)",
    "actor_rollout_ref.actor.kl_loss_coef": "[0, inf)",
    "actor_rollout_ref.actor.optim.lr": "[0, inf)",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "[-1, inf)",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "[0, 1]",
    "actor_rollout_ref.actor.optim.total_training_steps": "[-1, inf)",
    "actor_rollout_ref.actor.optim.weight_decay": "[0, inf)",
    "actor_rollout_ref.actor.optim.eps": "(0, inf)",
    "actor_rollout_ref.actor.optim.clip_grad": "(0, inf)",
    "actor_rollout_ref.actor.optim.min_lr_ratio": "[0, 1]",
    "actor_rollout_ref.actor.optim.num_cycles": "(0, inf)",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "[1, inf)",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": "[1, inf)",
    "actor_rollout_ref.rollout.n": "[1, inf)",
    "actor_rollout_ref.rollout.temperature": "(0, inf)",
    "actor_rollout_ref.rollout.top_p": "(0, 1]",
    "actor_rollout_ref.rollout.seed": "[0, inf)",
    "actor_rollout_ref.rollout.max_num_seqs": "[1, inf)",
    "actor_rollout_ref.rollout.replicas": "[1, inf)",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "[1, inf)",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "(0, 1]",
    "actor_rollout_ref.rollout.max_model_len": "[2, inf)",
    "actor_rollout_ref.rollout.val_kwargs.n": "[1, inf)",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "[0, inf)",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "(0, 1]",
    "reward.overlong_buffer.len": "[0, inf)",
    "reward.overlong_buffer.penalty_factor": "[0, inf)",
    "reward.num_workers": "[1, inf)",
    "reward.timeout_s": "(0, inf)",
    "algorithm.gamma": "[0, 1]",
    "algorithm.lam": "[0, 1]",
    "algorithm.kl_ctrl.kl_coef": "[0, inf)",
    "algorithm.kl_ctrl.horizon": "[1, inf)",
    "algorithm.kl_ctrl.target_kl": "(0, inf)",
    "algorithm.filter_groups.max_num_gen_batches": "[0, inf)",
    "trainer.total_epochs": "[1, inf)",
    "trainer.total_training_steps": "[1, inf)",
    "trainer.stop_after_steps": "[1, inf)",
    "trainer.seed": "[0, inf)",
    "trainer.num_threads": "[1, inf)",
    "trainer.nnodes": "[1, inf)",
    "trainer.n_gpus_per_node": "[1, inf)",
    "trainer.log_val_generations": "[0, inf)",
    "trainer.max_actor_ckpt_to_keep": "[1, inf)",
    "trainer.critic_warmup": "[0, 0]",
    "trainer.share_data_timeout": "(0, inf)",
    "trainer.share_data_heartbeat": "(0, inf)",
    "trainer.share_data_keep": "[0, inf)",
    "cluster.start_timeout": "(0, inf)",
    "cluster.call_timeout": "(0, inf)",
    "cluster.sync_timeout": "(0, inf)",
    "tape.keep": "[1, inf)",
    "tape.max_bytes": "[1, inf)",
}
# Besides these, any whole number from 1.
SWITCHED_OFF_BY_MINUS_ONE = (
    "data.train_max_samples",
    "data.val_max_samples",
    "actor_rollout_ref.rollout.top_k",
    "actor_rollout_ref.rollout.val_kwargs.top_k",
)


def check_values(flat: Mapping[str, Any]) -> list[str]:
    """What is wrong with single values; ``flat`` holds every key."""
    problems = [_out_of_range(path, flat[path], RANGES[path]) for path in RANGES]
    problems += [
        f"{path}={flat[path]}: want -1 (off) or a number from 1"
        for path in SWITCHED_OFF_BY_MINUS_ONE
        if flat[path] != -1 and flat[path] < 1
    ]
    betas = flat["actor_rollout_ref.actor.optim.betas"]
    if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        problems.append(f"actor_rollout_ref.actor.optim.betas={betas}: want two numbers in [0, 1)")
    for path, leaf in leaves().items():
        values = flat[path] if leaf.is_list else [flat[path]]
        problems += [_not_allowed(path, v, leaf.allowed) for v in values if leaf.allowed and v is not None]
    return [p for p in problems if p]


def _out_of_range(path: str, value: float | None, interval: str) -> str:
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    if value is None or (
        (value > low or (value == low and interval[0] == "["))
        and (value < high or (value == high and interval[-1] == "]"))
    ):
        return ""
    wanted = f"want {low:g}" if low == high else f"want a number in {interval}"
    return f"{path}={value}: {wanted}"


def _not_allowed(path: str, value: str, allowed: tuple[str, ...]) -> str:
    if value in allowed:
        return ""
    near = difflib.get_close_matches(value, allowed, 1, 0.4)
    hint = f"; nearest: {near[0]}" if near else ""
    return f"{path}={value} is not available here{hint}; allowed: {', '.join(allowed)}"
