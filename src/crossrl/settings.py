"""From configuration keys to the settings of single parts. Pure functions: nothing is loaded or started here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from crossrl.algorithms.correction import CorrectionConfig
from crossrl.algorithms.kl import KLController
from crossrl.algorithms.objective import ObjectiveConfig
from crossrl.algorithms.schedule import lr_factor, warmup_steps
from crossrl.algorithms.shaping import overlong_penalty
from crossrl.config.root import RunConfig
from crossrl.engines.base import Sampling
from crossrl.stages.advantage import AdvantageConfig
from crossrl.stages.reward import Shaping
from crossrl.stages.update import UpdatePlan


def seed_of(key: int | None, cfg: RunConfig) -> int:
    """A component's own seed key, where it is set; else the run's seed."""
    return cfg.trainer.seed if key is None else key


def train_dtype(cfg: RunConfig) -> str:
    """Of the weights that the optimizer updates: ``fsdp_config.model_dtype`` (auto: float32)."""
    dtype = cfg.actor_rollout_ref.actor.fsdp_config.model_dtype
    return "float32" if dtype == "auto" else dtype


def rollout_dtype(cfg: RunConfig) -> str:
    """Of the weights that the rollout engine computes with (auto: the trainer's)."""
    dtype = cfg.actor_rollout_ref.rollout.dtype
    return train_dtype(cfg) if dtype == "auto" else dtype


def processes(cfg: RunConfig) -> int:
    """How many train."""
    return cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node


def replicas(cfg: RunConfig) -> int:
    """How many rollout engines share the requests."""
    rollout = cfg.actor_rollout_ref.rollout
    spread = rollout.tensor_model_parallel_size if rollout.name == "vllm" else 1
    return rollout.replicas or processes(cfg) // spread


def launcher(cfg: RunConfig) -> Literal["none", "local", "ray"]:
    """Who starts the worker processes of this run; none: it has none."""
    asked = cfg.cluster.launcher
    if asked != "auto":
        return asked  # type: ignore[return-value]  # one of three, checked with the config
    if processes(cfg) > 1 or replicas(cfg) > 1:
        return "ray"
    return "none" if cfg.actor_rollout_ref.rollout.name == "hf" else "local"


def ray_address(cfg: RunConfig) -> str:
    """Of the cluster to run in; "": one that is started for this run. Several machines are never started by a run."""
    return cfg.cluster.address or ("auto" if cfg.trainer.nnodes > 1 else "")


def planted_in_engine(cfg: RunConfig) -> str:
    """The faults of ``cross.plant`` that are planted where an engine in another process computes."""
    return cfg.cross.plant or "" if launcher(cfg) != "none" else ""


def trains_apart(cfg: RunConfig) -> bool:
    """Whether training is in worker processes, and not in this one."""
    return processes(cfg) > 1 or launcher(cfg) == "ray"


def optimizer_steps(cfg: RunConfig) -> int:
    """Optimizer steps per training step."""
    actor = cfg.actor_rollout_ref.actor
    return math.ceil(cfg.data.train_batch_size / actor.ppo_mini_batch_size) * actor.ppo_epochs


def needs_old_log_probs(cfg: RunConfig) -> bool:
    """With one optimizer step per batch the old log-probs are the current ones, and the stage is not needed.

    Unless something needs them before the update: a KL penalty in the reward, or the correction between sampler
    and trainer.
    """
    return (
        optimizer_steps(cfg) > 1
        or cfg.actor_rollout_ref.actor.recompute_old_log_prob == "always"
        or cfg.algorithm.use_kl_in_reward
        or correction(cfg) is not None
    )


def needs_reference(cfg: RunConfig) -> bool:
    return cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward


def training_sampling(cfg: RunConfig) -> Sampling:
    rollout = cfg.actor_rollout_ref.rollout
    return Sampling(rollout.temperature, rollout.top_p, rollout.top_k, cfg.data.max_response_length, rollout.ignore_eos)


def validation_sampling(cfg: RunConfig) -> Sampling:
    """Greedy unless ``val_kwargs.do_sample``."""
    val, limit = cfg.actor_rollout_ref.rollout.val_kwargs, cfg.data.max_response_length
    if not val.do_sample:
        return Sampling(temperature=0.0, max_tokens=limit)
    return Sampling(val.temperature, val.top_p, val.top_k, limit)


def correction(cfg: RunConfig) -> CorrectionConfig | None:
    keys = cfg.algorithm.rollout_correction
    if keys.rollout_is is None and keys.rollout_rs is None:
        return None
    return CorrectionConfig(
        keys.rollout_is,
        keys.rollout_is_threshold,
        keys.rollout_is_batch_normalize,
        keys.rollout_rs,
        keys.rollout_rs_threshold,
    )


def advantage_config(cfg: RunConfig) -> AdvantageConfig:
    algorithm = cfg.algorithm
    return AdvantageConfig(
        algorithm.adv_estimator,
        cfg.actor_rollout_ref.rollout.n,
        algorithm.norm_adv_by_std_in_grpo,
        algorithm.gamma,
        algorithm.kl_penalty if algorithm.use_kl_in_reward else None,
        correction(cfg),
        algorithm.mask_truncated,
    )


def kl_controller(cfg: RunConfig) -> KLController:
    keys = cfg.algorithm.kl_ctrl
    return KLController("adaptive" if keys.type == "adaptive" else "fixed", keys.kl_coef, keys.target_kl, keys.horizon)


def objective_config(cfg: RunConfig) -> ObjectiveConfig:
    actor = cfg.actor_rollout_ref.actor
    return ObjectiveConfig(
        actor.policy_loss.loss_mode,
        actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        actor.clip_ratio_c,
        actor.kl_loss_coef if actor.use_kl_loss else None,
        actor.kl_loss_type,
        actor.entropy_coeff,
    )


def update_plan(cfg: RunConfig) -> UpdatePlan:
    actor = cfg.actor_rollout_ref.actor
    return UpdatePlan(
        actor.ppo_mini_batch_size,
        actor.ppo_epochs,
        actor.shuffle,
        seed_of(actor.data_loader_seed, cfg),
        cfg.actor_rollout_ref.rollout.temperature,
        actor.loss_agg_mode,
        actor.loss_scale_factor or float(cfg.data.max_response_length),
    )


def learning_rate(cfg: RunConfig, total_steps: int) -> Callable[[int], float]:
    """Training step (1-based) to learning rate; the schedule counts training steps, as verl's does."""
    optim = cfg.actor_rollout_ref.actor.optim
    total = optim.total_training_steps if optim.total_training_steps > 0 else total_steps
    warmup = warmup_steps(optim.lr_warmup_steps, optim.lr_warmup_steps_ratio, total)

    def lr(step: int) -> float:
        return optim.lr * lr_factor(
            step - 1,
            optim.lr_scheduler_type,
            warmup=warmup,
            total_steps=total,
            min_lr_ratio=optim.min_lr_ratio,
            num_cycles=optim.num_cycles,
            zero_indexed=optim.zero_indexed_step,
        )

    return lr


def shaping(cfg: RunConfig) -> Shaping | None:
    """DAPO's penalty for responses that come close to the limit."""
    buffer, limit = cfg.reward.overlong_buffer, cfg.data.max_response_length
    if not buffer.enable:
        return None
    return lambda lengths: overlong_penalty(lengths, limit, buffer.len, buffer.penalty_factor)
