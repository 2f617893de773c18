"""Records on disk: one folder per call of a stage, complete when it is visible, believed only by digest.

    record.json            see ``crossrl.tape.header``
    tensors.safetensors    ragged and number columns (and the marks of what was read), mapped on load
    columns.json           strings and nested values: one JSON map, one column after the other
    state.safetensors      only with an update whose state goes along: weights and optimizer after it

Every byte is covered by a digest, and no byte is used before its digest is checked. The format is specified in
``docs/reference/record-format.md``. Do not change files that a running program has mapped: publish a new folder.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from crossrl.batch import Batch, BatchError, Ragged
from crossrl.files import file_digest
from crossrl.tape import digest, tensorfile
from crossrl.tape.errors import CorruptRecord, RecordMissing
from crossrl.tape.header import COLUMNS, HEADER, MAX_BYTES, STATE, TENSORS, BadHeader, FieldEntry, Header, from_bytes
from crossrl.tape.publish import END, Draft, clean_leftovers, glue, write_record
from crossrl.tape.tensorfile import Slot
from crossrl.tape.values import BadJson, loads

__all__ = ["Draft", "Record", "clean_leftovers", "read_record", "write_record"]


@dataclass(frozen=True, slots=True)
class Record:
    """A record that was opened. Columns are mapped and their digests checked when first asked for.

    Arrays are private to the process: changing one in place changes neither the file nor what others see.

    >>> read_record(path).only(["response_ids", "reward"])        # doctest: +SKIP
    """

    path: Path
    header: Header
    nbytes: int
    _slots: Mapping[str, Slot]
    _maps: Mapping[str, memoryview]
    _checked: dict[str, Any] = field(default_factory=dict)

    @property
    def sample_id(self) -> tuple[str, ...]:
        return self.header.sample_id

    @property
    def batch(self) -> Batch:
        """All columns, each checked. Raises ``CorruptRecord``."""
        return self.only(self.header.fields)

    def only(self, names: Iterable[str]) -> Batch:
        """These columns, each checked. Raises ``CorruptRecord``, or ``BatchError`` for a column that is not there."""
        names = list(names)
        for name in names:
            if name not in self.header.fields:
                raise BatchError(f"{self.path}: no column {name!r}; there are: {', '.join(sorted(self.header.fields))}")
        meanings = {n: m for n, m in self.header.meanings.items() if n in names}
        return Batch(self.sample_id, {n: self.column(n) for n in names}, meanings, self.header.info)

    def column(self, name: str) -> Ragged | np.ndarray | list[Any]:
        """One column, its digest checked. Raises ``CorruptRecord``."""
        if name not in self._checked:
            entry = self.header.fields[name]
            self._checked[name] = self._text(name, entry) if entry.kind == "value" else self._numbers(name, entry)
        return self._checked[name]

    def marks(self, name: str) -> np.ndarray:
        """uint64 ``[N]``: a short digest of what the stage read in field ``name``, per sample."""
        key = f"reads.{name}"
        if key not in self._checked:
            values = self._tensor(key)
            found = digest.number_digest("uint64", values)
            self._compare(key, found, self.header.reads[name].marks, self._slots[key].start, TENSORS)
            self._checked[key] = values
        return self._checked[key]

    @property
    def has_state(self) -> bool:
        return STATE in self.header.files

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that go along with an update, by name. Raises ``CorruptRecord``, ``RecordMissing`` for none."""
        path = self.path / STATE
        if not self.has_state:
            raise RecordMissing(f"{self.path} was recorded without the state after the update (tape.state=True)")
        self._compare_state(path)
        try:
            return load_file(path)
        except SafetensorError as error:
            raise CorruptRecord(path, str(error)) from None

    def _compare_state(self, path: Path) -> None:
        try:
            found = f"sha256:{file_digest(path)}"
        except OSError as error:
            raise CorruptRecord(path, f"cannot be read: {error.strerror}") from None
        if found != self.header.files[STATE].head:
            raise CorruptRecord(path, f"digest {found}, expected {self.header.files[STATE].head}")

    def check(self) -> None:
        """Check the digest of everything in the record. Raises ``CorruptRecord``."""
        if self.has_state:
            self._compare_state(self.path / STATE)
        for name in self.header.fields:
            self.column(name)
        for name in self.header.reads:
            self.marks(name)

    def _tensor(self, name: str) -> np.ndarray:
        return tensorfile.view(self._maps[TENSORS], self._slots[name])

    def _numbers(self, name: str, entry: FieldEntry) -> Ragged | np.ndarray:
        values, start = self._tensor(name), self._slots[name].start
        if entry.kind == "number":
            self._compare(name, digest.number_digest(entry.dtype, values), entry.digest, start, TENSORS)
            return values
        lengths = self._tensor(f"{name}.lengths")
        self._compare(name, digest.ragged_digest(entry.dtype, lengths, values), entry.digest, start, TENSORS)
        # Each at most the sum, before they are added up: a sum of huge lengths could wrap around to the right one.
        if lengths.size and not 0 <= int(lengths.min()) <= int(lengths.max()) <= values.size:
            raise CorruptRecord(self.path / TENSORS, f"field {name!r} has a length beyond its {values.size} values")
        try:
            return Ragged(values, lengths)
        except BatchError as error:
            raise CorruptRecord(self.path / TENSORS, f"field {name!r}: {error}") from None

    def _text(self, name: str, entry: FieldEntry) -> list[Any]:
        assert entry.offset is not None and entry.nbytes is not None
        text = bytes(self._maps[COLUMNS][entry.offset : entry.offset + entry.nbytes])
        self._compare(name, digest.value_digest(len(self.sample_id), text), entry.digest, entry.offset, COLUMNS)
        try:
            column = loads(text)
        except BadJson as error:
            raise CorruptRecord(self.path / COLUMNS, f"field {name!r} at offset {entry.offset}: {error}") from None
        if not isinstance(column, list) or len(column) != len(self.sample_id):
            raise CorruptRecord(
                self.path / COLUMNS, f"field {name!r} does not hold one value for each of {len(self.sample_id)} samples"
            )
        return column

    def _compare(self, name: str, found: str, expected: str, offset: int, file: str) -> None:
        if found != expected:
            raise CorruptRecord(
                self.path / file, f"field {name!r} at offset {offset}: digest {found}, expected {expected}"
            )


