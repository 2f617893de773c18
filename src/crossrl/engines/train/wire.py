"""Tensors as bytes, for messages between processes.

Sent as they are, PyTorch would hand over a descriptor of shared memory, or of a view all that it is a view of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Packed:
    """``data``: uint8, row-major; read-only where the message lies in memory that is not ours (Ray)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    data: np.ndarray

    def tensor(self) -> torch.Tensor:
        """May be changed in place."""
        data = self.data if self.data.flags.writeable else self.data.copy()
        return torch.from_numpy(data).view(self.dtype).reshape(self.shape)


def pack(tensors: Mapping[str, torch.Tensor]) -> dict[str, Packed]:
    """
    >>> unpack(pack({"w": torch.ones(2, 3, dtype=torch.bfloat16)[:, :2]}))["w"].tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    return {name: _packed(tensor) for name, tensor in tensors.items()}


def unpack(packed: Mapping[str, Packed]) -> dict[str, torch.Tensor]:
    return {name: one.tensor() for name, one in packed.items()}


def _packed(tensor: torch.Tensor) -> Packed:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return Packed(tuple(tensor.shape), tensor.dtype, flat.view(torch.uint8).numpy())
