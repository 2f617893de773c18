"""Does this engine hold these weights? Tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from crossrl.engines.rollout.transaction import dtype_name
from crossrl.models.digest import same_storage, tensor_digest
from crossrl.sync.manifest import Manifest
from crossrl.sync.messages import SyncError

HASHING = min(4, os.cpu_count() or 1)  # at a time: XXH3 goes at about the speed of memory, which a few threads use up


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
    wanted = dict(named) | {name: named[first] for name, first in (tied or {}).items()}
    found, held = list[Difference](), set[str]()
    for name, tensor in engine.held():
        held.add(name)
        if name not in wanted:
            found.append(Difference(name, "is in the engine only"))
        elif difference := compare(name, tensor, wanted[name]):
            found.append(difference)
    if not held or not wanted:
        raise SyncError(
            f"the engine holds {len(held)} tensors, {len(wanted)} were to be found in it: nothing to compare"
        )
    found += [Difference(name, "is not in the engine") for name in wanted if name not in held]
    return sorted(found, key=lambda difference: difference.name)


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


@dataclass(frozen=True, slots=True)
class Seen:
    """What is kept of a tensor that an engine holds. ``dtype``: such as "float32". ``digest``: see ``tensor_digest``;
    "" if none was asked for. ``untied``: it has other values than the one that it should be tied to."""

    dtype: str
    digest: str
    untied: bool = False


def survey(held: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str], digests: bool) -> dict[str, Seen]:
    """Look at each tensor of ``held`` once and let it go: where an engine makes them for this (what is packed, or split
    among ranks), all at once would be the model a second time.

    ``tied``: further names, each with the one whose values it should have; of each such group one tensor is kept until
    the end. ``digests``: of all; else they are made only where a tied name is not the same memory. At most ``HASHING``
    tensors are hashed, and alive, at a time. Raises ``SyncError`` for a name that comes twice.
    """
    dtypes, same, kept = dict[str, str](), dict[str, str](), dict[str, tuple[str, torch.Tensor]]()
    firsts = set(tied.values())
    with ThreadPoolExecutor(HASHING) as pool:
        hashes = _Hashes(pool)
        for name, tensor in held:
            if name in dtypes:
                raise SyncError(f"the engine says twice what it holds as {name}")
            dtypes[name], group = dtype_name(tensor), tied.get(name, name)
            if group in firsts:
                other, first = kept.setdefault(group, (name, tensor))
                if other != name and same_storage(first, tensor):
                    same[name] = other
                elif other != name:
                    hashes.add(other, first)
                    hashes.add(name, tensor)
            if digests and name not in same:
                hashes.add(name, tensor)
        made = hashes.all()
    found = {name: made.get(same.get(name, name), "") for name in dtypes}
    return {
        name: Seen(dtype, found[name], tied.get(name) in found and found[name] != found[tied[name]])
        for name, dtype in dtypes.items()
    }


class _Hashes:
    """Digests by name that are being made; each tensor is let go when it is hashed."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool, self._running, self._done = pool, dict[str, Future[str]](), dict[str, str]()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Waits for: one of those before, if as many as ``HASHING`` are not done."""
        if name in self._running or name in self._done:
            return
        if len(self._running) == HASHING:
            first = next(iter(self._running))
            self._done[first] = self._running.pop(first).result()
        self._running[name] = self._pool.submit(tensor_digest, tensor)

    def all(self) -> dict[str, str]:
        return self._done | {name: running.result() for name, running in self._running.items()}


def differing(manifest: Manifest, held: Mapping[str, Seen], wanted: Mapping[str, str]) -> list[str]:
    """What of ``manifest`` is not ``held`` as it should be, in words and in name order.

    ``wanted``: digests by name. Without them (empty) names, dtypes and ties are still compared.
    """
    problems = [f"{name} is in the engine only" for name in sorted(set(held) - set(manifest.names()))]
    for name in manifest.names():
        first = manifest.tied.get(name, name)
        if name not in held:
            problems.append(f"{name} is not in the engine")
        elif held[name].dtype != (want := manifest.held_dtype(name)):
            problems.append(
                f"{name} was sent as {manifest.tensors[first][1]} and is held as {held[name].dtype}; "
                f"declared was {want}"
            )
        elif held[name].untied:
            problems.append(f"{name} is no longer tied to {first}: it holds other values")
        elif wanted and held[name].digest != wanted.get(name):
            problems.append(f"{name} does not hold what was sent")
    return problems
