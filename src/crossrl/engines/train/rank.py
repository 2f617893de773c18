"""One rank of a training group: the object that a worker process hosts. ``group.py`` is its other end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from crossrl.batch import Batch, Ragged
from crossrl.engines.base import EngineError, Objective, StepResult, TrainFacts
from crossrl.engines.train import saving
from crossrl.engines.train.fsdp import FsdpTrainEngine
from crossrl.engines.train.ranks import LOST, Agreed, RankLost, Ranks
from crossrl.engines.train.sending import Layout, this_machine
from crossrl.engines.train.sharded import ShardedTrainEngine
from crossrl.engines.train.spec import TrainSpec
from crossrl.engines.train.wire import Packed, pack, unpack
from crossrl.sync.messages import SyncError


@dataclass(frozen=True, slots=True)
class Refused:
    """A call that was given up on all ranks in the same way, so that the group can go on. ``kind``: which error to
    raise."""

    kind: Literal["engine", "sync", "file"]
    message: str


class TrainRank:
    """``TrainEngine``'s operations, each called on all ranks of a group at once. With one rank it is the plain engine.

    What comes back of whole tensors comes from rank 0; the others return None.
    """

    def __init__(self, spec: TrainSpec, rank: int, world: int, rendezvous: str) -> None:
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        self.spec, self.rank, self.world = spec, rank, world
        self.engine: FsdpTrainEngine
        if world == 1:
            self.engine = spec.plain_engine()
        else:
            ranks = Ranks(rank, world, rendezvous, torch.device(spec.device), spec.limit_s)
            model = spec.load("cpu")
            self.engine = ShardedTrainEngine(model, spec.optimizer, ranks, reshard=spec.reshard, **spec.options())

    def facts(self) -> tuple[TrainFacts, dict[str, Layout]]:
        """And shapes and dtypes of the whole tensors of each part."""
        return self.engine.facts, {part: self.engine.layout(part) for part in ("weights", "optimizer")}

    def log_probs(self, batch: Batch, temperature: float, entropy: bool) -> tuple[Ragged, Ragged | None] | Refused:
        return self._together(lambda: self.engine.log_probs(batch, temperature, entropy))

    def step(
        self,
        batch: Batch,
        objective: Objective,
        lr: float,
        temperature: float,
        entropy: bool,
        skip: np.ndarray | None,
    ) -> StepResult | Refused:
        return self._together(
            lambda: self.engine.step(batch, objective, lr=lr, temperature=temperature, entropy=entropy, skip=skip)
        )

    def scalars(self) -> dict[str, Any]:
        return self.engine.scalars()

    def changed(self) -> bool | None:
        return self._together(lambda: self.engine.changed)

    def sent(self) -> None:
        self.engine.sent()

    def digests(self, parts: Sequence[str]) -> dict[str, str] | None:
        found = self._together(lambda: self.engine.digests(*parts))
        return found if self.rank == 0 else None

    def whole(self, part: str, names: Sequence[str]) -> dict[str, Packed] | None:
        if not isinstance(self.engine, ShardedTrainEngine):
            tensors = self.engine.tensors(part)
            return pack({name: tensors[name] for name in names})
        engine = self.engine
        found = self._together(lambda: {name: tensor.cpu() for name, tensor in engine.whole(part, names)})
        return pack(found) if self.rank == 0 else None

    def load_shards(self, part: str, shards: Mapping[str, Packed]) -> None:
        """Take some of this rank's shards (with one rank: whole tensors); ``loaded`` ends it."""
        self.engine.load_shards(part, unpack(shards))

    def loaded(self, scalars: Mapping[str, Any]) -> None:
        self.engine.loaded(scalars)

    def save(self, folder: str) -> dict[str, int] | Refused:
        """The files that are in ``folder`` then, as this rank sees it; see ``saving.written``."""
        found: dict[str, int] | Refused = self._together(lambda: self._wrote(self.engine.save, folder))
        return found

    def load(self, folder: str, scalars: Mapping[str, Any]) -> Refused | None:
        return self._together(lambda: self.engine.load(Path(folder), scalars, self.spec.trust_remote_code))

    def save_hf(self, folder: str) -> dict[str, int] | Refused:
        """As ``save``; rank 0 writes."""
        found: dict[str, int] | Refused = self._together(lambda: self._wrote(self.engine.save_hf, folder))
        return found

    def _wrote(self, save: Callable[[Path], None], folder: str) -> dict[str, int]:
        save(Path(folder))
        return saving.written(Path(folder))

    def machine(self) -> str:
        return this_machine()

    def open_sender(
        self, receivers: Mapping[str, str], cast: str | None, options: Mapping[str, Any]
    ) -> dict[str, str] | Refused:
        """To those of this machine; with none this rank sends nothing."""
        if not receivers:
            self.engine.close_sender()
            return {}
        here = dict.fromkeys(receivers, this_machine())  # the group has looked who is where
        found: dict[str, str] | Refused = self._together(lambda: self.engine.open_sender(here, cast, **options))
        return found

    def send(self, version: int) -> Any:
        """``Sent`` from a rank that has receivers."""
        return self._together(lambda: self.engine.send(version))

    def close_sender(self) -> None:
        self.engine.close_sender()

    def close(self) -> None:
        self.engine.close()

    def _together(self, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Agreed as error:
            return Refused("engine", str(error))
        except SyncError as error:
            return Refused("sync", str(error))
        except OSError as error:
            return Refused("file", str(error))
        except EngineError as error:
            if self.world == 1:
                return Refused("engine", str(error))
            raise
        except RuntimeError as error:
            if _is_loss(error):
                raise RankLost(f"rank {self.rank} {LOST}: {str(error).splitlines()[0]}") from error
            raise


def make_rank(spec: TrainSpec, rank: int, world: int, rendezvous: str) -> TrainRank:
    """``rendezvous``: HOST:PORT of the driver's store (``beats.listen``); "" with one rank."""
    return TrainRank(spec, rank, world, rendezvous)


def _is_loss(error: RuntimeError) -> bool:
    """Whether a collective failed; PyTorch has no type for that with gloo."""
    words = str(error)
    known = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Timed out waiting")
    return isinstance(error, torch.distributed.DistError) or any(word in words for word in known)
