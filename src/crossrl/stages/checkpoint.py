"""checkpoint: save all that is needed to go on, every ``save_freq`` steps and at the end."""

from __future__ import annotations

from collections.abc import Callable

from crossrl.batch import Batch
from crossrl.stages.base import At


class Checkpoint:
    """Calls ``save(step)`` when ``due(step)``; the facts that it returns (path, digests) go into the record."""

    name = "checkpoint"
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __init__(self, save: Callable[[int], dict[str, str]], due: Callable[[int], bool]) -> None:
        self.save, self.due = save, due

    def __call__(self, batch: Batch, at: At) -> Batch:
        return Batch(batch.sample_id, {}, {}, {"checkpoint": self.save(at.step) if self.due(at.step) else {}})
