"""The same patches in child processes, and proof that they are live there.

How: environment variables name the patches, and a folder at the front of the child's ``PYTHONPATH`` holds a
``sitecustomize`` module, which Python imports before anything else. That reaches every process of this interpreter that
inherits the environment, however it is started (``spawn``, ``forkserver``, ``subprocess``, an engine's own workers,
Ray). A ``.pth`` file would have to lie in site-packages; wrapping what ``multiprocessing`` sends to its children would
be a patch of private code, and reach those only. A process that ignores the environment (``python -E``, ``-I``,
``-S``) is not reached: wrap its entry with ``guarded``, or find it missing with ``wait_until_live``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crossrl.patching.patch import Patch, PatchError, PatchNotLive, Status
from crossrl.patching.registry import REGISTRY, process_name, refuse_unless_live

PATCHES = "CROSSRL_PATCHES"
PREFIX = "CROSSRL_PATCHES_PREFIX"
FOLDERS = "CROSSRL_PATCHES_PATH"
SWITCHES = "CROSSRL_PATCHES_ON"
REPORTS = "CROSSRL_PATCH_REPORTS"
BOOTSTRAP = Path(__file__).parent / "bootstrap"
_POLL_SECONDS = 0.05


def child_environment(reports: Path | None = None) -> dict[str, str]:
    """The variables with which a child has this process's patches, for ``subprocess`` and the like.

    ``reports``: a folder in which each process says how its patches stand. Raises ``PatchError`` if a patch cannot be
    carried, or none is installed.
    """
    references = REGISTRY.references()
    if not references:
        raise PatchError("no patches are installed, so there are none to carry: call install() first")
    return environment_for(references, REGISTRY.carried(), reports)


def environment_for(
    references: Sequence[str], patches: Mapping[Patch, bool], reports: Path | None = None
) -> dict[str, str]:
    """``child_environment`` of ``patches``, which are those that ``references`` refer to, with their switches."""
    folders = dict.fromkeys(folder for r in references if (folder := _folder_of(r.partition(":")[0])))
    path = [
        str(BOOTSTRAP),
        *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p != str(BOOTSTRAP) and p),
    ]
    where = str(reports.absolute()) if reports else os.environ.get(REPORTS, "")
    return {
        PATCHES: ",".join(references),
        PREFIX: sys.prefix,
        FOLDERS: os.pathsep.join(folders),
        "PYTHONPATH": os.pathsep.join(path),
        SWITCHES: ",".join(f"{patch.name}={int(on)}" for patch, on in patches.items()),
        **({REPORTS: where} if where else {}),
    }


def carry(reports: Path | None = None) -> None:
    """Let all children that this process starts from now on have its patches: ``child_environment`` in ``os.environ``.

    Call it after ``install`` and before anything starts processes. Raises ``PatchError`` if the fork server of
    ``multiprocessing`` runs already: its children would be without.
    """
    server = sys.modules.get("multiprocessing.forkserver")
    if server is not None and getattr(server._forkserver, "_forkserver_pid", None) is not None:
        raise PatchError(
            "multiprocessing's fork server was started before the patches were carried, so its children would not have "
            "them: call carry() earlier"
        )
    os.environ.update(child_environment(reports))
    report()


def ray_runtime_env(reports: Path | None = None) -> dict[str, Any]:
    """For ``ray.init(runtime_env=...)``, or to be merged into yours: Ray's workers have this process's patches.

    The set-up hook does again what the environment does already, for workers whose interpreter was started before.
    """
    return {
        "env_vars": child_environment(reports),
        "worker_process_setup_hook": "crossrl.patching.children.boot",
    }


def boot() -> None:
    """Install what the environment names; called at the start of a child, before its own code. Again: nothing happens.

    Raises what ``install`` and ``require`` raise; a target that is not imported yet passes.
    """
    references = [r for r in os.environ.get(PATCHES, "").split(",") if r]
    switches = dict(word.split("=") for word in os.environ.get(SWITCHES, "").split(",") if word)
    if not references:
        raise PatchNotLive(f"{process_name()}: {PATCHES} names no patches, so this process would run without them")
    folders = [f for f in os.environ.get(FOLDERS, "").split(os.pathsep) if f and f not in sys.path]
    sys.path[:0] = folders  # the script's own folder comes later than this
    try:
        REGISTRY.install(*references, switches={name: on == "1" for name, on in switches.items()})
    finally:
        # Last from now on: what patches import when they are called is found, and nothing of the program is shadowed.
        sys.path[:] = [*(p for p in sys.path if p not in folders), *folders]
    REGISTRY.require(waiting_ok=True)


def guarded(target: Callable[..., Any]) -> Callable[..., Any]:
    """``target`` for ``multiprocessing.Process``: the child installs the patches before it even imports ``target``.

    For starts that leave the environment behind. The child ends with an error if a required patch is refused.
    """
    return _Guarded(target, child_environment())


@dataclass(frozen=True, slots=True)
class _Guarded:
    target: Callable[..., Any]
    environment: dict[str, str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        REGISTRY.require(waiting_ok=True)
        return self.target(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # The target is a pickle inside the pickle: reading it imports its module, which must come after the patches.
        return _unguard, (self.environment, pickle.dumps(self.target))


def _unguard(environment: dict[str, str], target: bytes) -> _Guarded:
    os.environ.update(environment)
    boot()
    return _Guarded(pickle.loads(target), environment)


# Reports


@dataclass(frozen=True, slots=True)
class Report:
    """What one process says of its patches. ``argv``: its command line."""

    pid: int
    parent: int
    process: str
    argv: tuple[str, ...]
    statuses: tuple[Status, ...]


def report() -> None:
    """Write this process's report, if a folder for them is named; done by itself whenever something changes."""
    folder = os.environ.get(REPORTS)
    if not folder:
        return
    data = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "process": process_name(),
        "argv": list(sys.orig_argv),
        "patches": [status.as_json() for status in REGISTRY.statuses()],
    }
    path = Path(folder) / f"{os.getpid()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data), encoding="utf-8")
    temporary.replace(path)


