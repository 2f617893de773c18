"""What happens when verl imports the host, in each of its processes: patches are installed, or the process ends.

verl hides a plug-in that fails to load: it catches ``Exception`` and writes a line at level debug. So a host that was
asked for and cannot work raises ``SystemExit``, which passes. What is asked for is read from the command line of the
process that the user starts; the processes that it starts learn it from their environment, together with the patches
(``patching.carry``), and end at their start if they cannot have them.

Nothing here imports torch, and nothing is patched in a process that is not asked and whose verl is not known.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
from pathlib import Path

from crossrl.hosts.verl.versions import SUPPORTED, installed
from crossrl.patching import PatchError, carry, install
from crossrl.patching.listing import on_disk

PATCHES = "crossrl.hosts.verl.patches:PATCHES"
SWITCH = "CROSSRL_VERL"
ASKED = re.compile(
    r"\+{0,2}(tape\.mode=(?!(off|null)$)|trainer\.share_data=(?!null$)|actor_rollout_ref\.rollout\.skip_rollout=(?i:true|1|on|yes)$)"
)
ALIVE = b"crossrl.hosts.verl.alive"


def asked(argv: list[str] | None = None) -> bool:
    """Whether this process must have the host: ``CROSSRL_VERL=1``, or a key of ours on the command line.

    >>> asked(["main_ppo", "++trainer.share_data=ckpt"]), asked(["main_ppo", "trainer.share_data_dir=x"])
    (True, False)
    """
    return os.environ.get(SWITCH) == "1" or any(ASKED.match(word) for word in (sys.argv if argv is None else argv))


def load() -> None:
    """Install the patches in a process that imports verl. Raises ``SystemExit`` if the host is asked for and cannot."""
    if "verl" not in sys.modules or os.environ.get(SWITCH) == "0":
        return
    wanted = asked()
    if not wanted and installed() not in SUPPORTED:
        return
    try:
        _require_version()
        if wanted:
            os.environ[SWITCH] = "1"  # for the modes of the patches, and for children
            _require_sources()
        install(PATCHES)
        if wanted and not _in_ray_worker():
            carry()
            atexit.register(_refuse_silence)
    except Exception as error:
        if wanted:
            raise SystemExit(f"crossrl: the verl host cannot be used: {type(error).__name__}: {error}") from error


def _in_ray_worker() -> bool:
    """Workers have what their driver has; the driver is who carries it, and who answers for the run."""
    return Path(sys.argv[0]).parts[-2:] == ("workers", "default_worker.py") if sys.argv else False


def _require_version() -> None:
    found = installed()
    if found not in SUPPORTED:
        raise PatchError(
            f"verl {found} is installed; the host is written for {', '.join(SUPPORTED)}. Install one of these, leave "
            f"out the keys tape.*, trainer.share_data* and skip_rollout, or switch the host off with {SWITCH}=0"
        )


def _require_sources() -> None:
    """All patches that this version needs fit the sources that are installed; none is imported for that."""
    from crossrl.hosts.verl.patches import PATCHES as KNOWN  # which asks this module who asked

    needed = {patch.name for patch in KNOWN if installed() in patch.fingerprints}
    bad = [s for s in on_disk([PATCHES]) if s.name in needed and s.state in ("refused", "failed")]
    if bad:
        raise PatchError("; ".join(s.note for s in bad))


def _refuse_silence() -> None:
    """At the end of the driver: a run in whose trainer the host was never alive did not do what it was asked.

    The trainer's process says so in Ray's own store, which reaches the driver from every node. A run that ended with
    an error says that itself.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or hasattr(sys, "last_type"):
        return
    from ray.experimental.internal_kv import _internal_kv_get

    if _internal_kv_get(ALIVE) is None:
        print(
            "crossrl: the host was asked for, but it was not alive in the process that ran the trainer: nothing was "
            "recorded, replayed or exchanged. Either the run failed before it began to train (see above), or its "
            "processes do not have the environment of this one: docs/how-to/use-with-verl.md, 'Several nodes'",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        os._exit(3)
