"""Recorded runs in Python: what is there, any record, any sample. Needs no trainer, no engine and no GPU.

run = open_run("runs/demo/tape")
run.steps()                                   # [1, 2, 3]
run.stages(2)                                 # ['rollout', 'reward', 'old_log_prob', ...]
run.record(2, "reward").batch["reward"]       # numpy array
run.sample("ab12/0/7/3").response             # text
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from crossrl.batch import Batch, Meaning, Ragged
from crossrl.stages.base import ORDER, At
from crossrl.tape.capture import read_digests
from crossrl.tape.errors import RecordMissing, TapeError
from crossrl.tape.layout import RunLayout
from crossrl.tape.record import Record, read_record

Split = Literal["train", "val"]
# Where the trainer's log-probs are, the better one first.
TRAINER_COLUMNS = ("old_log_probs", "log_probs")
SAMPLER_COLUMN = "rollout_log_probs"


def stage_rank(stage: str) -> tuple[int, str]:
    """Sorts stages in the order of a step; unknown ones come last, by name."""
    return (ORDER.index(stage), "") if stage in ORDER else (len(ORDER), stage)


def trainer_column(columns: Container[str], meanings: Mapping[str, Meaning]) -> str | None:
    """Which of a step's ``columns`` holds the trainer's log-probs to compare with the sampler's; None without any.

    ``old_log_probs``, unless a run does without them (one optimizer step) or copies the sampler's (bypass mode). Then
    what the update computed first; after its first mini-batch, those are of weights that have moved.
    """
    for name in TRAINER_COLUMNS:
        meaning = meanings.get(name)
        if name in columns and (meaning is None or meaning != meanings.get(SAMPLER_COLUMN)):
            return name
    return None


@dataclass(frozen=True, slots=True)
class SampleView:
    """All that a run recorded about one sample at one step.

    ``columns``: field to this sample's value (an array for ragged fields). ``meanings``: of the log-prob fields.

    >>> SampleView("s0", 1, "train", {"response": "4", "reward": 1.0}, {}).response
    '4'
    """

    sample_id: str
    step: int
    split: str
    columns: dict[str, Any]
    meanings: dict[str, Meaning]

    @property
    def prompt(self) -> Any:
        """Chat messages as in the data file, or None if they were not recorded."""
        return self.columns.get("prompt")

    @property
    def response(self) -> str | None:
        return self.columns.get("response")

    @property
    def reward(self) -> float | None:
        return self.columns.get("reward")

    @property
    def sampler_log_probs(self) -> np.ndarray | None:
        """float32, nat, one per response token."""
        return self.columns.get(SAMPLER_COLUMN)

    @property
    def trainer_log_probs(self) -> np.ndarray | None:
        """float32, nat, one per response token, NaN where not computed; of the field that ``trainer_column`` names."""
        name = trainer_column(self.columns, self.meanings)
        return None if name is None else self.columns[name]

    def tokens(self) -> list[tuple[int, int, float | None, float | None]]:
        """Per response token: position, token id, the sampler's and the trainer's log-prob (None: not computed)."""
        ids = self.columns.get("response_ids", np.zeros(0, np.int32))
        mine, theirs = self.sampler_log_probs, self.trainer_log_probs
        pick = [
            [None] * len(ids) if c is None else [None if math.isnan(v) else v for v in c.tolist()]
            for c in (mine, theirs)
        ]
        return list(zip(range(len(ids)), ids.tolist(), *pick, strict=True))

    def worst(self, count: int = 5) -> list[tuple[int, int, float, float]]:
        """The tokens (as in ``tokens``) at which sampler and trainer differ most, largest first."""
        both = [(i, t, a, b) for i, t, a, b in self.tokens() if a is not None and b is not None]
        return sorted(both, key=lambda row: -abs(row[2] - row[3]))[:count]


@dataclass(frozen=True, slots=True)
class RunTape:
    """A recorded run. What is read is checked against its digests; any method may raise ``CorruptRecord``."""

    layout: RunLayout
    _open: dict[Path, Record] = field(default_factory=dict, repr=False)  # of the step that was read last

    def steps(self) -> list[int]:
        return self.layout.steps()

    def stages(self, step: int, split: Split = "train") -> list[str]:
        """The stages recorded at ``step``, in the order of a step."""
        return list(dict.fromkeys(stage for stage, _ in self.calls(step, split)))

    def calls(self, step: int, split: Split = "train") -> list[tuple[str, At]]:
        """Stage and place of each record of ``step``, in the order of a step."""
        found = [(stage, at) for stage, at in self.layout.calls(step) if at.split == split]
        return sorted(found, key=lambda c: (stage_rank(c[0]), c[1].call))

    def record(self, step: int, stage: str, call: int = 0, split: Split = "train") -> Record:
        """Raises ``RecordMissing`` with what there is."""
        path = self.layout.path(stage, At(step, call, split), 0)
        if path in self._open:
            return self._open[path]
        if any(p.parent != path.parent for p in self._open):
            self._open.clear()
        try:
            self._open[path] = read_record(path)
            return self._open[path]
        except RecordMissing:
            there = ", ".join(f"{s}.{at.call}" for s, at in self.calls(step, split)) or "nothing"
            raise RecordMissing(f"no record at {path}; recorded at step {step} ({split}): {there}") from None

    def records(self, step: int, split: Split = "train") -> Iterator[tuple[At, Record]]:
        """All records of ``step``, in the order of a step."""
        for stage, at in self.calls(step, split):
            yield at, self.record(step, stage, at.call, split)

    def samples(self, step: int, split: Split = "train") -> list[SampleView]:
        """All samples of ``step``, with everything that was recorded about each."""
        views: dict[str, SampleView] = {}
        for _, record in self.records(step, split):
            batch = record.batch
            for i, sample in enumerate(batch.sample_id):
                view = views.setdefault(sample, SampleView(sample, step, split, {}, {}))
                view.columns.update({name: _value(batch[name], i) for name in batch.columns})
                view.meanings.update(batch.meanings)
        return list(views.values())

    def sample(self, sample_id: str, step: int | None = None, split: Split = "train") -> SampleView:
        """One sample, at ``step`` or at the first step that has it. Raises ``RecordMissing``."""
        for each in [step] if step is not None else self.steps():
            if any(sample_id in record.sample_id for _, record in self.records(each, split)):
                return next(v for v in self.samples(each, split) if v.sample_id == sample_id)
        where = f"at step {step}" if step is not None else f"in {len(self.steps())} steps"
        raise RecordMissing(f"sample {sample_id!r} is not recorded {where} of {self.layout.root} ({split})")

    def inputs(self, step: int, stage: str, call: int = 0, split: Split = "train") -> Batch:
        """What ``stage`` was given at this call, put together from the records of the stages before it.

        Raises ``TapeError`` when a field was not recorded, or is not what the stage read (by digest).
        """
        record = self.record(step, stage, call, split)
        columns: dict[str, Any] = {}
        meanings: dict[str, Meaning] = {}
        for name in record.header.reads:
            own = record.only([name]) if name in record.header.fields else None
            source = own or self.written(step, name, record.sample_id, split, before=stage)
            if source is None:
                raise TapeError(
                    f"{record.path}: its input {name!r} is in no record of step {step}: record the stage that writes it"
                )
            columns[name] = source[name]
            meanings |= source.meanings
        batch = Batch(record.sample_id, columns, meanings)
        for name, reads in read_digests(batch).items():
            if reads.digest != record.header.reads[name].digest:
                raise TapeError(
                    f"{record.path}: {stage} read another {name!r} than the stages before it wrote: digest "
                    f"{record.header.reads[name].digest}, written {reads.digest}"
                )
        return batch

    def writers(self, step: int, name: str, split: Split = "train", before: str | None = None) -> list[Record]:
        """The records of ``step`` that hold field ``name``, of stages before stage ``before``."""
        return [
            record
            for _, record in self.records(step, split)
            if name in record.header.fields and (before is None or stage_rank(record.header.stage) < stage_rank(before))
        ]

    def written(
        self, step: int, name: str, sample_id: Sequence[str], split: Split = "train", before: str | None = None
    ) -> Batch | None:
        """Field ``name`` of these samples, in this order, as the stages before stage ``before`` wrote it.

        None when a sample is in no record with that field.
        """
        parts = [record.only([name]) for record in self.writers(step, name, split, before)]
        where = {sample: (part, i) for part in parts for i, sample in enumerate(part.sample_id)}
        if not parts or any(sample not in where for sample in sample_id):
            return None
        if len(parts) == 1:
            return parts[0].take(parts[0].index_of(sample_id))
        values = [_value(where[s][0][name], where[s][1]) for s in sample_id]
        first = parts[0][name]
        column: Any = values
        if isinstance(first, Ragged):
            column = Ragged.from_rows(values, first.dtype)
        elif isinstance(first, np.ndarray):
            column = np.array(values, first.dtype)
        return Batch(tuple(sample_id), {name: column}, parts[0].meanings)


def _value(column: Any, i: int) -> Any:
    if isinstance(column, Ragged):
        return column.row(i)
    return column[i].item() if isinstance(column, np.ndarray) else column[i]


def open_run(folder: Path | str) -> RunTape:
    """The tape in ``folder`` or in its sub-folder ``tape``. Raises ``RecordMissing`` when nothing is recorded."""
    folder = Path(folder).expanduser()
    for root in (folder, folder / "tape"):
        if RunLayout(root).steps():
            return RunTape(RunLayout(root))
    raise RecordMissing(f"{folder}: no recorded steps (folders step_000001, ...) there or in its sub-folder tape")
