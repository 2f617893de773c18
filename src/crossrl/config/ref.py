"""``actor_rollout_ref.ref``: the reference model, in use when a KL term is."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import II


@dataclass(frozen=True, slots=True)
class RefConfig:
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Sequences per forward pass of the reference log-probs. null: cut by tokens."""
    log_prob_use_dynamic_bsz: bool = II("actor_rollout_ref.actor.use_dynamic_bsz")
    """Cut by tokens even if log_prob_micro_batch_size_per_gpu is set."""
    log_prob_max_token_len_per_gpu: int = II("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    """Tokens per forward pass when cut by tokens."""
