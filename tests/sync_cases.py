"""Senders, receivers and engines for the tests of ``crossrl.sync``: in threads, and in processes that can be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from crossrl.sync.manifest import Manifest
from crossrl.sync.messages import SyncError
from crossrl.sync.receiver import Received, WeightReceiver
from crossrl.sync.sender import WeightSender
from crossrl.sync.target import HeldTensors

PAGE = 4096  # the smallest bucket
TIED = {"head": "embed"}


def weights(seed: int = 0, width: int = 48) -> dict[str, torch.Tensor]:
    """Five buckets of a page: larger than a bucket, empty, scalar, strided, of many dtypes."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(60, width, generator=draw),  # 11520 bytes
        "norm": torch.randn(width, generator=draw).to(torch.bfloat16),
        "scale": torch.randn((), generator=draw, dtype=torch.float64),
        "none": torch.empty(0, 3),
        "odd": torch.randint(0, 255, (7,), generator=draw, dtype=torch.uint8),
        "turned": torch.randn(31, 67, generator=draw).t(),  # 8308 bytes, not contiguous
        "mask": torch.rand(13, generator=draw) > 0.5,
        "count": torch.randint(0, 1 << 40, (5,), generator=draw),
    }


def zeros(like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(t, memory_format=torch.preserve_format) for name, t in like.items()}


def engine(kind: type[HeldTensors] = HeldTensors, **how: Any) -> Any:
    return kind(zeros(weights()), TIED, **how)


def manifest(of: Mapping[str, torch.Tensor]) -> Manifest:
    return Manifest.of(of.items(), tied=TIED)


class Whole:
    """An engine that takes whole tensors only, and keeps what it is given (as ``tensor.to("cpu")`` does)."""

    def __init__(self, like: Mapping[str, torch.Tensor], weight_version: int = 0) -> None:
        self.tensors, self.next, self.weight_version = zeros(like), dict[str, torch.Tensor](), weight_version
        self.unusable = ""

    def begin_update(self, version: int, manifest: Mapping[str, Any]) -> None:
        self.next, self.version, self.unusable = {}, version, "begun"

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.next.update((name, tensor.to("cpu")) for name, tensor in named)

    def check_update(self) -> None:
        self.tensors = self.next

    def finish_update(self) -> None:
        self.weight_version, self.unusable = self.version, ""

    def abort_update(self, reason: str) -> None:
        self.next, self.unusable = {}, reason

    def clear_prefix_cache(self) -> str:
        return "cleared"

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()
        if "embed" in self.tensors:
            yield "head", self.tensors["embed"]


class Slow(HeldTensors):
    """Waits before it copies out."""

    wait_s = 0.1

    def load_part(self, *args: Any) -> None:
        time.sleep(self.wait_s)
        super().load_part(*args)


class Failing(HeldTensors):
    """Raises in the call ``at`` of ``where``."""

    def __init__(self, *args: Any, where: str, at: int = 1) -> None:
        super().__init__(*args)
        self.where, self.left = where, at

    def _perhaps(self, where: str) -> None:
        self.left -= where == self.where
        if where == self.where and self.left == 0:
            raise ValueError(f"no memory left in {where}")

    def load_part(self, *args: Any) -> None:
        self._perhaps("load")
        super().load_part(*args)

    def check_update(self) -> None:
        self._perhaps("check")
        super().check_update()

    def finish_update(self) -> None:
        self._perhaps("finish")
        super().finish_update()

    def clear_prefix_cache(self) -> str:
        self._perhaps("clear")
        return "cleared"


class Worker(threading.Thread):
    """Receives once."""

    def __init__(self, receiver: WeightReceiver) -> None:
        super().__init__(name=receiver.name)
        self.receiver, self.result, self.error = receiver, None, None
        self.start()

    def run(self) -> None:
        try:
            self.result: Received | None = self.receiver.receive()
        except SyncError as error:
            self.error: SyncError | None = error

    def end(self) -> Worker:
        self.join(20)
        assert not self.is_alive(), f"{self.name} hangs"
        return self


