"""A worker: one object in another process, whose methods are called one at a time, and every wait for it bounded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, overload

Progress = Callable[[int, int], None]  # done, total
# How often a wait for several workers looks at those that it is not waiting for just now.
LOOK_S = 0.05


class WorkerError(RuntimeError):
    """A worker failed, died or is late; the message names it and holds its own words. ``worker``: its name."""

    def __init__(self, worker: str, message: str) -> None:
        super().__init__(message)
        self.worker = worker


class WorkerDied(WorkerError):
    """Its process has ended without an answer."""


class WorkerLate(WorkerError):
    """It did not answer within the limit; it may hang, or be slow."""


class Pending(Protocol):
    """A call that was sent to a worker."""

    @property
    def worker(self) -> Worker: ...

    @property
    def method(self) -> str: ...

    def ready(self, wait_s: float) -> bool:
        """Whether the call is over, or its worker is; waits for that up to ``wait_s``."""
        ...

    def value(self) -> Any:
        """What the call returned, once ``ready``. Raises ``WorkerError`` with what it raised, or ``WorkerDied``."""
        ...


class Worker(Protocol):
    """``name``: as launched, unique in a run. ``process``: such as "process 123" or "process 123 on HOST"; "" until it
    is known."""

    @property
    def name(self) -> str: ...

    @property
    def process(self) -> str: ...

    @property
    def born(self) -> Pending:
        """The making of the worker's object, the first of its calls."""
        ...

    def start(self, method: str, *args: Any, progress: Progress | None = None, **kwargs: Any) -> Pending:
        """Call ``method`` after all calls before it. ``progress``: handed to the method, called in this process."""
        ...

    def now(self, method: str, *args: Any) -> Pending:
        """Call ``method`` beside the call that runs (such as ``abort``)."""
        ...

    def kill(self) -> None:
        """End the process at once; what it was doing is lost."""
        ...

    def close(self) -> None:
        """End the process, after what it is doing if that takes less than a few seconds."""
        ...


class Launcher(Protocol):
    def start(
        self,
        name: str,
        factory: str,
        *args: Any,
        env: Mapping[str, str] | None = None,
        gpus: float = 0.0,
    ) -> Worker:
        """A worker whose object is ``factory(*args)``, made there; ``factory``: ``module:callable``. ``env``: further
        environment variables of the process. ``gpus``: how many GPUs it needs to itself. Does not wait."""
        ...


@overload
def collect(
    pendings: Sequence[Pending], what: str, limit_s: float, keep_going: Literal[False] = False
) -> list[Any]: ...
@overload
def collect(
    pendings: Sequence[Pending], what: str, limit_s: float, keep_going: Literal[True]
) -> list[Any | WorkerError]: ...
def collect(pendings: Sequence[Pending], what: str, limit_s: float, keep_going: bool = False) -> list[Any]:
    """The values of ``pendings``, in their order.

    Waits for: every worker to ``what``. Unblocked by: the first failure or death, which is raised (``WorkerError``).
    Limit: ``limit_s``, then ``WorkerLate`` names all that are late. ``keep_going``: an error takes the place of a
    value, and the others are waited for.
    """
    out: dict[int, Any] = {}
    deadline = time.monotonic() + limit_s
    while len(out) < len(pendings):
        left = deadline - time.monotonic()
        for i, pending in enumerate(pendings):
            if i in out or not pending.ready(min(LOOK_S, max(0.0, left)) if _first(out, i) else 0.0):
                continue
            try:
                out[i] = pending.value()
            except WorkerError as error:
                if not keep_going:
                    raise
                out[i] = error
        late = [p for i, p in enumerate(pendings) if i not in out]
        if late and time.monotonic() > deadline:
            names = ", ".join(f"{p.worker.name} ({p.worker.process or 'not started yet'})" for p in late)
            message = f"waited {limit_s:g} s for {names} to {what}: no answer"
            if not keep_going:
                raise WorkerLate(late[0].worker.name, message)
            out |= {i: WorkerLate(p.worker.name, message) for i, p in enumerate(pendings) if i not in out}
    return [out[i] for i in range(len(pendings))]


def _first(out: Mapping[int, Any], i: int) -> bool:
    """Whether ``i`` is the first that is still awaited: the one whose answer is worth a sleep."""
    return all(k in out for k in range(i))


def close_all(workers: Sequence[Worker]) -> None:
    """Close every one, whatever the others raise; the first error is raised at the end."""
    first: BaseException | None = None
    for worker in workers:
        try:
            worker.close()
        except Exception as error:
            first = first or error
    if first:
        raise first
