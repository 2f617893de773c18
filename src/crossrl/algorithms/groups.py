"""Groups: which carry a signal, and pass@k over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from crossrl.algorithms.errors import AlgorithmError


def groups_with_signal(values: np.ndarray, groups: Sequence[str]) -> list[str]:
    """The groups whose samples do not all have the same value, in order of first appearance.

    ``values``: ``[N]``, the metric that ``algorithm.filter_groups.metric`` names; NaN (no score) is left out.
    Such groups alone have a gradient under group-relative advantages: dynamic sampling, Yu et al. 2025 (DAPO),
    arXiv:2503.14476, section 3.2. A group with one scored sample has no signal.
    """
    if len(values) != len(groups):
        raise AlgorithmError(f"{len(values)} values for {len(groups)} group names")
    lowest: dict[str, float] = {}
    highest: dict[str, float] = {}
    for value, group in zip(np.asarray(values, np.float64).tolist(), groups):
        if value == value:  # not NaN
            lowest[group] = min(value, lowest.get(group, value))
            highest[group] = max(value, highest.get(group, value))
    return [group for group in dict.fromkeys(groups) if group in lowest and lowest[group] < highest[group]]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of k samples is correct, estimated without bias from ``samples`` >= k.

    1 - C(samples - correct, k) / C(samples, k). Chen et al. 2021 (Codex), arXiv:2107.03374, eq. 1, as the
    product that does not overflow.

    >>> pass_at_k(samples=4, correct=1, k=2)
    0.5
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise AlgorithmError(
            f"pass@{k} from {samples} samples, {correct} correct: want 1 <= k <= samples and 0 <= correct <= samples"
        )
    sizes = np.arange(samples - correct + 1, samples + 1)
    return float(1.0 - np.prod(1.0 - k / sizes))  # with fewer than k wrong ones, one factor is 1 - k / k = 0
