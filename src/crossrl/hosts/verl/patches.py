"""The host's patches of verl: ``crossrl.hosts.verl.patches:PATCHES``. All are wrappers in the process of the trainer.

Each asks first whether this run has a tape or an exchange; if not, the original is called as it was. The workers are
not patched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossrl.hosts.verl.fingerprints import FINGERPRINTS, RAY_TRAINER, V1_TRAINER
from crossrl.hosts.verl.plugin import asked
from crossrl.hosts.verl.versions import SUPPORTED, installed
from crossrl.patching import Patch
from crossrl.patching.patch import Mode

Original = Callable[..., Any]
# Who asked for nothing is not to be stopped by a verl that was changed; who did must not run without.
MODE: Mode = "strict" if asked() else "warn"
HAS_V1 = installed() not in SUPPORTED or SUPPORTED[str(installed())].v1
WHY = "records, replays and exchanges the steps of verl's trainer (docs/how-to/use-with-verl.md)"


def with_settings(original: Original) -> Original:
    """Before anything is made of the configuration: take our keys out of it, check them, keep them at the trainer."""

    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        from crossrl.hosts.verl.settings import take_settings

        take_settings(self)
        return original(self, *args, **kwargs)

    return init


def with_session(original: Original) -> Original:
    """While the trainer trains: its parts that generate are replaced by ours, which ask them."""

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "crossrl_settings", None) is None:
            return original(self, *args, **kwargs)
        from crossrl.hosts.verl.start import session_of

        with session_of(self) as session:
            return original(self, *session.attach(*args), **kwargs)

    return fit


def with_update(original: Original) -> Original:
    """Where the actor is updated: what was computed before is recorded, and the update is recorded or exchanged."""

    def update_actor(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = getattr(self, "crossrl_session", None)
        if session is None:
            return original(self, *args, **kwargs)
        return session.update(lambda: original(self, *args, **kwargs), *args, **kwargs)

    return update_actor


def _patch(name: str, target: str, wrapper: Callable[[Original], Original], on: bool = True) -> Patch:
    return Patch(
        name=name, target=target, distribution="verl", fingerprints=FINGERPRINTS[target], wrapper=wrapper, why=WHY,
        required=False, mode=MODE, on=on,
    )  # fmt: skip


V0 = (
    _patch("verl.v0.init-workers", f"{RAY_TRAINER}.init_workers", with_settings),
    _patch("verl.v0.fit", f"{RAY_TRAINER}.fit", with_session),
    _patch("verl.v0.update-actor", f"{RAY_TRAINER}._update_actor", with_update),
)
V1 = (
    _patch("verl.v1.init", f"{V1_TRAINER}.init", with_settings, HAS_V1),
    _patch("verl.v1.fit", f"{V1_TRAINER}.fit", with_session, HAS_V1),
    _patch("verl.v1.update-actor", f"{V1_TRAINER}._update_actor", with_update, HAS_V1),
)
PATCHES = (*V0, *V1)
