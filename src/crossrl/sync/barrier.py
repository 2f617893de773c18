"""A barrier between processes that is bounded and says who is late: before an engine's cache takes its memory back.

The cache of an engine may come back only when every rank, those that train too, has released the weights and buffers
that lay in its memory. A barrier of a process group has no time limit of its own, names nobody, and needs a group that
is initialised on every rank; this one needs none of it. All waits here block: in an event loop, call them in a thread
(``asyncio.to_thread``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crossrl.sync.endpoint import Hub, Spoke
from crossrl.sync.messages import Message, SyncError, describe
from crossrl.sync.processes import Watched, this_process

RELEASED = "weights and buffers released"


@dataclass(slots=True)
class _Rank:
    """What a rank said last. ``sync``: in which round."""

    sync: str = ""
    phase: str = ""
    waits: bool = False
    since: float = 0.0
    failed: str = ""
    process: Watched | None = None

    def said(self) -> str:
        if not self.phase:
            return "it has reported nothing"
        return f"it last reported {self.phase!r} {time.monotonic() - self.since:.1f} s ago"


class Barrier:
    """The controller's end, at ``address``, for ``ranks`` (their names)."""

    def __init__(self, address: str, ranks: Sequence[str]) -> None:
        if not ranks or len(set(ranks)) < len(ranks):
            raise SyncError(f"a barrier for {list(ranks)}: want distinct names, at least one")
        self._hub = Hub(address, "barrier")
        self.address, self.log = self._hub.address, self._hub.log
        self._ranks = {name: _Rank() for name in ranks}

    def open(self, round: str, phase: str, limit_s: float) -> None:
        """Let all ranks pass ``phase`` of ``round`` (the version that was synced, say) once all of them wait there.

        Waits for: every rank's ``BarrierRank.wait``. Unblocked by: their reports, a failure, a death. Limit:
        ``limit_s``. Raises ``SyncError`` naming each rank that is late, with the phase it reported last; the ranks that
        wait are told the same, so that nobody waits for longer than this.
        """
        deadline = time.monotonic() + limit_s
        while late := [n for n, r in self._ranks.items() if (r.sync, r.phase, r.waits) != (round, phase, True)]:
            watched = {r.process.fd: n for n, r in self._ranks.items() if r.process and r.process.fd >= 0}
            got = self._hub.receive(deadline, watched)
            if isinstance(got, int):
                self._fail(round, f"{watched[got]} has died before {phase!r}; {self._ranks[watched[got]].said()}")
            elif got is None:
                told = "; ".join(f"{n} is late: {self._ranks[n].said()}" for n in late)
                self._fail(round, f"waited {limit_s:g} s at {phase!r}: {told}")
            elif problem := self._take(*got):
                self._fail(round, problem)
        for name, rank in self._ranks.items():
            rank.waits = False
            self._hub.send(name, Message("open", round, {"phase": phase}))

    def _take(self, name: str, message: Message) -> str:
        rank = self._ranks.get(name)
        if rank is None:
            return ""
        if message.kind == "failed":
            return f"{name} failed at {message.body['phase']!r}: {message.body['error']}"
        if message.kind == "phase":
            rank.sync, rank.phase, rank.waits = message.sync, message.body["phase"], message.body["waits"]
            rank.since = time.monotonic()
            if rank.process is None or rank.process.pid != message.body["process"]["pid"]:
                if rank.process:
                    rank.process.close()
                rank.process = Watched(message.body["process"])
        return ""

    def _fail(self, round: str, reason: str) -> None:
        for name, rank in self._ranks.items():
            self._hub.send(name, Message("late", round, {"reason": reason}))
            if rank.process:
                rank.process.close()
            self._ranks[name] = _Rank()
        raise SyncError(f"{reason}. Nothing was resumed")

    def close(self) -> None:
        for rank in self._ranks.values():
            if rank.process:
                rank.process.close()
        self._hub.close()


class BarrierRank:
    """A rank's end of the barrier at ``address``."""

    def __init__(self, address: str, name: str) -> None:
        self.name, self._spoke = name, Spoke(address, name)
        self.log = self._spoke.log
        self.phase = ""

    def report(self, round: str, phase: str, waits: bool = False) -> None:
        """Say what this rank is at, so that it can be named with it when it is late. Does not wait."""
        self.phase = phase
        self._spoke.send(Message("phase", round, {"phase": phase, "process": this_process(), "waits": waits}))

    def wait(self, round: str, phase: str, limit_s: float) -> None:
        """Waits for: every rank to be here. Unblocked by: the controller. Limit: ``limit_s``, which should be more than
        the controller's, whose message says who is late."""
        self.report(round, phase, waits=True)
        deadline = time.monotonic() + limit_s
        while (message := self._spoke.receive(deadline)) is not None:
            if not isinstance(message, Message) or message.sync != round:
                continue
            if message.kind == "late":
                raise SyncError(f"{self.name} was not let past {phase!r}: {message.body['reason']}")
            if message.kind == "open" and message.body["phase"] == phase:
                return
        raise SyncError(f"{self.name} waited {limit_s:g} s at {phase!r} for the controller at {self._spoke.address}")

    def fail(self, round: str, error: BaseException) -> None:
        self._spoke.send(Message("failed", round, {"phase": self.phase, "error": describe(error)}))

    def close(self) -> None:
        self._spoke.close()


def resume_cache(
    rank: BarrierRank, round: str, release: Callable[[], None], resume: Callable[[], None], limit_s: float
) -> None:
    """One rank's way from a sync back to generation: ``release`` its weights and buffers, wait until all ranks have,
    and only then ``resume`` the cache. What either raises reaches the controller as its text, and is raised here."""
    try:
        rank.report(round, "releasing weights and buffers")
        release()
        rank.wait(round, RELEASED, limit_s)
        rank.report(round, "resuming the cache")
        resume()
    except SyncError:
        raise
    except Exception as error:
        rank.fail(round, error)
        raise
    rank.report(round, "cache resumed")
