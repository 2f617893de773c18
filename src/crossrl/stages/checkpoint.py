"""checkpoint: save all that is needed to go on, every ``save_freq`` steps and at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from crossrl.batch import Batch
from crossrl.stages.base import At


class Checkpoint:
    """Calls ``save(step)`` when ``due(step)``; what it saves is the trainer's business."""

    name = "checkpoint"
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __init__(self, save: Callable[[int], Path], due: Callable[[int], bool]) -> None:
        self.save, self.due = save, due

    def __call__(self, batch: Batch, at: At) -> Batch:
        info = {"path": str(self.save(at.step))} if self.due(at.step) else {}
        return Batch(batch.sample_id, {}, {}, {"checkpoint": info})
