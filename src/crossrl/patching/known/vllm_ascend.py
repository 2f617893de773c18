"""vllm-ascend: waking a sleeping engine in part, or twice. Written from its source; it has NOT run on an NPU.

An engine that sleeps has given its device memory back; the allocator (``CaMemAllocator``) keeps the addresses and maps
memory to them again for the tags that are woken. ``NPUWorker.wake_up(tags)`` acts on the tags that it is told, not on
what is asleep, and it can be told wrongly: vLLM's executor lets ``wake_up()`` through as long as *anything* is asleep.

- ``wake_up(["weights"])``, then ``wake_up()``: the weights' memory is mapped a second time, and the steps that belong
  to a load (expert weights transposed for the loader) run a second time. Where the expert's size equals the hidden
  size, the shape does not tell, and they are transposed back: the loader then writes into the wrong layout.
- ``wake_up(["kv_cache"])`` first, after a level-2 sleep: the model's buffers lie in the weights' memory, which is not
  there, and are copied into all the same; their saved values are dropped, so waking the weights cannot restore them.
- the same with ``enable_sleep_mode_extra_cleanup`` (0.23): the model runs, to capture graphs, without weights.

The condition: act on ``asleep`` and ``tags`` both, where ``asleep`` is what the last sleep gave back and no wake-up
since has brought; restore buffers when the weights come; capture graphs when the weights are there. What is asleep is
known only to ``sleep``, so there are two patches, and the second needs the first.

Not mended: a level-1 wake-up that no load follows leaves expert weights in the loader's layout (vllm-ascend#11548,
#12226), and an engine may go on computing while the cache is asleep (vllm#44395).
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from crossrl.patching.patch import Patch

log = logging.getLogger("crossrl.patching.vllm_ascend")
_ASLEEP = "_crossrl_asleep"  # on the worker: the set of tags; None: a sleep or wake-up failed half-way


class SleepError(RuntimeError):
    """The engine was asked for what would touch memory that is not there."""


def _sleep(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def sleep(self: Any, level: int = 1) -> None:
        asleep = _asleep(self)
        allocator = _globals(original)["CaMemAllocator"].get_instance()
        persistent = getattr(allocator, "sleep_persistent_tag", None)
        there = {data.tag for data in allocator.pointer_to_data.values()} - {persistent}
        if asleep and asleep >= there:
            log.warning("sleep(level=%s): everything is asleep already (%s)", level, ", ".join(sorted(asleep)))
            return
        if asleep:
            raise SleepError(
                f"sleep(level={level}): {', '.join(sorted(asleep))} is still asleep, and its memory would be given "
                f"back a second time: call wake_up() first"
            )
        setattr(self, _ASLEEP, None)
        original(self, level)
        setattr(self, _ASLEEP, there)

    return sleep


def _wake_up(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        asleep = _asleep(self)
        wanted = asleep if tags is None else asleep & set(tags)
        if not wanted:
            log.warning("wake_up(%s): awake already; asleep: %s", tags, ", ".join(sorted(asleep)) or "nothing")
            return
        without_weights = "weights" in asleep - wanted
        if without_weights and "kv_cache" in wanted and _captures_graphs(original):
            raise SleepError(
                f"wake_up({tags}): graphs would be captured now (enable_sleep_mode_extra_cleanup), with the weights "
                f"still asleep: wake the weights first"
            )
        held = self._sleep_saved_buffers
        setattr(self, _ASLEEP, None)
        if without_weights:
            self._sleep_saved_buffers = {}
        try:
            original(self, sorted(wanted))
        finally:
            if without_weights:
                self._sleep_saved_buffers = held
        setattr(self, _ASLEEP, asleep - wanted)

    return wake_up


def _asleep(worker: Any) -> set[str]:
    asleep: set[str] | None = getattr(worker, _ASLEEP, set())
    if asleep is None:
        raise SleepError(
            "an earlier sleep or wake-up failed, so it is not known which memory is there: restart the engine"
        )
    return asleep


def _globals(function: Callable[..., None]) -> dict[str, Any]:
    """The names of vllm-ascend's worker module; by way of the function, since importing it needs an NPU."""
    names: dict[str, Any] = inspect.unwrap(function).__globals__
    return names


def _captures_graphs(original: Callable[..., None]) -> bool:
    config = _globals(original).get("get_ascend_config")
    return config is not None and bool(getattr(config(), "enable_sleep_mode_extra_cleanup", False))


SLEEP = Patch(
    name="vllm-ascend.sleep",
    target="vllm_ascend.worker.worker:NPUWorker.sleep",
    distribution="vllm-ascend",
    fingerprints={
        "0.13.0": "835bef1302c325e5bdc76b234a38dc3d:3c3f889c3dfc430db2a7df9e32fbad141af5",
        "0.18.0": "835bef1302c325e5bdc76b234a38dc3d:3c3f889c3dfc430db2a7df9e32fbad141af5",
        "0.23.0": "75d2863fad213a57ee887a193d3f2ef8:3c3f889c3dfc43031f3cb209db2a7df9e32fbad14156b",
    },
    wrapper=_sleep,
    why="records which memory a sleep gave back, for vllm-ascend.wake-up; refuses to give it back twice",
    required=False,
    mode="warn",
)
WAKE_UP = Patch(
    name="vllm-ascend.wake-up",
    target="vllm_ascend.worker.worker:NPUWorker.wake_up",
    distribution="vllm-ascend",
    fingerprints={
        "0.13.0": "ddd4baf221119c02bc27ef173ca87734:"
        "fe182463adb27492ae3c5a4c73ad95a819976011a394bbb7197e7721c3ee55af5fa289e7a597914d1f55",
        "0.18.0": "4b1452e0c27799b4f271a30da391130b:"
        "43382463adb27492ae3c5a4c73ad95a819976011a394bbb7197e7721c3ee55af5fa289e7a597914d1f55",
        "0.23.0": "5f736c646cbde36ed3bcf5c47d147520:"
        "433d9630191bdb27492ae3c523d73ad95a819976011a394bbb7197e7721c3ee55af5fa289e7a597914d1f5531f3cbaeb",
    },
    wrapper=_wake_up,
    why="a wake-up in part or twice maps memory twice, transposes experts twice, or writes to memory that is not there",
    needs=("vllm-ascend.sleep",),
    required=False,
    mode="warn",
)
