"""The objective: what a training engine minimises, built once from settings, and its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from crossrl.algorithms.errors import AlgorithmError, need_choice, need_same_shape
from crossrl.algorithms.kl import K3_MAX, is_k3, kl_estimate, need_kl_type
from crossrl.algorithms.losses import LOSS_MODES, TokenLoss, cispo, gspo, ppo_clip
from crossrl.batch import Ragged
from crossrl.engines.base import LossInput, Objective


@dataclass(frozen=True, slots=True)
class ObjectiveConfig:
    """What to minimise. Keys under ``actor_rollout_ref.actor``: ``policy_loss.loss_mode``, ``clip_ratio_low``,
    ``clip_ratio_high``, ``clip_ratio_c``, ``kl_loss_coef`` (with ``use_kl_loss``), ``kl_loss_type``,
    ``entropy_coeff``.

    ``kl_coef`` None: no KL term, and no reference log-probs needed. ``clip_c`` None: no dual clip.
    """

    loss_mode: str = "vanilla"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float | None = 3.0
    kl_coef: float | None = None
    kl_type: str = "low_var_kl"
    entropy_coeff: float = 0.0

    def __post_init__(self) -> None:
        need_choice("actor.policy_loss.loss_mode", self.loss_mode, LOSS_MODES)
        need_kl_type("actor.kl_loss_type", self.kl_type)
        if self.clip_low < 0 or self.clip_high < 0:
            raise AlgorithmError(
                f"actor.clip_ratio_low={self.clip_low}, actor.clip_ratio_high={self.clip_high}: want 0 or more"
            )
        if self.clip_c is not None and self.clip_c <= 1.0:
            raise AlgorithmError(f"actor.clip_ratio_c={self.clip_c}: want above 1 (dual clip), such as 3")
        for key, value in (("kl_loss_coef", self.kl_coef), ("entropy_coeff", self.entropy_coeff)):
            if value is not None and not np.isfinite(value):
                raise AlgorithmError(f"actor.{key}={value}: want a finite number")

    @property
    def only_policy_gradient(self) -> bool:
        """Whether a token without advantage has no gradient."""
        return not self.kl_coef and not self.entropy_coeff


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The loss of a micro-batch: sum of w * (pg * is_weight + kl_coef * kl - entropy_coeff * entropy). An ``Objective``
    that can be pickled: it travels to the processes that train.

    Reads the columns ``advantages``, ``loss_mask`` and ``loss_weights`` (w), and, when there, ``is_weights``
    (held constant) and ``old_log_probs``; without those the batch is on-policy and the ratio is 1. Needs
    ``ref_log_probs`` when ``kl_coef`` is set. The sums that it returns add up over micro-batches, to be
    handed to ``finish_metrics``.
    """

    config: ObjectiveConfig

    def __call__(self, batch: LossInput) -> tuple[torch.Tensor, dict[str, float]]:
        config, columns = self.config, batch.columns
        weights, mask = columns["loss_weights"], columns["loss_mask"].to(batch.log_probs.dtype)
        old = columns.get("old_log_probs")
        old = batch.log_probs.detach() if old is None else old
        policy = _policy_loss(config, batch, old, mask)
        token_loss = policy.loss * columns["is_weights"] if "is_weights" in columns else policy.loss
        counts = {"clip_low": policy.low, "clip_high": policy.high, "ppo_kl": old - batch.log_probs}
        weighted = {"pg_loss": token_loss}
        if policy.dual is not None:
            counts["clip_dual"] = policy.dual
        if config.kl_coef is not None:
            if "ref_log_probs" not in columns:
                raise AlgorithmError("actor.use_kl_loss needs the column ref_log_probs, which is not there")
            kl = kl_estimate(batch.log_probs, columns["ref_log_probs"], config.kl_type)
            token_loss = token_loss + config.kl_coef * kl
            counts["kl"], weighted["kl_loss"] = kl, kl
            if is_k3(config.kl_type):
                counts["kl_limited"] = kl >= K3_MAX
        if batch.entropy is not None:
            counts["entropy"] = batch.entropy
            if config.entropy_coeff:
                token_loss = token_loss - config.entropy_coeff * batch.entropy
        elif config.entropy_coeff:
            raise AlgorithmError(f"actor.entropy_coeff={config.entropy_coeff} needs the entropy of each token")
        return (weights * token_loss).sum(), _sums(counts, mask, weighted, weights)


def make_objective(config: ObjectiveConfig) -> Objective:
    """The objective of ``config``."""
    return PolicyObjective(config)


def _policy_loss(config: ObjectiveConfig, batch: LossInput, old: torch.Tensor, mask: torch.Tensor) -> TokenLoss:
    advantages, low, high = batch.columns["advantages"], config.clip_low, config.clip_high
    if config.loss_mode == "gspo":
        return gspo(batch.log_probs, old, advantages, low, high, mask, batch.sequence, batch.num_sequences)
    if config.loss_mode == "cispo":
        return cispo(batch.log_probs, old, advantages, low, high)
    return ppo_clip(batch.log_probs, old, advantages, low, high, config.clip_c)


@torch.no_grad()
def _sums(
    counts: Mapping[str, torch.Tensor],
    mask: torch.Tensor,
    weighted: Mapping[str, torch.Tensor],
    weights: torch.Tensor,
) -> dict[str, float]:
    """Masked sums of ``counts`` and weighted sums of ``weighted``; one transfer to the host for all of them."""
    rows = [mask] + [value * mask for value in counts.values()] + [value * weights for value in weighted.values()]
    return dict(zip(["tokens", *counts, *weighted], torch.stack(rows).sum(1).tolist(), strict=True))


def finish_metrics(sums: Mapping[str, float], optimizer_steps: int = 1) -> dict[str, float]:
    """Metrics, under verl's names, from sums over all micro-batches of ``optimizer_steps`` optimizer steps.

    Fractions, KL and entropy are means over the tokens whose loss was computed (samples that were skipped
    because they have no gradient are not among them); ``actor/pg_loss`` and ``actor/kl_loss`` are aggregated
    like the loss, per optimizer step. ``actor/pg_clipfrac_lower`` is the share of tokens where the dual clip
    took effect. With no token there is nothing to average, and the means are absent.
    """
    tokens = sums.get("tokens", 0.0)
    out = {"actor/computed_tokens": tokens}
    if not tokens:
        return out
    out["actor/pg_clipfrac"] = (sums["clip_low"] + sums["clip_high"]) / tokens
    names = {
        "clip_low": "actor/pg_clipfrac_at_low",
        "clip_high": "actor/pg_clipfrac_at_high",
        "clip_dual": "actor/pg_clipfrac_lower",
        "ppo_kl": "actor/ppo_kl",
        "kl": "actor/kl",
        "kl_limited": "actor/kl_limited_frac",
        "entropy": "actor/entropy",
    }
    out |= {name: sums[key] / tokens for key, name in names.items() if key in sums}
    out |= {f"actor/{key}": sums[key] / optimizer_steps for key in ("pg_loss", "kl_loss") if key in sums}
    return out


def has_gradient(advantages: Ragged, loss_mask: Ragged, config: ObjectiveConfig) -> np.ndarray:
    """bool ``[N]``: False where the gradient of a sample's loss is exactly zero, so that skipping it is exact.

    That is where all tokens are masked, or, if the policy gradient is the only term, where every token that
    counts has advantage 0.
    """
    need_same_shape("advantages", advantages, "loss_mask", loss_mask)
    live = loss_mask.values > 0
    if config.only_policy_gradient:
        live &= advantages.values != 0
    return Ragged(live, loss_mask.lengths).sums() > 0
