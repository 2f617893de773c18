"""Workers as actors of a Ray cluster (extra ``ray``)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossrl.cluster.host import Answer, Host
from crossrl.cluster.logs import last_words, write_output_to
from crossrl.cluster.worker import LOOK_S, Progress, WorkerDied, WorkerError

PLACE_S = 300.0
CLOSE_S = 10.0


class ClusterError(RuntimeError):
    """The Ray cluster is not there, or too small; the message says what was found and what is needed."""


class RayLauncher:
    """Starts workers as actors. ``kinds``: how many of each there will be; worker ``KIND-i`` of ``n`` is in slot
    ``i * slots // n``, so that each kind is spread over the machines, and what belongs together (train rank i,
    inference replica i) shares a machine and, with ``gpus`` below 1, a GPU.

    ``address``: of a running cluster ("auto": the one that this machine belongs to); "": start one here, for this run
    only, with ``init`` for ``ray.init``. ``nodes`` x ``per_node`` slots, those of one node on one machine; each has
    ``slot`` (Ray's resources, such as ``{"CPU": 2, "GPU": 1}``). ``logs``: folder for what each of them writes to its
    output, ``NAME.log``, on its own machine; None: Ray's.

    Raises ``ClusterError`` if the cluster has no room for them within ``PLACE_S``.
    """

    def __init__(
        self, nodes: int, per_node: int, slot: Mapping[str, float], kinds: Mapping[str, int], address: str = "",
        logs: Path | None = None,
        init: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        try:
            import ray as imported
        except ImportError as error:
            raise ClusterError("more than one process of a kind needs Ray: pip install 'crossrl[ray]'") from error
        ray: Any = imported  # its decorators are not typed for what they take
        self.ray, self.per_node, self.slot, self.kinds, self.logs = ray, per_node, dict(slot), dict(kinds), logs
        self._own = not ray.is_initialized()
        self._groups: list[Any] = []
        try:
            if self._own:
                self._connect(address, init or {})
            for _ in range(nodes):
                self._groups.append(ray.util.placement_group([self.slot] * per_node, strategy="STRICT_PACK"))
            self._wait_for_room()
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str, init: Mapping[str, Any]) -> None:
        on_term = signal.getsignal(signal.SIGTERM)  # Ray puts its own handler there
        try:
            # What a worker prints belongs to its own log, not between the lines of this run's console.
            self.ray.init(
                address=address or "local", log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False,
                **init,
            )  # fmt: skip
        except (ConnectionError, ValueError, RuntimeError, TypeError) as error:
            where = f"the Ray cluster cluster.address={address}" if address else "a Ray cluster on this machine"
            raise ClusterError(
                f"{where} cannot be used: {' '.join(str(error).split())}. Is it up (ray status), and does "
                "cluster.ray_init hold only what ray.init takes there?"
            ) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_term)

    def _wait_for_room(self) -> None:
        """Waits for: all slots. Limit: ``PLACE_S`` for all of them."""
        end, nodes = time.monotonic() + PLACE_S, len(self._groups)
        late = [g for g in self._groups if not g.wait(max(0.1, end - time.monotonic()))]
        if late:
            have = {k: v for k, v in self.ray.cluster_resources().items() if k in ("CPU", "GPU", "NPU")}
            raise ClusterError(
                f"{len(late)} of {nodes} nodes of {self.per_node} processes found no room within {PLACE_S:g} s. A node "
                f"needs {self.per_node} x {self.slot} on one machine; the whole cluster has {have}. Add machines "
                "(ray start --address=...), or set trainer.nnodes and trainer.n_gpus_per_node lower"
            )
        tables = [self.ray.util.placement_group_table(group)["bundles_to_node_id"] for group in self._groups]
        used = [next(iter(table.values())) for table in tables]
        if len(set(used)) < nodes:
            raise ClusterError(
                f"trainer.nnodes={nodes}, but Ray found room for several of them on one machine ({len(set(used))} "
                "machines in all). Set trainer.nnodes to the number of machines and trainer.n_gpus_per_node to the "
                "processes on each"
            )

    def start(
        self,
        name: str,
        factory: str,
        *args: Any,
        env: Mapping[str, str] | None = None,
        gpus: float = 0.0,
    ) -> RayWorker:
        """See ``Launcher``."""
        slots = len(self._groups) * self.per_node
        slot = slot_of(name, self.kinds, slots)
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._groups[slot // self.per_node], slot % self.per_node
        )
        actor = self.ray.remote(concurrency_groups={"now": 1})(_Actor).options(
            num_cpus=0,  # the slot has them; Ray would otherwise set OMP_NUM_THREADS
            num_gpus=gpus,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": {**_carried(), **(env or {})}},
            max_restarts=0,
        ).remote()  # fmt: skip
        return RayWorker(self.ray, name, actor, factory, args, self.logs and self.logs / f"{name}.log")

    def close(self) -> None:
        """Give the room back; a cluster that was started for this run ends."""
        for group in self._groups:
            with contextlib.suppress(Exception):  # the cluster may be gone
                self.ray.util.remove_placement_group(group)
        if self._own:
            self.ray.shutdown()


def slot_of(name: str, kinds: Mapping[str, int], slots: int) -> int:
    """Where worker ``KIND-i`` is.

    >>> [slot_of(f"rollout-{i}", {"rollout": 2}, 4) for i in range(2)]
    [0, 2]
    """
    kind, _, number = name.rpartition("-")
    if kind not in kinds or not 0 <= int(number) < kinds[kind]:
        raise ClusterError(f"worker {name} is none of those that there is room for: {dict(kinds)}")
    return int(number) * slots // kinds[kind]


def _carried() -> dict[str, str]:
    """Variables that must be the same in every process of a run: our own switches, and PyTorch's threads."""
    kept = ("CROSSRL_", "OMP_", "MKL_", "HF_HUB_", "TOKENIZERS_")
    return {k: v for k, v in os.environ.items() if k.startswith(kept) and "TOKEN" not in k.removeprefix("TOKENIZERS_")}


class _Actor:
    """A ``Host`` in Ray's form. The methods of the group "now" run beside the others."""

    def __init__(self) -> None:
        self._host = Host()
        self._progress: tuple[int, int] | None = None

    def make(self, factory: str, args: tuple[Any, ...], log: str) -> Answer:
        if log:
            write_output_to(Path(log))
        return self._host.make(factory, args)

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], progress: bool) -> Answer:
        self._progress = None
        return self._host.call(method, args, kwargs, self._note if progress else None)

    def _note(self, done: int, total: int) -> None:
        self._progress = done, total

    def peek(self) -> tuple[int, int] | None:
        return self._progress

    def now(self, method: str, args: tuple[Any, ...]) -> Answer:
        return self._host.call(method, args, {})

    def close(self) -> None:
        self._host.close()


