"""What ``crossrl verdict`` and ``report`` read of a run besides its tape: ``metrics.jsonl``, a line for each step, and
``config.yaml``, what it was to do. ``.lock`` is held while it runs, so that a run that stopped early is told from one
that goes on."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

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
        self._lock: IO[str] | None = None

    def start(self, done: int, config: Any, total_steps: int) -> None:
        """``done``: training steps that this run has behind it. ``config``: verl's, resolved; ``total_steps``: of the
        whole run, which verl works out from the data where the configuration does not say."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line).get("step", 0) <= done]
        self.path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        (self.path.parent / "config.yaml").write_text(_config_text(config, total_steps), encoding="utf-8")
        self._lock = (self.path.parent / ".lock").open("a+")
        with contextlib.suppress(OSError):  # a file system without locks: it cannot be told then, and that is all
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lock.truncate(0)
            self._lock.write(f"{socket.gethostname()} {os.getpid()}\n")
            self._lock.flush()

    def add(self, row: Mapping[str, float]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _config_text(config: Any, total_steps: int) -> str:
    from omegaconf import OmegaConf

    body: Any = OmegaConf.to_container(config, resolve=True)
    body["trainer"]["total_training_steps"] = total_steps
    sections = {name: part for name, part in body.items() if isinstance(part, dict)}  # as a run of ours has them
    return OmegaConf.to_yaml(OmegaConf.create(sections))
