"""Workers: every wait is bounded, every failure is named, nothing is left behind. The same for children and for Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_cases import alive, gone

from crossrl.cluster.local import LocalLauncher
from crossrl.cluster.worker import WorkerDied, WorkerError, WorkerLate, close_all, collect

TESTS = Path(__file__).parent
Start = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    made: dict[str, Any] = {}

    def get(kind: str) -> Any:
        logs = tmp_path_factory.mktemp(kind)
        if kind == "local":
            return LocalLauncher(logs)
        pytest.importorskip("ray")
        from crossrl.cluster.ray import RayLauncher

        if kind not in made:
            init = {"num_cpus": 4, "object_store_memory": 80_000_000}
            made[kind] = RayLauncher(1, 2, {"CPU": 1}, {"w": 2}, logs=logs, init=init)
        return made[kind]

    yield get
    for launcher in made.values():
        launcher.close()


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def start(request: pytest.FixtureRequest, launchers: Callable[[str], Any]) -> Iterator[Start]:
    """Start ``count`` workers of ``factory``."""
    launcher, workers = launchers(request.param), []

    def begin(count: int = 2, factory: str = "cluster_cases:Work", wait: bool = True, **env: str) -> list[Any]:
        path = f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        made = [launcher.start(f"w-{i}", factory, i, env={"PYTHONPATH": path, **env}) for i in range(count)]
        workers.extend(made)
        if wait:
            collect([w.born for w in made], "start", 60)
        return made

    yield begin
    for worker in workers:
        worker.kill()  # one that hangs on purpose would have its time to end
    close_all(workers)


def pid_of(worker: Any) -> int:
    return int(worker.process.split()[1])


def test_values_come_in_the_order_of_the_calls_whoever_is_first(start: Start) -> None:
    slow, fast = start()
    assert collect([slow.start("nap", 0.4), fast.start("nap", 0.0)], "nap", 20) == [0, 1]
    assert collect([w.start("square", 3) for w in (fast, slow)], "square", 20) == [(1, 9), (0, 9)]


def test_a_worker_has_the_environment_that_it_was_given(start: Start) -> None:
    (worker,) = start(1, CROSSRL_TEST="here")
    assert collect([worker.start("variable", "CROSSRL_TEST")], "read", 20) == ["here"]


def test_the_drivers_message_is_the_workers_own_error(start: Start) -> None:
    (worker,) = start(1)
    with pytest.raises(WorkerError, match=r"w-0 \(process \d+.*\) failed at fail: ValueError: the reason"):
        collect([worker.start("fail")], "fail", 20)
    assert collect([worker.start("square", 2)], "go on", 20) == [(0, 4)]


def test_a_result_that_cannot_be_sent_is_an_error_and_not_a_hang(start: Start) -> None:
    (worker,) = start(1)
    with pytest.raises(WorkerError, match="pickle"):
        collect([worker.start("cannot_be_sent")], "answer", 20)


def test_a_worker_that_cannot_be_made_says_why(start: Start) -> None:
    workers = start(1, "cluster_cases:broken", wait=False)
    with pytest.raises(WorkerError, match="failed at start: FileNotFoundError: no such model"):
        collect([w.born for w in workers], "start", 60)


def test_a_killed_worker_is_noticed_at_once_and_named_with_its_last_words(start: Start) -> None:
    dies, hangs = start()
    begin = time.monotonic()
    with pytest.raises(WorkerDied, match=r"(?s)w-0 \(process \d+.*has died at die.*last words") as caught:
        collect([hangs.start("nap", 30), dies.start("die")], "end", 25)
    assert time.monotonic() - begin < 20
    assert caught.value.worker == "w-0"
    with pytest.raises(WorkerDied, match="w-0"):
        collect([dies.start("square", 1)], "answer", 20)


def test_a_worker_that_hangs_is_named_within_the_limit(start: Start) -> None:
    quick, hangs = start()
    begin = time.monotonic()
    with pytest.raises(WorkerLate, match=r"waited 0.5 s for w-1 \(process \d+.*\) to nap: no answer"):
        collect([quick.start("nap", 0.0), hangs.start("nap", 30)], "nap", 0.5)
    assert time.monotonic() - begin < 5


def test_with_keep_going_an_error_takes_the_place_of_a_value(start: Start) -> None:
    good, bad = start()
    value, error = collect([good.start("square", 2), bad.start("fail")], "work", 20, keep_going=True)
    assert value == (0, 4)
    assert isinstance(error, WorkerError) and "the reason" in str(error)


def test_progress_reaches_the_driver_while_the_call_runs(start: Start) -> None:
    (worker,) = start(1)
    seen: list[tuple[int, int]] = []
    assert collect([worker.start("count", 4, progress=lambda *at: seen.append(at))], "count", 20) == [4]
    assert seen and seen == sorted(set(seen)) and {to for _, to in seen} == {4}


def test_a_call_for_now_is_made_beside_the_one_that_runs(start: Start) -> None:
    (worker,) = start(1)
    running = worker.start("until_stopped")
    assert not running.ready(0.2)
    assert collect([worker.now("please_stop")], "be told", 20) == [True]
    assert collect([running], "stop", 20) == ["stopped"]


def test_a_killed_worker_leaves_no_process(start: Start) -> None:
    (worker,) = start(1)
    pid = pid_of(worker)
    worker.kill()
    assert gone(pid)


def test_closing_a_local_worker_ends_what_it_has_started() -> None:
    worker = LocalLauncher().start("w-0", "cluster_cases:Work", 0, env={"PYTHONPATH": str(TESTS)})
    child = worker.start("leave_a_child").value()
    assert alive(child)
    worker.close()
    assert gone(child) and gone(pid_of(worker))


def test_opening_and_closing_workers_leaks_no_descriptor() -> None:
    def once() -> int:
        worker = LocalLauncher().start("w-0", "cluster_cases:Work", 0, env={"PYTHONPATH": str(TESTS)})
        assert worker.start("square", 2).value() == (0, 4)
        worker.close()
        return len(list(Path("/proc/self/fd").iterdir()))

    before = once()
    assert [once() for _ in range(3)] == [before] * 3


DRIVER = """
import os, sys, time
from crossrl.cluster.local import LocalLauncher
worker = LocalLauncher().start("w-0", "cluster_cases:Work", 0)
worker.born.value()
print(worker.process.split()[1], flush=True)
worker.start("nap", 600)
time.sleep(600)
"""


def test_workers_end_with_a_driver_that_is_killed_in_the_middle_of_a_call() -> None:
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], env=env, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    assert alive(pid)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert gone(pid)
