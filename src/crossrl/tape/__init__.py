"""Records of every stage of a run: written, loaded, verified, compared. Start with ``open_run`` and ``Tape``."""

from crossrl.tape.api import RunTape, SampleView, open_run
from crossrl.tape.compare import Difference
from crossrl.tape.diff import Diff, diff_runs
from crossrl.tape.errors import (
    CannotStore,
    CorruptRecord,
    Mismatch,
    RecordExists,
    RecordMissing,
    ReplayRefused,
    TapeError,
    TapeFull,
    TapeWriteError,
    WaitTimeout,
)
from crossrl.tape.gap import GapView, gap_at
from crossrl.tape.layout import RunLayout, SkipLayout
from crossrl.tape.record import Record, read_record
from crossrl.tape.tape import Tape, TapeOptions
from crossrl.tape.taped import Comparison

__all__ = [
    "CannotStore",
    "Comparison",
    "CorruptRecord",
    "Diff",
    "Difference",
    "GapView",
    "Mismatch",
    "Record",
    "RecordExists",
    "RecordMissing",
    "ReplayRefused",
    "RunLayout",
    "RunTape",
    "SampleView",
    "SkipLayout",
    "Tape",
    "TapeError",
    "TapeFull",
    "TapeOptions",
    "TapeWriteError",
    "WaitTimeout",
    "diff_runs",
    "gap_at",
    "open_run",
    "read_record",
]
