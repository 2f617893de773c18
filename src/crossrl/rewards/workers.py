"""A pool of scoring children: one sample at a time each, killed when it takes too long, replaced when it dies.

Children are started with ``python -m crossrl.rewards.child`` rather than forked or spawned by
``multiprocessing``: a fork of a process with PyTorch's threads may hang, and ``multiprocessing`` imports the
main program again, which fails without a ``__main__`` guard and in notebooks.

What the pool waits for is an answer, the end of a child, or the nearest time limit, whichever is first.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossrl.rewards.protocol import MAX_FRAME_BYTES, ProtocolError, RewardError, Status, pack, unpack

START_LIMIT_S = 120.0  # reasoning-gym takes two seconds to import on an idle machine
GROW_AFTER_S = 0.1
SEND_ATTEMPTS = 3
_READ_BYTES = 1 << 16


class ChildGone(Exception):
    """A child ended, or sent what is no answer; the text says how."""


class Worker:
    """One child: starting until ``ready``, then idle, or busy with the sample ``item_id`` until ``deadline``."""

    def __init__(self, process: subprocess.Popen[bytes], read_fd: int, write_fd: int) -> None:
        self.process, self.read_fd, self.write_fd = process, read_fd, write_fd
        self.ready = False
        self.item_id: str | None = None
        self.deadline = time.monotonic() + START_LIMIT_S
        self._buffer = bytearray()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    @property
    def idle(self) -> bool:
        return self.ready and self.item_id is None

    def send(self, frame: bytes, limit_s: float) -> None:
        """Write one frame. Waits for the child to read, at most ``limit_s``. Raises ``ChildGone``."""
        view, deadline = memoryview(frame), time.monotonic() + limit_s
        while view:
            try:
                view = view[os.write(self.write_fd, view) :]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ChildGone(f"did not read its input within {limit_s:g} s") from None
                poll = select.poll()  # not select(): that cannot watch descriptors above 1023
                poll.register(self.write_fd, select.POLLOUT)
                poll.poll(left * 1000)
            except OSError:
                raise ChildGone(self.how_it_ended()) from None

    def receive(self) -> list[Any]:
        """The messages that have arrived; does not wait. Raises ``ChildGone``."""
        while len(self._buffer) <= MAX_FRAME_BYTES:
            try:
                data = os.read(self.read_fd, _READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                raise ChildGone(self.how_it_ended())
            self._buffer += data
        try:
            return unpack(self._buffer)
        except ProtocolError as error:
            raise ChildGone(f"sent what is no answer: {error}") from error

    def how_it_ended(self) -> str:
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its pipes"
        if code >= 0:
            return f"exited with code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"

    def kill(self) -> None:
        """End the child and what it started in its process group; no zombie is left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10.0)
        os.close(self.read_fd)
        os.close(self.write_fd)


@dataclass(slots=True)
class _Pending:
    id: str
    frame: bytes
    attempts: int = 0


def _answer(status: Status, error: str) -> dict[str, Any]:
    """An answer in a child's place, in the child's form."""
    return {"status": status, "value": None, "extra": {}, "error": error}


