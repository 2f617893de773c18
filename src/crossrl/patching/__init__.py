"""Changing other people's code safely: verified before, proven live after, the same in every process, or refused.

    from crossrl import patching

    patching.install("my_fixes:PATCHES")     # applied when their targets are imported
    patching.carry()                         # children have them, too
    ...                                      # import the engine, start it
    patching.require()                       # or PatchNotLive, naming process and patch

`docs/how-to/write-a-safe-patch.md` shows how to write one.
"""

from crossrl.patching.children import (
    Report,
    boot,
    carry,
    child_environment,
    guarded,
    ray_runtime_env,
    report,
    reports,
    wait_until_live,
)
from crossrl.patching.patch import (
    Installed,
    Patch,
    PatchConflict,
    PatchError,
    PatchFailed,
    PatchNotLive,
    PatchRefused,
    Status,
    from_version,
    source_has,
)
from crossrl.patching.registry import REGISTRY

install = REGISTRY.install
live = REGISTRY.live
require = REGISTRY.require
revert = REGISTRY.revert

__all__ = [
    "Installed",
    "Patch",
    "PatchConflict",
    "PatchError",
    "PatchFailed",
    "PatchNotLive",
    "PatchRefused",
    "Report",
    "Status",
    "boot",
    "carry",
    "child_environment",
    "from_version",
    "guarded",
    "install",
    "live",
    "ray_runtime_env",
    "report",
    "reports",
    "require",
    "revert",
    "source_has",
    "wait_until_live",
]
