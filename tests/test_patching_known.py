"""The patches for vllm-ascend, on stand-ins of its worker and its allocator: no NPU is here."""

from __future__ import annotations

import ast
import os
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from crossrl.patching.fingerprint import definitions, fingerprint
from crossrl.patching.known import PATCHES
from crossrl.patching.known.vllm_ascend import SLEEP, WAKE_UP, SleepError

HIDDEN = 4


class Unmapped(RuntimeError):
    """What a device would do: memory is used, or given back, or mapped, that is in no state for it."""


class Allocation:
    def __init__(self, tag: str) -> None:
        self.tag, self.mapped = tag, True


class CaMemAllocator:
    """Maps and unmaps by tag, like its namesake; a device's errors are exceptions here."""

    sleep_persistent_tag = "sleep_persistent"
    instance: CaMemAllocator

    def __init__(self) -> None:
        self.pointer_to_data = {i: Allocation(tag) for i, tag in enumerate(("weights", "kv_cache", "sleep_persistent"))}
        self.maps: list[str] = []

    @classmethod
    def get_instance(cls) -> CaMemAllocator:
        return cls.instance

    def mine(self, tags: list[str] | None = None) -> Iterator[Allocation]:
        for data in self.pointer_to_data.values():
            if data.tag != self.sleep_persistent_tag and (tags is None or data.tag in tags):
                yield data

    def mapped(self, tag: str) -> bool:
        return all(data.mapped for data in self.mine([tag]))

    def sleep(self) -> None:
        for data in self.mine():
            if not data.mapped:
                raise Unmapped(f"{data.tag} is given back twice")
            data.mapped = False

    def wake_up(self, tags: list[str] | None) -> None:
        for data in self.mine(tags):
            data.mapped = True
            self.maps.append(data.tag)


def get_ascend_config() -> types.SimpleNamespace:
    return types.SimpleNamespace(enable_sleep_mode_extra_cleanup=CLEANUP)


CLEANUP = False


class NPUWorker:
    """What the patches touch of a worker. ``layout``: of expert weights whose size equals the hidden size, so that
    shapes do not tell: "run" after loading, "load" where the loader expects it."""

    def __init__(self) -> None:
        CaMemAllocator.instance = self.memory = CaMemAllocator()
        self._sleep_saved_buffers: dict[str, int] = {}
        self.buffers, self.layout, self.captures = {"rope": 7}, "run", 0

    def sleep(self, level: int = 1) -> None:
        if level == 2:
            self._sleep_saved_buffers = dict(self.buffers)
            self.buffers = {}
        CaMemAllocator.get_instance().sleep()

    def wake_up(self, tags: list[str] | None = None) -> None:
        CaMemAllocator.get_instance().wake_up(tags)
        if tags is None or "weights" in tags:
            self.layout = {"run": "load", "load": "run"}[self.layout]
        if self._sleep_saved_buffers:
            if not self.memory.mapped("weights"):
                raise Unmapped("buffers are written")
            self.buffers, self._sleep_saved_buffers = self._sleep_saved_buffers, {}
        if get_ascend_config().enable_sleep_mode_extra_cleanup and (tags is None or "kv_cache" in tags):
            if not self.memory.mapped("weights"):
                raise Unmapped("the model runs")
            self.captures += 1


class Guarded(NPUWorker):
    sleep = SLEEP.wrapper(NPUWorker.sleep)
    wake_up = WAKE_UP.wrapper(NPUWorker.wake_up)


def after(worker: NPUWorker, *calls: tuple) -> NPUWorker:
    for name, *args in calls:
        getattr(worker, name)(*args)
    return worker


TWICE = (("sleep", 1), ("wake_up", ["weights"]), ("wake_up",))
CACHE_FIRST = (("sleep", 2), ("wake_up", ["kv_cache"]), ("wake_up", ["weights"]))


def test_waking_everything_after_the_weights_wakes_only_the_rest():
    bare = after(NPUWorker(), *TWICE)
    assert (bare.memory.maps, bare.layout) == (["weights", "weights", "kv_cache"], "run"), "the fault: twice"
    guarded = after(Guarded(), *TWICE)
    assert (guarded.memory.maps, guarded.layout) == (["weights", "kv_cache"], "load")


