"""Verify, then replace: one patch, one loaded module. What it changed can be read back and taken back."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from crossrl.patching.fingerprint import Definition, difference, fingerprint
from crossrl.patching.patch import Installed, Patch, PatchConflict, PatchFailed, PatchRefused
from crossrl.patching.target import Slot, find, source

MARK = "__crossrl_patch__"


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """Left on a function that took another's place: which patch, that function itself, and what lay there before.

    ``function`` is there because ``functools.wraps`` copies attributes: a later wrapper by other people carries the
    mark too, and must not be taken for ours.
    """

    patch: str
    function: Callable[..., Any]
    slot: Slot


@dataclass(frozen=True, slots=True)
class Applied:
    """A patch is in place (``note``: of which version the source is; empty if it was in place before), or there was
    no need of it (``needed`` is False, ``note`` says why)."""

    note: str
    needed: bool = True


def apply(patch: Patch, module: ModuleType) -> Applied:
    """Put ``patch`` in place in ``module``, once; on any error the target is as it was.

    Raises ``PatchRefused``, ``PatchConflict`` or ``PatchFailed``.
    """
    slot = find(module, patch.qualname)
    before = list(marks(slot.function))
    if patch.name in [mark.patch for mark in before]:
        return Applied("")
    original = source(module, slot, patch.qualname)
    version = installed_version(patch.distribution)
    if note := obsolete_note(patch, Installed(version, original.text)):
        return Applied(note, needed=False)
    verify(patch, original.node, version)
    _refuse_conflicts(patch, before, slot, original.node)
    new = _made(patch, slot)
    setattr(new, MARK, Mark(patch.name, new, slot))
    slot.put(new)
    ours, found = read_back(patch, module)
    if not ours:
        slot.put_raw(slot.raw)
        raise PatchRefused(f"patch {patch.name} was put in place, and what can be read there is not it: {found}")
    return Applied(f"as in {', '.join(v for v, f in patch.fingerprints.items() if f == fingerprint(original.node))}")


def revert(patch: Patch, module: ModuleType) -> None:
    """Put back what lay there before. Raises ``PatchRefused`` if the patch is not the last that was put there."""
    function = find(module, patch.qualname).function
    mark = vars(function).get(MARK)
    if mark is None or mark.function is not function or mark.patch != patch.name:
        raise PatchRefused(
            f"patch {patch.name}: {patch.target} is not ours now; take back what was put there later first"
        )
    mark.slot.put_raw(mark.slot.raw)
    delattr(function, MARK)


def marks(function: Any) -> Iterator[Mark]:
    """The marks on ``function`` and on what it is around, the latest first."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        mark = getattr(function, "__dict__", {}).get(MARK)
        if isinstance(mark, Mark) and mark.function is function:
            yield mark
            function = mark.slot.function
        else:
            function = getattr(function, "__wrapped__", None)


def read_back(patch: Patch, module: ModuleType) -> tuple[bool, str]:
    """Whether a call of the target goes through the patch now, and a note when it is not the outermost."""
    try:
        function = find(module, patch.qualname).function
    except PatchRefused as error:
        return False, str(error)
    names = [mark.patch for mark in marks(function)]
    if patch.name not in names:
        return False, f"{patch.target} is {function.__module__}.{function.__qualname__} now, without the patch"
    mark = vars(function).get(MARK)
    return True, "" if isinstance(mark, Mark) and mark.function is function else "wrapped by other code since"


def stale_references(patch: Patch, module: ModuleType) -> tuple[str, ...]:
    """Names of loaded modules that hold what lay there before the patch: calls by these names miss the patch.

    Module globals, and the other names of the target's class, are looked at; closures and containers are not.
    """
    slot = find(module, patch.qualname).function
    old = [mark.slot for mark in marks(slot) if mark.patch == patch.name]
    gone = {id(s.raw) for s in old} | {id(s.function) for s in old}
    spaces: list[tuple[str, Any]] = [
        (name, vars(m)) for name, m in list(sys.modules.items()) if isinstance(m, ModuleType)
    ]
    if old and isinstance(old[0].owner, type):
        spaces.append((f"{old[0].owner.__module__}.{old[0].owner.__qualname__}", vars(old[0].owner)))
    found = [
        f"{space}.{name}"
        for space, names in spaces
        for name, value in list(names.items())
        # A module that is loaded under two names, such as __main__, is counted once.
        if id(value) in gone and (space == names.get("__name__", space) or "__name__" not in names)
    ]
    return tuple(sorted(set(found)))


