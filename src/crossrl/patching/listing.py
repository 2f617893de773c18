"""How patches stand, without importing their targets; and how they stand in a spawned child, which imports them."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from crossrl.patching.apply import installed_version, obsolete_note, verify
from crossrl.patching.children import PATCHES, environment_for
from crossrl.patching.fingerprint import Definition, definitions, fingerprint, source_of
from crossrl.patching.patch import Installed, Patch, PatchError, PatchRefused, Status
from crossrl.patching.registry import REGISTRY, is_on, load, ordered
from crossrl.patching.target import parsed

KNOWN = "crossrl.patching.known:PATCHES"


def references(given: Iterable[str]) -> list[str]:
    """``given``, or else ours and those that the environment names."""
    carried_here = [r for r in os.environ.get(PATCHES, "").split(",") if r]
    return list(given) or list(dict.fromkeys([KNOWN, *carried_here]))


def on_disk(names: Iterable[str]) -> list[Status]:
    """The patches that ``names`` refer to, against the sources that are installed here; nothing is applied.

    Raises ``PatchConflict`` and ``PatchError`` as ``install`` does.
    """
    return [_examine(patch, on) for patch, on in _wanted(names).items()]


def reasons(names: Iterable[str]) -> dict[str, str]:
    """Why each patch exists, by its name."""
    return {patch.name: patch.why for patch in _wanted(names)}


def in_child(names: Sequence[str], timeout: float = 120.0) -> list[Status]:
    """The same patches in a child that ``multiprocessing`` spawns, after it has imported their targets.

    Waits for: the child; at most ``timeout`` seconds. Raises ``PatchError`` if it ends or hangs without an answer.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=tell, args=(theirs,), name="patches-check")
    before = dict(os.environ)
    os.environ.update(environment_for(names, _wanted(names)))
    try:
        child.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise PatchError(
                f"the child did not answer within {timeout:g} s: importing a target takes longer, or hangs"
            )
        answer = ours.recv()
    except EOFError:
        child.join(timeout)
        raise PatchError(f"the child ended with exit code {child.exitcode}; its own message is above") from None
    finally:
        child.kill()  # an engine's import may leave threads behind that never end
        child.join()
        ours.close()
    return [Status.from_json(data) for data in answer]


def _wanted(names: Iterable[str]) -> dict[Patch, bool]:
    """The patches, and whether each is on."""
    found = {patch: is_on(patch, {}) for name in names for patch, _ in load(name)}
    ordered([patch for patch, on in found.items() if on])
    return found


def tell(answer: Connection) -> None:
    """In the child: import the targets, send how the patches stand."""
    errors: dict[str, str] = {}
    missing = {
        patch.name for patch in REGISTRY.patches() if importlib.util.find_spec(patch.module.partition(".")[0]) is None
    }
    for patch, on in REGISTRY.patches().items():
        try:
            if on and patch.name not in missing:
                importlib.import_module(patch.module)
        except Exception as error:
            errors[patch.name] = f"its import failed: {type(error).__name__}: {error}"
    statuses = []
    for status in REGISTRY.statuses():
        if status.state == "waiting" and status.name in missing:
            status = replace(status, state="not installed", note="")
        elif status.state == "waiting":
            status = replace(status, note=errors.get(status.name, status.note))
        statuses.append(status.as_json())
    answer.send(statuses)
    answer.close()


def fingerprint_of(target: str) -> str:
    """The fingerprint of ``module:qualname`` as it is installed here; its top-level package alone may be imported.

    Raises ``PatchError`` if it is not there, or is defined more than once.
    """
    module, _, qualname = target.partition(":")
    if not module or not qualname:
        raise PatchError(f"{target!r}: want 'module:qualname', such as 'engine.worker:Worker.wake_up'")
    file = source_file(module)
    if file is None:
        raise PatchError(
            f"{target}: no package {module.partition('.')[0]} with a source file for {module} is installed here"
        )
    found = definitions(parsed(file.read_text(encoding="utf-8")), qualname)
    if len(found) != 1:
        lines = f" (lines {', '.join(str(node.lineno) for node in found)})" if found else ""
        raise PatchError(f"{target}: {len(found)} definitions in {file}{lines}; want one")
    return fingerprint(found[0])


def source_file(module: str) -> Path | None:
    """The source file of ``module``, found without importing more than finders need; None if there is none."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        for file in (Path(folder, *rest).with_suffix(".py"), Path(folder, *rest, "__init__.py")):
            if file.is_file():
                return file
    return None


def _examine(patch: Patch, on: bool) -> Status:
    status = Status(patch.name, patch.target, "off", patch.required, installed_version(patch.distribution))
    if not on:
        return replace(status, note=f"switch it on with {patch.switch}=1")
    if importlib.util.find_spec(patch.module.partition(".")[0]) is None:
        return replace(status, state="not installed")
    try:
        node, text = _definition(patch)
        if note := obsolete_note(patch, Installed(status.version, source_of(node, text))):
            return replace(status, state="not needed", note=note)
        verify(patch, node, status.version)
    except PatchError as error:
        return replace(status, state="refused", note=str(error))
    same = ", ".join(v for v, f in patch.fingerprints.items() if f == fingerprint(node))
    loaded = "; its module is loaded here already" if patch.module in sys.modules else ""
    return replace(status, state="waiting", note=f"applied on import; source as in {same}{loaded}")


def _definition(patch: Patch) -> tuple[Definition, str]:
    """The definition that is installed; of several (branches of an ``if``) one that the patch knows."""
    file = source_file(patch.module)
    if file is None:
        raise PatchRefused(f"there is no source file for {patch.module}")
    text = file.read_text(encoding="utf-8")
    found = definitions(parsed(text), patch.qualname)
    if not found:
        raise PatchRefused(f"{file} has no {patch.qualname}")
    return next((n for n in found if fingerprint(n) in patch.fingerprints.values()), found[0]), text
