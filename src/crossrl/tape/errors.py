"""What can go wrong with records and tapes. Every message names the file or key, what was found, and the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class TapeError(RuntimeError):
    """Anything that the tape refuses or cannot do."""


class CorruptRecord(TapeError):
    """The bytes of a record are not those that were written, or were never a record."""

    def __init__(self, path: Path, found: str) -> None:
        self.path = path
        super().__init__(
            f"{path}: {found}. The record is not used. Restore the file from a copy, or remove the record's folder "
            f"and run its stage again"
        )


class RecordExists(TapeError):
    """A record is already there; records are never overwritten."""


class RecordMissing(TapeError):
    """A mode that only loads found no record."""


class CannotStore(TapeError):
    """A field holds something that has no place in a record."""


class TapeWriteError(TapeError):
    """The background writer failed; raised at the next boundary between stages."""


class TapeFull(TapeError):
    """The disk, or ``tape.max_bytes``, has no room for what is to be recorded."""


class ExchangeError(TapeError):
    """The two sides of an exchange do not fit together, or the folder does not fit this exchange."""


class PeerLost(ExchangeError):
    """The other side of an exchange failed, died, or ended without what this side waits for: ``trouble``."""

    def __init__(self, trouble: str) -> None:
        self.trouble = trouble
        super().__init__(f"{trouble}. Start both sides again once that is mended: they go on where they were")


class WaitTimeout(TapeError):
    """A record that another run should publish did not come in time."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One reason why a record does not belong to this call.

    ``key``: what ``tape.accept`` must name to accept it. ``acceptable``: False where accepting would make no
    sense (there is no way to join the record with the batch).

    >>> Mismatch("rollout.temperature", 1.0, 0.6).line()
    'rollout.temperature: recorded 1.0, found 0.6'
    """

    key: str
    recorded: Any
    found: Any
    acceptable: bool = True

    def line(self) -> str:
        return f"{self.key}: recorded {_short(self.recorded)}, found {_short(self.found)}"


class ReplayRefused(TapeError):
    """A record was made under other conditions than those of this call."""

    def __init__(self, path: Path, mismatches: Sequence[Mismatch]) -> None:
        self.path = path
        self.mismatches = tuple(mismatches)
        lines = [f"  {m.line()}" for m in self.mismatches]
        keys = [m.key for m in self.mismatches if m.acceptable]
        fixed = [m.key for m in self.mismatches if not m.acceptable]
        advice = []
        if fixed:
            advice.append(
                f"{', '.join(fixed)} cannot be accepted: restore the recorded setting, or use another folder."
            )
        if keys:
            advice.append(
                f"To load it all the same: tape.accept=[{','.join(keys)}]. The new run's records will then say that it "
                f"is not a valid reproduction."
            )
        super().__init__(
            f"the record {path} was made under other conditions, so it is not loaded:\n" + "\n".join([*lines, *advice])
        )


def _short(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
