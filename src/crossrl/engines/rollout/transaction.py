"""Receiving weights: announced, brought, checked, and only then in force."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from crossrl.engines.base import EngineError

Manifest = Mapping[str, "tuple[tuple[int, ...], str]"]


def manifest_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name to (shape, dtype name) of tensors that are about to be sent."""
    return {name: (tuple(t.shape), dtype_name(t)) for name, t in named}


def dtype_name(tensor: torch.Tensor) -> str:
    """``float32`` for ``torch.float32``."""
    return str(tensor.dtype).removeprefix("torch.")


class WeightTransaction:
    """One update of ``held`` to ``version``. Problems are collected and raised together by ``finish``.

    A tensor that does not fit is never copied. What was copied before a problem was found stays copied, but the
    version does not move, so the engine must refuse to generate until an update succeeds.
    """

    def __init__(self, held: Mapping[str, torch.Tensor], version: int, manifest: Manifest) -> None:
        self.version, self._held, self._manifest = version, held, manifest
        self._came: set[str] = set()
        self._problems: list[str] = []
        for name in sorted(set(held) - set(manifest)):
            self._problems.append(f"{name} was not announced")
        for name in sorted(set(manifest) - set(held)):
            self._problems.append(f"{name} was announced but the model has no such weight")
        for name in sorted(set(manifest) & set(held)):
            want, found = (tuple(held[name].shape), dtype_name(held[name])), manifest[name]
            if (tuple(found[0]), found[1]) != want:
                self._problems.append(
                    f"{name} was announced as {tuple(found[0])} {found[1]}, the model has {want[0]} {want[1]}"
                )

    @torch.no_grad()
    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            found = (tuple(tensor.shape), dtype_name(tensor))
            if name in self._came:
                self._problems.append(f"{name} came twice")
            elif name not in self._manifest or name not in self._held:
                self._problems.append(f"{name} came without being announced")
            elif found != (tuple(self._held[name].shape), dtype_name(self._held[name])):
                self._problems.append(f"{name} came as {found[0]} {found[1]}, the model has another shape or dtype")
            elif tensor.data_ptr() != self._held[name].data_ptr():  # the trainer's own storage needs no copy
                self._held[name].copy_(tensor)
            self._came.add(name)

    def finish(self) -> None:
        """Raises ``EngineError`` naming everything that is missing, unknown, duplicate or of another shape or dtype."""
        problems = [*self._problems, *(f"{n} did not come" for n in sorted(set(self._manifest) - self._came))]
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise EngineError(f"weight update to version {self.version} failed: {shown}. The version has not moved")
