"""What a stage is: a named callable from ``Batch`` to ``Batch`` that says what it reads and writes.

Everything that is done *about* a stage (recording, replaying, exchanging, timing) is done from outside,
by wrapping a ``Stage`` in another one. A stage never knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from crossrl import schema
from crossrl.batch import Batch, BatchError

# The stages in the order of a step.
ORDER = ("rollout", "reward", "old_log_prob", "ref_log_prob", "advantage", "update", "checkpoint", "sync")


@dataclass(frozen=True, slots=True)
class At:
    """Where in the run a stage is called.

    ``step``: 1-based training step (0: before training). ``call``: counts the calls of this stage within
    the step from 0 (dynamic sampling generates several times). ``split``: training or validation.
    """

    step: int
    call: int = 0
    split: Literal["train", "val"] = "train"


@runtime_checkable
class Stage(Protocol):
    """``reads``: the fields it is given, all others are withheld. ``writes``: exactly the fields it returns."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def __call__(self, batch: Batch, at: At) -> Batch: ...


def apply(stage: Stage, batch: Batch, at: At) -> Batch:
    """Run ``stage`` on the fields that it declares and join what it wrote to ``batch`` by sample id.

    Raises ``BatchError`` when the stage wrote other fields than it declares, or broke the schema.
    """
    out = stage(batch.only(stage.reads), at)
    if set(out.columns) != set(stage.writes):
        odd = sorted(set(out.columns) ^ set(stage.writes))
        raise BatchError(f"stage {stage.name!r} declares {stage.writes}, but wrote {sorted(out.columns)}: {odd}")
    joined = batch.join(out)
    schema.check(joined, stage.writes)
    return joined