def reports(folder: Path) -> dict[int, Report]:
    """The reports in ``folder``, by process id."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        statuses = tuple(Status.from_json(s) for s in data["patches"])
        found[data["pid"]] = Report(data["pid"], data["parent"], data["process"], tuple(data["argv"]), statuses)
    return found


def wait_until_live(
    folder: Path, pids: Sequence[int], timeout: float, names: Sequence[str] | None = None
) -> dict[int, Report]:
    """Wait until the processes ``pids`` have reported that their required patches (or the patches ``names``) are live.

    Waits for: their reports in ``folder``; unblocked by their imports of the targets; at most ``timeout`` seconds.
    Raises ``PatchNotLive`` naming each process and patch, at once where one is refused.
    """
    if not pids:
        raise PatchError("wait_until_live was asked about no process")
    end = time.monotonic() + timeout
    while True:
        seen = reports(folder)
        wanted = {pid: _of_interest(seen[pid], names) for pid in pids if pid in seen}
        for pid, statuses in wanted.items():
            refuse_unless_live(statuses, seen[pid].process, waiting_ok=True)
        if len(wanted) == len(pids) and all(s.settled for statuses in wanted.values() for s in statuses):
            return {pid: seen[pid] for pid in pids}
        if time.monotonic() > end:
            silent = [str(pid) for pid in pids if pid not in seen]
            if silent:
                raise PatchNotLive(
                    f"process {', '.join(silent)} did not report its patches in {folder} within {timeout:g} s: it was "
                    f"started without {PATCHES} and PYTHONPATH, or by another interpreter than {sys.prefix}"
                )
            for pid, statuses in wanted.items():
                refuse_unless_live(statuses, seen[pid].process)
        time.sleep(_POLL_SECONDS)


def _of_interest(report: Report, names: Sequence[str] | None) -> list[Status]:
    if names is None:
        return [s for s in report.statuses if s.required]
    there = {s.name: s for s in report.statuses}
    for name in names:
        if name not in there:
            raise PatchNotLive(f"{report.process}: patch {name} is not known there; known are: {', '.join(there)}")
    return [replace(there[name], required=True) for name in names]


def _folder_of(module: str) -> str | None:
    """The folder from which ``module`` is imported, unless every process of this interpreter has it."""
    try:
        top = importlib.util.find_spec(module.partition(".")[0])
    except ValueError:  # made by hand, without a spec
        return None
    if top is None or not (top.submodule_search_locations or top.origin):
        return None
    folder = Path((list(top.submodule_search_locations or ()) or [str(top.origin)])[0]).parent
    common: Mapping[str, str] = sysconfig.get_paths()
    everywhere = {*site.getsitepackages(), site.getusersitepackages(), common["stdlib"], common["purelib"]}
    return None if str(folder) in everywhere else str(folder)


def _after_fork() -> None:
    # A forked child has the patches of its parent; it only has to say so under its own process id.
    if REGISTRY.patches():
        report()


REGISTRY.changed = report
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
