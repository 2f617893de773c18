"""Which prompts come next: an order per epoch that depends on the seed and the epoch only.

An epoch is ``len(dataset) // batch_size`` whole batches; the rows that do not fill one are left out of that
epoch (with shuffling, other rows each time). The place in the data is two numbers, epoch and position, and is
part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossrl.batch import Batch
from crossrl.data.dataset import PromptDataset, permutation
from crossrl.data.errors import DataError


class DataExhausted(DataError):
    """More prompts were asked for than the planned epochs hold."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One prompt drawn: ``row`` counts the rows of the dataset (after filtering), ``epoch`` from 0."""

    epoch: int
    row: int


def prompt_batch(dataset: PromptDataset, draws: Sequence[Draw], n: int, prefix: str = "") -> Batch:
    """The drawn prompts, each repeated ``n`` times, the members of a group next to each other.

    Ids: ``{digest[:12]}.e{epoch}.r{row}.n{repeat}`` where row is the row's number in the files (``Row.index``);
    the group's id is the same without ``.n``. Two rows with the same text are two groups.
    """
    groups = [f"{prefix}{dataset.digest[:12]}.e{d.epoch}.r{dataset.rows[d.row].index}" for d in draws]
    rows = [dataset.rows[d.row] for d in draws for _ in range(n)]
    return Batch(
        tuple(f"{group}.n{repeat}" for group in groups for repeat in range(n)),
        {
            "group_id": [group for group in groups for _ in range(n)],
            "prompt_ids": dataset.prompt_ids.take(np.repeat([d.row for d in draws], n)),
            "prompt": [row.prompt for row in rows],
            "data_source": [row.data_source for row in rows],
            "ground_truth": [row.ground_truth for row in rows],
            "extra_info": [row.extra_info for row in rows],
        },
    )


def validation_batches(dataset: PromptDataset, batch_size: int | None, n: int) -> Iterator[Batch]:
    """Every row once, in the files' order, the last batch as small as it comes; ids start with ``val.``

    ``batch_size``: prompts per batch; None for one batch.
    """
    size = batch_size or len(dataset)
    for start in range(0, len(dataset), size):
        draws = [Draw(0, row) for row in range(start, min(start + size, len(dataset)))]
        yield prompt_batch(dataset, draws, n, prefix="val.")


class PromptLoader:
    """Draws training prompts; its whole state is ``state()``.

    ``batch_size``: prompts per step. ``n``: samples per prompt. ``total_epochs``: None for no end. Raises
    ``DataError`` when one batch needs more prompts than there are.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        batch_size: int,
        n: int,
        seed: int,
        shuffle: bool = True,
        total_epochs: int | None = None,
    ) -> None:
        if batch_size < 1 or n < 1:
            raise DataError(f"batch size {batch_size} and n {n}: both must be at least 1")
        if batch_size > len(dataset):
            raise DataError(
                f"data.train_batch_size={batch_size} is more than the {len(dataset)} prompts of the data set: "
                f"{len(dataset)} // {batch_size} = 0 steps per epoch. Set data.train_batch_size to at most "
                f"{len(dataset)}, or use more data"
            )
        self.dataset, self.batch_size, self.n = dataset, batch_size, n
        self.seed, self.shuffle, self.total_epochs = seed, shuffle, total_epochs
        self.epoch, self.position = 0, 0
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    @property
    def steps_per_epoch(self) -> int:
        return len(self.dataset) // self.batch_size

    @property
    def remaining(self) -> int | None:
        """Prompts left in the planned epochs; None without an end."""
        if self.total_epochs is None:
            return None
        return max(0, (self.total_epochs - self.epoch) * self._epoch_length - self.position)

    @property
    def _epoch_length(self) -> int:
        return self.steps_per_epoch * self.batch_size

    def draw(self, count: int) -> list[Draw]:
        """The next ``count`` prompts, over the end of an epoch if need be; fewer where the last epoch ends."""
        draws: list[Draw] = []
        while len(draws) < count and (self.total_epochs is None or self.epoch < self.total_epochs):
            take = min(count - len(draws), self._epoch_length - self.position)
            rows = self._epoch_order(self.epoch)[self.position : self.position + take]
            draws += [Draw(self.epoch, int(row)) for row in rows]
            self.position += take
            if self.position == self._epoch_length:
                # At once, not at the next draw: a checkpoint at an epoch's end must not look like unfinished work.
                self.epoch, self.position = self.epoch + 1, 0
        return draws

    def next(self, count: int | None = None) -> Batch:
        """A batch of the next ``count`` prompts (default: ``batch_size``), each ``n`` times.

        Raises ``DataExhausted``, without having drawn, when fewer are left; ``draw`` gives those.
        """
        count = self.batch_size if count is None else count
        left = self.remaining
        if left is not None and left < count:
            raise DataExhausted(
                f"{count} prompts wanted, {left} left in the {self.total_epochs} planned epochs of "
                f"{self._epoch_length} prompts; raise trainer.total_epochs, or stop here"
            )
        return self.batch(self.draw(count))

    def batch(self, draws: Sequence[Draw]) -> Batch:
        """The batch for ``draws``; see ``prompt_batch``."""
        return prompt_batch(self.dataset, draws, self.n)

    def state(self) -> dict[str, Any]:
        """JSON-like: the place in the data, and what gives that place its meaning."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "digest": self.dataset.digest,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``. Raises ``DataError``, changing nothing, when it was taken over other data or order."""
        mine = self.state()
        missing = sorted(set(mine) - set(state))
        if missing:
            raise DataError(f"loader state lacks {', '.join(missing)}; it is not a state of this loader")
        names = {"digest": "data set digest", "batch_size": "batch size", "seed": "data seed", "shuffle": "shuffle"}
        differ = [
            f"{name}: saved {state[key]}, now {mine[key]}" for key, name in names.items() if state[key] != mine[key]
        ]
        if differ:
            raise DataError(
                f"cannot resume in the middle of other data: {'; '.join(differ)}. Resume with the same data, tokenizer "
                f"and settings, or start anew in another trainer.default_local_dir"
            )
        epoch, position = state["epoch"], state["position"]
        if not (isinstance(epoch, int) and isinstance(position, int) and epoch >= 0 and position >= 0):
            raise DataError(f"loader state: epoch {epoch!r} and position {position!r} must be integers from 0")
        if position >= self._epoch_length:
            raise DataError(f"loader state: position {position} lies outside an epoch of {self._epoch_length} prompts")
        self.epoch, self.position = epoch, position

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            count = len(self.dataset)
            order = permutation(count, self.seed, "data", epoch) if self.shuffle else np.arange(count)
            self._order = (epoch, order)
        return self._order[1]
