"""The start of a run with the host: proof that it is live in this process, and a session for as long as verl trains."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from crossrl import patching
from crossrl.hosts.verl.errors import HostError
from crossrl.hosts.verl.fingerprints import CONTRACT
from crossrl.hosts.verl.plugin import ALIVE
from crossrl.hosts.verl.session import Session
from crossrl.hosts.verl.settings import Settings
from crossrl.hosts.verl.versions import installed
from crossrl.patching.listing import fingerprint_of
from crossrl.tape.session import log_to


@contextlib.contextmanager
def session_of(trainer: Any) -> Iterator[Session]:
    """A session while the block runs. Raises before it begins where the host is not live here, or verl is another."""
    from crossrl.hosts.verl.patches import V0, V1

    settings: Settings = trainer.crossrl_settings
    patching.require(*(patch.name for patch in (V1 if settings.v1 else V0)))
    check_contract(settings.v1)
    with log_to(_messages()):
        session = Session(trainer, settings)
        _say_alive()
        trainer.crossrl_session = session
        try:
            session.preflight()
            yield session
        except BaseException as error:
            session.close(error)
            raise
        else:
            session.close(None)
        finally:
            del trainer.crossrl_session


def check_contract(v1: bool) -> None:
    """Compare the sources on whose way of working the host relies. ``v1``: those of the transfer queue as well.

    Raises ``HostError`` naming the first that is another.
    """
    version = str(installed())
    for target, known in CONTRACT.items():
        if version not in known or (".ppo.v1." in target and not v1):
            continue
        found = fingerprint_of(target)[: len(known[version])]
        if found != known[version]:
            raise HostError(
                f"{target} is not as in verl {version}: fingerprint {known[version]} expected, {found} found. It was "
                f"changed here; the host relies on how it works, so nothing is recorded, replayed or exchanged"
            )


def _say_alive() -> None:
    """To the driver, which may be on another node: see ``plugin``."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(ALIVE, b"1", overwrite=True)


def _messages() -> logging.Handler:
    """verl shows warnings only; what the tape says belongs into the log of a run that asked for it."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("crossrl: %(message)s"))
    return handler
