"""The sender's digests, made beside the transfer and not before it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from crossrl.models.digest import tensor_digest
from crossrl.sync.manifest import Manifest


class Digests:
    """``tensor_digest`` of what passes through ``of``, in threads.

    ``pending_bytes``: tensors that wait for their digest are kept alive up to so many bytes; more of them wait here.
    """

    def __init__(self, manifest: Manifest, pending_bytes: int) -> None:
        self._manifest, self._most = manifest, pending_bytes
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="crossrl-digest")
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._sent: dict[str, str] = {}
        self._held: dict[str, str] = {}

    def of(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named:
            self._waiting.append((tensor.nbytes, self._pool.submit(self._one, name, tensor)))
            while len(self._waiting) > 1 and sum(size for size, _ in self._waiting) > self._most:
                self._waiting.popleft()[1].result()
            yield name, tensor

    def result(self) -> tuple[dict[str, str], dict[str, str]]:
        """By name: of what was sent, and of what is to be held (after declared casts, tied names included)."""
        while self._waiting:
            self._waiting.popleft()[1].result()
        tied = {name: self._held[first] for name, first in self._manifest.tied.items() if first in self._held}
        return self._sent, self._held | tied

    def close(self) -> None:
        """Waits for: the tensors that are being hashed. No limit: hashing does not block."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _one(self, name: str, tensor: torch.Tensor) -> None:
        self._sent[name] = self._held[name] = tensor_digest(tensor)
        if name in self._manifest.casts:
            self._held[name] = tensor_digest(tensor.detach().to(getattr(torch, self._manifest.casts[name])))
