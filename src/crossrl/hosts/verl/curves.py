"""What ``crossrl verdict`` and ``report`` read of a run besides its tape: ``metrics.jsonl``, a line for each step, and
``config.yaml``, what it was to do. ``.lock`` is held while it runs, so that a run that stopped early is told from one
that goes on."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from crossrl.batch import Batch
from crossrl.files import LOCK_S, FolderInUse, lock_folder, publish_text
from crossrl.hosts.verl.errors import HostError

log = logging.getLogger("crossrl.tape")


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

    def lock(self) -> None:
        """Before anything in the folder is touched. Raises ``HostError`` where another run is writing there."""
        if self._lock is not None:
            return
        try:
            self._lock = lock_folder(self.path.parent, LOCK_S)
        except FolderInUse as error:
            raise HostError(str(error)) from None
        except OSError as error:
            log.warning(
                "tape: %s cannot be locked (%s): a second run there will not be noticed", self.path.parent, error
            )

    def start(self, done: int, config: Any, total_steps: int, replaced: Path | None = None) -> None:
        """``done``: training steps that this run has behind it. ``config``: verl's, resolved; ``total_steps``: of the
        whole run, which verl works out from the data where the configuration does not say. ``replaced``: the folder to
        which the tape has moved records of steps that run again; where lines of such steps are taken out, the files as
        they were are kept there (None: in a ``superseded-<n>`` beside them)."""
        self.lock()
        kept, again = self._lines(done)
        if again:
            self._keep_old(replaced)
        publish_text(self.path, "".join(f"{line}\n" for line in kept))
        publish_text(self.path.parent / "config.yaml", _config_text(config, total_steps))

    def _lines(self, done: int) -> tuple[list[str], int]:
        """The lines of steps up to ``done``, and how many there are of later ones. What a killed run left of a line is
        of no use to anybody."""
        kept, again, torn = [], 0, 0
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines() if self.path.exists() else ():
            step = _step_of(line)
            if step is None:
                torn += 1
            elif step <= done:
                kept.append(line)
            else:
                again += 1
        if torn:
            log.warning("tape: %s: %d line(s) that are not whole are left out", self.path, torn)
        return kept, again

    def _keep_old(self, replaced: Path | None) -> None:
        folder = self.path.parent
        names = (folder / f"superseded-{n}" for n in itertools.count())
        target = replaced or next(name for name in names if not name.exists())
        target.mkdir(exist_ok=True)
        for path in (self.path, folder / "config.yaml"):
            if path.exists():
                shutil.copyfile(path, target / path.name)
        log.info("tape: %s: lines of steps that run again are kept in %s", self.path, target)

    def close(self) -> None:
        """The run ends; another one may have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def add(self, row: Mapping[str, float]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _step_of(line: str) -> int | None:
    """None for what is not a whole line of ours."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None


def _config_text(config: Any, total_steps: int) -> str:
    from omegaconf import OmegaConf

    body: Any = OmegaConf.to_container(config, resolve=True)
    body["trainer"]["total_training_steps"] = total_steps
    sections = {name: part for name, part in body.items() if isinstance(part, dict)}  # as a run of ours has them
    return OmegaConf.to_yaml(OmegaConf.create(sections))
