"""The two ways of weights from the trainer to where responses are generated: within this process, and to others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from crossrl.cluster.worker import WorkerError, collect
from crossrl.engines.base import EngineError, RolloutEngine, TrainEngine
from crossrl.engines.rollout.remote import versions_of
from crossrl.engines.rollout.replicas import Replicas
from crossrl.engines.rollout.transaction import manifest_of
from crossrl.models.digest import combined, tensor_digests

DIGEST = "xxh3-128"  # of each tensor; two syncs can be compared by digests of one kind


@dataclass(frozen=True, slots=True)
class Brought:
    """What a sync did, for its record.

    ``sent``: digest of the trainer's weights after the cast that the engine declares; ``held``: of what the engine
    computes with; both over all names (``models.digest.combined``). They are equal, or the engine computes with
    something else. Both are "" where no digest is made.
    """

    weight_version: int
    tensors: int
    sent: str
    held: str
    cast: str | None
    prefix_cache: str

    def facts(self) -> dict[str, Any]:
        return {
            "weight_version": self.weight_version, "tensors": self.tensors, "sent": self.sent, "held": self.held,
            "digest": DIGEST, "cast": self.cast, "prefix_cache": self.prefix_cache,
        }  # fmt: skip


class Carrier(Protocol):
    def bring(self) -> Brought:
        """Bring the trainer's weights, as its ``weight_version``. Raises ``EngineError`` (``SyncError``)."""
        ...


class InProcess:
    """``trainer`` and ``engine`` in one process. ``tied``: further names of the trainer's weights, each with the name
    under which it is sent. ``digest``: whether to hash, which costs more than the rest; it is for the record."""

    def __init__(
        self,
        trainer: TrainEngine,
        engine: RolloutEngine,
        tied: Mapping[str, str] | None = None,
        digest: bool = True,
    ) -> None:
        self.trainer, self.engine, self.tied, self.digest = trainer, engine, dict(tied or {}), digest

    def bring(self) -> Brought:
        weights = dict(self.trainer.named_weights())
        manifest = manifest_of(weights.items())
        self.engine.begin_update(self.trainer.weight_version, manifest)
        self.engine.load(weights.items())
        cleared = self.engine.clear_prefix_cache()  # what was computed with the old weights must not be used again
        self.engine.finish_update()
        weights |= {name: weights[first] for name, first in self.tied.items()}
        held = combined(tensor_digests(self.engine.held())) if self.digest else ""
        sent = held  # the same memory is not hashed twice
        if held and not self.engine.shares(weights):
            sent = combined(tensor_digests(self.engine.as_held(weights).items()))
        return Brought(self.engine.weight_version, len(manifest), sent, held, self.engine.cast, cleared)


class Transfer:
    """From ``trainer`` to ``replicas`` in other processes. ``limit_s``: of each wait of the transfer (see ``sync``).
    ``transport``: see ``TrainEngine.open_sender``."""

    def __init__(
        self, trainer: TrainEngine, replicas: Replicas, limit_s: float, transport: str = "shared_memory"
    ) -> None:
        self.trainer, self.replicas, self.limit_s, self.transport = trainer, replicas, limit_s, transport
        self._receivers, self._addresses = dict[str, str](), dict[str, str]()

    def bring(self) -> Brought:
        """Waits for: all replicas to hold the weights. Limits: ``limit_s`` for each step; a replica that was lost is
        started anew before."""
        replicas, version = self.replicas, self.trainer.weight_version
        replicas.revive(self.limit_s)
        replicas.wake()
        self._open({name: e.facts.machine for e in replicas.engines for name in e.facts.receivers})
        waiting = [engine.start_receive(self._addresses, self.limit_s) for engine in replicas.engines]
        try:
            sent = self.trainer.send(version)
        except Exception as error:
            heard = collect(waiting, "leave the transfer", 3 * self.limit_s, keep_going=True)
            others = {str(one) for one in heard if isinstance(one, WorkerError)}
            raise EngineError("; ".join([str(error), *sorted(o for o in others if str(error) not in o)])) from error
        received = collect(waiting, "confirm the transfer", self.limit_s)
        if (found := versions_of(received)) != {version}:
            raise EngineError(f"after a transfer of version {version} the replicas have versions {sorted(found)}")
        replicas.weight_version = version
        held = sorted({one.digest for engine in received for one in engine})
        return Brought(
            version, sent.tensors, sent.digest, ", ".join(held), replicas.cast,
            ", ".join(sorted(set(sent.prefix_caches.values()))),
        )  # fmt: skip

    def _open(self, receivers: dict[str, str]) -> None:
        """Once, and again when an engine was started anew on another machine."""
        if receivers != self._receivers:
            held = self.replicas.cast.rpartition(" ")[2] if self.replicas.cast else None
            self._addresses = self.trainer.open_sender(receivers, held, limit_s=self.limit_s, transport=self.transport)
            self._receivers = receivers
