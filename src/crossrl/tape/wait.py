"""Waiting for a record that another run publishes: bounded, and visible in the log."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from crossrl.tape.errors import WaitTimeout

logger = logging.getLogger("crossrl.tape")


def wait_for(path: Path, timeout_s: float, why: str) -> None:
    """Return when ``path`` exists.

    Waits for: a peer to publish ``path``. Unblocked by: its rename into place. Time limit: ``timeout_s``, then
    ``WaitTimeout``. Polls; says every 10 s what it waits for and since when.
    """
    start = said = time.monotonic()
    pause = 0.01
    while not path.exists():
        now = time.monotonic()
        if now - start > timeout_s:
            raise WaitTimeout(
                f"{path} did not appear within {timeout_s:g} s ({why}). Is the run that publishes it alive?"
            )
        if now - said >= 10:
            logger.info("tape: waiting for %s for %.0f s (%s; limit %g s)", path, now - start, why, timeout_s)
            said = now
        time.sleep(min(pause, max(0.0, start + timeout_s - now)))
        pause = min(pause * 1.5, 1.0)
