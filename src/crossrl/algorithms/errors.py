"""The error of this package, and the checks that several files need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from crossrl.batch import Ragged


class AlgorithmError(ValueError):
    """An algorithm got an option or numbers it cannot work with; the message says which and what to change."""


def need_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise AlgorithmError(f"{key}={value!r} is not known; it can be: {', '.join(choices)}")


def need_same_shape(name: str, column: Ragged, other_name: str, other: Ragged) -> None:
    """Raise unless both columns have the same number of values for each sample."""
    if len(column) != len(other):
        raise AlgorithmError(f"{name} has {len(column)} samples, {other_name} has {len(other)}")
    if not column.same_shape(other):
        at = int(np.flatnonzero(column.lengths != other.lengths)[0])
        raise AlgorithmError(
            f"{name} has {column.lengths[at]} values at sample position {at}, {other_name} has {other.lengths[at]}"
        )


def need_finite(name: str, column: Ragged, sample_id: Sequence[str]) -> None:
    """Raise, naming the first sample and token, if a value is NaN or infinite."""
    bad = np.flatnonzero(~np.isfinite(column.values))
    if len(bad):
        at = int(bad[0])
        sample = int(column.sample_index[at])
        raise AlgorithmError(
            f"{name}: {column.values[at]} in sample {sample_id[sample]!r} at token {at - int(column.offsets[sample])} "
            f"({len(bad)} of {len(column.values)} values are not finite)"
        )
