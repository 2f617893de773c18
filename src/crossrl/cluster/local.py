"""Workers as child processes on this machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from socket import SO_RCVTIMEO, SO_SNDTIMEO, SOL_SOCKET, socketpair
from typing import Any

from crossrl.cluster.host import Answer
from crossrl.cluster.logs import last_words
from crossrl.cluster.worker import LOOK_S, Progress, WorkerDied, WorkerError

CLOSE_S = 10.0
MESSAGE_S = 120


class LocalLauncher:
    """Starts workers as children. They end with this process, however it ends.

    ``logs``: folder for what each of them writes to its output, ``NAME.log``; None: a temporary one. The end of it is
    shown when a worker dies.
    """

    def __init__(self, logs: Path | None = None) -> None:
        self._temporary = None if logs else tempfile.TemporaryDirectory(prefix="crossrl-workers-")
        self.logs = logs or Path(self._temporary.name)  # type: ignore[union-attr]  # one of the two

    def start(
        self,
        name: str,
        factory: str,
        *args: Any,
        env: Mapping[str, str] | None = None,
        gpus: float = 0.0,
    ) -> LocalWorker:
        """See ``Launcher``. With ``gpus`` above 0, worker ``KIND-i`` sees GPU ``i`` (modulo) of those that this process
        sees, and no other."""
        self.logs.mkdir(parents=True, exist_ok=True)
        own = {**os.environ, **(env or {})}
        if gpus > 0 and (devices := _gpus()):
            own["CUDA_VISIBLE_DEVICES"] = devices[int(name.rpartition("-")[2]) % len(devices)]
        return LocalWorker(name, factory, args, own, self.logs / f"{name}.log")


def _gpus() -> list[str]:
    """Those that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [d for d in named.split(",") if d] if named else [str(i) for i in range(torch.cuda.device_count())]


class LocalWorker:
    """See ``Worker``. Used by one thread at a time, but for ``kill``."""

    def __init__(self, name: str, factory: str, args: tuple[Any, ...], env: Mapping[str, str], log: Path) -> None:
        self.name, self.log = name, log
        ours, theirs = socketpair()
        for option in (SO_SNDTIMEO, SO_RCVTIMEO):  # of a message that has begun and does not go on
            ours.setsockopt(SOL_SOCKET, option, struct.pack("ll", MESSAGE_S, 0))
        lifeline, self._lifeline = os.pipe()
        try:
            with log.open("ab") as output:
                self._popen = subprocess.Popen(
                    [sys.executable, "-m", "crossrl.cluster.child", str(theirs.fileno()), str(lifeline)],
                    env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(), lifeline),
                    start_new_session=True,  # an interrupt is for the driver, which then closes its workers
                )  # fmt: skip
        finally:
            theirs.close()
            os.close(lifeline)
        self._connection = Connection(ours.detach())
        self._numbers = itertools.count()
        self._answers: dict[int, Answer] = {}
        self._progress: dict[int, Progress] = {}
        self._ended = False
        self.born: LocalPending = self._send("later", "", (factory, args), {}, None)

    @property
    def process(self) -> str:
        return f"process {self._popen.pid}"

    def start(self, method: str, *args: Any, progress: Progress | None = None, **kwargs: Any) -> LocalPending:
        return self._send("later", method, args, kwargs, progress)

    def now(self, method: str, *args: Any) -> LocalPending:
        return self._send("now", method, args, {}, None)

    def kill(self) -> None:
        """With all processes that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait(CLOSE_S)

    def close(self) -> None:
        """Waits for: its process to end. Unblocked by: its current call being over. Limit: ``CLOSE_S``, then it is
        killed."""
        if self._lifeline < 0:
            return
        with contextlib.suppress(OSError):
            self._connection.send(("close",))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(CLOSE_S)
        self.kill()  # also what it has left behind
        self._connection.close()
        os.close(self._lifeline)
        self._lifeline = -1

    def _send(
        self, when: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], progress: Progress | None
    ) -> LocalPending:
        number = next(self._numbers)
        if progress:
            self._progress[number] = progress
        try:
            self._connection.send((when, number, method, args, dict(kwargs), progress is not None))
        except OSError:
            self._ended = True  # the answer will say so
        return LocalPending(self, number, method)

    def take(self, number: int, wait_s: float) -> bool:
        """Take in what came; whether call ``number`` is over, or this worker is. Waits up to ``wait_s``."""
        deadline = time.monotonic() + wait_s
        while number not in self._answers and not self._ended:
            try:
                if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                    return False
                self._note(*self._connection.recv())
            except (EOFError, OSError):
                self._ended = True
        return True

    def _note(self, number: int, what: str, value: Any) -> None:
        if what == "answer":
            self._answers[number] = value
            self._progress.pop(number, None)
        elif number in self._progress:
            self._progress[number](*value)

    def answer(self, number: int, method: str) -> Any:
        what = f"{self.name} ({self.process})"
        if number not in self._answers:
            code = self._exit_code()
            raise WorkerDied(self.name, f"{what} has died at {_called(method)} ({code}){last_words(self.log)}")
        found = self._answers.pop(number)
        if found.error:
            raise WorkerError(self.name, f"{what} failed at {_called(method)}: {found.error}")
        return found.value

    def _exit_code(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(2.0)
        code = self._popen.returncode
        if code is None:
            return "it does not answer any more"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class LocalPending:
    """See ``Pending``."""

    def __init__(self, worker: LocalWorker, number: int, method: str) -> None:
        self.worker, self.method, self._number = worker, method, number

    def ready(self, wait_s: float) -> bool:
        return self.worker.take(self._number, wait_s)

    def value(self) -> Any:
        while not self.ready(LOOK_S):
            pass
        return self.worker.answer(self._number, self.method)


def _called(method: str) -> str:
    return method or "start"
