"""Buckets in POSIX shared memory.

Not ``multiprocessing.shared_memory``: in Python 3.11 its resource tracker also registers segments that were only
attached, and removes them when that process ends, under the hands of the others. Here the name of a segment goes
away as soon as every receiver has attached, and the memory with the last process that maps it, killed or not.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from crossrl.sync.messages import SyncError

FOLDER = Path("/dev/shm")
PREFIX = "crossrl-weights-"
ABANDONED_S = 60.0


class SharedBuffer:
    """``slots`` x ``size`` bytes of shared memory, made by ``create`` or mapped by ``attach``."""

    def __init__(self, fd: int, size: int, slots: int, path: Path | None) -> None:
        self.size, self.slots, self._path, self._fd = size, slots, path, fd
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # page faults at once: half the cost of one by one
        self._map: mmap.mmap | None = mmap.mmap(fd, size * slots, flags=flags)
        # Through a memoryview, since PyTorch keeps that alive, and the map refuses to close while it lives: a view
        # that was forgotten is an error then. Of a bare map the memory would vanish under it.
        self._bytes: torch.Tensor | None = torch.frombuffer(memoryview(self._map), dtype=torch.uint8)

    @classmethod
    def create(cls, size: int, slots: int = 2) -> SharedBuffer:
        """New memory, reserved, so that a full /dev/shm is an error here and no SIGBUS later."""
        remove_abandoned()
        path = FOLDER / f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SyncError(f"cannot make shared memory in {FOLDER}: {error}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # held while its maker lives: see remove_abandoned
            os.posix_fallocate(fd, 0, size * slots)
            return cls(fd, size, slots, path)
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            free = os.statvfs(FOLDER)
            raise SyncError(
                f"{FOLDER} has {free.f_bavail * free.f_frsize / 2**20:.0f} MiB free, {slots} buckets of "
                f"{size / 2**20:.0f} MiB were asked for ({error.strerror}): make it larger (docker run --shm-size) "
                "or the buckets smaller"
            ) from None

    @classmethod
    def attach(cls, description: Mapping[str, Any]) -> SharedBuffer:
        size, slots, name = int(description["size"]), int(description["slots"]), str(description["name"])
        path = FOLDER / name
        if not name.startswith(PREFIX) or path.parent != FOLDER:
            raise SyncError(f"{name!r} is not the name of shared memory for weights ({PREFIX}...)")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SyncError(
                f"cannot attach to the sender's shared memory: {error}. Do both see one {FOLDER}?"
            ) from None
        try:
            if os.fstat(fd).st_size != size * slots:
                raise SyncError(f"{path} has {os.fstat(fd).st_size} bytes, the sender said {size * slots}")
            return cls(fd, size, slots, None)
        except BaseException:
            os.close(fd)
            raise

    def describe(self) -> dict[str, Any]:
        assert self._path is not None
        return {"kind": "shared_memory", "name": self._path.name, "size": self.size, "slots": self.slots}

    def slot(self, number: int) -> torch.Tensor:
        if self._bytes is None:
            raise SyncError("the shared memory is closed already")
        place = number % self.slots
        return self._bytes[place * self.size : (place + 1) * self.size]

    def written(self) -> None:
        """On a CPU a copy is done when it returns; one from a device may not be."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def attached(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def close(self) -> None:
        self.attached()
        self._bytes = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._map is not None:
            held, self._map = self._map, None  # whoever holds a view keeps the map; its memory goes with the view
            try:
                held.close()
            except BufferError:
                raise SyncError(
                    "a view of the shared memory is still held after the transfer (load must copy what it is given)"
                ) from None


def remove_abandoned() -> None:
    """Unlink segments whose makers were killed before all receivers had attached."""
    for path in FOLDER.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime < ABANDONED_S:
                continue  # perhaps made, and not locked yet
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            finally:
                os.close(fd)