def read_record(path: Path | str, verify: Literal["eager", "lazy"] = "lazy") -> Record:
    """Open the record in folder ``path``.

    ``lazy``: ``record.json``, sizes and layout are checked now, each column when it is first used. ``eager``:
    everything now. Raises ``RecordMissing`` when there is no such folder, ``CorruptRecord`` for all else.
    """
    path = Path(path)
    sizes = _list(path)
    header = _read_header(path)
    _check_files(path, header, sizes)
    maps = {name: _map(path / name, entry.nbytes) for name, entry in header.files.items() if name != STATE}
    slots = _check_tensors(path / TENSORS, header, maps[TENSORS]) if TENSORS in maps else {}
    _check_layout(path, header, slots)
    _check_columns(path / COLUMNS, header, maps.get(COLUMNS, memoryview(b"")))
    record = Record(path, header, sum(sizes.values()), slots, maps)
    if verify == "eager":
        record.check()
    return record


def _list(path: Path) -> dict[str, int]:
    """The files of the folder and their sizes; anything but plain files with known names is refused."""
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise CorruptRecord(path, "not a folder (links are not followed)")
        entries = list(os.scandir(path))
    except FileNotFoundError:
        raise RecordMissing(f"no record at {path}") from None
    sizes = {}
    for entry in entries:
        if entry.name not in (HEADER, TENSORS, COLUMNS, STATE):
            raise CorruptRecord(path, f"holds {entry.name!r}, which is no part of a record")
        if not entry.is_file(follow_symlinks=False):
            raise CorruptRecord(path, f"{entry.name} is not a plain file (links are not followed)")
        sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    if HEADER not in sizes:
        raise CorruptRecord(path, f"has no {HEADER}")
    return sizes


