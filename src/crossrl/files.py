"""Publish files by rename: what is visible under its name is complete and on the disk."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

LOCK_S = 5.0  # for how long a folder's lock is asked for


class FolderInUse(RuntimeError):
    """Another run writes to the folder; the message names it and what to do."""


def lock_folder(folder: Path, limit_s: float = LOCK_S) -> IO[str]:
    """Hold ``folder`` for this run as long as the returned file is open: two runs in one would overwrite each other.

    The lock goes with the process, even a killed one. ``.lock`` holds the machine and the process of who has it.
    Raises ``FolderInUse``, or ``OSError`` where the file system has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("a")  # what the holder wrote stays if this one is refused
    try:
        end = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise FolderInUse(
                        f"another run is writing to {folder}; wait for it, or set trainer.default_local_dir"
                    ) from None
                time.sleep(0.02)  # somebody looks whether it is held (crossrl verdict), for a moment
        file.truncate(0)
        file.write(f"{socket.gethostname()} {os.getpid()}\n")
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(paths: Iterable[Path]) -> list[str]:
    """SHA-256 of each file; in parallel, since hashing releases the interpreter lock."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(file_digest, paths))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def dump_json(value: Any) -> str:
    """Sorted, readable JSON; NaN and infinity are refused."""
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False, sort_keys=True) + "\n"


def publish_text(path: Path, text: str) -> None:
    """Write ``text`` (UTF-8) to ``path`` by way of a temporary file beside it: replaced whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o666 & ~umask())  # mkstemp's 0600 would keep colleagues from reading it
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def publish_folder(path: Path) -> Iterator[Path]:
    """Give a new, empty folder to fill; it becomes ``path`` if the block ends well, and is removed if not.

    Raises ``FileExistsError`` when there is something at ``path``: a published folder is never changed.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists already")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~umask())
        for folder, _, names in os.walk(temporary):
            for name in names:
                (Path(folder) / name).chmod(0o666 & ~umask())  # safetensors writes 0600
                _sync(Path(folder) / name)
            sync_folder(Path(folder))
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)


def remove_leftovers(parent: Path) -> None:
    """Remove temporary files and folders of writers that were killed; for the only writer below ``parent``."""
    for path in parent.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Bring a folder's entries (new names, renames) to the disk."""
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def umask() -> int:
    """The process's umask; it can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
