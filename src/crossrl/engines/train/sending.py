"""The trainer's end of weight transfers, the same for one process and for the first of several ranks."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from crossrl.engines.base import EngineError

if TYPE_CHECKING:  # it needs the extra `sync`
    from crossrl.sync.sender import Sent, WeightSender

Layout = Mapping[str, "tuple[tuple[int, ...], str]"]  # name to (shape, dtype such as "float32")


def this_machine() -> str:
    """Its name, by which it is known who shares memory with whom."""
    return socket.gethostname()


def check_machines(receivers: Mapping[str, str], machines: Sequence[str]) -> None:
    """Raises ``EngineError`` unless each of ``receivers`` (name to machine) is on one of ``machines``, those of the
    processes that train: weights go through shared memory."""
    if far := {name: at for name, at in receivers.items() if at not in machines}:
        raise EngineError(
            f"weights go through shared memory, but {', '.join(f'{n} is on {at}' for n, at in far.items())}, where no "
            f"process trains (those are on {', '.join(sorted(set(machines)))}). Have at most as many rollout engines "
            "on each machine as train processes (actor_rollout_ref.rollout.replicas)"
        )


def merged(sent: Sequence[Sent]) -> Sent:
    """One account of the transfers of several senders of the same weights."""
    first = sent[0]
    if odd := {s.digest for s in sent} - {first.digest}:
        raise EngineError(f"senders of version {first.version} sent different weights: {first.digest}, {odd}")
    return dataclasses.replace(
        first,
        bytes=sum(s.bytes for s in sent),
        buckets=sum(s.buckets for s in sent),
        seconds=max(s.seconds for s in sent),
        prefix_caches={name: what for s in sent for name, what in s.prefix_caches.items()},
    )


class Sending:
    """A ``WeightSender`` that is opened once and used for every transfer of a run. Used by one thread."""

    def __init__(self) -> None:
        self._sender: WeightSender | None = None
        self._cast: str | None = None

    def open(self, receivers: Sequence[str], cast: str | None, options: Mapping[str, Any]) -> str:
        """Returns the address. Raises ``SyncError``, or ``ImportError`` where the extra ``sync`` is not installed."""
        from crossrl.sync.cuda_ipc import CudaBuffer
        from crossrl.sync.sender import WeightSender
        from crossrl.sync.shared_memory import SharedBuffer

        self.close()
        how = dict(options)
        kinds = {"shared_memory": SharedBuffer.create, "cuda_ipc": CudaBuffer.create}
        if transport := how.pop("transport", ""):
            how["make_buffer"] = kinds[transport]
        self._sender, self._cast = WeightSender(receivers, **how), cast
        return self._sender.address

    @property
    def is_open(self) -> bool:
        return self._sender is not None

    def send(
        self,
        version: int,
        layout: Layout,
        tied: Mapping[str, str],
        named: Iterable[tuple[str, torch.Tensor]],
        changed: bool | None,
    ) -> Sent:
        """See ``WeightSender.send``; ``named``: as ``layout`` says."""
        from crossrl.sync.manifest import Manifest

        if self._sender is None:
            raise EngineError("no sender is open: call open_sender first")
        cast = self._cast
        casts = {name: cast for name, (_, dtype) in layout.items() if cast is not None and dtype != cast}
        manifest = Manifest(dict(layout), tied, casts)
        return self._sender.send(version, manifest, named, changed if self._sender.digest else None)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
