"""Ranks for the tests of ``crossrl.engines.train.group``, with handles to change their settings and to break them."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models_for_tests import wide

from crossrl.cluster.local import LocalLauncher
from crossrl.engines.base import LossInput
from crossrl.engines.train.beats import listen
from crossrl.engines.train.group import TrainGroup
from crossrl.engines.train.optimizer import AdamWSettings
from crossrl.engines.train.rank import Refused, TrainRank
from crossrl.engines.train.sharded import ShardedTrainEngine
from crossrl.engines.train.spec import TrainSpec

FACTORY = "ranks_cases:TestedRank"


class TestedRank(TrainRank):
    """A ``TrainRank`` with handles."""

    engine: ShardedTrainEngine

    def micro(self, size: int) -> None:
        self.engine._max_sequences, self.engine._max_tokens = size, None

    def divide(self, factor: float) -> None:
        """What the summed gradient is divided by: 1.0, or the number of ranks for a mean."""
        for module in self.engine._sharded:
            module.set_gradient_divide_factor(factor)

    def stale(self, on: bool) -> None:
        """Send the weights that there are now, whatever becomes of them."""
        kept = dict(self.engine.whole("weights")) if on else {}
        if on:
            self.engine.kept = self.engine.whole  # type: ignore[attr-defined]
            self.engine.whole = lambda *_, **__: (item for item in kept.items())  # type: ignore[method-assign]
        else:
            del self.engine.whole

    def apart(self, on: bool) -> None:
        """Each rank says that it is on a machine of its own."""
        self.own_machine = f"machine-{self.rank}" if on else ""

    def machine(self) -> str:
        return getattr(self, "own_machine", "") or super().machine()

    def elsewhere(self, rank: int, folder: str) -> None:
        """``rank`` (-1: each) writes to ``folder``, as if its machine had another file system; "": as it is told."""
        self.own_folder = folder if rank in (self.rank, -1) else ""

    def save(self, folder: str) -> dict[str, int] | Refused:
        return super().save(getattr(self, "own_folder", "") or folder)

    def save_hf(self, folder: str) -> dict[str, int] | Refused:
        return super().save_hf(getattr(self, "own_folder", "") or folder)

    def apart_in_the_end(self, rank: int) -> Refused | None:
        """``rank`` gives up by itself, while the others wait for it."""
        if self.rank == rank:
            return Refused("file", "no space left on machine-1")
        self.engine.ranks.all(None)
        return None

    def broken(self, rank: int) -> None:
        """A fault of the program in the middle of the forward pass of one rank."""
        if self.rank == rank:
            self.engine.model.forward = None
            self.engine.policy.log_probs = lambda *_: [][0]  # type: ignore[method-assign]


def start(
    spec: TrainSpec | list[TrainSpec],
    world: int = 2,
    logs: Path | None = None,
    limit_s: float | None = None,
    start_s: float | None = None,
) -> TrainGroup:
    """A group of ``TestedRank``s. ``limit_s``: from the first call on."""
    specs = spec if isinstance(spec, list) else [spec] * world
    store, address = listen("127.0.0.1") if world > 1 else (None, "")
    launcher, env = LocalLauncher(logs), {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    workers = [launcher.start(f"train-{r}", FACTORY, specs[r], r, world, address, env=env) for r in range(world)]
    group = TrainGroup(workers, specs[0].limit_s, store, start_s)
    if limit_s is not None:
        group._calls.limit_s = limit_s
    return group


def spec_of(folder: Path, **options: Any) -> TrainSpec:
    how: dict[str, Any] = {"threads": 1, "limit_s": 120.0, "micro_batch_size": 2}
    return TrainSpec(str(folder), optimizer=AdamWSettings(weight_decay=0.1, max_grad_norm=None), **{**how, **options})


def saved_spec(folder: Path) -> TrainSpec:
    """Of a model with a tied head, which is written to ``folder``."""
    wide(tie_word_embeddings=True).save_pretrained(folder)
    return spec_of(folder)


def policy_gradient(given: LossInput) -> tuple[torch.Tensor, dict[str, float]]:
    loss = -(given.log_probs * given.columns["advantages"] * given.columns["loss_weights"]).sum()
    if given.entropy is not None:
        loss = loss - 0.3 * (given.entropy * given.columns["loss_weights"]).sum()
    return loss, {"tokens": float(len(given.log_probs)), "sequences": float(given.num_sequences)}


@dataclass(frozen=True, slots=True)
class On:
    """``policy_gradient``, and something else on one rank. ``what``: "raise", "die", "hang", "stop", "explode"."""

    rank: int
    what: str

    def __call__(self, given: LossInput) -> tuple[torch.Tensor, dict[str, float]]:
        if dist.get_rank() == self.rank:
            if self.what == "raise":
                raise ValueError("no such column")
            if self.what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.what == "hang":
                time.sleep(600)
            if self.what == "explode":  # the value is 0, the slope infinite
                return torch.sqrt((given.log_probs - given.log_probs.detach()).sum()), {}
        return policy_gradient(given)