def test_buffers_wait_for_the_weights():
    with pytest.raises(Unmapped, match="buffers are written"):
        after(NPUWorker(), *CACHE_FIRST)
    worker = after(Guarded(), *CACHE_FIRST[:2])
    assert (worker.buffers, worker._sleep_saved_buffers) == ({}, {"rope": 7})
    after(worker, CACHE_FIRST[2])
    assert (worker.buffers, worker._sleep_saved_buffers, worker.layout) == ({"rope": 7}, {}, "load")


def test_graphs_are_not_captured_without_weights(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "CLEANUP", True)
    with pytest.raises(Unmapped, match="the model runs"):
        after(NPUWorker(), ("sleep", 1), ("wake_up", ["kv_cache"]))
    worker = after(Guarded(), ("sleep", 1))
    with pytest.raises(SleepError, match="with the weights still asleep: wake the weights first"):
        worker.wake_up(["kv_cache"])
    after(worker, ("wake_up", ["weights"]), ("wake_up", ["kv_cache"]))
    assert worker.captures == 1


@pytest.mark.parametrize(
    "calls",
    [
        [("sleep", 1), ("wake_up",)],
        [("sleep", 2), ("wake_up",)],
        [("sleep", 2), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])],
        [("sleep", 1), ("wake_up",), ("sleep", 2), ("wake_up", ["weights", "kv_cache"])],
        [("sleep", 1)],
    ],
)
@pytest.mark.parametrize("cleanup", [False, True])
def test_what_was_right_is_as_before(calls, cleanup, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "CLEANUP", cleanup)
    bare, guarded = after(NPUWorker(), *calls), after(Guarded(), *calls)
    kept = ("buffers", "layout", "captures", "_sleep_saved_buffers")
    assert [getattr(guarded, k) for k in kept] == [getattr(bare, k) for k in kept]
    assert guarded.memory.maps == bare.memory.maps


def test_what_is_awake_is_not_woken_and_what_sleeps_is_not_sent_to_sleep(caplog):
    worker = after(Guarded(), ("wake_up",), ("sleep", 1), ("sleep", 1), ("wake_up", []), ("wake_up", ["scheduling"]))
    assert worker.memory.maps == []
    assert caplog.text.count("awake already") == 3
    assert "everything is asleep already (kv_cache, weights)" in caplog.text
    after(worker, ("wake_up",), ("wake_up",))
    assert worker.memory.maps == ["weights", "kv_cache"]
    with pytest.raises(Unmapped, match="given back twice"):
        after(NPUWorker(), ("sleep", 1), ("sleep", 1))


def test_sleeping_when_half_is_asleep_is_refused():
    with pytest.raises(SleepError, match="kv_cache is still asleep, and its memory would be given back a second time"):
        after(Guarded(), ("sleep", 1), ("wake_up", ["weights"]), ("sleep", 1))


def test_after_a_failure_nothing_is_done_on_memory_of_unknown_state(monkeypatch):
    worker = Guarded()
    monkeypatch.setattr(worker.memory, "sleep", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker.sleep(1)
    for call in (worker.sleep, worker.wake_up):
        with pytest.raises(SleepError, match="not known which memory is there: restart the engine"):
            call()


def test_two_workers_do_not_share_what_is_asleep():
    one = after(Guarded(), ("sleep", 1))
    other = after(Guarded(), ("wake_up",))
    assert other.memory.maps == []
    CaMemAllocator.instance = one.memory
    assert after(one, ("wake_up",)).memory.maps == ["weights", "kv_cache"]


def test_the_second_patch_needs_the_first():
    assert WAKE_UP.needs == (SLEEP.name,)
    assert not any(patch.required or patch.mode == "strict" for patch in PATCHES), "it has not run on an NPU"


WHEELS = os.environ.get("CROSSRL_TEST_WHEELS", "")


@pytest.mark.skipif(not WHEELS, reason="CROSSRL_TEST_WHEELS is not set: the folder of `make wheels`")
@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.name)
def test_fingerprints_are_those_of_the_packaged_sources(patch):
    found = {}
    for wheel in Path(WHEELS).glob("vllm_ascend-*.whl"):
        version = wheel.name.split("-")[1]
        if version in patch.fingerprints:
            text = zipfile.ZipFile(wheel).read(patch.module.replace(".", "/") + ".py").decode()
            (node,) = definitions(ast.parse(text), patch.qualname)
            found[version] = fingerprint(node)
    assert len(found) >= 2, f"wheels of at least two of {', '.join(patch.fingerprints)}"
    assert found == {version: patch.fingerprints[version] for version in found}
