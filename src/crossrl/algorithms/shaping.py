"""Overlong responses: a soft penalty on their reward, or no training on them at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from crossrl.algorithms.errors import AlgorithmError
from crossrl.batch import Ragged


def overlong_penalty(
    lengths: np.ndarray, max_response_length: int, buffer: int, penalty_factor: float = 1.0
) -> np.ndarray:
    """What is added to the reward for length, float64 ``[N]``, from 0 down to ``-penalty_factor``.

    ``lengths``: tokens of each response. 0 up to ``max_response_length - buffer``, from there falling linearly
    to ``-penalty_factor`` at ``max_response_length``, and that beyond. Yu et al. 2025 (DAPO),
    arXiv:2503.14476, eq. 13 (with factor 1); keys ``reward.overlong_buffer.*``.

    >>> overlong_penalty(np.array([8, 9, 10]), max_response_length=10, buffer=2).tolist()
    [0.0, -0.5, -1.0]
    """
    if not 0 < buffer <= max_response_length:
        raise AlgorithmError(
            f"reward.overlong_buffer.len={buffer}: want 1 to data.max_response_length={max_response_length}"
        )
    left = (max_response_length - buffer) - np.asarray(lengths, np.float64)
    return penalty_factor * (np.clip(left, -buffer, 0.0) / buffer)


def overlong_filter(mask: Ragged, finish_reason: Sequence[str]) -> tuple[Ragged, int]:
    """``mask`` with the responses that were cut off (finish reason "length") set to 0, and how many they are.

    Overlong filtering, Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.4: whether a response that was cut off
    would have been right is not known. What remains is the one mask that all denominators use.
    """
    if len(finish_reason) != len(mask):
        raise AlgorithmError(f"{len(finish_reason)} finish reasons for {len(mask)} samples")
    cut = np.array([reason == "length" for reason in finish_reason], bool)
    kept = np.where(np.repeat(cut, mask.lengths), 0, mask.values).astype(np.uint8)
    return Ragged(kept, mask.lengths), int(cut.sum())
