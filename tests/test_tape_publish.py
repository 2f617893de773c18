"""A record is complete when it is visible, whatever happens to its writer; failures of the disk are never lost."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from crossrl.batch import Batch, Ragged
from crossrl.tape import publish
from crossrl.tape.capture import capture
from crossrl.tape.errors import CorruptRecord, RecordExists, TapeError, TapeWriteError
from crossrl.tape.header import Header
from crossrl.tape.publish import Draft, clean_leftovers, write_record
from crossrl.tape.record import read_record
from crossrl.tape.writer import Writer


def make_draft(number: int = 0, size: int = 2000) -> Draft:
    columns = {
        "response_ids": Ragged.from_rows([np.full(size, number), [1, 2]], np.int32),
        "reward": np.array([float(number), 0.0]),
        "response": [str(number), "x" * size],
    }
    return Draft(Header("run", "rollout", number), capture(Batch(("a", "b"), columns)))


@contextlib.contextmanager
def child(work: Callable[[], None]) -> Iterator[int]:
    """Runs ``work`` in a forked process; the process is dead when the block ends."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            work()
        os._exit(0)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def visible(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if not p.name.startswith(".")]


def killed_at_random_points(folder: Path, write: Callable[[Path, Draft], object], times: int) -> int:
    """Kill a process that writes records, ``times`` times; returns how many temporary folders were left."""
    rng = random.Random(0)
    number = 0
    for _ in range(times):

        def work(first: int = number) -> None:
            for i in range(first, first + 10_000):
                write(folder / f"r{i}", make_draft(i))

        with child(work):
            deadline = time.monotonic() + 10
            while not (folder / f"r{number}").exists() and time.monotonic() < deadline:
                time.sleep(0.0005)
            time.sleep(rng.random() * 0.01)
        number += 10_000
    return len(list(folder.glob(".tmp-*")))


def test_a_writer_killed_at_100_random_points_leaves_no_partial_record(tmp_path: Path) -> None:
    left = killed_at_random_points(tmp_path, write_record, 100)
    records = visible(tmp_path)
    assert len(records) >= 100
    for path in records:
        record = read_record(path, "eager")
        assert record.batch.array("reward")[0] == record.header.step
    assert left > 0, "no kill hit a write in progress: the test shows nothing"
    assert len(clean_leftovers(tmp_path, min_age_s=0)) == left
    assert not list(tmp_path.glob(".tmp-*")) and len(visible(tmp_path)) == len(records)


def test_the_kill_test_fails_for_a_writer_that_writes_in_place(tmp_path: Path) -> None:
    """The planted control: the same files, written straight into the visible folder."""

    def in_place(path: Path, draft: Draft) -> None:
        path.mkdir()
        with (path / "record.json").open("xb") as file:
            publish._write_files(path, file, draft, None)

    killed_at_random_points(tmp_path, in_place, 30)
    broken = 0
    for path in visible(tmp_path):
        try:
            read_record(path, "eager")
        except CorruptRecord:
            broken += 1
    assert broken > 0


def test_a_leftover_in_use_or_young_stays(tmp_path: Path) -> None:
    entered, go = threading.Event(), threading.Event()
    real = publish._write_files

    def slow(*args: object) -> int:
        entered.set()
        assert go.wait(10)
        return real(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "_write_files", slow)
        thread = threading.Thread(target=write_record, args=(tmp_path / "r", make_draft()))
        thread.start()
        assert entered.wait(10)
        assert clean_leftovers(tmp_path, min_age_s=0) == []
        go.set()
        thread.join()
    read_record(tmp_path / "r", "eager")
    (tmp_path / ".tmp-young").mkdir()
    assert clean_leftovers(tmp_path) == []
    os.utime(tmp_path / ".tmp-young", (0, 0))
    assert clean_leftovers(tmp_path) == [tmp_path / ".tmp-young"]


def test_of_two_writers_of_one_record_one_wins_and_one_is_told(tmp_path: Path) -> None:
    results: list[str] = []
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        barrier.wait()
        try:
            write_record(tmp_path / "r", make_draft(number))
            results.append("written")
        except RecordExists:
            results.append("exists")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["exists", "exists", "exists", "written"]
    read_record(tmp_path / "r", "eager")
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


