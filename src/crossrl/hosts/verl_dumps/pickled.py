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

from crossrl.hosts.verl_dumps.errors import DumpError

CHILD = Path(__file__).with_name("unpickle_child.py")
REFUSAL = (
    "{path} is a pickle. Opening a pickle runs whatever its writer put into it, with your rights: it can read your "
    "files and keys, and change or delete them; no check beforehand can rule that out. It was not opened.\n"
    "If you do not know who wrote it, do not open it. Ask for trainer.rollout_data_dir of verl instead (JSON Lines: "
    "text and scores), or record the run with the host (++tape.mode=record: everything, checked; "
    "docs/how-to/use-with-verl.md); both hold data only.\n"
    "If it is yours, or you trust its writer: the same command with --trust-pickle"
)


@dataclass(frozen=True, slots=True)
class Neutral:
    """What was in one file. ``tensors``: by name, first dimension N. ``columns``: by name, N values each."""

    path: Path
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
    folder = Path(tempfile.mkdtemp(prefix="crossrl-import-"))
    try:
        with _running([python, str(CHILD), str(folder), *(str(p.absolute()) for p in paths)]) as child:
            _finish(child, paths, python, limit_s)
        return [_take(folder, i, path) for i, path in enumerate(paths)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A child in a session of its own, which is gone with all its children when the block ends."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CROSSRL_VERL": "0"}
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env=environment, start_new_session=True,
        )  # fmt: skip
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
        if child.stdout is not None:
            child.stdout.close()


def _finish(child: subprocess.Popen[str], paths: Sequence[Path], python: str, limit_s: float) -> None:
    try:
        said, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise DumpError(
            f"the process that opens {paths[0]}{' and others' if len(paths) > 1 else ''} was not done after "
            f"{limit_s:g} s and was killed. Importing verl can take a minute: give --timeout more, or look at what the "
            f"file does"
        ) from None
    if child.returncode == 0:
        return
    last = said.strip()[-2000:] or "(it said nothing)"
    hint = (
        f"; give an interpreter in which import verl works: --python PATH (this was {python})"
        if "verl cannot be imported" in said or "No module named" in said
        else ""
    )
    raise DumpError(f"the process that opens the pickles ended with {child.returncode}{hint}. It said:\n{last}")


def _take(folder: Path, i: int, path: Path) -> Neutral:
    """Read what the child wrote. It ran a stranger's code, so its files are checked like any stranger's."""
    numbers, text = folder / f"{i}.safetensors", folder / f"{i}.json"
    try:
        for file in (numbers, text):
            if not stat.S_ISREG(file.lstat().st_mode):
                raise DumpError(f"{path}: the process that opened it left something else than a file at {file.name}")
        tensors = load_file(numbers)
        about = json.loads(text.read_text(encoding="utf-8"))
        found = Neutral(
            path, tensors, about["columns"], about["meta"], about["left_out"], about["samples"], about["verl"]
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DumpError(f"{path}: what the process that opened it handed back cannot be read ({error!r})") from None
    for key, values in [*found.tensors.items(), *found.columns.items()]:
        if len(values) != found.samples:
            raise DumpError(f"{path}: {key} has {len(values)} entries for {found.samples} samples")
    return found
