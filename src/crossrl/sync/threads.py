"""Copying with one thread: both ends of a transfer copy at the same time, and threads that wait for each other spin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def copying_threads(count: int) -> Iterator[None]:
    """PyTorch's operations of the calling thread use ``count`` threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
