"""Receiving weights: announced, brought, checked, and only then in force."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from crossrl.engines.base import EngineError

Manifest = Mapping[str, "tuple[tuple[int, ...], str]"]


def manifest_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name to (shape, dtype name) of tensors that are about to be sent."""
    return {name: (tuple(t.shape), dtype_name(t)) for name, t in named}


def dtype_name(what: torch.Tensor | torch.dtype) -> str:
    """``float32`` for ``torch.float32``, and for a tensor of it."""
    return str(what.dtype if isinstance(what, torch.Tensor) else what).removeprefix("torch.")


class WeightTransaction:
    """One update of ``held`` to ``version``. Problems are collected and raised together by ``finish``.

    ``receives``: the dtype in which all weights come, if it is not the one that is held: the declared cast. Any other
    difference of dtype is a problem.

    A tensor that does not fit is never copied. What was copied before a problem was found stays copied, but the
    version does not move, so the engine must refuse to generate until an update succeeds.
    """

    def __init__(
        self,
        held: Mapping[str, torch.Tensor],
        version: int,
        manifest: Manifest,
        receives: torch.dtype | None = None,
    ) -> None:
        self.version, self._held, self._manifest, self._receives = version, held, manifest, receives
        self._came: set[str] = set()
        self._problems: list[str] = []
        for name in sorted(set(held) - set(manifest)):
            self._problems.append(f"{name} was not announced")
        for name in sorted(set(manifest) - set(held)):
            self._problems.append(f"{name} was announced but the model has no such weight")
        for name in sorted(set(manifest) & set(held)):
            want, found = self._want(name), manifest[name]
            if (tuple(found[0]), found[1]) != want:
                self._problems.append(
                    f"{name} was announced as {tuple(found[0])} {found[1]}, the model takes {want[0]} {want[1]}"
                )

    def _want(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype in which ``name`` must come."""
        held = self._held[name]
        return tuple(held.shape), dtype_name(held.dtype if self._receives is None else self._receives)

    @torch.no_grad()
    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            found = (tuple(tensor.shape), dtype_name(tensor))
            if name in self._came:
                self._problems.append(f"{name} came twice")
            elif name not in self._manifest or name not in self._held:
                self._problems.append(f"{name} came without being announced")
            elif found != (want := self._want(name)):
                self._problems.append(f"{name} came as {found[0]} {found[1]}, the model takes {want[0]} {want[1]}")
            elif tensor.data_ptr() != self._held[name].data_ptr():  # the trainer's own storage needs no copy
                self._held[name].copy_(tensor)
            self._came.add(name)

    def finish(self) -> None:
        """Raises ``EngineError`` naming everything that is missing, unknown, duplicate or of another shape or dtype."""
        problems = [*self._problems, *(f"{n} did not come" for n in sorted(set(self._manifest) - self._came))]
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise EngineError(f"weight update to version {self.version} failed: {shown}. The version has not moved")