def verify(patch: Patch, node: Definition, version: str | None) -> None:
    """Raise ``PatchRefused``, saying what changed, unless ``node`` is a source that the patch was written for."""
    found = fingerprint(node)
    if found in patch.fingerprints.values():
        return
    if version is not None and version in patch.fingerprints:
        close, why = version, f"{patch.distribution} {version} is not as it was published: it was changed here"
    else:
        shared = {v: _shared(f, found) for v, f in patch.fingerprints.items()}
        close = max(shared, key=lambda v: shared[v])
        why = f"written for {', '.join(patch.fingerprints)}{f'; installed is {version}' if version else ''}"
    changes = "; ".join(difference(patch.fingerprints[close], node)) or "only the order of its parts"
    raise PatchRefused(
        f"patch {patch.name} refuses {patch.target}: expected fingerprint {patch.fingerprints[close][:32]} ({close}), "
        f"found {found[:32]}; {why}. Compared with {close}: {changes}. Read the new source: if the fault is still "
        f"there and the patch still right, add the fingerprint that `crossrl patches fingerprint {patch.target}` "
        f"prints; or switch the patch off with {patch.switch}=0"
    )


def obsolete_note(patch: Patch, installed: Installed) -> str | None:
    """The note of ``patch.obsolete``. Raises ``PatchFailed`` if asking raises."""
    try:
        return patch.obsolete(installed) if patch.obsolete else None
    except Exception as error:
        raise PatchFailed(f"patch {patch.name}: obsolete raised {type(error).__name__}: {error}") from error


def installed_version(distribution: str | None) -> str | None:
    import importlib.metadata  # not at the top: every child pays for it

    try:
        return importlib.metadata.version(distribution) if distribution else None
    except importlib.metadata.PackageNotFoundError:
        return None


def _refuse_conflicts(patch: Patch, before: list[Mark], slot: Slot, node: Definition) -> None:
    for mark in before:
        if mark.patch not in patch.after + patch.needs:
            raise PatchConflict(
                f"patches {mark.patch} and {patch.name} are both for {patch.target}; {mark.patch} is in place. Switch "
                f"one off ({patch.switch}=0), or say that it goes on top: after=({mark.patch!r},)"
            )
        if patch.replacement is not None:
            raise PatchConflict(
                f"patch {patch.name} would replace {patch.target} and thereby remove {mark.patch}: make it a wrapper, "
                f"or put it first"
            )
    if patch.replacement is not None and not node.decorator_list and slot.function is not inspect.unwrap(slot.function):
        code = slot.function.__code__
        raise PatchConflict(
            f"patch {patch.name} would replace {patch.target}, around which other code has put a function of its own "
            f"({code.co_filename}:{code.co_firstlineno}): make it a wrapper, or put it first"
        )


def _made(patch: Patch, slot: Slot) -> Any:
    """What takes the place of the slot's function, dressed as the original: name, module, signature."""
    if patch.replacement is not None:
        new: Any = patch.replacement
    else:
        assert patch.wrapper is not None  # Patch checks that one of the two is there
        try:
            new = patch.wrapper(slot.function)
        except Exception as error:
            raise PatchFailed(
                f"patch {patch.name}: its wrapper raised {type(error).__name__}: {error}; {patch.target} is as it was"
            ) from error
    if not isinstance(new, FunctionType):
        raise PatchRefused(f"patch {patch.name} gave a {type(new).__name__} for {patch.target}: want a Python function")
    mark = getattr(new, MARK, None)
    if new is slot.function or (mark is not None and mark.function is new):
        raise PatchRefused(
            f"patch {patch.name} gave a function that is in use already, {new.__qualname__}: make a new one"
        )
    return functools.update_wrapper(new, slot.function)


def _shared(a: str, b: str) -> int:
    """How many leading digits of the statements agree: which of the known sources is nearest."""
    return sum(x == y for x, y in zip(a[33:], b[33:]))
