"""The processes that train one model together, as each of them sees the others."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from crossrl.engines.base import EngineError
from crossrl.engines.train.beats import Beats, connect

Item = TypeVar("Item")
LOST = "lost another rank"  # in the words of every rank that is left behind
BACKSTOP_S = 60.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Agreed(EngineError):
    """An error that every rank raises at the same point, so that none of them waits for another."""


class RankLost(EngineError):
    """Another rank does not take part any more, so this one cannot go on."""


class Ranks:
    """``rank`` of ``world`` processes that meet at the store at ``rendezvous``. ``device``: "cpu" or "cuda".

    ``limit_s``: of the driver's wait for a call; ``BACKSTOP_S`` later a rank gives up by itself.
    """

    def __init__(self, rank: int, world: int, rendezvous: str, device: torch.device, limit_s: float) -> None:
        self.rank, self.world = rank, world
        if rendezvous.rpartition(":")[0] in LOOPBACK:  # a host name that does not resolve is then no obstacle
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        cuda = device.type == "cuda"
        if cuda and not torch.cuda.device_count():
            raise EngineError(f"rank {rank} was asked to train on {device}, and its process sees no GPU")
        self.device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        self.beats = Beats(rendezvous, rank)
        limit = timedelta(seconds=limit_s + BACKSTOP_S)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=connect(rendezvous), rank=rank, world_size=world, timeout=limit,
            device_id=self.device if cuda else None,
        )  # fmt: skip
        self.group = dist.new_group(backend="gloo", timeout=limit) if cuda else dist.group.WORLD
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (world,))

    def all(self, value: Any) -> list[Any]:
        """``value`` of every rank, in their order."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, problem: str, value: Item) -> list[Item]:
        """``value`` of every rank; or, if any has a ``problem``, ``Agreed`` on all."""
        found = self.all((problem, value))
        problems = [f"{text} (rank {rank})" for rank, (text, _) in enumerate(found) if text]
        if problems:
            raise Agreed("; ".join(dict.fromkeys(problems)))
        return [v for _, v in found]

    def together(self, items: Sequence[Item]) -> Generator[Item]:
        """``items``, the same on all ranks, as far as rank 0 goes through them: if it stops or fails, all stop."""
        return self._leading(items) if self.rank == 0 else self._following(items)

    def _leading(self, items: Iterable[Item]) -> Generator[Item]:
        try:
            for item in items:
                self._told(True)
                yield item
        finally:
            self._told(False)

    def _following(self, items: Iterable[Item]) -> Generator[Item]:
        for item in items:
            if not self._told(False):
                return
            yield item
        self._told(False)

    def _told(self, go_on: bool) -> bool:
        """What rank 0 says."""
        word = torch.tensor(int(go_on))
        dist.broadcast(word, 0, group=self.group)
        return bool(word)

    def close(self) -> None:
        self.beats.close()
        if dist.is_initialized():
            dist.destroy_process_group()
