"""Cutting tensors into buckets: one way for every size, dtype, stride and device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from crossrl.engines.rollout.transaction import dtype_name
from crossrl.models.digest import values_between
from crossrl.sync.messages import SyncError

ALIGNMENT = 64  # bytes; every dtype's size divides it, so any mixture of dtypes can be viewed where it lies


@dataclass(frozen=True, slots=True)
class Piece:
    """Values ``start`` to ``start + count`` (row-major) of the tensor ``name``, at byte ``offset`` of a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    count: int
    offset: int

    def to_json(self) -> list[Any]:
        return [self.name, list(self.shape), self.dtype, self.start, self.count, self.offset]

    @classmethod
    def from_json(cls, data: list[Any]) -> Piece:
        name, shape, dtype, start, count, offset = data
        return cls(str(name), tuple(shape), str(dtype), int(start), int(count), int(offset))

    def view(self, slot: torch.Tensor) -> torch.Tensor:
        """The values where they lie in ``slot`` (uint8), flat. Valid until the bucket is acknowledged."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise SyncError(f"{self.name} comes as {self.dtype}, which this PyTorch does not have")
        end = self.offset + self.count * dtype.itemsize
        if self.offset % ALIGNMENT or not 0 <= self.offset <= end <= len(slot):
            raise SyncError(f"{self.name} is said to be at bytes {self.offset} to {end} of a bucket of {len(slot)}")
        return slot[self.offset : end].view(dtype)


def pack(
    named: Iterable[tuple[str, torch.Tensor]], size: int, slot: Callable[[int], torch.Tensor]
) -> Iterator[tuple[int, list[Piece]]]:
    """Fill buckets of ``size`` bytes with ``named`` in its order; yields (number, pieces) of each full one, from 0.

    ``slot(number)`` gives the memory of a bucket and may wait until it is free. A tensor that does not fit into the
    rest of a bucket goes on in the next; an empty one is a piece without values. Nothing is copied but into the slot.
    """
    if size < ALIGNMENT:
        raise SyncError(f"buckets of {size} bytes are too small: want at least {ALIGNMENT}")
    number, room, pieces, offset = 0, None, list[Piece](), 0
    for name, tensor in named:
        tensor, start = tensor.detach(), 0
        while True:
            offset = -(-offset // ALIGNMENT) * ALIGNMENT
            count = min(tensor.numel() - start, max(0, size - offset) // tensor.element_size())
            if count or not tensor.numel():
                room = slot(number) if room is None else room
                piece = Piece(name, tuple(tensor.shape), dtype_name(tensor), start, count, offset)
                copy_values(piece.view(room), values_between(tensor, start, start + count))
                pieces.append(piece)
                start, offset = start + count, offset + count * tensor.element_size()
            if start == tensor.numel():
                break
            yield number, pieces
            number, room, pieces, offset = number + 1, None, [], 0
    if pieces:
        yield number, pieces


def copy_values(out: torch.Tensor, runs: Iterable[torch.Tensor]) -> None:
    """Copy ``runs`` one after another into the flat tensor ``out``."""
    at = 0
    for run in runs:
        out[at : at + run.numel()].view(run.shape).copy_(run, non_blocking=True)
        at += run.numel()
