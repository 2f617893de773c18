"""Calls to all ranks at once: answers in their order, or the one rank that is to blame."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
NOT_BEGUN = "All ranks were ended; nothing was trained yet"


@dataclass(frozen=True, slots=True)
class _Wait:
    """For ranks to ``what``, at most ``limit_s``. ``then``: what an error of it says at its end."""

    what: str
    limit_s: float
    then: str = ENDED
    began: float = field(default_factory=time.monotonic)


class Calls:
    """Calls to ``workers``, rank by rank. ``limit_s``: for each call. After a failure that the ranks do not share they
    are ended, and every further call is refused."""

    def __init__(self, workers: Sequence[Worker], limit_s: float, store: dist.TCPStore | None) -> None:
        self.workers, self.limit_s, self.store = list(workers), limit_s, store
        self._ended = ""

    def born(self, limit_s: float) -> None:
        """Waits for: all objects to be made. Unblocked by: them; ``GRACE_S`` after the first failure or death. Limit:
        ``limit_s``."""
        self._answers([w.born for w in self.workers], _Wait("start", limit_s, NOT_BEGUN))

    def all(self, method: str, what: str, *args: Any) -> list[Any]:
        """The same call to all."""
        return self.each(method, [args] * len(self.workers), what)

    def each(self, method: str, calls: Sequence[tuple[Any, ...]], what: str) -> list[Any]:
        """A call to each, with its own arguments.

        Waits for: all answers. Unblocked by: them; ``GRACE_S`` after the first failure, death or refusal (ranks refuse
        at the same point). Limit: ``limit_s``. Raises what they have agreed to refuse, or what one has refused while
        another gave no answer; ``WorkerError``, which names the rank to blame.
        """
        if self._ended:
            raise EngineError(f"the ranks are not there any more: {self._ended}")
        try:
            pendings = [w.start(method, *args) for w, args in zip(self.workers, calls, strict=True)]
            answers = self._answers(pendings, _Wait(what, self.limit_s))
        except BaseException as error:
            self._end(str(error) or type(error).__name__)
            raise
        if refused := _refused(answers):
            raise RAISED[refused.kind](refused.message)
        return answers

    def close(self) -> None:
        """Ends all processes. Waits for: what they let go of. Limit: ``CLOSE_S``."""
        if not self._ended:
            with contextlib.suppress(WorkerError):  # all at once: ranks may wait for each other at the end
                collect([w.start("close") for w in self.workers], "close", CLOSE_S)
            self._end("they were closed")  # nothing is left that could be lost
        close_all(self.workers)

    def _answers(self, pendings: Sequence[Pending], wait: _Wait) -> list[Any]:
        found: dict[int, Any] = {}
        failed: dict[int, WorkerError] = {}
        end = wait.began + wait.limit_s
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
                if i in failed or isinstance(found[i], Refused):
                    end = min(end, time.monotonic() + GRACE_S)
        if failed or left:
            self._blame(pendings, failed, left, _refused(found.values()), wait)
        return [found[i] for i in range(len(pendings))]

    def _blame(
        self,
        pendings: Sequence[Pending],
        failed: Mapping[int, WorkerError],
        late: Sequence[int],
        refused: Refused | None,
        wait: _Wait,
    ) -> NoReturn:
        """Raise for the rank that began it: one that died, then one with an error of its own, then one that has refused
        while others go on, then one that is late; what ranks say that lost another one comes last."""
        died = [e for e in failed.values() if isinstance(e, WorkerDied)]
        own = [e for e in failed.values() if LOST not in str(e)]
        if culprits := died or own:
            raise type(culprits[0])(culprits[0].worker, f"{culprits[0]}. {wait.then}")
        names = {i: f"{p.worker.name} ({p.worker.process or 'not started yet'})" for i, p in enumerate(pendings)}
        if refused:
            others = ", ".join(names[i] for i in [*failed, *late])
            raise RAISED[refused.kind](f"{refused.message}; {others} did not come to the same end. {wait.then}")
        if not late:
            error = next(iter(failed.values()))
            raise type(error)(error.worker, f"{error}. {wait.then}")
        waited = time.monotonic() - wait.began
        last, places = (list(late), "") if self.store is None else behind(self.store, late)
        who = ", ".join(names[i] for i in last)
        raise WorkerLate(
            pendings[last[0]].worker.name,
            f"waited {waited:.0f} s for {who} to {wait.what}: no answer. {places}{'. ' if places else ''}{wait.then}",
        )

    def _end(self, reason: str) -> None:
        self._ended = reason
        for worker in self.workers:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                worker.kill()


def _refused(answers: Iterable[Any]) -> Refused | None:
    """The first refusal among them."""
    return next((answer for answer in answers if isinstance(answer, Refused)), None)