def _open(path: Path) -> int:
    # Not following links and not blocking: between listing and opening, the file may have become a link or a pipe.
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CorruptRecord(path, f"cannot be opened: {error.strerror}") from None


def _read_header(path: Path) -> Header:
    with os.fdopen(_open(path / HEADER), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise CorruptRecord(path / HEADER, f"has {size} bytes, more than {MAX_BYTES}")
        data = file.read(size)
    try:
        return from_bytes(data)
    except BadHeader as error:
        raise CorruptRecord(path / HEADER, str(error)) from None


def _check_files(path: Path, header: Header, sizes: Mapping[str, int]) -> None:
    for name in sorted({HEADER, *header.files} ^ set(sizes)):
        what = "is missing" if name in header.files else f"is not listed in {HEADER}"
        raise CorruptRecord(path / name, what)
    for name, entry in header.files.items():
        if entry.nbytes != sizes[name]:
            raise CorruptRecord(path / name, f"has {sizes[name]} bytes, expected {entry.nbytes}")
        if entry.nbytes == 0:
            raise CorruptRecord(path / name, "is empty")


def _map(path: Path, nbytes: int) -> memoryview:
    handle = _open(path)
    try:
        # Copy on write: a stage may work in place on what it is given, and no file changes by it.
        return memoryview(mmap.mmap(handle, nbytes, access=mmap.ACCESS_COPY))
    except (OSError, ValueError) as error:
        raise CorruptRecord(path, f"cannot be mapped: {error}") from None
    finally:
        os.close(handle)


def _check_tensors(path: Path, header: Header, data: memoryview) -> dict[str, Slot]:
    expected = header.files[TENSORS].head
    try:
        size = tensorfile.head_size(bytes(data[:8]), len(data))
        found = digest.plain_digest(data[:size])
        if found != expected:
            raise CorruptRecord(path, f"bytes 0 to {size} have digest {found}, expected {expected}")
        return tensorfile.parse(bytes(data[:size]), len(data))
    except tensorfile.BadTensors as error:
        raise CorruptRecord(path, str(error)) from None


def _check_layout(path: Path, header: Header, slots: Mapping[str, Slot]) -> None:
    """The tensors are exactly those that the fields need, with the right types and sizes."""
    samples = len(header.sample_id)
    want: dict[str, tuple[str, int]] = {f"reads.{name}": ("uint64", samples) for name in header.reads}
    for name, entry in header.fields.items():
        if entry.kind == "number":
            want[name] = (entry.dtype, samples)
        elif entry.kind == "ragged":
            want[name] = (entry.dtype, entry.values or 0)
            want[f"{name}.lengths"] = ("int64", samples)
    found = {name: (slot.dtype, slot.size) for name, slot in slots.items()}
    for name in sorted(set(want) | set(found)):
        if want.get(name) != found.get(name):
            raise CorruptRecord(
                path / TENSORS, f"tensor {name!r:.80} is {found.get(name)}, expected {want.get(name)} (dtype, size)"
            )


def _check_columns(path: Path, header: Header, data: memoryview) -> None:
    """The value columns lie one after the other, with nothing but JSON's own punctuation between them."""
    entries = [(e.offset or 0, e.nbytes or 0, name) for name, e in header.fields.items() if e.kind == "value"]
    at = 0
    for i, (offset, nbytes, name) in enumerate(sorted(entries)):
        between = glue(name, first=i == 0)
        if offset != at + len(between) or bytes(data[at:offset]) != between:
            raise CorruptRecord(path, f"at offset {at}: field {name!r} does not begin as written")
        at = offset + nbytes
    end = END if entries else b""
    if at > len(data) or len(data) - at != len(end) or bytes(data[at:]) != end:
        raise CorruptRecord(path, f"at offset {at}: the file does not end as written")
