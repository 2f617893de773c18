"""Content hashes of weights that depend on every byte, name, dtype and shape, and on nothing else."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash

CHUNK_BYTES = 8 << 20


def weights_digest(named: Iterable[tuple[str, torch.Tensor]], threads: int | None = None) -> str:
    """sha256 over the tensors in name order; hexadecimal.

    Each tensor's bytes are hashed in chunks of 8 MiB, and the chunk hashes are hashed together with name,
    dtype and shape. The chunks are fixed, so the result depends on neither ``threads`` nor their timing
    (``hashlib`` releases the interpreter lock, so the threads do run at once). Order of ``named``: no matter.
    A tensor that comes under several names (a tied weight) is hashed once, and counts under each.
    """
    tensors = sorted(named, key=lambda item: item[0])
    chunks: list[memoryview] = []
    places: dict[tuple[object, ...], range] = {}
    for _, tensor in tensors:
        if (key := _storage(tensor)) not in places:
            pieces = _chunks(tensor)
            places[key] = range(len(chunks), len(chunks) + len(pieces))
            chunks += pieces
    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        hashes = list(pool.map(_sha256, chunks))
    total = hashlib.sha256()
    for name, tensor in tensors:
        _count_in(total, name, tensor, [hashes[i] for i in places[_storage(tensor)]])
    return total.hexdigest()


def passing_digest(named: Iterable[tuple[str, torch.Tensor]], threads: int | None = None) -> str:
    """``weights_digest`` of tensors that come in name order and need not all be there at once."""
    total, last = hashlib.sha256(), ""
    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        for name, tensor in named:
            if name < last:
                raise ValueError(f"{name} came after {last}: want name order")
            last = name
            _count_in(total, name, tensor, list(pool.map(_sha256, _chunks(tensor))))
    return total.hexdigest()


def _sha256(chunk: memoryview) -> bytes:
    return hashlib.sha256(chunk).digest()


def _count_in(total: Any, name: str, tensor: torch.Tensor, hashes: list[bytes]) -> None:
    total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0{len(hashes)}\0".encode())
    for chunk in hashes:
        total.update(chunk)


def tensor_digest(tensor: torch.Tensor) -> str:
    """XXH3 (128 bits) of dtype, shape and every byte in order; hexadecimal.

    For what is made anew at every weight transfer, where sha256 would cost more than the transfer: XXH3 goes at about
    the speed of a copy. It finds every accident (a changed, moved or swapped value); it does not stop a forger, who
    could as well change the engine. At most 8 MiB are copied at a time, from a device or out of a strided tensor.
    """
    total: Any = xxhash.xxh3_128(f"{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
    whole = tensor.is_contiguous() and tensor.device.type == "cpu"  # then nothing is copied
    step = max(1, tensor.numel() if whole else CHUNK_BYTES // tensor.element_size())
    for start in range(0, tensor.numel(), step):
        for run in values_between(tensor, start, min(tensor.numel(), start + step)):
            total.update(_bytes(run))
    return total.hexdigest()


def tensor_digests(named: Iterable[tuple[str, torch.Tensor]], threads: int | None = None) -> dict[str, str]:
    """``tensor_digest`` of each, by name. One that comes under several names (a tied weight) is hashed once."""
    tensors = dict(named)
    distinct = {_storage(tensor): tensor for tensor in tensors.values()}
    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        found = dict(zip(distinct, pool.map(tensor_digest, distinct.values())))
    return {name: found[_storage(tensor)] for name, tensor in tensors.items()}


def combined(digests: Mapping[str, str]) -> str:
    """One digest for the tensors of ``tensor_digests``, their names included; hexadecimal."""
    return hashlib.sha256("".join(f"{name}\0{digests[name]}\0" for name in sorted(digests)).encode()).hexdigest()


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are views of the same memory with the same meaning, so that they can never differ."""
    return _storage(a) == _storage(b)


def values_between(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Views that together are the values ``start`` to ``stop`` of ``tensor`` in row-major order, however it is strided.

    >>> [v.tolist() for v in values_between(torch.arange(6).reshape(3, 2).t(), 1, 5)]
    [[2, 4], [1, 3]]
    """
    if start >= stop:
        return
    if tensor.is_contiguous() or tensor.dim() == 0:
        yield tensor.reshape(-1)[start:stop]
        return
    row = tensor.numel() // tensor.shape[0]
    first, last = -(-start // row), stop // row  # rows first to last are whole
    if first > last:  # within one row
        yield from values_between(tensor[last], start - last * row, stop - last * row)
        return
    yield from values_between(tensor[first - 1], start - (first - 1) * row, row) if start < first * row else ()
    if first < last:
        yield tensor[first:last]
    yield from values_between(tensor[last], 0, stop - last * row) if last * row < stop else ()


def _storage(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _chunks(tensor: torch.Tensor) -> list[memoryview]:
    if not tensor.numel():
        return []
    raw = _bytes(tensor)
    return [raw[i : i + CHUNK_BYTES] for i in range(0, len(raw), CHUNK_BYTES)]