class Pool:
    """Up to ``num_workers`` children, each told ``spec`` at its start; ``limit_s`` seconds per sample.

    The first is started at once; more follow while samples have waited for ``GROW_AFTER_S``. Not thread-safe.
    Raises ``RewardError`` when the first child refuses ``spec`` or does not start within ``START_LIMIT_S``.
    """

    def __init__(self, spec: Mapping[str, Any], num_workers: int, limit_s: float) -> None:
        self._spec, self._num_workers, self._limit_s = dict(spec), num_workers, limit_s
        self._workers: list[Worker] = []
        self._grow_at = 0.0
        self._selector = selectors.DefaultSelector()
        # On Linux a child is killed when the *thread* that started it ends. This one lives as long as the pool.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="crossrl-rewards")
        self.code = ""
        try:
            self._start()
            while not self._workers[0].ready:
                self._step(deque(), {})
        except BaseException:
            self.close()
            raise

    def score(self, items: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The answer for each item, by id. Waits at most the limit per sample, plus the start of replacements.

        Raises ``RewardError`` when a child cannot be started any more. Leaves no child busy, however it ends.
        """
        pending, answers = deque[_Pending](), dict[str, dict[str, Any]]()
        for item in items:
            try:
                pending.append(_Pending(item["id"], pack(item)))
            except (ProtocolError, TypeError, ValueError) as error:
                answers[item["id"]] = _answer("raised", f"the sample cannot be sent to a scoring process: {error}")
        self._grow_at = time.monotonic() + GROW_AFTER_S
        try:
            while len(answers) < len(items):
                self._assign(pending, answers)
                self._step(pending, answers)
        finally:
            for worker in [w for w in self._workers if w.item_id is not None]:
                self._drop(worker)
        return answers

    def close(self) -> None:
        """Kill all children. May be called twice."""
        for worker in list(self._workers):
            self._drop(worker)
        self._selector.close()
        self._starter.shutdown()

    def _assign(self, pending: deque[_Pending], answers: dict[str, dict[str, Any]]) -> None:
        for worker in [w for w in self._workers if w.idle]:
            if not pending:
                return
            item = pending.popleft()
            try:
                worker.send(item.frame, self._limit_s)
            except ChildGone as gone:
                self._drop(worker)
                item.attempts += 1
                if item.attempts < SEND_ATTEMPTS:  # it ended between two samples, which is no fault of this one
                    pending.appendleft(item)
                else:
                    answers[item.id] = _answer("crashed", f"the scoring process {gone}, {SEND_ATTEMPTS} times")
                continue
            worker.item_id, worker.deadline = item.id, time.monotonic() + self._limit_s
        if pending and (not self._workers or self._may_grow()):
            self._start()

    def _may_grow(self) -> bool:
        if len(self._workers) >= self._num_workers or time.monotonic() < self._grow_at:
            return False
        self._grow_at = time.monotonic() + GROW_AFTER_S
        return True

    def _step(self, pending: deque[_Pending], answers: dict[str, dict[str, Any]]) -> None:
        """Wait for the next event, take in what has arrived, then kill what is over its limit."""
        waiting = [w.deadline for w in self._workers if not w.idle]
        if pending and len(self._workers) < self._num_workers:
            waiting.append(self._grow_at)
        wait = max(0.0, min(waiting, default=0.0) - time.monotonic())
        for key, _ in self._selector.select(wait):
            worker: Worker = key.data
            try:
                for message in worker.receive():
                    self._take(worker, message, answers)
            except ChildGone as gone:
                self._lost(worker, "crashed", f"the scoring process {gone}", answers)
        # After reading: an answer that arrived while this process was stopped or busy still counts.
        now = time.monotonic()
        for worker in [w for w in self._workers if not w.idle and now >= w.deadline]:
            if worker.process.poll() is not None:
                self._lost(worker, "crashed", f"the scoring process {worker.how_it_ended()}", answers)
            else:
                self._lost(worker, "timed_out", f"no score within {self._limit_s:g} s; killed", answers)

    def _take(self, worker: Worker, message: Any, answers: dict[str, dict[str, Any]]) -> None:
        if not isinstance(message, dict):
            raise ChildGone(f"sent what is no answer: {message!r:.100}")
        if not worker.ready:
            if "refused" in message:
                raise RewardError(message["refused"])
            worker.ready, self.code = True, message["ready"]
            self._spec["code"] = self.code  # replacements must load the same
        elif message.get("id") != worker.item_id:
            raise ChildGone(f"answered for sample {message.get('id')!r} when asked for {worker.item_id!r}")
        else:
            answers[message["id"]] = message
            worker.item_id = None

    def _lost(self, worker: Worker, status: Status, error: str, answers: dict[str, dict[str, Any]]) -> None:
        if not worker.ready:
            why = error if status == "crashed" else f"the scoring process was not ready within {START_LIMIT_S:g} s"
            raise RewardError(f"{why}, while it was loading the reward code (its output is above)")
        if worker.item_id is not None:
            answers[worker.item_id] = _answer(status, error)
            worker.item_id = None
        self._drop(worker)

    def _drop(self, worker: Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.read_fd)
        worker.kill()

    def _start(self) -> None:
        worker = self._starter.submit(_launch).result()
        self._workers.append(worker)
        self._selector.register(worker.read_fd, selectors.EVENT_READ, worker)
        try:
            worker.send(pack(self._spec), START_LIMIT_S)
        except ChildGone as gone:
            raise RewardError(f"the scoring process {gone} at its start (its output is above)") from gone


def _launch() -> Worker:
    """Start a child in a process group of its own: Ctrl-C in the terminal is for the run, which then closes it."""
    here = str(Path(__file__).parents[2])  # the child must find this very package, installed or not
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
        "PYTHONHASHSEED": "0",  # else the order of sets, and what depends on it, differs between children
    }
    environment.setdefault("OMP_NUM_THREADS", "1")  # several children share the cores
    child_read, write_fd = os.pipe()
    read_fd, child_write = os.pipe()
    try:
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-u",
                "-m",
                "crossrl.rewards.child",
                *map(str, (child_read, child_write, os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=(child_read, child_write),
            env=environment,
            start_new_session=True,
        )
    except BaseException:
        os.close(read_fd)
        os.close(write_fd)
        raise
    finally:
        os.close(child_read)
        os.close(child_write)
    return Worker(process, read_fd, write_fd)
