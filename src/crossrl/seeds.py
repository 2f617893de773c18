"""Seeds: one per run, from which every consumer derives its own. Nothing reads the global generators.

A derived seed depends on what it is for and on nothing else: not on the order of calls, the batch that a
sample happens to be in, or how often the run was resumed.
"""

from __future__ import annotations

import hashlib

import numpy as np


def derive(seed: int, *purpose: str | int) -> int:
    """A 64-bit seed for one purpose, such as ``derive(run_seed, "rollout", step, sample_id)``."""
    text = "\x1f".join([str(seed), *(str(p) for p in purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """A private NumPy generator (Philox) for one purpose."""
    return np.random.Generator(np.random.Philox(derive(seed, *purpose)))
