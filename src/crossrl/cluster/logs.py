"""What a worker writes to its output, and the end of it where it died."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LAST_LINES = 12


def write_output_to(log: Path) -> None:
    """From now on what this process (and its children) writes to its output goes to the end of ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def last_words(log: Path | None) -> str:
    """The end of ``log``, to follow an error message; "" where it cannot be read (it may be on another machine)."""
    if log is None or not log.is_file():
        return ""
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return f". The end of {log}:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
