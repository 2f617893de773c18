"""Whatever fails where: both sides hear of it in time, let everything go, and the next full transfer succeeds."""

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sync_cases import (
    PAGE,
    Failing,
    HeldTensors,
    Suicidal,
    Worker,
    context,
    engine,
    manifest,
    pair,
    raw,
    receive_in_process,
    send_and_hang,
    weights,
)  # fmt: skip

from crossrl.sync import shared_memory
from crossrl.sync.buffer import attach
from crossrl.sync.cuda_ipc import CudaBuffer
from crossrl.sync.endpoint import Hub, Spoke
from crossrl.sync.messages import Message, SyncError
from crossrl.sync.receiver import WeightReceiver
from crossrl.sync.sender import WeightSender
from crossrl.sync.shared_memory import SharedBuffer

LIMIT_S = 1.0


def segments() -> list[str]:
    return sorted(p.name for p in Path("/dev/shm").glob(f"{shared_memory.PREFIX}*") if str(os.getpid()) in p.name)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Children:
    """Processes of a test, ended with it."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def start(self, run: Any, *args: Any) -> Any:
        process = context().Process(target=run, args=args, daemon=True)
        process.start()
        self.all.append(process)
        return process


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    for process in made.all:
        process.kill()
        process.join(10)


# C11


def test_c11_i_a_receiver_that_raises_on_bucket_3_reaches_the_sender_as_its_text() -> None:
    with pair(engine(), engine(Failing, where="load", at=6), limit_s=LIMIT_S) as both:
        started = time.monotonic()
        with pytest.raises(SyncError, match=r"engine-1 .* failed at load: ValueError: no memory left in load"):
            both.send(weights(1))
        assert time.monotonic() - started < 2 * LIMIT_S
        assert not segments()
        assert "the sender gave it up" in str(both.workers[0].error) and "no memory left" in both.engines[0].unusable
        both.send(weights(2), 2)
        assert all(raw(held.tensors) == raw(weights(2)) for held in both.engines)


def test_c11_ii_a_receiver_that_is_killed_on_a_bucket_is_noticed_and_one_in_its_place_is_served(children) -> None:
    with WeightSender(["engine-0", "engine-1"], bucket_bytes=PAGE, limit_s=20) as sender:
        answers = context().Queue()
        children.start(receive_in_process, sender.address, "engine-0", HeldTensors, 2, answers)
        killed = children.start(receive_in_process, sender.address, "engine-1", Suicidal, 1, answers)
        with pytest.raises(SyncError, match=rf"engine-1 \(process {killed.pid}\) has died"):
            sender.send(1, manifest(weights(1)), weights(1).items())
        heard = time.monotonic()
        killed.join(10)
        assert time.monotonic() - heard < 2 * LIMIT_S  # noticed when it died, not after 20 s
        assert not segments()
        name, version, outcome, _ = answers.get(timeout=10)
        assert (name, version) == ("engine-0", 0) and "engine-1" in outcome and "has died" in outcome
        children.start(receive_in_process, sender.address, "engine-1", HeldTensors, 1, answers)
        sender.send(2, manifest(weights(2)), weights(2).items())
        for _ in range(2):
            _, version, outcome, _ = answers.get(timeout=10)
            assert version == 2 and outcome == raw(weights(2))


def test_a_killed_receiver_that_cannot_be_watched_is_noticed_within_the_limit(children, monkeypatch) -> None:
    """As on a system without pidfd_open."""

    def unknown(pid: int) -> int:
        raise OSError("no such system call")

    monkeypatch.setattr(os, "pidfd_open", unknown)
    with WeightSender(["engine-1"], bucket_bytes=PAGE, limit_s=LIMIT_S) as sender:
        answers = context().Queue()
        children.start(receive_in_process, sender.address, "engine-1", Suicidal, 1, answers)
        sender.limit_s = 10
        peers = sender._peers
        real = peers.wait
        monkeypatch.setattr(peers, "wait", lambda p, what, done, limit_s: real(p, what, done, LIMIT_S))
        with pytest.raises(SyncError, match=r"waited 1 s for engine-1 .* to copy bucket|engine-1 .* is not connected"):
            sender.send(1, manifest(weights(1)), weights(1).items())


def test_c11_iii_no_receiver_at_all_is_an_error_within_the_limit_that_names_it() -> None:
    with WeightSender(["engine-0", "engine-1"], limit_s=LIMIT_S) as sender:
        started = time.monotonic()
        with pytest.raises(SyncError, match=r"waited 1 s for engine-0, engine-1 to ask for weights at ipc://"):
            sender.send(1, manifest(weights(1)), weights(1).items())
        assert time.monotonic() - started < 2 * LIMIT_S
        assert not segments()


class Hanging(HeldTensors):
    """Hangs in its third part until it is let go."""

    def load_part(self, *args: Any) -> None:
        self.parts = getattr(self, "parts", 0) + 1
        if self.parts == 3:
            self.go.wait(20)
        super().load_part(*args)


def test_a_receiver_that_hangs_is_named_within_twice_the_limit_and_served_when_it_is_back() -> None:
    held = engine(Hanging)
    held.go = threading.Event()
    with pair(held, engine(), limit_s=0.4) as both:
        for receiver in both.receivers:
            receiver.limit_s = 10
        started = time.monotonic()
        threading.Timer(1.2, held.go.set).start()
        said = r"waited 0.4 s for engine-0 .* to copy bucket \d out.*did not answer"
        with pytest.raises(SyncError, match=said) as caught:
            both.send(weights(1))
        assert "engine-1" not in str(caught.value)
        raised = next(e.at for e in both.sender.log.events if e.did == "closed") / 1e9 - started
        assert raised < 2 * 0.4 + 0.3
        assert not segments() and held.weight_version == 0
        both.send(weights(2), 2)
        assert raw(held.tensors) == raw(weights(2))


def test_control_without_a_time_limit_the_sender_would_wait_as_long_as_the_receiver_hangs(monkeypatch) -> None:
    from crossrl.sync.peers import Peers

    real = Peers.wait
    monkeypatch.setattr(Peers, "wait", lambda self, peers, what, done, limit_s: real(self, peers, what, done, 10.0))
    held = engine(Hanging)
    held.go = threading.Event()
    with pair(held, limit_s=0.2) as one:
        threading.Timer(1.0, held.go.set).start()
        started = time.monotonic()
        one.send(weights(1))
        assert time.monotonic() - started > 2 * 0.2 + 0.3


# The other way round


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_a_sender_that_dies_or_hangs_lets_the_receiver_go_with_the_reason(children, tmp_path, how) -> None:
    said = context().Queue()
    address = f"ipc://{tmp_path}/w"
    sender = children.start(send_and_hang, address, ["engine-0"], said)
    target = engine()
    before = descriptors()
    with WeightReceiver(address, "engine-0", target, limit_s=20) as receiver:
        if how == "hung":
            from crossrl.sync import receiver as module

            real = module._Transfer.__init__

            def impatient(self: Any, *args: Any) -> None:
                real(self, *args)
                self._limit_s = 0.5

            module._Transfer.__init__ = impatient  # type: ignore[method-assign]
            try:
                with pytest.raises(SyncError, match=r"waited 0.5 s for the sender's bucket or finish: nothing came"):
                    receiver.receive()
            finally:
                module._Transfer.__init__ = real  # type: ignore[method-assign]
        else:
            threading.Thread(target=lambda: (said.get(timeout=20), sender.kill())).start()
            with pytest.raises(SyncError, match=rf"the sender \(process {sender.pid}\) has died"):
                receiver.receive()
        assert target.weight_version == 0 and target.unusable
    assert descriptors() <= before + 2  # the pipe of the child
    assert not list(Path("/dev/shm").glob(f"{shared_memory.PREFIX}{sender.pid}-*"))


def test_an_error_of_the_trainer_in_the_middle_reaches_the_receivers_and_is_raised_as_it_is() -> None:
    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(1).items())[:6]
        raise OSError("a rank is gone")

    with pair(engine()) as one:
        worker = Worker(one.receivers[0])
        with pytest.raises(SyncError, match="OSError: a rank is gone"):
            one.sender.send(1, manifest(weights(1)), gathered())
        assert "a rank is gone" in str(worker.end().error) and "a rank is gone" in one.engines[0].unusable
        one.send(weights(2), 2)


def test_an_error_in_the_clean_up_reaches_the_sender_and_does_not_hide_the_first() -> None:
    class Keeping(HeldTensors):
        kept = None

        def load_part(self, name: str, shape: Any, start: int, values: torch.Tensor) -> None:
            self.kept = values
            super().load_part(name, shape, start, values)
            if start:
                raise ValueError("the first error")

        def abort_update(self, reason: str) -> None:
            super().abort_update(reason)
            raise RuntimeError("the third error")

    with pair(engine(Keeping)) as one, pytest.raises(SyncError) as caught:
        one.send(weights(1))
    for part in ("the first error", "a view of the shared memory is still held", "the third error"):
        assert part in str(caught.value)
    assert str(caught.value).index("the first error") < str(caught.value).index("a view of")


def test_an_error_of_on_release_reaches_the_sender() -> None:
    def broken() -> None:
        raise RuntimeError("the handle cannot be closed")

    with pair(engine()) as one:
        one.receivers[0]._on_release = broken
        with pytest.raises(SyncError, match="failed at release: RuntimeError: the handle cannot be closed"):
            one.send(weights(1))
        assert one.engines[0].unusable


def test_both_sides_free_memory_descriptors_and_threads_in_good_and_failed_rounds() -> None:
    rounds(10)


@pytest.mark.slow
def test_nothing_is_left_after_many_good_and_failed_rounds() -> None:
    rounds(int(os.environ.get("CROSSRL_SYNC_ROUNDS", "50")))


def rounds(count: int) -> None:
    """``count`` good and ``count`` failed ones, the failures of different kinds, then close."""
    gc.collect()  # what other tests have left
    outside = descriptors(), threading.active_count(), segments()
    failing = engine(Failing, where="load", at=-1)
    with pair(engine(), failing, limit_s=10) as both:
        both.send(weights(1))
        inside = descriptors(), threading.active_count(), segments()
        for i in range(count):
            failing.where, failing.left = ("load", "check", "clear", "finish")[i % 4], 1 + (i % 4 == 0) * (i % 5)
            payload = dict(list(weights(2).items())[i % 3 == 0 :])
            with pytest.raises(SyncError):
                both.send(payload, 2, manifest(weights(2)))
            failing.left = -1
            both.send(weights(3 + i % 2), 3)
            gc.collect()
            assert (descriptors(), threading.active_count(), segments()) == inside, f"after round {i}"
    assert (descriptors(), threading.active_count(), segments()) == outside


def test_control_a_buffer_that_is_not_closed_is_counted(monkeypatch) -> None:
    kept = []
    monkeypatch.setattr(SharedBuffer, "close", lambda self: kept.append(self))
    with pytest.raises(AssertionError, match="after round 0"):
        rounds(1)
    monkeypatch.undo()
    for buffer in kept:
        buffer.close()


# Shared memory


def test_memory_whose_maker_was_killed_is_removed(monkeypatch, children) -> None:
    monkeypatch.setattr(shared_memory, "ABANDONED_S", -1.0)
    left = Path(f"/dev/shm/{shared_memory.PREFIX}0-left")
    left.write_bytes(b"x")
    mine = SharedBuffer.create(PAGE)
    try:
        assert not left.exists()
        shared_memory.remove_abandoned()
        assert segments()  # what lives is left alone
        other = SharedBuffer.attach(mine.describe())
        mine.attached()
        assert not segments()  # with no name, nothing can be left, whoever is killed
        mine.slot(1).fill_(7)
        assert other.slot(1).eq(7).all() and other.slot(0).eq(0).all()
        other.close()
    finally:
        mine.close()


def test_a_full_dev_shm_is_an_error_with_the_arithmetic() -> None:
    free = os.statvfs("/dev/shm")
    size = free.f_blocks * free.f_frsize // PAGE * PAGE
    with pytest.raises(SyncError, match=r"MiB free, 2 buckets of \d+ MiB were asked for .*--shm-size"):
        SharedBuffer.create(size)
    assert not segments()


def test_a_view_that_is_still_held_is_an_error_and_no_crash() -> None:
    buffer = SharedBuffer.create(PAGE)
    view = buffer.slot(0)
    with pytest.raises(SyncError, match="a view of the shared memory is still held"):
        buffer.close()
    view.fill_(3)
    assert view.sum() == 3 * PAGE


def test_names_outside_of_the_shared_memory_are_refused() -> None:
    for name in ("../../etc/passwd", "/etc/passwd", "psm_1234", f"{shared_memory.PREFIX}../x"):
        with pytest.raises(SyncError, match="is not the name of shared memory"):
            SharedBuffer.attach({"name": name, "size": PAGE, "slots": 2})


# Sockets


def test_a_socket_can_send_again_whatever_was_not_answered(tmp_path) -> None:
    hub = Hub(f"ipc://{tmp_path}/s", "hub")
    spoke = Spoke(hub.address, "a")
    try:
        assert not hub.send("a", Message("commit"))  # nobody yet: said, and nothing breaks
        for _ in range(3):
            spoke.send(Message("left"))
        for _ in range(3):
            assert hub.receive(time.monotonic() + 5) == ("a", Message("left"))
        for _ in range(3):
            assert hub.send("a", Message("commit"))
        for _ in range(3):
            assert spoke.receive(time.monotonic() + 5) == Message("commit")
        spoke.send(Message("left"))
        assert hub.receive(time.monotonic() + 5) == ("a", Message("left"))
    finally:
        spoke.close()
        hub.close()
    assert not list(tmp_path.iterdir())


def test_an_address_that_cannot_be_used_is_named() -> None:
    before = descriptors()
    with pytest.raises(SyncError, match=r"cannot listen at ipc:///no/such/folder/s"):
        WeightSender(["a"], "ipc:///no/such/folder/s")
    assert descriptors() == before


# The port of transports


def test_a_transport_that_is_not_known_or_not_possible_here_is_refused() -> None:
    with pytest.raises(SyncError, match="passes weights by 'carrier pigeon', this side knows shared_memory, cuda_ipc"):
        attach({"kind": "carrier pigeon"})
    if not torch.cuda.is_available():
        with pytest.raises(SyncError, match="CUDA IPC needs a GPU"):
            CudaBuffer.create(PAGE)
        with pair(engine()) as one:
            one.sender._make_buffer = CudaBuffer.create
            worker = Worker(one.receivers[0])
            with pytest.raises(SyncError, match="CUDA IPC needs a GPU"):
                one.sender.send(1, manifest(weights(1)), weights(1).items())
            one.sender._make_buffer = SharedBuffer.create
            one.sender.send(1, manifest(weights(1)), weights(1).items())  # it has waited on
            assert worker.end().result and one.engines[0].weight_version == 1


def test_a_receiver_that_was_not_told_of_a_failed_transfer_is_not_waited_for_and_takes_part_in_the_next(monkeypatch):
    with pair(engine(), engine(), limit_s=3) as both:
        gone, waiting = (Worker(r) for r in both.receivers)
        hub, real = both.sender._hub, both.sender._hub.send
        monkeypatch.setattr(hub, "send", lambda peer, message: peer != "engine-0" and real(peer, message))
        started = time.monotonic()
        with pytest.raises(SyncError, match=r"engine-0 .* is not connected any more"):
            both.sender.send(1, manifest(weights(1)), weights(1).items())
        assert time.monotonic() - started < 2
        monkeypatch.undo()
        both.sender._peers.names = ("engine-1",)
        both.sender.send(2, manifest(weights(2)), weights(2).items())
        assert waiting.end().result and both.engines[1].weight_version == 2
        gone.join(20)
