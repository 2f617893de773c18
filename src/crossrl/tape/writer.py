"""The background writer: stages do not wait for the disk, and no failed write goes unnoticed."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from crossrl.tape.errors import TapeError, TapeWriteError
from crossrl.tape.publish import Draft, write_record

logger = logging.getLogger("crossrl.tape")


class Writer:
    """Writes records in the order in which they are submitted, one thread, bounded memory.

    ``limit_bytes``: of drafts in flight; a larger single draft waits until it is alone. ``stall_s``: how long a
    wait may last without a record being finished. ``written``: called in the writer's thread with the path and size
    of each finished record. The first failure is kept: every later ``submit``, ``check``, ``flush`` and ``close``
    raises it, and nothing more is written.
    """

    def __init__(
        self,
        limit_bytes: int = 512 << 20,
        stall_s: float = 600.0,
        write: Callable[[Path, Draft], int] = write_record,
        written: Callable[[Path, int], None] = lambda path, size: None,
    ) -> None:
        self._limit, self._stall = limit_bytes, stall_s
        self._write, self._written = write, written
        self._changed = threading.Condition()
        self._queue: deque[tuple[Path, Draft]] = deque()
        self._in_flight = 0
        self._lost = 0
        self._failure: tuple[Path, BaseException] | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, path: Path, draft: Draft) -> None:
        """Have ``draft`` written to ``path``. Raises ``TapeWriteError`` for an earlier failure.

        Waits for: room for the draft. Unblocked by: the writer finishing records, or failing. Time limit:
        ``stall_s`` without a finished record.
        """
        with self._changed:
            self._wait(lambda: not self._in_flight or self._in_flight + draft.nbytes <= self._limit, path)
            if self._closed:
                raise TapeError(f"the tape is closed; {path} comes too late")
            self._queue.append((path, draft))
            self._in_flight += draft.nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="crossrl-tape-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def check(self) -> None:
        """Raise ``TapeWriteError`` if a write has failed; does not wait."""
        with self._changed:
            self._raise()

    def flush(self) -> None:
        """Return when everything submitted so far is on the disk. Raises ``TapeWriteError``.

        Waits for: the queue to empty. Unblocked by: the writer. Time limit: ``stall_s`` without a finished record.
        """
        with self._changed:
            self._wait(lambda: not self._in_flight, None)

    def close(self) -> None:
        """``flush``, then end the thread. Raises ``TapeWriteError``; may be called twice."""
        try:
            self.flush()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], path: Path | None) -> None:
        at, mark = time.monotonic(), (len(self._queue), self._in_flight)
        while not (ready() or self._failure):
            if not self._changed.wait(timeout=min(1.0, self._stall)) and time.monotonic() - at > self._stall:
                raise TapeWriteError(
                    f"no record was finished for {self._stall:g} s ({len(self._queue)} are waiting"
                    + (f", next {self._queue[0][0]}" if self._queue else "")
                    + "): is the disk or the network folder alive?"
                )
            if (now := (len(self._queue), self._in_flight)) != mark:
                at, mark = time.monotonic(), now
        self._raise(path)

    def _raise(self, path: Path | None = None) -> None:
        if self._failure is None:
            return
        failed, error = self._failure
        lost = self._lost + (path is not None)
        more = f" {lost} later record(s) were not written either." if lost else ""
        raise TapeWriteError(
            f"the record {failed} could not be written: {_reason(error)}.{more} Make room or fix the folder, then "
            f"resume from the last checkpoint; to train without recording, set tape.mode=off"
        ) from error

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closed:
                        return
                    self._changed.wait()
                path, draft = self._queue.popleft()
            try:
                size = self._write(path, draft)
                self._written(path, size)
            except BaseException as error:  # kept for the next boundary; a thread has nobody to raise it to
                logger.error("could not store in %s: %s", path, _reason(error))
                with self._changed:
                    self._failure = (path, error)
                    self._lost = len(self._queue)
                    self._queue.clear()
                    self._in_flight = 0
                    self._changed.notify_all()
                return
            with self._changed:
                self._in_flight -= draft.nbytes
                self._changed.notify_all()
            del draft


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