def test_a_full_disk_is_raised_at_the_next_boundary_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file size stands for the full disk: the write itself fails, in the middle of a file."""
    report = tmp_path / "report"

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        writer = Writer()
        writer.submit(tmp_path / "t" / "small", make_draft(size=10))
        writer.submit(tmp_path / "t" / "large", make_draft(size=100_000))
        try:
            writer.close()
        except TapeWriteError as error:
            report.write_text(str(error))

    with child(work) as pid:
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.01)
    assert f"{tmp_path}/t/large could not be written: [Errno 27] File too large" in report.read_text()
    assert [p.name for p in (tmp_path / "t").iterdir()] == ["small"]


def test_a_folder_that_cannot_be_made_is_raised(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = Writer()
    writer.submit(tmp_path / "file" / "r", make_draft())
    with pytest.raises(TapeWriteError, match=r"file/r could not be written.*Not a directory|File exists"):
        writer.flush()


def fail_on(number: int, error: BaseException) -> Callable[[Path, Draft], int]:
    def write(path: Path, draft: Draft) -> int:
        if draft.header.step == number:
            raise error
        return write_record(path, draft)

    return write


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), PermissionError(13, "denied"), MemoryError()]
)
def test_a_failure_is_kept_and_raised_at_every_later_boundary(tmp_path: Path, error: BaseException) -> None:
    writer = Writer(write=fail_on(1, error))
    for i in range(3):
        with contextlib.suppress(TapeWriteError):
            writer.submit(tmp_path / f"r{i}", make_draft(i))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            writer.check()
        except TapeWriteError:
            break
        time.sleep(0.001)
    for call in (writer.check, writer.flush, writer.close, lambda: writer.submit(tmp_path / "r9", make_draft(9))):
        with pytest.raises(TapeWriteError, match="r1 could not be written"):
            call()
    assert [p.name for p in tmp_path.iterdir()] == ["r0"]


def test_without_a_failure_nothing_is_raised(tmp_path: Path) -> None:
    """The control of the tests above."""
    done: list[Path] = []
    writer = Writer(written=lambda path, size: done.append(path))
    for i in range(5):
        writer.submit(tmp_path / f"r{i}", make_draft(i))
        writer.check()
    writer.close()
    writer.close()
    assert done == [tmp_path / f"r{i}" for i in range(5)]
    with pytest.raises(TapeError, match="too late"):
        writer.submit(tmp_path / "r9", make_draft())


def test_memory_in_flight_is_bounded(tmp_path: Path) -> None:
    gate, in_flight, most = threading.Semaphore(0), [0], [0]

    def slow(path: Path, draft: Draft) -> int:
        assert gate.acquire(timeout=10)
        in_flight[0] -= draft.nbytes
        return 0

    draft = make_draft(size=1000)
    writer = Writer(limit_bytes=3 * draft.nbytes, write=slow)

    def produce() -> None:
        for i in range(10):
            writer.submit(tmp_path / f"r{i}", draft)
            in_flight[0] += draft.nbytes
            most[0] = max(most[0], in_flight[0])

    thread = threading.Thread(target=produce)
    thread.start()
    for _ in range(10):
        time.sleep(0.01)
        gate.release()
    thread.join(10)
    writer.close()
    assert draft.nbytes <= most[0] <= 3 * draft.nbytes


def test_a_draft_larger_than_the_limit_is_written_alone(tmp_path: Path) -> None:
    writer = Writer(limit_bytes=10)
    for i in range(3):
        writer.submit(tmp_path / f"r{i}", make_draft(i))
    writer.close()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_disk_that_hangs_is_an_error_within_the_limit(tmp_path: Path) -> None:
    gate = threading.Event()
    writer = Writer(stall_s=0.2, write=lambda path, draft: int(gate.wait(20)))
    writer.submit(tmp_path / "r", make_draft())
    start = time.monotonic()
    with pytest.raises(TapeWriteError, match=r"no record was finished for 0\.2 s"):
        writer.flush()
    assert time.monotonic() - start < 5
    gate.set()


def test_a_vanished_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()

    def write(path: Path, draft: Draft) -> int:
        real = publish._sync_folder

        def vanish(folder: Path) -> None:
            shutil.rmtree(tmp_path / "t", ignore_errors=True)
            real(folder)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(publish, "_sync_folder", vanish)
            return write_record(path, draft)

    writer = Writer(write=write)
    writer.submit(tmp_path / "t" / "r", make_draft())
    with pytest.raises(TapeWriteError, match="No such file"):
        writer.close()
