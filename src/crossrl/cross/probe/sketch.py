"""What is kept of an output: all of it where it is small, else 64 sums per token from which errors are estimated.

A sketch of a row ``x`` is ``x @ S`` with a fixed matrix S of random signs (over 8, the root of 64). For two rows the
norm of the difference of their sketches is that of the rows' difference, give or take 9 %, wherever it lies (Johnson
and Lindenstrauss, 1984; signs: Achlioptas, 2003): a strided sample would miss what differs between its columns. Memory
is 256 bytes per token and tensor, whatever the width. Equality of all bits is a matter of the digest.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch

WIDTH = 64
FULL_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor that a module was given or returned, its rows in the order of the sample's tokens.

    ``label``: which one, such as ``0`` or ``position_embeddings.1``. ``shape``: of one row. ``digest``: SHA-256 of
    the bytes, dtype and shape; it is also the name of what is kept: float32 ``[rows, columns]``, the rows themselves
    (``full``) or their sketches. ``mean``, ``std``, ``norm``: over all values.
    """

    label: str
    dtype: str
    shape: tuple[int, ...]
    rows: int
    digest: str
    mean: float
    std: float
    norm: float
    full: bool


@functools.lru_cache(maxsize=8)
def signs(width: int) -> torch.Tensor:
    """float32 ``[width, 64]``: S for rows of this width. The same everywhere: NumPy keeps Philox's raw stream."""
    raw = np.random.Philox(key=width).random_raw(width)
    bits = np.unpackbits(raw.astype("<u8").view(np.uint8).reshape(width, 8), axis=1)
    return torch.from_numpy((bits.astype(np.float32) * 2 - 1) / math.sqrt(WIDTH))


class Sink:
    """Takes a tensor's rows as they come, in order; ``total``: how many will come (decides whether all are kept)."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total = label, total
        self.rows = 0
        self.uneven = False  # rows of other shapes in other passes: scores over a growing number of keys, say
        self._hash = hashlib.sha256()
        self._kept: list[torch.Tensor] = []
        self._first: torch.Tensor | None = None
        self._sum = self._squares = 0.0
        self._count = 0

    def add(self, rows: torch.Tensor) -> None:
        """``[n, ...]``; at most ``total`` rows over all calls are taken, so that filler at the end is left out."""
        rows = rows[: self.total - self.rows].detach().to("cpu").contiguous()
        if not len(rows) or self.uneven:
            return
        if self._first is not None and rows.shape[1:] != self._first.shape[1:]:
            self.uneven = True
            return
        if self._first is None:
            self._first = rows[:1].clone()
            self._hash.update(f"{rows.dtype}\0{tuple(rows.shape[1:])}\0".encode())
        self.rows += len(rows)
        self._hash.update(memoryview(rows.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
        flat = rows.reshape(len(rows), -1).float()
        self._kept.append(flat.clone() if self._is_small(flat.shape[1]) else flat @ signs(flat.shape[1]))
        self._sum += float(flat.sum(dtype=torch.float64))
        self._squares += float(flat.double().square().sum()) if flat.numel() < 1 << 20 else float(flat.norm()) ** 2
        self._count += flat.numel()

    def finish(self) -> tuple[Seen, np.ndarray] | None:
        """None when no row came, or rows of several shapes."""
        if self._first is None or self.uneven:
            return None
        mean = self._sum / max(1, self._count)
        seen = Seen(
            label=self.label,
            dtype=str(self._first.dtype).removeprefix("torch."),
            shape=tuple(self._first.shape[1:]),
            rows=self.rows,
            digest=self._hash.hexdigest(),
            mean=mean,
            std=math.sqrt(max(0.0, self._squares / max(1, self._count) - mean**2)) if math.isfinite(mean) else mean,
            norm=math.sqrt(self._squares),
            full=self._is_small(self._first.numel()),
        )
        return seen, torch.cat(self._kept).numpy()

    def _is_small(self, width: int) -> bool:
        return width <= WIDTH or 4 * width * self.total <= FULL_BYTES
