"""Buckets in the memory of a GPU that both processes share, by CUDA IPC.

Not run yet: this was written on machines without a GPU, from PyTorch's own code (``torch/multiprocessing/
reductions.py``). ``benchmarks/gpu.py`` is to check it before anybody relies on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from crossrl.sync.messages import SyncError

_HANDLE = ("device", "handle", "bytes", "offset", "counter", "counter_offset", "event", "event_sync")


class CudaBuffer:
    """``slots`` x ``size`` bytes on one GPU. One export and one import per receiver and transfer; the memory goes back
    to the sender's allocator when the last receiver has dropped its import, which is before its last message."""

    def __init__(self, flat: torch.Tensor, size: int, slots: int) -> None:
        self.size, self.slots, self._device = size, slots, flat.device
        self._bytes: torch.Tensor | None = flat

    @classmethod
    def create(cls, size: int, slots: int = 2) -> CudaBuffer:
        if not torch.cuda.is_available():
            raise SyncError("CUDA IPC needs a GPU, PyTorch sees none here: use shared memory")
        return cls(torch.empty(size * slots, dtype=torch.uint8, device="cuda"), size, slots)

    def describe(self) -> dict[str, Any]:
        """Each call exports the memory anew: a receiver has a reference count of its own."""
        assert self._bytes is not None
        values = self._bytes.untyped_storage()._share_cuda_()
        packed = {key: value.hex() if isinstance(value, bytes) else value for key, value in zip(_HANDLE, values)}
        return {"kind": "cuda_ipc", "size": self.size, "slots": self.slots,
                "uuid": str(torch.cuda.get_device_properties(self._device).uuid), "cuda": packed}  # fmt: skip

    @classmethod
    def attach(cls, description: Mapping[str, Any]) -> CudaBuffer:
        count = torch.cuda.device_count()
        uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
        if description["uuid"] not in uuids:  # numbers differ between processes with other CUDA_VISIBLE_DEVICES
            raise SyncError(f"the sender's GPU {description['uuid']} is not among {uuids}: use shared memory")
        size, slots, packed = int(description["size"]), int(description["slots"]), dict(description["cuda"])
        packed["device"] = uuids.index(description["uuid"])
        values = [bytes.fromhex(v) if isinstance(v := packed[key], str) else v for key in _HANDLE]
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(*values)
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size * slots,))  # type: ignore[call-overload]
        return cls(flat, size, slots)

    def slot(self, number: int) -> torch.Tensor:
        if self._bytes is None:
            raise SyncError("the shared memory of the GPU is closed already")
        place = number % self.slots
        return self._bytes[place * self.size : (place + 1) * self.size]

    def written(self) -> None:
        torch.cuda.synchronize(self._device)

    def attached(self) -> None:
        """Nothing has a name here."""

    def close(self) -> None:
        if self._bytes is not None:
            try:
                torch.cuda.synchronize(self._device)
            except RuntimeError as error:  # of an earlier kernel: the device is lost, and with it this process's work
                raise SyncError(f"the GPU reports an error: {error}") from error
            finally:
                self._bytes = None
            torch.cuda.ipc_collect()
