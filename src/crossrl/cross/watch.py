"""Programs of others that hang when a part of them has failed, and leave processes behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path

MARK = "CROSSRL_CROSS_RUN"
"""In the environment of a run and of all that it starts."""
GRACE_S = 20.0
"""After an error that ends it, for a run to end by itself."""
QUIET_S = 600.0
"""After an error that may have ended it: so long without a line in its log or a step, and it hangs."""


def first_match(pattern: re.Pattern[bytes], log: Path) -> str:
    """The first line of ``log`` with ``pattern``; "" if there is none."""
    with contextlib.suppress(OSError):
        for line in log.read_bytes().splitlines():
            if pattern.search(line):
                return line.decode(errors="replace").strip()[:300]
    return ""


def clear(env: Mapping[str, str]) -> None:
    """Kill what a run with the mark in ``env`` has left, and nothing else, and remove its Ray's folder."""
    if MARK not in env:
        return
    kill_marked(MARK, env[MARK])
    if folder := env.get("RAY_TMPDIR"):
        shutil.rmtree(folder, ignore_errors=True)


def kill_marked(variable: str, mark: str) -> None:
    """Kill the processes whose environment has ``variable`` with the value ``mark``; also what they start meanwhile."""
    for _ in range(3):
        for pid in _marked(variable, mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _marked(variable: str, mark: str) -> list[int]:
    wanted, found = f"{variable}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # ended in between, or somebody else's
            continue
    return found
