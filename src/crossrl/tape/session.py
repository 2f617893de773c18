"""What any trainer does around its steps when it has a tape: which steps, whose log, and how it ends."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from crossrl.tape.errors import PeerLost, TapeError
from crossrl.tape.exchange import Exchange
from crossrl.tape.tape import Tape


def step_range(text: str | None) -> frozenset[int] | None:
    """``1-3,7`` to {1, 2, 3, 7}; None (all) for nothing."""
    if not text:
        return None
    steps: set[int] = set()
    for part in str(text).split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ValueError(f"steps {text!r}: want numbers and ranges such as 1-10,20")
        steps.update(range(int(first), int(last or first) + 1))
    return frozenset(steps)


@contextlib.contextmanager
def log_to(handler: logging.Handler) -> Iterator[None]:
    """While this is open, the tape's log lines go to ``handler``, and nowhere else."""
    logger = logging.getLogger("crossrl.tape")
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


def close(tape: Tape, exchange: Exchange | None, error: BaseException | None, how: str) -> None:
    """The run ends, with ``error`` or as ``how`` says: bring all records to the disk, and tell the other side of an
    exchange. Raises ``TapeError``."""
    try:
        if error is None:
            tape.close()
        else:  # what was recorded before the failure is what one wants to see
            with contextlib.suppress(TapeError):
                tape.close()
    except TapeError as failure:
        error = failure
        raise
    finally:
        if exchange:
            reason = how if error is None else error.trouble if isinstance(error, PeerLost) else _reason_of(error)
            exchange.close(error is not None, reason)


def _reason_of(error: BaseException) -> str:
    return str(error) or ("stopped by Ctrl-C" if isinstance(error, KeyboardInterrupt) else type(error).__name__)
