"""What a run must be like for a fault to act: overrides that make it so, and whether a configuration is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossrl import settings

if TYPE_CHECKING:
    from crossrl.config.root import RunConfig

TEMPERATURE = ("actor_rollout_ref.rollout.temperature=0.7",)
PACKED = ("actor_rollout_ref.model.use_remove_padding=True",)
OWN_WEIGHTS = ("actor_rollout_ref.rollout.own_weights=True",)
EXACT_WEIGHTS = (*OWN_WEIGHTS, "actor_rollout_ref.rollout.dtype=auto")
SEVERAL_STEPS = ("actor_rollout_ref.actor.ppo_epochs=2",)
KL_LOSS = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.1")
OLD_LOG_PROBS = ("actor_rollout_ref.actor.recompute_old_log_prob=always",)
CLIPPING = ("actor_rollout_ref.actor.optim.clip_grad=0.01",)
GROUP_NORM = ("algorithm.adv_estimator=grpo",)


def has_temperature(cfg: RunConfig) -> bool:
    return cfg.actor_rollout_ref.rollout.temperature != 1.0


def is_packed(cfg: RunConfig) -> bool:
    return cfg.actor_rollout_ref.model.use_remove_padding


def has_own_weights(cfg: RunConfig) -> bool:
    return cfg.actor_rollout_ref.rollout.own_weights or settings.rollout_dtype(cfg) != settings.train_dtype(cfg)


def has_exact_weights(cfg: RunConfig) -> bool:
    """Own ones, and not in bfloat16 by declaration."""
    return has_own_weights(cfg) and settings.rollout_dtype(cfg) != "bfloat16"


def has_several_steps(cfg: RunConfig) -> bool:
    return settings.optimizer_steps(cfg) > 1


def has_kl_loss(cfg: RunConfig) -> bool:
    return cfg.actor_rollout_ref.actor.use_kl_loss and cfg.actor_rollout_ref.actor.kl_loss_coef > 0


def has_old_log_probs(cfg: RunConfig) -> bool:
    return settings.needs_old_log_probs(cfg) and not cfg.algorithm.rollout_correction.bypass_mode


def clips_often(cfg: RunConfig) -> bool:
    return cfg.actor_rollout_ref.actor.optim.clip_grad <= 0.1


def normalises_groups(cfg: RunConfig) -> bool:
    return cfg.algorithm.adv_estimator == "grpo" and cfg.algorithm.norm_adv_by_std_in_grpo


def has_old_log_probs_and_temperature(cfg: RunConfig) -> bool:
    return has_old_log_probs(cfg) and has_temperature(cfg)


def has_kl_loss_and_several_steps(cfg: RunConfig) -> bool:
    return has_kl_loss(cfg) and has_several_steps(cfg)
