"""What a patch is, in which states it can be, and what can go wrong with one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Mode = Literal["strict", "warn"]
State = Literal["waiting", "applied", "off", "not needed", "not installed", "refused", "failed", "lost"]
FINGERPRINT = re.compile(r"[0-9a-f]{32}:(?:[0-9a-f]{3})+")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_PART = r"[^\W\d]\w*"
_TARGET = re.compile(rf"{_PART}(?:\.{_PART})*:{_PART}(?:\.{_PART})*")


class PatchError(RuntimeError):
    """Anything that goes wrong with patches; the message names the patch, what was found and the next step."""


class PatchRefused(PatchError):
    """The target is not the source that the patch was written for, or cannot be patched safely."""


class PatchConflict(PatchError):
    """Two patches want one target, or one name."""


class PatchFailed(PatchError):
    """The patch's own code raised; the target is as it was."""


class PatchNotLive(PatchError):
    """A required patch is not live in this process, or in one of its children."""


@dataclass(frozen=True, slots=True)
class Installed:
    """What a patch's ``obsolete`` is asked about: the ``version`` of its distribution (None: unknown) and the
    ``source`` of its target, decorators included."""

    version: str | None
    source: str


Obsolete = Callable[[Installed], str | None]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Patch:
    """A change of one function of somebody else's package.

    >>> def wrapper(original):
    ...     def call(self, tags=None):
    ...         return original(self, tags or ["weights"])
    ...     return call
    >>> patch = Patch(
    ...     name="engine.wake",
    ...     target="engine.worker:Worker.wake_up",
    ...     distribution="engine",
    ...     fingerprints={"1.4.0": "0123456789abcdef0123456789abcdef:0a11b2"},
    ...     wrapper=wrapper,
    ...     why="wakes memory that was never asleep, engine#123",
    ... )
    >>> patch.module, patch.qualname, patch.switch
    ('engine.worker', 'Worker.wake_up', 'CROSSRL_PATCH_ENGINE_WAKE')

    ``name``: lower-case letters, digits, ``.``, ``_``, ``-``. ``target``: ``module:qualname`` of a function, method,
    static or class method, or property (its getter), where it is defined. ``distribution``: the installed package
    whose version is shown and given to ``obsolete``. ``fingerprints``: of each version's source that the patch was
    written for (``crossrl patches fingerprint``); a fingerprint that is none of them is refused.
    One of ``wrapper``, called with the original function and returning what takes its place, and ``replacement``,
    which takes its place itself.
    ``why``: the fault, with a reference. ``obsolete``: a note when an installation has no need of the patch, else
    None. ``required``: ``require()`` fails in a process where it is not live. ``mode``: "strict" makes the import of a
    target that is refused fail; "warn" logs it and leaves the target alone. ``on``: whether it is on where neither
    its environment variable (``switch``) nor the caller's configuration says. ``after``: patches that may share the
    target and go first. ``needs``: patches on the same module without which this one is refused.
    """

    name: str
    target: str
    fingerprints: Mapping[str, str]
    why: str
    wrapper: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    replacement: Callable[..., Any] | None = None
    distribution: str | None = None
    obsolete: Obsolete | None = None
    required: bool = True
    mode: Mode = "strict"
    on: bool = True
    after: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        def wrong(what: str) -> PatchError:
            return PatchError(f"patch {self.name!r}: {what}")

        if not _NAME.fullmatch(self.name):
            raise wrong("the name must be of lower-case letters, digits, '.', '_' and '-'")
        if not _TARGET.fullmatch(self.target):
            raise wrong(f"target is {self.target!r}: want 'module:qualname', such as 'engine.worker:Worker.wake_up'")
        if (self.wrapper is None) == (self.replacement is None):
            raise wrong("give one of wrapper and replacement")
        if not self.why.strip():
            raise wrong("why is empty: say which fault it mends, and where that is described")
        if self.mode not in ("strict", "warn"):
            raise wrong(f"mode is {self.mode!r}: want 'strict' or 'warn'")
        bad = [f for f in self.fingerprints.values() if not FINGERPRINT.fullmatch(f)]
        if bad or not self.fingerprints:
            raise wrong(
                f"fingerprints hold {bad[0] if bad else 'nothing'!r}: want one for each version that the patch was "
                f"written for, as printed by: crossrl patches fingerprint {self.target}"
            )

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]

    @property
    def switch(self) -> str:
        """The environment variable that turns it on (1) or off (0)."""
        return "CROSSRL_PATCH_" + re.sub(r"\W", "_", self.name).upper()


@dataclass(frozen=True, slots=True)
class Status:
    """How one patch stands in one process.

    >>> Status("engine.wake", "engine.worker:Worker.wake_up", "waiting", note="not imported yet").live
    False

    ``state``: "waiting" (target not imported yet), "applied", "off", "not needed", "not installed", "refused",
    "failed" (its own code raised), "lost" (replaced by something else since). ``version``: of its distribution.
    ``stale``: names in loaded modules that still hold the original, as ``module.name``.
    """

    name: str
    target: str
    state: State
    required: bool = True
    version: str | None = None
    note: str = ""
    stale: tuple[str, ...] = ()

    @property
    def live(self) -> bool:
        """Whether every call that can be seen goes through the patch."""
        return self.state == "applied" and not self.stale

    @property
    def settled(self) -> bool:
        """Live, or not wanted here: switched off, or mended upstream."""
        return self.live or self.state in ("off", "not needed")

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "stale": list(self.stale), "live": self.live}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Status:
        kept = {key: value for key, value in data.items() if key != "live"}
        return cls(**{**kept, "stale": tuple(data["stale"])})


def from_version(version: str, note: str) -> Obsolete:
    """Not needed from ``version`` of the distribution on; ``note`` says why.

    >>> from_version("0.20", "mended")(Installed("0.23.0", "")), from_version("0.20", "mended")(Installed("0.18", ""))
    ('mended (0.23.0 is 0.20 or newer)', None)
    """

    def obsolete(installed: Installed) -> str | None:
        from packaging.version import Version

        if installed.version is None or Version(installed.version) < Version(version):
            return None
        return f"{note} ({installed.version} is {version} or newer)"

    return obsolete


def source_has(text: str, note: str) -> Obsolete:
    """Not needed where the target's source has ``text``; ``note`` says why.

    >>> source_has("is not None", "mended")(Installed(None, "if x is not None: ..."))
    'mended'
    """
    return lambda installed: note if text in installed.source else None
