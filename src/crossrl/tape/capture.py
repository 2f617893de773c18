"""What a batch holds at one moment, independent of the batch: the snapshot that goes into a record.

Arrays are copied, strings and nested values become JSON text at once. A later in-place change, in a stage or
in somebody's reward function, does not reach the record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from crossrl.batch import Batch, BatchError, Meaning, Ragged
from crossrl.tape import digest
from crossrl.tape.errors import CannotStore
from crossrl.tape.tensorfile import DTYPES
from crossrl.tape.values import LeftOut, Unstorable, dumps, encode_column, join_column, loads, plain

Kind = Literal["ragged", "number", "value"]


@dataclass(frozen=True, slots=True)
class Captured:
    """One column. ``values``: of a ragged or number one; ``lengths``: of a ragged one; ``texts``: JSON per sample."""

    kind: Kind
    dtype: str
    values: np.ndarray | None = None
    lengths: np.ndarray | None = None
    texts: tuple[bytes, ...] = ()

    def __len__(self) -> int:
        if self.kind == "value":
            return len(self.texts)
        return len(self.lengths if self.lengths is not None else self._values)

    @property
    def _values(self) -> np.ndarray:
        assert self.values is not None
        return self.values

    @property
    def nbytes(self) -> int:
        arrays = sum(a.nbytes for a in (self.values, self.lengths) if a is not None)
        return arrays + sum(map(len, self.texts))

    def take(self, index: np.ndarray) -> Captured:
        """Samples ``index`` (positions), in that order."""
        if self.lengths is not None:
            rows = Ragged(self._values, self.lengths).take(index)
            return replace(self, values=rows.values, lengths=rows.lengths)
        if self.kind == "number":
            return replace(self, values=self._values[index])
        return replace(self, texts=tuple(self.texts[int(i)] for i in index))

    def digest(self, threads: int | None = None) -> str:
        """The content digest of the column; the samples' order counts."""
        if self.lengths is not None:
            return digest.ragged_digest(self.dtype, self.lengths, self._values, threads)
        if self.kind == "number":
            return digest.number_digest(self.dtype, self._values, threads)
        return digest.value_digest(len(self.texts), join_column(self.texts), threads)

    def marks(self) -> np.ndarray:
        """uint64 ``[N]``: a short digest of each sample's value: which samples differ (the digest says whether any)."""
        if self.kind == "value":
            rows: Iterable[Any] = self.texts
        else:
            data = digest.as_bytes(self._values)
            size = self._values.dtype.itemsize
            lengths = self.lengths if self.lengths is not None else np.ones(len(self), np.int64)
            ends = np.cumsum(lengths) * size
            rows = (data[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=False))
        return np.array([_mark(row) for row in rows], np.uint64)


def _mark(row: bytes | memoryview) -> int:
    return int.from_bytes(hashlib.sha256(row).digest()[:8], "little")


@dataclass(frozen=True, slots=True)
class Reads:
    """What a stage was given, by digest. ``marks``: see ``Captured.marks``."""

    kind: Kind
    dtype: str
    digest: str
    marks: np.ndarray


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A batch at one moment. ``info``: JSON-like, a copy. ``left_out``: what could not be stored."""

    sample_id: tuple[str, ...]
    columns: Mapping[str, Captured]
    meanings: Mapping[str, Meaning]
    info: Mapping[str, Any]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.columns.values()) + sum(map(len, self.sample_id))


def capture(batch: Batch, leave_out: bool = True) -> Snapshot:
    """A snapshot of ``batch`` that shares nothing with it.

    ``leave_out``: what cannot be stored is left out and listed; else it raises ``CannotStore``.
    """
    columns: dict[str, Captured] = {}
    left_out: list[LeftOut] = []
    for name, column in batch.columns.items():
        captured = capture_column(name, column, batch.sample_id, leave_out, left_out)
        if captured is not None:
            columns[name] = captured
    info: dict[str, Any] = {}
    for key, value in batch.info.items():
        try:
            dropped: list[Unstorable] | None = [] if leave_out else None
            info[str(key)] = loads(dumps(plain(value, dropped)))
            left_out += [LeftOut(f"info.{key}", d.path, d.what, "") for d in dropped or ()]
        except Unstorable as error:
            _cannot(f"info.{key}", error.path, error.what, "", leave_out, left_out)
    meanings = {name: m for name, m in batch.meanings.items() if name in columns}
    return Snapshot(batch.sample_id, columns, meanings, info, tuple(left_out))


def join(out: Snapshot, carried: Snapshot) -> Snapshot:
    """``out`` and, in its order of samples, the columns of ``carried``; both of the same samples."""
    if not carried.columns:
        return out
    if set(out.sample_id) != set(carried.sample_id):
        raise BatchError("a stage returned other samples than it was given; there is nothing to join by")
    if out.sample_id == carried.sample_id:
        columns = dict(carried.columns)
    else:
        where = {s: i for i, s in enumerate(carried.sample_id)}
        index = np.array([where[s] for s in out.sample_id], np.int64)
        columns = {name: column.take(index) for name, column in carried.columns.items()}
    return replace(
        out,
        columns={**columns, **out.columns},
        meanings={**carried.meanings, **out.meanings},
        left_out=carried.left_out + out.left_out,
    )


def capture_column(
    name: str,
    column: Any,
    sample_id: Sequence[str],
    leave_out: bool,
    left_out: list[LeftOut],
    copy: bool = True,
) -> Captured | None:
    """One column of a batch; None when it was left out as a whole. ``copy`` False: arrays are shared with the batch."""
    if isinstance(column, list):
        try:
            texts, dropped = encode_column(name, column, sample_id, leave_out)
        except Unstorable as error:
            raise CannotStore(_message(error.path, error.what)) from None
        left_out += dropped
        return Captured("value", "json", texts=tuple(texts))
    values = column.values if isinstance(column, Ragged) else column
    if values.dtype.name not in DTYPES:
        _cannot(name, "$", f"an array of dtype {values.dtype}", sample_id[0] if sample_id else "", leave_out, left_out)
        return None
    lengths = column.lengths if isinstance(column, Ragged) else None
    if copy:
        values, lengths = values.copy(), None if lengths is None else lengths.copy()
    return Captured("number" if lengths is None else "ragged", values.dtype.name, values, lengths)


def read_digests(batch: Batch, leave_out: bool = True) -> dict[str, Reads]:
    """Digest and marks of each column of ``batch``, for the record of the stage that reads it."""
    columns = {n: capture_column(n, c, batch.sample_id, leave_out, [], copy=False) for n, c in batch.columns.items()}
    return digests_of({name: column for name, column in columns.items() if column is not None})


def digests_of(columns: Mapping[str, Captured]) -> dict[str, Reads]:
    """The same for columns that were captured already."""
    return {name: Reads(c.kind, c.dtype, c.digest(), c.marks()) for name, c in columns.items()}


def _cannot(name: str, path: str, what: str, sample: str, leave_out: bool, left_out: list[LeftOut]) -> None:
    if not leave_out:
        raise CannotStore(_message(f"{name}, {path}", what))
    left_out.append(LeftOut(name, path, what, sample))


def _message(where: str, what: str) -> str:
    return (
        f"{where}: {what} cannot be stored in a record. Store null, booleans, numbers, strings, lists and maps with "
        f"string keys, or let the tape leave it out (tape.unstorable=leave_out)"
    )
