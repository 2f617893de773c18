"""The patches of this process: which there are, and how each stands. One registry for all that use them."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType

from crossrl.patching.apply import apply, installed_version, read_back, revert, stale_references
from crossrl.patching.hook import Finder
from crossrl.patching.patch import Patch, PatchConflict, PatchError, PatchFailed, PatchNotLive, State, Status

log = logging.getLogger("crossrl.patching")
_ON, _OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no")


@dataclass(slots=True)
class _Entry:
    patch: Patch
    reference: str | None  # "module:NAME" with which another process finds it; None: only this process has it
    on: bool
    state: State
    note: str


class Registry:
    """Patches that are applied when their target is imported, or at once where it is.

    Thread-safe. One lock for each target module is held while its patches are applied: a thread that imports the
    target waits for one that applies (no longer than the patch's own code takes), and no patch is applied twice. It is
    never held while waiting for an import that this registry starts.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._locks: dict[str, threading.RLock] = {}
        self._lock = threading.RLock()
        self._finder = Finder(self._waits_for, self._loaded)
        self.changed: Callable[[], None] = lambda: None

    def install(self, *what: str | Patch, switches: Mapping[str, bool] | None = None) -> None:
        """Register patches and apply those whose target is imported already.

        ``what``: patches, or references ``module:NAME`` to one or to a sequence of them; only what is installed by
        reference can be carried into other processes. ``switches``: on or off by the patches' names, as a caller's
        configuration has it; a patch's environment variable goes before it. Doing it again changes nothing.

        Raises ``PatchConflict``, and of strict patches whose target is loaded, what ``apply`` raises.
        """
        found = [pair for each in what for pair in load(each)]
        self._register(found, dict(switches or {}))
        self._finder.install()
        self.sweep()
        self.changed()

    def sweep(self) -> None:
        """Apply what is not, in modules that are loaded: they were before the hook, or came around it."""
        for name in dict.fromkeys(e.patch.module for e in list(self._entries.values()) if e.state == "waiting"):
            module = sys.modules.get(name)
            if module is None:
                continue
            if getattr(getattr(module, "__spec__", None), "_initializing", False):
                module = importlib.import_module(name)  # another thread is at it: wait until it is done
                if getattr(module.__spec__, "_initializing", False):
                    continue  # this thread is: the next sweep will do
            self._loaded(module)

    def live(self) -> tuple[Status, ...]:
        """How each patch stands now, read back from the live objects. Strict patches may raise, as in ``install``."""
        self.sweep()
        return self.statuses()

    def statuses(self) -> tuple[Status, ...]:
        """As ``live()``, but nothing is applied, so nothing raises."""
        return tuple(self._status(entry) for entry in list(self._entries.values()))

    def require(self, *names: str, waiting_ok: bool = False) -> tuple[Status, ...]:
        """``live()``, or ``PatchNotLive`` naming this process and each required patch that is not live in it.

        ``names``: patches that must be known here, for code that cannot do without them: a process to which nothing
        was carried has no patches, and so none that is required. ``waiting_ok``: a target that is not imported yet
        passes; for the start of a process.
        """
        statuses = self.live()
        unknown = [name for name in names if name not in self._entries]
        if unknown:
            raise PatchNotLive(
                f"{process_name()}: patch {', '.join(unknown)} is not known here: carry() was not called in the "
                f"parent, or this process was started without its environment"
            )
        statuses = tuple(replace(s, required=s.required or s.name in names) for s in statuses)
        refuse_unless_live(statuses, process_name(), waiting_ok=waiting_ok)
        return statuses

    def references(self) -> tuple[str, ...]:
        """What another process has to install to have the same patches, in order.

        Raises ``PatchError`` if one has no reference.
        """
        for entry in self._entries.values():
            if entry.reference is None and entry.on:
                raise PatchError(
                    f"patch {entry.patch.name} was installed as an object, so other processes cannot find it. Install "
                    f"it as 'module:NAME', from a module that they can import (not __main__)"
                )
        return tuple(dict.fromkeys(e.reference for e in self._entries.values() if e.reference is not None))

    def carried(self) -> dict[Patch, bool]:
        """The patches of ``references``, in order, and whether each is switched on."""
        return {e.patch: e.on for e in self._entries.values() if e.reference is not None}

    def patches(self) -> dict[Patch, bool]:
        """All patches, in order, and whether each is switched on."""
        return {entry.patch: entry.on for entry in self._entries.values()}

    def revert(self, *names: str) -> None:
        """Take patches back, all of them without names, the latest first; they are no longer known then."""
        on = reversed(ordered([e.patch for e in self._entries.values() if e.on]))
        off = [e.patch for e in self._entries.values() if not e.on]
        for name in [p.name for p in (*off, *on) if not names or p.name in names]:
            entry = self._entries[name]
            module = sys.modules.get(entry.patch.module)
            with self._module_lock(entry.patch.module):
                if entry.state == "applied" and module is not None:
                    revert(entry.patch, module)
                del self._entries[name]
        if not self._entries:
            self._finder.remove()
        self.changed()

    def after_fork(self) -> None:
        """In a forked child: no other thread is there that could release a lock."""
        self._lock, self._locks = threading.RLock(), {}

    def _register(self, found: list[tuple[Patch, str | None]], switches: dict[str, bool]) -> None:
        with self._lock:
            entries = dict(self._entries)
            for patch, reference in found:
                known = entries.get(patch.name)
                if known is not None and known.patch is not patch:
                    raise PatchConflict(
                        f"two patches have the name {patch.name}: one for {known.patch.target}, one for {patch.target}"
                    )
                if known is None:
                    on = is_on(patch, switches)
                    state: State = "waiting" if on else "off"
                    note = "" if on else f"switch it on with {patch.switch}=1"
                    entries[patch.name] = _Entry(patch, reference, on, state, note)
            unknown = sorted(switches.keys() - entries.keys())
            if unknown:
                raise PatchError(f"there is no patch {unknown[0]!r} to switch; there are: {', '.join(entries)}")
            ordered([e.patch for e in entries.values() if e.on])
            self._entries = entries

    def _waits_for(self, module: str) -> bool:
        return any(e.patch.module == module and e.on for e in list(self._entries.values()))

    def _loaded(self, module: ModuleType) -> None:
        """Apply this module's patches, in order."""
        try:
            with self._module_lock(module.__name__):
                mine = [e.patch for e in list(self._entries.values()) if e.patch.module == module.__name__ and e.on]
                for patch in ordered(mine):
                    self._apply(self._entries[patch.name], module)
        finally:
            self.changed()  # a refusal is to be known outside, too

    def _apply(self, entry: _Entry, module: ModuleType) -> None:
        patch = entry.patch
        try:
            for name in patch.needs:
                other = self._entries.get(name)
                if other is None or other.state != "applied":
                    raise PatchError(f"it needs patch {name}, which is {other.state if other else 'not there'}")
            done = apply(patch, module)
        except PatchError as error:
            entry.state = "failed" if isinstance(error, PatchFailed) else "refused"
            entry.note = str(error)
            if patch.mode == "strict":
                raise
            log.warning("%s", error)
        else:
            entry.state, entry.note = "applied" if done.needed else "not needed", done.note or entry.note
            log.info("patch %s: %s (%s)", patch.name, entry.state, entry.note)

    def _status(self, entry: _Entry) -> Status:
        patch, state, note = entry.patch, entry.state, entry.note
        stale: tuple[str, ...] = ()
        module = sys.modules.get(patch.module)
        if state == "applied" and module is not None:
            ours, later = read_back(patch, module)
            state, note = ("applied", later or note) if ours else ("lost", later)
            stale = stale_references(patch, module) if ours else ()
            if stale:
                note = f"{', '.join(stale)} still hold the original, from before the patch: install it earlier"
        elif state in ("waiting", "applied"):  # or its module is gone again: another patch made its import fail
            state, note = "waiting", "not imported yet"
            if not self._finder.installed:
                state, note = "lost", "not imported yet, and the import hook was removed from sys.meta_path"
        return Status(
            patch.name, patch.target, state, patch.required, installed_version(patch.distribution), note, stale
        )

    def _module_lock(self, module: str) -> threading.RLock:
        with self._lock:
            return self._locks.setdefault(module, threading.RLock())


def refuse_unless_live(statuses: Iterable[Status], process: str, *, waiting_ok: bool = False) -> None:
    """Raise ``PatchNotLive`` if a required patch is not live in ``process``."""
    bad = [
        f"{s.name} ({s.target}) is {s.state}{' but passed by' if s.stale else ''}{f': {s.note}' if s.note else ''}"
        for s in statuses
        if s.required and not s.settled and not (waiting_ok and s.state == "waiting")
    ]
    if bad:
        raise PatchNotLive(f"{process}: required patches are not live: {'; '.join(bad)}")


def ordered(patches: list[Patch]) -> list[Patch]:
    """``patches`` with those named by ``after`` and ``needs`` first, otherwise as they are.

    Raises ``PatchConflict``: two patches on one target without an order, a circle, a need on another module.
    """
    by_name = {patch.name: patch for patch in patches}
    for i, patch in enumerate(patches):
        for name in patch.needs:
            if name in by_name and by_name[name].module != patch.module:
                raise PatchConflict(f"patch {patch.name} needs {name}, which is for another module: use after")
        for other in patches[:i]:
            if other.target == patch.target and not {other.name, patch.name} & {
                *patch.after, *patch.needs, *other.after, *other.needs,
            }:  # fmt: skip
                raise PatchConflict(
                    f"patches {other.name} and {patch.name} are both for {patch.target}. Switch one off "
                    f"({other.switch}=0 or {patch.switch}=0), or give an order: after=({other.name!r},) in {patch.name}"
                )
    result: list[Patch] = []
    while len(result) < len(patches):
        placed = {patch.name for patch in result}
        ready = [
            p for p in patches if p.name not in placed and {*p.after, *p.needs} & by_name.keys() <= placed
        ]  # fmt: skip
        if not ready:
            names = ", ".join(p.name for p in patches if p.name not in placed)
            raise PatchConflict(f"the patches {names} each want to come after another of them")
        result.append(ready[0])
    return result


def is_on(patch: Patch, switches: Mapping[str, bool]) -> bool:
    """By environment variable, else by ``switches``, else by default. Raises ``PatchError`` on another value."""
    value = os.environ.get(patch.switch, "").strip().lower()
    if value and value not in _ON + _OFF:
        raise PatchError(f"{patch.switch} is {value!r}: want 1 or 0")
    return value in _ON if value else switches.get(patch.name, patch.on)


def load(what: str | Patch) -> list[tuple[Patch, str | None]]:
    """The patches that ``what`` is or refers to, each with its reference. Raises ``PatchError`` if there are none."""
    if isinstance(what, Patch):
        return [(what, None)]
    module, _, name = what.partition(":")
    if not module or not name:
        raise PatchError(f"{what!r} does not refer to patches: want 'module:NAME'")
    if module == "__main__":
        raise PatchError(f"{what!r}: other processes have another __main__. Put the patches into a module of their own")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PatchError(f"{what!r}: {error}") from error
    patches = [found] if isinstance(found, Patch) else list(found) if isinstance(found, list | tuple) else []
    if not patches or not all(isinstance(p, Patch) for p in patches):
        raise PatchError(f"{what!r} is a {type(found).__name__}: want a Patch, or a list or tuple of at least one")
    return [(patch, what) for patch in patches]


def process_name() -> str:
    """This process, for messages: ``SpawnProcess-1 (process 4711)``."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    name = multiprocessing.current_process().name if multiprocessing else "MainProcess"
    return f"{name} (process {os.getpid()})"


REGISTRY = Registry()
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=REGISTRY.after_fork)
