"""advantage: from rewards to one advantage per token, and which tokens count in the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossrl.algorithms.advantages import Outcomes, estimate
from crossrl.algorithms.aggregation import mask_metrics
from crossrl.algorithms.correction import CorrectionConfig, correct
from crossrl.algorithms.kl import KLController, kl_rewards
from crossrl.algorithms.shaping import overlong_filter
from crossrl.batch import Batch, Ragged
from crossrl.stages.base import At


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """``kl_kind``: estimator of the KL penalty in the reward, None without one.

    ``correction``: importance weights between sampler and trainer, None without them. ``mask_truncated``: responses
    that were cut off do not count in the loss (their reward still counts in their group's baseline).
    """

    estimator: str
    group_size: int
    norm_by_std: bool = True
    gamma: float = 1.0
    kl_kind: str | None = None
    correction: CorrectionConfig | None = None
    mask_truncated: bool = False


class Advantage:
    """Samples without a score are masked out, and so is what the correction between sampler and trainer rejects.

    ``controller``: the coefficient of the KL penalty in the reward; it moves once a step (adaptive) and is part
    of a checkpoint.
    """

    name = "advantage"

    def __init__(self, config: AdvantageConfig, controller: KLController) -> None:
        self.config, self.controller = config, controller
        reads = ["group_id", "reward", "response_mask"]
        reads += ["finish_reason"] if config.mask_truncated else []
        reads += ["baseline_reward"] if config.estimator == "remax" else []
        reads += ["old_log_probs"] if config.kl_kind or config.correction else []
        reads += ["ref_log_probs"] if config.kl_kind else []
        reads += ["rollout_log_probs"] if config.correction else []
        self.reads: tuple[str, ...] = tuple(reads)
        self.writes: tuple[str, ...] = ("advantages", "loss_mask", *(["is_weights"] if config.correction else []))

    def __call__(self, batch: Batch, at: At) -> Batch:
        mask = batch.ragged("response_mask")
        metrics: dict[str, float] = {}
        outcomes = Outcomes(
            batch.sample_id,
            batch.array("reward"),
            batch["group_id"],
            mask,
            token_rewards=self._kl_penalty(batch, mask, metrics),
            baseline_rewards=batch.array("baseline_reward") if "baseline_reward" in batch else None,
        )
        result = estimate(
            self.config.estimator,
            outcomes,
            norm_adv_by_std_in_grpo=self.config.norm_by_std,
            gamma=self.config.gamma,
            group_size=self.config.group_size,
        )
        keep = np.repeat(~result.excluded, mask.lengths)
        loss_mask = Ragged((mask.values * keep).astype(np.uint8), mask.lengths)
        if self.config.mask_truncated:
            loss_mask, cut = overlong_filter(loss_mask, batch["finish_reason"])
            metrics["advantage/truncated_samples"] = float(cut)
        columns: dict[str, Any] = {"advantages": result.advantages}
        warnings = list(result.warnings)
        if self.config.correction:
            corrected = correct(
                self.config.correction,
                batch.ragged("old_log_probs"),
                batch.ragged("rollout_log_probs"),
                loss_mask,
                batch.meanings["old_log_probs"],
                batch.meanings["rollout_log_probs"],
            )
            loss_mask, columns["is_weights"] = corrected.mask, corrected.is_weights
            metrics |= corrected.metrics
            warnings += corrected.warnings
        columns["loss_mask"] = loss_mask
        metrics |= {**result.metrics, **mask_metrics(loss_mask)}
        return Batch(batch.sample_id, columns, {}, {"metrics": metrics, "warnings": warnings})

    def _kl_penalty(self, batch: Batch, mask: Ragged, metrics: dict[str, float]) -> Ragged | None:
        if self.config.kl_kind is None:
            return None
        rewards, current = kl_rewards(
            batch.ragged("old_log_probs"),
            batch.ragged("ref_log_probs"),
            mask,
            self.controller.kl_coef,
            self.config.kl_kind,
        )
        metrics |= {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": self.controller.kl_coef}
        self.controller = self.controller.updated(current, len(batch))
        return rewards

    def state(self) -> Mapping[str, float]:
        return self.controller.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.controller = self.controller.restored(state)
