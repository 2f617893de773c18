"""What a training engine says when it cannot go on, the same on one rank and on several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from crossrl.batch import Batch
from crossrl.engines.base import EngineError


def check_scalars(scalars: Mapping[str, Any]) -> None:
    for key in ("steps_done", "weight_version"):
        if not isinstance(scalars.get(key), int):
            raise EngineError(f"engine state: {key} is {scalars.get(key)!r}, want an integer")


def gradient_trouble(norm: float, bad: Sequence[str]) -> str:
    return (
        f"the gradient norm is {norm}; {len(bad)} parameters have gradients that are not finite "
        f"(first: {list(bad[:3])}). The optimizer did not step and the weights are unchanged"
    )


def log_prob_trouble(batch: Batch, values: np.ndarray) -> str:
    """ "" if all are finite."""
    if np.isfinite(values).all():
        return ""
    bad = int(batch.ragged("response_ids").sample_index[np.flatnonzero(~np.isfinite(values))[0]])
    return f"the log-probs of sample {batch.sample_id[bad]} are not finite; the weights may have diverged"
