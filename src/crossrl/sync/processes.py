"""Which process is at the other end, and whether it still lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """What another process needs to watch this one."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "namespace": _namespace()}


class Watched:
    """A process at the other end. ``fd`` becomes readable when it ends: at once, also by ``kill -9``.

    -1 where it cannot be watched (another machine, another container, no such process any more): then ``gone`` says
    whether it is known to be dead, and else only time limits help.
    """

    def __init__(self, process: Mapping[str, Any]) -> None:
        self.pid, self.fd, self.gone = int(process["pid"]), -1, False
        mine = this_process()
        if (process.get("host"), process.get("namespace")) != (mine["host"], mine["namespace"]):
            return
        try:
            self.fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self.gone = True
        except (AttributeError, OSError):  # not Linux, or a sandbox without it
            pass

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def _namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
