"""The port of the memory through which buckets pass; ``shared_memory`` and ``cuda_ipc`` are behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from crossrl.sync.messages import SyncError


class Buffer(Protocol):
    """``slots`` slots of ``size`` bytes. The sender makes one per transfer, each receiver attaches to it."""

    size: int

    def slot(self, number: int) -> torch.Tensor:
        """The memory of bucket ``number``: uint8 ``[size]``, a view. Buckets take turns in the slots."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a receiver needs to attach, as JSON."""
        ...

    def written(self) -> None:
        """Wait until what was copied into or out of a slot is really there (copies on a device are not at once)."""
        ...

    def attached(self) -> None:
        """All receivers have attached: take away whatever would outlive the processes."""
        ...

    def close(self) -> None:
        """Give the memory up. May be called twice. Raises ``SyncError`` while somebody still holds a view of it."""
        ...


def attach(description: Mapping[str, Any]) -> Buffer:
    """The receiver's end of the buffer that ``description`` (of ``Buffer.describe``) names."""
    from crossrl.sync.cuda_ipc import CudaBuffer
    from crossrl.sync.shared_memory import SharedBuffer

    kinds: dict[str, Any] = {"shared_memory": SharedBuffer, "cuda_ipc": CudaBuffer}
    kind = str(description.get("kind"))
    if kind not in kinds:
        raise SyncError(f"the sender passes weights by {kind!r}, this side knows {', '.join(kinds)}")
    buffer: Buffer = kinds[kind].attach(description)
    return buffer
