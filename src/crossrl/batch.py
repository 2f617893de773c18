"""The data that flows between stages: columns keyed by ``sample_id``.

A column is one of three things, each with exactly one entry per sample:

- ``Ragged``: numbers of varying length per sample (tokens, masks, log-probs), stored flat, never padded;
- ``numpy.ndarray`` of shape ``[N]``: one number per sample;
- ``list`` of length N: strings or JSON-like values, for people and for verifiers.

Joins are by id, never by position. Nothing is overwritten: a stage that wants to write a field that is
already there is a mistake, and an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Column = "Ragged | np.ndarray | list[Any]"


class BatchError(ValueError):
    """Two batches do not fit together, or a column does not fit its batch."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Numbers of varying length per sample, stored flat.

    ``values``: shape ``[sum(lengths)]``; ``lengths``: int64, shape ``[N]``.

    >>> r = Ragged.from_rows([[1, 2, 3], [], [4]], np.int32)
    >>> r.row(0), r.lengths.tolist()
    (array([1, 2, 3], dtype=int32), [3, 0, 1])
    """

    values: np.ndarray
    lengths: np.ndarray
    _offsets: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = np.asarray(self.lengths, dtype=np.int64)
        values = np.asarray(self.values)
        if lengths.ndim != 1 or values.ndim != 1:
            raise BatchError(
                f"ragged column: values and lengths must be one-dimensional, "
                f"found shapes {values.shape} and {lengths.shape}"
            )
        if lengths.size and int(lengths.min()) < 0:
            raise BatchError("ragged column: a length is negative")
        if int(lengths.sum()) != values.shape[0]:
            raise BatchError(
                f"ragged column: lengths add up to {int(lengths.sum())}, but there are {values.shape[0]} values"
            )
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "_offsets", np.concatenate([[0], np.cumsum(lengths)]))

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[Any] | np.ndarray], dtype: Any) -> Ragged:
        """One row per sample; ``dtype`` is needed because a row may be empty."""
        arrays = [np.asarray(row, dtype=dtype).reshape(-1) for row in rows]
        lengths = np.array([len(a) for a in arrays], dtype=np.int64)
        return cls(np.concatenate(arrays) if arrays else np.zeros(0, dtype), lengths)

    @classmethod
    def full_like(cls, other: Ragged, fill: Any, dtype: Any) -> Ragged:
        """``fill`` at every position of ``other``."""
        return cls(np.full(other.values.shape, fill, dtype), other.lengths)

    @classmethod
    def spread(cls, per_sample: np.ndarray, lengths: np.ndarray) -> Ragged:
        """Each sample's number at each of its positions: ``[N]`` to ragged."""
        return cls(np.repeat(np.asarray(per_sample), lengths), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    @property
    def offsets(self) -> np.ndarray:
        """int64 ``[N + 1]``: sample i is ``values[offsets[i]:offsets[i + 1]]``."""
        return self._offsets

    @property
    def sample_index(self) -> np.ndarray:
        """int64 ``[sum(lengths)]``: the position in the batch of the sample that each value belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def row(self, i: int) -> np.ndarray:
        return self.values[self._offsets[i] : self._offsets[i + 1]]

    def rows(self) -> list[np.ndarray]:
        return [self.row(i) for i in range(len(self))]

    def take(self, index: np.ndarray) -> Ragged:
        """Samples ``index`` (positions), in that order, as a copy."""
        index = np.asarray(index, dtype=np.int64)
        parts = [self.row(int(i)) for i in index]
        values = np.concatenate(parts) if parts else self.values[:0].copy()
        return Ragged(values, self.lengths[index])

    def sums(self) -> np.ndarray:
        """float64 ``[N]``: the sum over each sample's values (0 for an empty one)."""
        return np.bincount(self.sample_index, weights=self.values, minlength=len(self)).astype(np.float64)

    def same_shape(self, other: Ragged) -> bool:
        return bool(np.array_equal(self.lengths, other.lengths))


@dataclass(frozen=True, slots=True)
class Meaning:
    """What the numbers of a log-prob column are; two columns are comparable only if these agree.

    ``temperature``: logits were divided by it before the softmax (1.0: the raw distribution).
    ``truncation``: "none", or the top-p/top-k rule after which the distribution was renormalised.
    ``engine``: which engine computed it. ``weight_version``: with which weights.

    >>> Meaning(temperature=0.6, truncation="none", engine="hf", weight_version=3).comparable(
    ...     Meaning(temperature=1.0, truncation="none", engine="fsdp", weight_version=3))
    False
    """

    temperature: float = 1.0
    truncation: str = "none"
    engine: str = ""
    weight_version: int = -1

    def comparable(self, other: Meaning) -> bool:
        """Engine and weights may differ (that is what one compares); the distribution may not."""
        return self.temperature == other.temperature and self.truncation == other.truncation


@dataclass(frozen=True, slots=True)
class Batch:
    """Columns over the same samples.

    ``sample_id``: one id per sample, unique. ``columns``: name to column (names: ``crossrl.schema``).
    ``meanings``: for log-prob columns, what they are. ``info``: facts about the call as a whole
    (metrics, digests), JSON-like; not joined, each stage's own.

    >>> b = Batch(("a", "b"), {"reward": np.array([1.0, 0.0])})
    >>> b.join(Batch(("b", "a"), {"score": np.array([5.0, 7.0])}))["score"].tolist()
    [7.0, 5.0]
    """

    sample_id: tuple[str, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    meanings: Mapping[str, Meaning] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_id", tuple(self.sample_id))
        if len(set(self.sample_id)) != len(self.sample_id):
            seen: set[str] = set()
            twice = next(s for s in self.sample_id if s in seen or seen.add(s))  # type: ignore[func-returns-value]
            raise BatchError(f"sample id {twice!r} occurs twice in one batch")
        for name, column in self.columns.items():
            if not isinstance(column, (Ragged, np.ndarray, list)):
                raise BatchError(f"column {name!r} is a {type(column).__name__}: want Ragged, ndarray or list")
            if isinstance(column, np.ndarray) and column.ndim != 1:
                raise BatchError(f"column {name!r} has shape {column.shape}: want [N]")
            if len(column) != len(self.sample_id):
                raise BatchError(f"column {name!r} has {len(column)} entries for {len(self.sample_id)} samples")

    def __len__(self) -> int:
        return len(self.sample_id)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Any:
        try:
            return self.columns[name]
        except KeyError:
            raise BatchError(f"no column {name!r}; there are: {', '.join(sorted(self.columns))}") from None

    def ragged(self, name: str) -> Ragged:
        column = self[name]
        if not isinstance(column, Ragged):
            raise BatchError(f"column {name!r} is not ragged")
        return column

    def array(self, name: str) -> np.ndarray:
        column = self[name]
        if not isinstance(column, np.ndarray):
            raise BatchError(f"column {name!r} is not an array of one number per sample")
        return column

    def with_columns(self, meanings: Mapping[str, Meaning] | None = None, **columns: Any) -> Batch:
        """More columns over the same samples, in this batch's order. Overwriting is an error."""
        twice = sorted(set(columns) & set(self.columns))
        if twice:
            raise BatchError(f"column {twice[0]!r} is already there; a stage never overwrites")
        return Batch(self.sample_id, {**self.columns, **columns}, {**self.meanings, **(meanings or {})}, self.info)

    def only(self, names: Iterable[str]) -> Batch:
        """These columns alone; a missing one is an error."""
        names = list(names)
        return Batch(
            self.sample_id,
            {n: self[n] for n in names},
            {n: m for n, m in self.meanings.items() if n in names},
            self.info,
        )

    def index_of(self, ids: Iterable[str]) -> np.ndarray:
        """int64: where each of ``ids`` is in this batch. An unknown id is an error."""
        where = {s: i for i, s in enumerate(self.sample_id)}
        try:
            return np.array([where[s] for s in ids], dtype=np.int64)
        except KeyError as error:
            raise BatchError(f"sample id {error.args[0]!r} is not in this batch") from None

    def take(self, index: Sequence[int] | np.ndarray) -> Batch:
        """Samples at these positions, in that order, as a copy."""
        index = np.asarray(index, dtype=np.int64)

        def pick(column: Any) -> Any:
            if isinstance(column, Ragged):
                return column.take(index)
            if isinstance(column, np.ndarray):
                return column[index]
            return [column[int(i)] for i in index]

        return Batch(
            tuple(self.sample_id[int(i)] for i in index),
            {n: pick(c) for n, c in self.columns.items()},
            self.meanings,
            self.info,
        )

    def join(self, other: Batch) -> Batch:
        """The columns of both, joined by sample id, in this batch's order; ``info`` is the other's.

        Raises ``BatchError`` when the id sets differ or a column is in both.
        """
        if other.sample_id != self.sample_id:
            mine, theirs = set(self.sample_id), set(other.sample_id)
            if mine != theirs:
                missing, extra = sorted(mine - theirs), sorted(theirs - mine)
                raise BatchError(
                    f"the sample ids differ: {len(missing)} missing (first: {missing[:1]}), "
                    f"{len(extra)} unknown (first: {extra[:1]})"
                )
            other = other.take(other.index_of(self.sample_id))
        joined = self.with_columns(other.meanings, **other.columns)
        return Batch(joined.sample_id, joined.columns, joined.meanings, other.info)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The samples of all, in order. All must have the same columns and meanings."""
        if not batches:
            raise BatchError("nothing to concatenate")
        first = batches[0]
        for other in batches[1:]:
            if set(other.columns) != set(first.columns):
                odd = sorted(set(other.columns) ^ set(first.columns))
                raise BatchError(f"cannot concatenate: column {odd[0]!r} is not in all batches")
            if other.meanings != first.meanings:
                raise BatchError("cannot concatenate: log-prob columns with different meanings")

        def glue(name: str) -> Any:
            parts = [b[name] for b in batches]
            if isinstance(parts[0], Ragged):
                return Ragged(np.concatenate([p.values for p in parts]), np.concatenate([p.lengths for p in parts]))
            if isinstance(parts[0], np.ndarray):
                return np.concatenate(parts)
            return [value for part in parts for value in part]

        ids = tuple(s for b in batches for s in b.sample_id)
        return Batch(ids, {n: glue(n) for n in first.columns}, first.meanings, first.info)
