"""From logits to tokens: temperature, truncation, inverse CDF with the request's own random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from crossrl.engines.base import Sampling

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: Sequence[int], count: int) -> torch.Tensor:
    """float64 ``[N, count]`` in [0, 1): row i is a function of ``seeds[i]`` (modulo 2**64) alone, and its first
    numbers do not depend on ``count``.

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), from a state that is
    the mixed seed, so that seeds that lie close together give unrelated rows.
    """
    state = _mix(np.array([int(seed) % 2**64 for seed in seeds], dtype=np.uint64))
    numbers = _mix(state[:, None] + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN)
    return torch.from_numpy((numbers >> np.uint64(11)) * 2.0**-53)


def _mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser, uint64 with wrap-around."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def choose(logits: torch.Tensor, draw: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """A token per row, and its log-prob (float32, nat) under the distribution it was drawn from.

    ``logits``: float32 ``[B, V]``, overwritten. ``draw``: float64 ``[B]`` in [0, 1). The distribution is
    softmax(logits / temperature), cut to the ``top_k`` most likely tokens, of those to the smallest set with at
    least ``top_p`` of their mass, and renormalised; tokens as likely as the last one kept are kept too, so that
    the set does not depend on how a sort breaks ties. At temperature 0: the most likely token, and its log-prob
    under softmax(logits).
    """
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
    log_p = torch.log_softmax(logits.div_(sampling.temperature), -1)
    p = log_p.exp()
    if sampling.truncation != "none":
        p.masked_fill_(p < _threshold(p, sampling)[:, None], 0.0)
    cumulative = p.cumsum(-1)
    total = cumulative[:, -1:]
    # Strictly below the total, so that a token of probability 0 at the end is never reached.
    target = torch.minimum((draw[:, None] * total).float(), torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    chosen = log_p.gather(1, tokens[:, None])[:, 0]
    return tokens, chosen - total[:, 0].log() if sampling.truncation != "none" else chosen


def _threshold(p: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The probability of the least likely token kept, ``[B]``."""
    vocabulary = p.shape[-1]
    k = min(sampling.top_k, vocabulary) if sampling.top_k > 0 else vocabulary
    if sampling.top_p >= 1.0:
        return p.topk(k, -1).values[:, -1]
    tried = min(k, 256)
    while True:
        ordered = p.topk(tried, -1).values
        mass = ordered.sum(-1, keepdim=True) if k < vocabulary and tried == k else p.sum(-1, keepdim=True)
        before = ordered.cumsum(-1) - ordered
        inside = before < sampling.top_p * mass
        if tried == k or not bool(inside[:, -1].any()):
            return ordered.masked_fill(~inside, float("inf")).amin(-1)
        tried = min(k, tried * 8)
