"""Pickles, opened by a child process that hands back numbers and JSON. This process never unpickles."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from crossrl.files import file_digests
from crossrl.hosts.verl_dumps.errors import DumpError

CHILD = Path(__file__).with_name("unpickle_child.py")
REFUSAL = (
    "{path} is a pickle. Opening a pickle runs whatever code it holds, with your rights: it can read your "
    "files and keys, and change or delete them; no check beforehand can rule that out. It was not opened.\n"
    "If you do not know who wrote it, do not open it. Ask for trainer.rollout_data_dir of verl instead (JSON Lines: "
    "text and scores), or record the run with the host (++tape.mode=record: everything, checked; "
    "docs/how-to/use-with-verl.md); both hold data only.\n"
    "If it is yours, or you trust its writer: the same command with --trust-pickle"
)


@dataclass(frozen=True, slots=True)
class Neutral:
    """What was in one file. ``digest``: of the file before it was opened. ``tensors``: by name, first dimension N.
    ``columns``: by name, N values each."""

    path: Path
    digest: str
    tensors: Mapping[str, np.ndarray]
    columns: Mapping[str, list[Any]]
    meta: Mapping[str, Any]
    left_out: Mapping[str, str]
    samples: int
    verl: str


def refuse(path: Path) -> DumpError:
    return DumpError(REFUSAL.format(path=path))


def unpickle(paths: Sequence[Path], python: str, limit_s: float) -> list[Neutral]:
    """What is in ``paths``, which the caller said to trust. One process opens all: importing verl takes a while.

    Waits for the child, ``limit_s`` seconds at most; then it and what it started are killed. ``python``: an interpreter
    that can import verl. Raises ``DumpError``.
    """
    digests = [f"sha256:{digest}" for digest in file_digests(paths)]
    folder = Path(tempfile.mkdtemp(prefix="crossrl-import-"))
    said = folder / "said.txt"
    try:
        with _running([python, str(CHILD), str(folder), *(str(p.absolute()) for p in paths)], said) as child:
            _finish(child, paths, python, limit_s, said)
        return [_take(folder, i, path, digest) for i, (path, digest) in enumerate(zip(paths, digests, strict=True))]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _running(command: list[str], said: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a session of its own, which is gone with all its children when the block ends."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CROSSRL_VERL": "0"}
    try:
        with said.open("xb") as file:  # no pipe: what the child starts could hold it open for ever
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )
    except OSError as error:
        raise DumpError(
            f"--python {command[0]} cannot be started ({error}): want an interpreter in which import verl works"
        ) from None
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _finish(child: subprocess.Popen[bytes], paths: Sequence[Path], python: str, limit_s: float, said: Path) -> None:
    try:
        child.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise DumpError(
            f"the process that opens {paths[0]}{' and others' if len(paths) > 1 else ''} was not done after "
            f"{limit_s:g} s and was killed. Importing verl can take a minute: give --timeout more, or look at what the "
            f"file does"
        ) from None
    if child.returncode == 0:
        return
    with said.open("rb") as file:
        file.seek(max(0, said.stat().st_size - 2000))
        last = file.read().decode(errors="replace").strip() or "(it said nothing)"
    hint = (
        f"; give an interpreter in which import verl works: --python PATH (this was {python})"
        if "verl cannot be imported" in last or "No module named" in last
        else ""
    )
    raise DumpError(f"the process that opens the pickles ended with {child.returncode}{hint}. It said:\n{last}")


def _take(folder: Path, i: int, path: Path, digest: str) -> Neutral:
    """Read what the child wrote. It ran a stranger's code, so its files are checked like any stranger's."""
    numbers, text = folder / f"{i}.safetensors", folder / f"{i}.json"
    try:
        for file in (numbers, text):
            if not stat.S_ISREG(file.lstat().st_mode):
                raise DumpError(f"{path}: the process that opened it left something else than a file at {file.name}")
        tensors = load_file(numbers)
        about = json.loads(text.read_text(encoding="utf-8"))
        columns, meta, left_out = (dict(about[key]) for key in ("columns", "meta", "left_out"))
        samples, verl = int(about["samples"]), str(about["verl"])
        lengths = {key: len(values) for key, values in [*tensors.items(), *columns.items()]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise DumpError(f"{path}: what the process that opened it handed back cannot be read ({error!r})") from None
    for key, count in lengths.items():
        if count != samples:
            raise DumpError(f"{path}: {key} has {count} entries for {samples} samples")
    return Neutral(path, digest, tensors, columns, meta, left_out, samples, verl)