class Pair:
    """A sender, and a receiver in a thread for each of ``engines``."""

    def __init__(self, *engines: Any, limit_s: float = 5.0, **how: Any) -> None:
        names = [f"engine-{i}" for i in range(len(engines))]
        self.engines = engines
        self.sender = WeightSender(names, bucket_bytes=PAGE, limit_s=limit_s, **how)
        self.receivers = [
            WeightReceiver(self.sender.address, n, e, limit_s=limit_s) for n, e in zip(names, engines, strict=True)
        ]
        self.workers: list[Worker] = []

    def send(self, named: Any, version: int = 1, announced: Manifest | None = None, **how: Any) -> Any:
        """One transfer of ``named`` (a dict or pairs); every receiver has ended when this returns or raises."""
        self.workers = [Worker(receiver) for receiver in self.receivers]
        pairs = list(named.items()) if isinstance(named, Mapping) else list(named)
        try:
            return self.sender.send(version, announced or manifest(dict(pairs)), pairs, **how)
        finally:
            for worker in self.workers:
                worker.end()

    def close(self) -> None:
        self.sender.close()
        for receiver in self.receivers:
            receiver.close()


@contextmanager
def pair(*engines: Any, **how: Any) -> Iterator[Pair]:
    made = Pair(*engines, **how)
    try:
        yield made
    finally:
        made.close()


# In processes


def context() -> Any:
    """Children that start in a few milliseconds, with PyTorch imported and nothing of the parent."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["torch", "crossrl.sync.receiver", "crossrl.sync.barrier"])
    return made


class Suicidal(HeldTensors):
    """Is killed while it loads ``at``'s part."""

    at = 4

    def load_part(self, *args: Any) -> None:
        self.at -= 1
        if not self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        super().load_part(*args)


def receive_in_process(address: str, name: str, kind: type[HeldTensors], rounds: int, answers: Any) -> None:
    """Receive ``rounds`` times; put (name, version, tensors or error, log) of each."""
    target = engine(kind)
    with WeightReceiver(address, name, target, limit_s=20) as receiver:
        for _ in range(rounds):
            try:
                receiver.receive()
                outcome: Any = {n: t.contiguous().clone() for n, t in target.tensors.items()}
            except SyncError as error:
                outcome = str(error)
            # Bytes by value: tensors in a queue are passed through shared memory, which is what is counted here.
            if isinstance(outcome, dict):
                outcome = {n: (t.flatten().view(torch.uint8).numpy().tobytes()) for n, t in outcome.items()}
            answers.put((name, target.weight_version, outcome, list(receiver.log.events)))


def raw(named: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {n: t.contiguous().flatten().view(torch.uint8).numpy().tobytes() for n, t in named.items()}


def send_and_hang(address: str, names: Sequence[str], said: Any) -> None:
    """Begin a transfer and stop in the middle of it."""

    def endless() -> Iterator[tuple[str, torch.Tensor]]:
        for i, pair in enumerate(weights().items()):
            if i == 5:
                said.put("half way")
                time.sleep(600)
            yield pair

    with WeightSender(list(names), address, bucket_bytes=PAGE, limit_s=20) as sender:
        sender.send(1, manifest(weights()), endless())


def rank_in_process(address: str, name: str, late_s: float, limit_s: float, answers: Any) -> None:
    """One rank of a barrier that releases ``late_s`` late; puts (name, what happened, when it released, resumed)."""
    from crossrl.sync.barrier import BarrierRank, resume_cache

    rank = BarrierRank(address, name)
    times: dict[str, int] = {}

    def note(what: str, wait: float = 0.0) -> Callable[[], None]:
        def done() -> None:
            time.sleep(wait)
            times[what] = time.monotonic_ns()

        return done

    try:
        resume_cache(rank, "v1", note("released", late_s), note("resumed"), limit_s)
        answers.put((name, "resumed", times))
    except SyncError as error:
        answers.put((name, str(error), times))
    finally:
        rank.close()
