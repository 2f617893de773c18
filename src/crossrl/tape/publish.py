"""Writing a record: a temporary folder, flushed to the disk, then renamed. What is visible is complete."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from crossrl.files import file_digest, umask
from crossrl.tape import digest, tensorfile
from crossrl.tape.capture import Captured, Reads, Snapshot
from crossrl.tape.errors import CannotStore, RecordExists
from crossrl.tape.header import (
    COLUMNS,
    HEADER,
    MAX_BYTES,
    NAME,
    STATE,
    TENSORS,
    FieldEntry,
    FileEntry,
    Header,
    ReadEntry,
    to_bytes,
)
from crossrl.tape.values import Unstorable, join_column

TEMPORARY = ".tmp-"


@dataclass(frozen=True, slots=True)
class Draft:
    """What is to be written: ``header`` with the facts of the call, without fields, reads, files and sample ids.

    ``state``: tensors by name that go along (weights, optimizer); not copied, so they must not change until written.
    """

    header: Header
    snapshot: Snapshot
    reads: Mapping[str, Reads] = field(default_factory=dict)
    state: Mapping[str, torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Memory that the draft holds; ``state`` belongs to somebody else."""
        return self.snapshot.nbytes + sum(r.marks.nbytes for r in self.reads.values())


def write_record(path: Path, draft: Draft, threads: int | None = None) -> int:
    """Publish ``draft`` as the folder ``path`` and return its size in bytes.

    Written to a temporary folder next to ``path``, flushed to the disk, then renamed: whoever sees the folder sees
    all of it. Raises ``RecordExists`` (never overwrites), ``CannotStore``, or ``OSError`` from the file system.
    """
    path = Path(path)
    if os.path.lexists(path):
        raise _exists(path)
    _make_folders(path.parent)
    temporary = path.parent / f"{TEMPORARY}{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        # Held open and locked until the folder has its name: `clean_leftovers` sees that somebody is at work.
        with (temporary / HEADER).open("xb") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            size = _write_files(temporary, file, draft, threads)
            _sync_folder(temporary)
            try:
                temporary.rename(path)
            except OSError as error:
                raise (_exists(path) if os.path.lexists(path) else error) from None
        _sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return size


def _exists(path: Path) -> RecordExists:
    return RecordExists(
        f"{path} is already there, and a record is never overwritten. Move it away, or choose another folder "
        f"(trainer.default_local_dir, tape.dir; for rollout skip actor_rollout_ref.rollout.skip_dump_dir)"
    )


def _make_folders(folder: Path) -> None:
    if not folder.is_dir():
        _make_folders(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_files(folder: Path, header_file: BinaryIO, draft: Draft, threads: int | None) -> int:
    columns = draft.snapshot.columns
    for name in [*columns, *draft.reads]:
        if not NAME.fullmatch(name):
            raise CannotStore(f"field {name!r}: a field's name is letters, digits and underscores, at most 64")
    fields = {
        name: FieldEntry(c.kind, c.dtype, c.digest(threads), values=None if c.lengths is None else c.values.size)
        for name, c in columns.items()
        if c.values is not None
    }
    files: dict[str, FileEntry] = {}
    arrays = _arrays(columns, draft.reads)
    if arrays:
        head, order = tensorfile.layout(arrays)
        with (folder / TENSORS).open("xb") as file:
            file.write(head)
            for name in order:
                file.write(digest.as_bytes(arrays[name]))
            files[TENSORS] = FileEntry(_finish(file), digest.plain_digest(head))
    texts = {name: c for name, c in columns.items() if c.kind == "value"}
    if texts:
        with (folder / COLUMNS).open("xb") as file:
            fields |= _write_columns(file, texts, threads)
            files[COLUMNS] = FileEntry(_finish(file))
    if draft.state is not None:
        files[STATE] = _write_state(folder / STATE, draft.state)
    reads = {
        name: ReadEntry(r.kind, r.dtype, r.digest, digest.number_digest("uint64", r.marks))
        for name, r in draft.reads.items()
    }
    header = replace(
        draft.header, sample_id=draft.snapshot.sample_id, fields=fields, reads=reads, files=files,
        meanings=draft.snapshot.meanings, info=draft.snapshot.info, left_out=draft.snapshot.left_out,
    )  # fmt: skip
    try:
        data = to_bytes(header)
    except Unstorable as error:
        raise CannotStore(f"{HEADER}: {error} cannot be stored") from None
    if len(data) > MAX_BYTES:
        raise CannotStore(f"{HEADER} would have {len(data)} bytes (limit {MAX_BYTES}): record fewer samples per call")
    header_file.write(data)
    return _finish(header_file) + sum(f.nbytes for f in files.values())


def _write_state(path: Path, state: Mapping[str, torch.Tensor]) -> FileEntry:
    try:
        save_file({name: t.detach().contiguous() for name, t in state.items()}, path)
    except SafetensorError as error:  # its name for whatever the file system says, a full disk for one
        raise OSError(str(error)) from error
    path.chmod(0o666 & ~umask())  # safetensors writes 0600, which would keep colleagues from reading it
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileEntry(path.stat().st_size, f"sha256:{file_digest(path)}")


def _arrays(columns: Mapping[str, Captured], reads: Mapping[str, Reads]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for name, column in columns.items():
        if column.values is not None:
            arrays[name] = column.values
        if column.lengths is not None:
            arrays[f"{name}.lengths"] = column.lengths
    return arrays | {f"reads.{name}": r.marks for name, r in reads.items()}


def _write_columns(file: BinaryIO, columns: Mapping[str, Captured], threads: int | None) -> dict[str, FieldEntry]:
    fields = {}
    for i, (name, column) in enumerate(columns.items()):
        file.write(glue(name, first=i == 0))
        text = join_column(column.texts)
        fields[name] = FieldEntry(
            "value", "json", digest.value_digest(len(column), text, threads), offset=file.tell(), nbytes=len(text)
        )
        file.write(text)
    file.write(END)
    return fields


END = b"\n}\n"


def glue(name: str, first: bool) -> bytes:
    """What stands between the columns in ``columns.json``; with ``END`` it makes the file one JSON map."""
    return (b"{\n" if first else b",\n") + f'"{name}":'.encode()


def _finish(file: BinaryIO) -> int:
    file.flush()
    os.fsync(file.fileno())
    return file.tell()


def clean_leftovers(folder: Path, min_age_s: float = 10.0) -> list[Path]:
    """Remove temporary folders in ``folder`` whose writer is gone; returns which.

    A folder younger than ``min_age_s``, or whose ``record.json`` a living writer holds locked, stays.
    """
    removed = []
    for path in folder.glob(f"{TEMPORARY}*"):
        with suppress(OSError):
            if path.is_symlink() or time.time() - path.stat().st_mtime < min_age_s or _locked(path / HEADER):
                continue
            shutil.rmtree(path)
            removed.append(path)
    return removed


def _locked(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
