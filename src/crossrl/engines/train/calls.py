"""Calls to all ranks at once: answers in their order, or the one rank that is to blame."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from crossrl.cluster.worker import LOOK_S, Pending, Worker, WorkerDied, WorkerError, WorkerLate, close_all, collect
from crossrl.engines.base import EngineError
from crossrl.engines.train.beats import behind
from crossrl.engines.train.rank import Refused
from crossrl.engines.train.ranks import LOST
from crossrl.sync.messages import SyncError

GRACE_S = 2.0  # after a first failure, for what the other ranks have to say
CLOSE_S = 10.0
RAISED = {"engine": EngineError, "sync": SyncError, "file": OSError}
ENDED = "All ranks were ended; started again, the run goes on from its last checkpoint"


class Calls:
    """Calls to ``workers``, rank by rank. ``limit_s``: for each call. After a failure that the ranks do not share they
    are ended, and every further call is refused."""

    def __init__(self, workers: Sequence[Worker], limit_s: float, store: dist.TCPStore | None) -> None:
        self.workers, self.limit_s, self.store = list(workers), limit_s, store
        self._ended = ""

    def born(self) -> None:
        """Waits for: all objects to be made."""
        self._answers([w.born for w in self.workers], "start")

    def all(self, method: str, what: str, *args: Any) -> list[Any]:
        """The same call to all."""
        return self.each(method, [args] * len(self.workers), what)

    def each(self, method: str, calls: Sequence[tuple[Any, ...]], what: str) -> list[Any]:
        """A call to each, with its own arguments.

        Waits for: all answers. Unblocked by: them; ``GRACE_S`` after the first failure or death. Limit: ``limit_s``.
        Raises what they have agreed to refuse; ``WorkerError``, which names the rank to blame.
        """
        return self._call(self.workers, method, calls, what)

    def first(self, method: str, what: str, *args: Any) -> Any:
        """A call to rank 0 alone."""
        return self._call(self.workers[:1], method, [args], what)[0]

    def close(self) -> None:
        """Ends all processes. Waits for: what they let go of. Limit: ``CLOSE_S``."""
        if not self._ended:
            with contextlib.suppress(WorkerError):  # all at once: ranks may wait for each other at the end
                collect([w.start("close") for w in self.workers], "close", CLOSE_S)
            self._end("they were closed")  # nothing is left that could be lost
        close_all(self.workers)

    def _call(self, workers: Sequence[Worker], method: str, calls: Sequence[tuple[Any, ...]], what: str) -> list[Any]:
        if self._ended:
            raise EngineError(f"the ranks are not there any more: {self._ended}")
        try:
            answers = self._answers([w.start(method, *args) for w, args in zip(workers, calls, strict=True)], what)
        except BaseException as error:
            self._end(str(error) or type(error).__name__)
            raise
        for answer in answers:
            if isinstance(answer, Refused):
                raise RAISED[answer.kind](answer.message)
        return answers

    def _answers(self, pendings: Sequence[Pending], what: str) -> list[Any]:
        found: dict[int, Any] = {}
        failed: dict[int, WorkerError] = {}
        end = time.monotonic() + self.limit_s
        while (left := [i for i in range(len(pendings)) if i not in found and i not in failed]) and (
            time.monotonic() < end
        ):
            for i in left:
                if not pendings[i].ready(LOOK_S):
                    continue
                try:
                    found[i] = pendings[i].value()
                except WorkerError as error:
                    failed[i] = error
                    end = min(end, time.monotonic() + GRACE_S)
        if failed or left:
            self._blame(pendings, what, failed, left)
        return [found[i] for i in range(len(pendings))]

    def _blame(
        self, pendings: Sequence[Pending], what: str, failed: Mapping[int, WorkerError], late: Sequence[int]
    ) -> NoReturn:
        """Raise for the rank that began it: one that died, then one with an error of its own, then one that is late;
        what ranks say that lost another one comes last."""
        died = [e for e in failed.values() if isinstance(e, WorkerDied)]
        own = [e for e in failed.values() if LOST not in str(e)]
        if culprits := died or own:
            raise type(culprits[0])(culprits[0].worker, f"{culprits[0]}. {ENDED}")
        names = {i: f"{p.worker.name} ({p.worker.process or 'not started yet'})" for i, p in enumerate(pendings)}
        if not late:
            error = next(iter(failed.values()))
            raise type(error)(error.worker, f"{error}. {ENDED}")
        last, places = (list(late), "") if self.store is None else behind(self.store, late)
        who = ", ".join(names[i] for i in last)
        raise WorkerLate(
            pendings[last[0]].worker.name,
            f"waited {self.limit_s:g} s for {who} to {what}: no answer. {places}{'. ' if places else ''}{ENDED}",
        )

    def _end(self, reason: str) -> None:
        self._ended = reason
        for worker in self.workers:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                worker.kill()
