"""The numbers of one step, from its batch: a pure function, so that they can be recomputed from a recording.

Names follow verl where it has one, so that dashboards keep working.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from crossrl.algorithms.gap import gap_metrics
from crossrl.batch import Batch, Ragged


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    values = values[np.isfinite(values)]
    if not values.size:
        return {}
    found = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{what}": float(value) for what, value in found.items()}


def _masked(column: Ragged, mask: Ragged) -> np.ndarray:
    return column.values[mask.values.astype(bool)]


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Rewards, lengths, advantages, entropy, and the gap between sampler and trainer."""
    lengths = batch.ragged("response_ids").lengths
    cut = np.array([reason == "length" for reason in batch["finish_reason"]])
    out = {
        **_spread("critic/score", batch.array("score")),
        **_spread("critic/rewards", batch.array("reward")),
        **_spread("critic/advantages", _masked(batch.ragged("advantages"), batch.ragged("loss_mask"))),
        **_spread("response_length", lengths.astype(np.float64)),
        "response_length/clip_ratio": float(cut.mean()),
        **_spread("prompt_length", batch.ragged("prompt_ids").lengths.astype(np.float64)),
    }
    if "entropy" in batch:
        out["actor/entropy"] = float(_masked(batch.ragged("entropy"), batch.ragged("response_mask")).mean())
    # In bypass mode the old log-probs are the sampler's own; "log_probs" are always the trainer's.
    measured = "old_log_probs" in batch and batch.meanings["old_log_probs"] != batch.meanings["rollout_log_probs"]
    trainer = "old_log_probs" if measured else "log_probs"
    if trainer in batch:
        same = batch.meanings["rollout_log_probs"].temperature == batch.meanings[trainer].temperature
        # Another temperature is another distribution: there is no gap to measure (only an accepted replay gets here).
        gap = gap_metrics(batch, "rollout_log_probs", trainer) if same else {"training/rollout_probs_diff_valid": 0.0}
        out |= gap
    for key, values in _extra_numbers(batch["reward_extra"]).items():
        out[f"reward_extra/{key}/mean"] = float(np.mean(values))
    return out


def _extra_numbers(extras: list[Mapping[str, object]]) -> dict[str, list[float]]:
    """The numeric entries of what verifiers returned besides the score, such as ``acc``."""
    numbers: dict[str, list[float]] = {}
    for extra in extras:
        for key, value in extra.items():
            number = as_number(value)
            if number is not None and key != "score":
                numbers.setdefault(key, []).append(number)
    return numbers


def outcomes(batch: Batch, name: str) -> np.ndarray:
    """float64 ``[N]``: what ``algorithm.filter_groups.metric`` names; NaN where a sample has no such number.

    ``reward`` is the shaped one, ``score`` the verifier's; any other name is a number that the verifier returns,
    and ``acc`` is the score where it returns none (verl's rule).
    """
    if name in ("reward", "seq_reward", "seq_final_reward"):
        return batch.array("reward")
    score = batch.array("score")
    if name == "score":
        return score
    values = [extra.get(name) for extra in batch["reward_extra"]]
    fallback = score if name == "acc" else np.full(len(batch), np.nan)
    numbers = [as_number(value) for value in values]
    return np.array([f if n is None else n for n, f in zip(numbers, fallback.tolist())], np.float64)


def as_number(value: object) -> float | None:
    """A finite number that a verifier returned, as float; None for anything else, such as an integer of 400 digits."""
    if not isinstance(value, (bool, int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if np.isfinite(number) else None


def speed_metrics(batch: Batch, seconds: Mapping[str, float], total: float) -> dict[str, float]:
    """Seconds per stage and per step; tokens per second over the step, and of generation alone."""
    prompt, response = (float(batch.ragged(f).lengths.sum()) for f in ("prompt_ids", "response_ids"))
    out = {f"timing_s/{_TIMING_NAMES.get(name, name)}": s for name, s in seconds.items()}
    out["timing_s/step"] = total
    out["perf/total_num_tokens"] = prompt + response
    out["perf/throughput"] = (prompt + response) / total
    if seconds.get("rollout"):
        out["perf/rollout_throughput"] = response / seconds["rollout"]
    return out


# verl's names for the same spans
_TIMING_NAMES = {"rollout": "gen", "ref_log_prob": "ref", "advantage": "adv", "update": "update_actor",
                 "checkpoint": "save_checkpoint", "sync": "update_weights"}  # fmt: skip