class RayWorker:
    """See ``Worker``."""

    def __init__(self, ray: Any, name: str, actor: Any, factory: str, args: tuple[Any, ...], log: Path | None) -> None:
        self.name, self._ray, self._actor, self.process, self.log = name, ray, actor, "", log
        self.born = RayPending(self, "", actor.make.remote(factory, args, str(log or "")))

    def start(self, method: str, *args: Any, progress: Progress | None = None, **kwargs: Any) -> RayPending:
        return RayPending(self, method, self._actor.call.remote(method, args, kwargs, progress is not None), progress)

    def now(self, method: str, *args: Any) -> RayPending:
        call = self._actor.now.options(concurrency_group="now")
        return RayPending(self, method, call.remote(method, args))

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # it, or the whole cluster, may be gone
            self._ray.kill(self._actor)

    def close(self) -> None:
        """Waits for: the object's own ``close``. Limit: ``CLOSE_S``, then its process is killed."""
        with contextlib.suppress(Exception):  # it may be dead, or busy: it ends in any case
            self._ray.get(self._actor.close.remote(), timeout=CLOSE_S)
        self.kill()

    def peek(self) -> tuple[int, int] | None:
        """How far the current call is, if it says."""
        with contextlib.suppress(Exception):  # progress is for people: the call itself will say what is wrong
            found: tuple[int, int] | None = self._ray.get(
                self._actor.peek.options(concurrency_group="now").remote(), timeout=1.0
            )
            return found
        return None


class RayPending:
    """See ``Pending``."""

    def __init__(self, worker: RayWorker, method: str, ref: Any, progress: Progress | None = None) -> None:
        self.worker, self.method, self._ref, self._progress = worker, method, ref, progress
        self._seen: tuple[int, int] | None = None

    def ready(self, wait_s: float) -> bool:
        done, _ = self.worker._ray.wait([self._ref], timeout=wait_s)
        if not done and self._progress and wait_s and (seen := self.worker.peek()) not in (None, self._seen):
            self._seen = seen
            self._progress(*seen)
        return bool(done)

    def value(self) -> Any:
        worker, at = self.worker, self.method or "start"
        while not self.ready(LOOK_S):
            pass
        what = f"{worker.name} ({worker.process or 'not started yet'})"
        try:
            found: Answer = worker._ray.get(self._ref)
        except worker._ray.exceptions.RayTaskError as error:  # the host catches all but what comes after the call
            raise WorkerError(worker.name, f"{what} failed at {at}: the result cannot be sent: {error.cause}") from None
        except worker._ray.exceptions.RayError as error:
            why = " ".join(str(error).split("Some common causes")[0].split())
            raise WorkerDied(worker.name, f"{what} has died at {at}: {why}{last_words(worker.log)}") from None
        if found.error:
            raise WorkerError(worker.name, f"{what} failed at {at}: {found.error}")
        if not self.method:
            worker.process = found.value
        return found.value
