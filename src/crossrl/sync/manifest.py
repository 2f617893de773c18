"""What a sender announces: every tensor, which of them are one weight under two names, and how they are held."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from crossrl.engines.rollout.transaction import manifest_of
from crossrl.sync.messages import SyncError


@dataclass(frozen=True, slots=True)
class Manifest:
    """``tensors``: name to (shape, dtype) as they are sent. ``tied``: further names, each with the name under which it
    is sent. ``casts``: name to the dtype in which the engine is to hold it, where that is another one than is sent; any
    other change of dtype is an error. ``adapters``: LoRA adapters that the engine must have afterwards, each with the
    names of its tensors.

    >>> Manifest.of([("w", torch.zeros(2))], tied={"head": "w"}).names()
    ['head', 'w']
    """

    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    tied: Mapping[str, str] = field(default_factory=dict)
    casts: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        named: Iterable[tuple[str, torch.Tensor]],
        tied: Mapping[str, str] | None = None,
        casts: Mapping[str, str] | None = None,
        adapters: Mapping[str, Sequence[str]] | None = None,
    ) -> Manifest:
        return cls(manifest_of(named), tied or {}, casts or {}, adapters or {})

    def names(self) -> list[str]:
        """All names under which an engine holds something afterwards, sorted."""
        return sorted({*self.tensors, *self.tied})

    def held_dtype(self, name: str) -> str:
        """In which dtype the engine is to hold ``name`` (``float32``)."""
        name = self.tied.get(name, name)
        return self.casts.get(name, self.tensors[name][1])

    def check(self) -> None:
        """Raises ``SyncError`` for a manifest that contradicts itself, announces nothing, or has an empty adapter."""
        problems = []
        if not self.tensors:
            problems.append("it announces no tensor")
        problems += [f"{n} is tied to {first}, which is not sent" for n, first in self.tied.items()
                     if first not in self.tensors]  # fmt: skip
        problems += [f"{n} is sent and also tied to {self.tied[n]}" for n in self.tied if n in self.tensors]
        problems += [f"{n} has a cast to {to} but is not sent" for n, to in self.casts.items() if n not in self.tensors]
        for adapter, names in self.adapters.items():
            if not names:
                problems.append(f"adapter {adapter} is declared, but none of its tensors is in the payload")
            problems += [f"{n} of adapter {adapter} is not in the payload" for n in names if n not in self.tensors]
        if problems:
            raise SyncError("the manifest of the weights is wrong: " + listed(problems))

    def to_json(self) -> dict[str, Any]:
        return {
            "tensors": {name: [list(shape), dtype] for name, (shape, dtype) in self.tensors.items()},
            "tied": dict(self.tied),
            "casts": dict(self.casts),
            "adapters": {name: list(names) for name, names in self.adapters.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        tensors = {name: (tuple(shape), str(dtype)) for name, (shape, dtype) in data["tensors"].items()}
        return cls(tensors, data["tied"], data["casts"], data["adapters"])


def listed(items: Sequence[str], most: int = 8) -> str:
    """The first of ``items``, and how many more there are."""
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")
