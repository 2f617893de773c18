"""What verl's numbers are, by the names of our schema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crossrl.batch import Batch, Meaning, Ragged

Column = Callable[..., Ragged | None]


def sampled(config: Any, version: int) -> Meaning:
    """Of the sampler's log-probs: verl asks its engines for those after temperature and truncation."""
    rollout = config.actor_rollout_ref.rollout
    rules = [f"top_k={rollout.top_k}"] if int(rollout.top_k) > 0 else []
    rules += [f"top_p={rollout.top_p}"] if float(rollout.top_p) < 1 else []
    return Meaning(float(rollout.temperature), ",".join(rules) or "none", str(rollout.name), version)


def computed(
    config: Any,
    version: int,
    ids: Sequence[str],
    column: Column,
    scores: Any,
    rewards: Any,
    extra: list[dict[str, Any]],
    responses: list[str],
    response_ids: Ragged,
) -> Batch:
    """What a step has computed before the update. ``column``: one of verl's, by its name, with our dtype.

    ``version``: of the weights before the update. ``extra``: what the reward function returned besides the score.
    """
    found: dict[str, Any] = {
        "response": responses, "response_ids": response_ids,
        "score": np.asarray(scores, np.float64), "reward": np.asarray(rewards, np.float64),
        "reward_status": ["ok"] * len(ids), "reward_extra": extra,
        "loss_mask": column("response_mask", np.uint8),
        "old_log_probs": column("old_log_probs"), "entropy": column("entropy"),
        "ref_log_probs": column("ref_log_prob"), "advantages": column("advantages"),
        "is_weights": column("rollout_is_weights"), "rollout_log_probs": column("rollout_log_probs"),
    }  # fmt: skip
    there = {name: value for name, value in found.items() if value is not None}
    arr, correction = config.actor_rollout_ref, config.algorithm.get("rollout_correction") or {}
    temperature, strategy = float(arr.rollout.temperature), str(arr.actor.strategy)
    meanings = {
        # In bypass mode verl takes the sampler's for the old ones.
        "old_log_probs": sampled(config, version)
        if correction.get("bypass_mode")
        else Meaning(temperature, "none", strategy, version),
        "ref_log_probs": Meaning(temperature, "none", strategy, 0),
        "rollout_log_probs": sampled(config, version),
    }
    return Batch(tuple(ids), there, {k: m for k, m in meanings.items() if k in there})
