"""Does this engine hold these weights? Tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from crossrl.engines.rollout.transaction import dtype_name
from crossrl.models.digest import same_storage, tensor_digest
from crossrl.sync.manifest import Manifest
from crossrl.sync.messages import SyncError


class Holder(Protocol):
    """Anything that says what it computes with: an engine, a ``HeldTensors``."""

    def held(self) -> Iterable[tuple[str, torch.Tensor]]: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that is not what it should be. ``what``: in words. ``largest``: absolute difference of the values, where
    they can be compared (NaN where one of them is)."""

    name: str
    what: str
    largest: float | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.what}"


def check(engine: Holder, named: Mapping[str, torch.Tensor], tied: Mapping[str, str] | None = None) -> list[Difference]:
    """What ``engine`` holds otherwise than ``named``, in name order; nothing if it holds exactly these, bit for bit.

    ``named``: the weights as the engine should hold them (``engine.as_held`` applies a declared cast). ``tied``:
    further names, each with the one under which it is in ``named``.

    Raises ``SyncError`` when there is nothing to compare.
    """
    held = dict(engine.held())
    wanted = dict(named) | {name: named[first] for name, first in (tied or {}).items()}
    if not held or not wanted:
        raise SyncError(
            f"the engine holds {len(held)} tensors, {len(wanted)} were to be found in it: nothing to compare"
        )
    found = []
    for name in sorted({*held, *wanted}):
        if name not in held:
            found.append(Difference(name, "is not in the engine"))
        elif name not in wanted:
            found.append(Difference(name, "is in the engine only"))
        elif difference := compare(name, held[name], wanted[name]):
            found.append(difference)
    return found


def compare(name: str, held: torch.Tensor, wanted: torch.Tensor) -> Difference | None:
    """None if they are equal bit for bit."""
    if held.shape != wanted.shape:
        return Difference(name, f"is held with shape {tuple(held.shape)}, want {tuple(wanted.shape)}")
    if held.dtype != wanted.dtype:
        return Difference(name, f"is held as {dtype_name(held)}, want {dtype_name(wanted)}")
    if same_storage(held, wanted) or tensor_digest(held) == tensor_digest(wanted):
        return None
    a, b = (t.detach().cpu().double() for t in (held, wanted))
    other = int((a != b).sum())
    largest = float((a - b).abs().max())
    return Difference(name, f"has {other} of {a.numel()} values that differ, by up to {largest:.3g}", largest)


def differing(
    manifest: Manifest, held: Mapping[str, torch.Tensor], wanted: Mapping[str, str], found: Mapping[str, str]
) -> list[str]:
    """What of ``manifest`` is not ``held`` as it should be, in words and in name order.

    ``wanted`` and ``found``: digests by name. Without them (both empty) names, dtypes and ties are still compared.
    """
    problems = [f"{name} is in the engine only" for name in sorted(set(held) - set(manifest.names()))]
    for name in manifest.names():
        first = manifest.tied.get(name, name)
        if name not in held:
            problems.append(f"{name} is not in the engine")
        elif (dtype := dtype_name(held[name])) != (want := manifest.held_dtype(name)):
            problems.append(
                f"{name} was sent as {manifest.tensors[first][1]} and is held as {dtype}; declared was {want}"
            )
        elif first != name and first in held and not _equal(held[name], held[first]):
            problems.append(f"{name} is no longer tied to {first}: it holds other values")
        elif wanted and found.get(name) != wanted.get(name):
            problems.append(f"{name} does not hold what was sent")
    return problems


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    return same_storage(a, b) or (a.shape == b.shape and tensor_digest(a) == tensor_digest(b))
