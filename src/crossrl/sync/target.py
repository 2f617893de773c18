"""The receiving end's view of an engine, and the two ways into one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch

from crossrl.engines.rollout.transaction import WeightTransaction
from crossrl.sync.messages import SyncError
from crossrl.sync.plan import Piece


class Target(Protocol):
    """The part of ``RolloutEngine`` that a transfer needs; see there. A vLLM worker can be one, which generates nothing
    by itself."""

    weight_version: int

    def begin_update(self, version: int, manifest: Mapping[str, tuple[tuple[int, ...], str]]) -> None: ...

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    def check_update(self) -> None: ...

    def finish_update(self) -> None: ...

    def abort_update(self, reason: str) -> None: ...

    def clear_prefix_cache(self) -> str: ...

    def held(self) -> Iterable[tuple[str, torch.Tensor]]: ...


@runtime_checkable
class PartTarget(Protocol):
    """An engine that takes tensors in parts, so that no whole one is ever made for it."""

    def load_part(self, name: str, shape: tuple[int, ...], start: int, values: torch.Tensor) -> None:
        """Take the values (flat, row-major) from ``start`` on of a tensor of ``shape``; its parts come in order. They
        must be copied before this returns: the next bucket is written over them."""
        ...


class Loader:
    """Brings pieces from the buckets into ``target``, which has copied them out when ``take`` returns.

    A target that takes parts copies them straight to where they stay. Any other gets whole tensors in memory of their
    own: it may keep what it is given (``tensor.to("cpu")`` of a view of a bucket is that view). That memory is not more
    than a bucket, or the largest tensor if that is more.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._growing: dict[str, torch.Tensor] = {}

    def take(self, pieces: Iterable[Piece], slot: torch.Tensor) -> None:
        if isinstance(self.target, PartTarget):
            for piece in pieces:
                self.target.load_part(piece.name, piece.shape, piece.start, piece.view(slot))
        else:
            self.target.load(list(self._whole(pieces, slot)))

    def _whole(self, pieces: Iterable[Piece], slot: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for piece in pieces:
            values, size = piece.view(slot), math.prod(piece.shape)
            if piece.start == 0:
                self._growing[piece.name] = torch.empty(piece.shape, dtype=values.dtype, device=slot.device)
            if piece.name not in self._growing or piece.start + piece.count > size:
                raise SyncError(f"{piece.name}: values from {piece.start} on came without those before them")
            self._growing[piece.name].view(-1)[piece.start : piece.start + piece.count].copy_(values)
            if piece.start + piece.count == size:
                yield piece.name, self._growing.pop(piece.name)


class HeldTensors:
    """A ``Target`` that is nothing but named tensors: of a worker whose weights are to be filled in place.

    ``tied``: further names, each with the one whose tensor it shares.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str] | None = None, weight_version: int = 0
    ) -> None:
        self.tensors, self.tied, self.weight_version = dict(tensors), dict(tied or {}), weight_version
        self.unusable = ""  # why it must not be used, "" if it may
        self._update: WeightTransaction | None = None

    def begin_update(self, version: int, manifest: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        self._update = WeightTransaction(self.tensors, version, manifest)
        self.unusable = f"the update to version {version} has not succeeded"

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._begun().load(named)

    def load_part(self, name: str, shape: tuple[int, ...], start: int, values: torch.Tensor) -> None:
        self._begun().load_part(name, shape, start, values)

    def check_update(self) -> None:
        self._begun().finish()

    def finish_update(self) -> None:
        update = self._begun()
        update.finish()
        self._update, self.weight_version, self.unusable = None, update.version, ""

    def abort_update(self, reason: str) -> None:
        self._update, self.unusable = None, reason

    def clear_prefix_cache(self) -> str:
        return "none is kept"

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()
        yield from ((name, self.tensors[first]) for name, first in self.tied.items())

    def _begun(self) -> WeightTransaction:
        if self._update is None:
            raise SyncError("no weight update was begun")
        return self._update
