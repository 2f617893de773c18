"""Other weights for a moment: what faults of inference and of the weight sync are made of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch

from crossrl.cross.faults.base import FaultError, Site
from crossrl.engines.rollout.hf import HfRolloutEngine


class Versions:
    """The weights that the rollout engine had after its last two syncs: a copy of each."""

    def __init__(self, site: Site) -> None:
        engine = site.parts.local_engine
        self.engine = engine
        self._last: list[dict[str, torch.Tensor]] = []
        finish = engine.finish_update

        def keep() -> None:
            finish()
            self._last = [*self._last[-1:], {n: t.clone() for n, t in engine.held()}]

        engine.finish_update = keep  # type: ignore[method-assign]

    @contextlib.contextmanager
    def before(self) -> Iterator[None]:
        """While open, the engine computes with the version before its own (there is none before the second sync)."""
        with computing_with(self.engine, self._last[0] if len(self._last) == 2 else {}):
            yield


@contextlib.contextmanager
def computing_with(engine: HfRolloutEngine, other: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """While open, ``engine`` computes with the weights ``other``; then with its own again, bit for bit.

    The trainer may share them: nothing may train while this is open.
    """
    held = dict(engine.held())
    kept = {name: held[name].clone() for name in other}
    try:
        with torch.no_grad():
            for name, tensor in other.items():
                held[name].copy_(tensor)
        yield
    finally:
        with torch.no_grad():
            for name, tensor in kept.items():
                held[name].copy_(tensor)


def a_matrix(named: Iterable[tuple[str, torch.Tensor]], square: bool = False) -> str:
    """The name of a weight matrix of a middle layer: not an embedding, not the head."""
    names = [
        name
        for name, tensor in named
        if tensor.ndim == 2
        and not any(word in name for word in ("embed", "head", "wte", "wpe"))
        and (tensor.shape[0] == tensor.shape[1] or not square)
    ]
    if not names:
        raise FaultError(f"the model has no {'square ' if square else ''}weight matrix to plant this fault in")
    return names[len(names) // 2]
