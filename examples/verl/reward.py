"""A reward that a random model sometimes earns: the share of digits in its answer, and 1 more for the right one."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> float:
    if not solution_str:
        return 0.0
    digits = sum(c.isdigit() for c in solution_str) / len(solution_str)
    return digits + float(ground_truth in solution_str)
