"""Receiving weights: announced, brought, checked, and only then in force."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from crossrl.engines.base import EngineError
from crossrl.models.digest import values_between

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
        self._came: dict[str, int] = {}  # how many values of it
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
        """Take whole tensors."""
        for name, tensor in named:
            if self.take(name, tensor) and tensor.data_ptr() != self._held[name].data_ptr():
                self._held[name].copy_(tensor)  # the trainer's own storage needs no copy

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """Count ``tensor`` as come, for an engine that copies it by itself; False if it does not fit: then it must not.
        ``held`` may then be on PyTorch's meta device."""
        fits = self._fits(name, tuple(tensor.shape), dtype_name(tensor), 0)
        self._came.setdefault(name, tensor.numel())
        return fits

    @torch.no_grad()
    def load_part(self, name: str, shape: tuple[int, ...], start: int, values: torch.Tensor) -> None:
        """Take the values (flat, row-major) from ``start`` on of a tensor of ``shape``; its parts come in order. They
        are copied before this returns."""
        if self._fits(name, shape, dtype_name(values), start):
            at = 0
            for run in values_between(self._held[name], start, start + len(values)):
                run.copy_(values[at : at + run.numel()].view(run.shape))
                at += run.numel()
        self._came[name] = max(self._came.get(name, 0), start + len(values))

    def _fits(self, name: str, shape: tuple[int, ...], dtype: str, start: int) -> bool:
        """Whether the values from ``start`` on are what is to come next of ``name``; notes the problem if not."""
        problem = ""
        if start == 0 and name in self._came:
            problem = f"{name} came twice"
        elif name not in self._manifest or name not in self._held:
            problem = f"{name} came without being announced"
        elif (shape, dtype) != (want := self._want(name)):
            problem = f"{name} came as {shape} {dtype}, the model takes {want[0]} {want[1]}"
        elif start != self._came.get(name, 0):
            problem = f"{name} came with values from {start} on after the first {self._came.get(name, 0)}"
        if problem and problem not in self._problems:
            self._problems.append(problem)
        return not problem

    def finish(self) -> None:
        """Raises ``EngineError`` naming everything that is missing, unknown, duplicate or of another shape or dtype."""
        problems = list(self._problems)
        for name in sorted(self._manifest):
            all_of_it = math.prod(self._manifest[name][0])
            if name not in self._came:
                problems.append(f"{name} did not come")
            elif self._came[name] < all_of_it and not any(p.startswith(f"{name} ") for p in problems):
                problems.append(f"{name} came with {self._came[name]} of its {all_of_it} values")
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise EngineError(f"weight update to version {self.version} failed: {shown}. The version has not moved")
