"""What the workers of the cluster tests do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path


class Work:
    """``number``: which worker it is."""

    def __init__(self, number: int) -> None:
        self.number, self.stop = number, False

    def square(self, x: int) -> tuple[int, int]:
        return self.number, x * x

    def nap(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.number

    def count(self, to: int, progress: Callable[[int, int], None]) -> int:
        for done in range(1, to + 1):
            progress(done, to)
            time.sleep(0.15)
        return to

    def until_stopped(self) -> str:
        while not self.stop:
            time.sleep(0.01)
        return "stopped"

    def please_stop(self) -> bool:
        self.stop = True
        return True

    def fail(self) -> None:
        raise ValueError("the reason")

    def cannot_be_sent(self) -> object:
        return threading.Lock()

    def die(self) -> None:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def leave_a_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


def broken(number: int) -> Work:
    raise FileNotFoundError("no such model")


def alive(pid: int) -> bool:
    """Whether ``pid`` runs (a zombie does not)."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int, limit_s: float = 10.0) -> bool:
    """Waits for ``pid`` to end; False if it has not within ``limit_s``."""
    end = time.monotonic() + limit_s
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)
