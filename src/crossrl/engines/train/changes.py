"""Whether weights are other ones than those that were sent: proven by values that differ."""

from __future__ import annotations

from collections.abc import Iterable

import torch

SAMPLES = 64  # of each tensor; an update moves nearly every value, and one that differs is proof


class Changes:
    """Compares samples of the weights with those taken when the weights were last sent.

    A step says little by itself: with a tiny learning rate, or with weights in bfloat16, all of it may be rounded away.
    """

    def __init__(self) -> None:
        self._sent: list[torch.Tensor] | None = None
        self._touched = False

    def sent(self, tensors: Iterable[torch.Tensor]) -> None:
        self._sent, self._touched = [_sample(t) for t in tensors], False

    def touched(self) -> None:
        """There was a step, or other weights were loaded."""
        self._touched = True

    def since_sent(self, tensors: Iterable[torch.Tensor]) -> bool | None:
        """True: there are other values. False: nothing was done to them. None: not known."""
        if self._sent is None:
            return None
        if not self._touched:
            return False
        return any(not torch.equal(a, _sample(t)) for a, t in zip(self._sent, tensors, strict=True)) or None


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLES)].clone()
