"""``metrics.jsonl`` in the run's folder, as ``crossrl verdict`` and ``report`` read it: a line for each step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from crossrl.batch import Batch


def row_of(step: int, whole: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
    """verl's own numbers of the update, and under verl's names what it computes from the batch."""
    found = {
        "step": step,
        "critic/score/mean": float(whole.array("score").mean()),
        "critic/rewards/mean": float(whole.array("reward").mean()),
        "response_length/mean": float(whole.ragged("response_ids").lengths.mean()),
    }
    if {"old_log_probs", "rollout_log_probs", "loss_mask"} <= set(whole.columns):
        counts = whole.ragged("loss_mask").values.astype(bool)
        mine, theirs = (np.exp(whole.ragged(n).values[counts]) for n in ("old_log_probs", "rollout_log_probs"))
        if counts.any():
            found["training/rollout_probs_diff_mean"] = float(np.abs(mine - theirs).mean())
    return {**found, **metrics}


class Rows:
    """The file, from which lines of steps that run again are taken out at the start."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"

    def start(self, done: int) -> None:
        """``done``: training steps that this run has behind it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line).get("step", 0) <= done]
        self.path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def add(self, row: Mapping[str, float]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
