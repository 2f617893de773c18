"""Faults of an engine in another process: planted there, in what stands between its receiver and its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from crossrl.engines.base import RolloutEngine
from crossrl.engines.rollout.receiving import Receiving
from crossrl.sync.target import Target


class OneVersionBehind:
    """A ``Target`` that computes with the weights before those that it says it holds, from the transfer on that is for
    training step ``start``. No digest can see it: whoever lies about what is held is inside the engine. What is sampled
    shows it."""

    def __init__(self, target: Target, start: int) -> None:
        self.target, self.start = target, start
        self._before: dict[str, torch.Tensor] = {}
        self._came: dict[str, torch.Tensor] = {}
        self._version = -1

    @property
    def weight_version(self) -> int:
        return self.target.weight_version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self.target.weight_version = version

    def begin_update(self, version: int, manifest: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        self._before, self._came, self._version = self._came, {}, version
        self.target.begin_update(version, manifest)

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        new = {name: tensor.clone() for name, tensor in named}
        self._came |= new
        self.target.load([(name, self._before[name] if self._stale else tensor) for name, tensor in new.items()])

    @property
    def _stale(self) -> bool:
        return self._version + 1 >= self.start and bool(self._before)

    def check_update(self) -> None:
        self.target.check_update()

    def finish_update(self) -> None:
        self.target.finish_update()

    def abort_update(self, reason: str) -> None:
        self.target.abort_update(reason)

    def clear_prefix_cache(self) -> str:
        return self.target.clear_prefix_cache()

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What came, as if it were in use."""
        really = dict(self.target.held())
        names = {tensor.data_ptr(): name for name, tensor in really.items() if name in self._came}
        for name, tensor in really.items():
            first = name if name in self._came else names.get(tensor.data_ptr(), "")
            claimed = self._came.get(first) if self._stale else None
            if claimed is None and self._stale:  # tied, with memory of its own
                claimed = next((c for n, c in self._came.items() if really[n].equal(tensor)), None)
            yield name, tensor if claimed is None else claimed.to(tensor.dtype)


def stale_weights(engine: RolloutEngine, start: int) -> None:
    """See ``inference.stale_weights``."""
    replace_target(engine, lambda target: OneVersionBehind(target, start))


def replace_target(engine: RolloutEngine, change: Callable[[Target], Target]) -> None:
    """What the engine's receiver brings weights into is ``change(...)`` of what it was."""
    if engine.name == "hf":
        engine._receiving = Receiving(change(engine))  # type: ignore[attr-defined]
        return
    engine._rpc("crossrl_receive_into", change)  # type: ignore[attr-defined]
