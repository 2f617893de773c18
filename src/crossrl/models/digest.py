"""A content hash of weights that depends on every byte, name, dtype and shape, and on nothing else."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

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
        hashes = list(pool.map(lambda chunk: hashlib.sha256(chunk).digest(), chunks))
    total = hashlib.sha256()
    for name, tensor in tensors:
        place = places[_storage(tensor)]
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0{len(place)}\0".encode())
        for i in place:
            total.update(hashes[i])
    return total.hexdigest()


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are views of the same memory with the same meaning, so that they can never differ."""
    return _storage(a) == _storage(b)


def _storage(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _chunks(tensor: torch.Tensor) -> list[memoryview]:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if not flat.numel():
        return []
    raw = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
    return [raw[i : i + CHUNK_BYTES] for i in range(0, len(raw), CHUNK_BYTES)]
