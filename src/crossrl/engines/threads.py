"""How many threads PyTorch should use: a rule that was measured, and said aloud."""

from __future__ import annotations

import os

TINY = 5_000_000  # parameters; below, a matrix product is too small to be worth waking another thread


def choose_threads(num_parameters: int) -> tuple[int, str]:
    """The number of threads for a model of ``num_parameters`` on this machine, and a sentence that says why."""
    cores = len(os.sched_getaffinity(0))
    if num_parameters < TINY:
        return 1, f"threads: 1 of {cores} cores (fastest for a model of {num_parameters / 1e6:.1f}M parameters)"
    return cores, f"threads: {cores}, one per core"
