"""The modes of a taped stage: one table that says what happens when its record is there, and when it is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from crossrl.tape.errors import TapeError

Mode = Literal["live", "record", "cache", "replay", "publish", "follow", "verify"]


@dataclass(frozen=True, slots=True)
class Rule:
    """``found``: what to do with a record that is there. ``missing``: what to do without one.

    found: ``ignore`` it; ``refuse`` (never overwrite); ``load`` it and do not run the stage; ``compare`` the stage's
    output with it. missing: ``run`` the stage; ``store`` (run and write); ``wait`` for a peer's; ``refuse``.
    """

    found: Literal["ignore", "refuse", "load", "compare"]
    missing: Literal["run", "store", "wait", "refuse"]


RULES: dict[str, Rule] = {
    "live": Rule("ignore", "run"),
    "record": Rule("refuse", "store"),
    "cache": Rule("load", "store"),
    "replay": Rule("load", "refuse"),
    "publish": Rule("load", "store"),  # what is there, this run published before it was started again
    "follow": Rule("load", "wait"),
    "verify": Rule("compare", "refuse"),
}

# Loading the output of one of these does not bring the state that it changed.
STATEFUL = ("update", "checkpoint", "sync")

# The modes that `tape.steps` limits; in the others a step without its record would break a run or its peer.
STEPPED = ("record", "replay", "verify")


def rule(mode: str) -> Rule:
    """The rule of ``mode``. Raises ``TapeError`` with the valid names."""
    if mode not in RULES:
        raise TapeError(f"tape mode {mode!r} is unknown; there are: {', '.join(RULES)}")
    return RULES[mode]
