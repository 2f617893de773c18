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
    """
    tensors = sorted(named, key=lambda item: item[0])
    chunks: list[memoryview] = []
    counts: list[int] = []
    for _, tensor in tensors:
        pieces = _chunks(tensor)
        chunks += pieces
        counts.append(len(pieces))
    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        hashes = iter(list(pool.map(lambda chunk: hashlib.sha256(chunk).digest(), chunks)))
    total = hashlib.sha256()
    for (name, tensor), count in zip(tensors, counts, strict=True):
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0{count}\0".encode())
        for _ in range(count):
            total.update(next(hashes))
    return total.hexdigest()


def _chunks(tensor: torch.Tensor) -> list[memoryview]:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if not flat.numel():
        return []
    raw = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
    return [raw[i : i + CHUNK_BYTES] for i in range(0, len(raw), CHUNK_BYTES)]
