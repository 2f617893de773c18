"""Sampler against trainer at one recorded step: first whether they may be compared at all, then the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from crossrl.algorithms.gap import Gap, measure_gap
from crossrl.batch import Batch, Meaning, Ragged
from crossrl.tape.api import SAMPLER_COLUMN, RunTape, Split, trainer_column
from crossrl.tape.capture import read_digests
from crossrl.tape.compare import Difference
from crossrl.tape.errors import RecordMissing
from crossrl.tape.record import Record

Verdict = Literal["inputs differ", "different meaning", "ratios not comparable", "comparable", "nothing to compare"]


def meaning_verdict(sampler: Meaning, trainer: Meaning) -> tuple[Verdict, str]:
    """Whether two log-prob columns may be subtracted, and why not.

    Another temperature is another distribution: their difference looks like a policy that has moved, and is none
    (trl#4159). A truncated sampler (top-p, top-k) has renormalised what was left: its ratios are shifted by design.
    """
    if sampler.temperature != trainer.temperature:
        return "different meaning", (
            f"the sampler's log-probs are at temperature {sampler.temperature:g}, the trainer's at "
            f"{trainer.temperature:g}: two distributions, so their difference says nothing about the policy"
        )
    if sampler.truncation != trainer.truncation:
        return "ratios not comparable", (
            f"the sampler's log-probs are after truncation {sampler.truncation!r}, the trainer's after "
            f"{trainer.truncation!r}: ratios are shifted by the renormalisation"
        )
    return "comparable", ""


@dataclass(frozen=True, slots=True)
class GapView:
    """``gap``: None unless the columns are comparable (or only shifted by truncation). ``inputs``: what differs there.

    ``lag``: how many weight versions the trainer was ahead of the sampler; None when versions were not recorded.
    ``column``: the field that the trainer's log-probs are from; see ``trainer_column``.
    """

    step: int
    verdict: Verdict
    reason: str
    gap: Gap | None = None
    lag: int | None = None
    inputs: tuple[Difference, ...] = ()
    column: str = ""


def input_differences(run: RunTape, step: int, split: Split = "train") -> list[Difference]:
    """Fields that a stage read and that are not, for the same sample, what the stages before it wrote.

    Such a run has mixed up its samples between two stages; no comparison of numbers means anything after that.
    Fields that no earlier stage recorded are passed over.
    """
    out = []
    for at, record in run.records(step, split):
        for name, read in record.header.reads.items():
            sources = run.writers(step, name, split, before=record.header.stage)
            if [(s.sample_id, s.header.fields[name].digest) for s in sources] == [(record.sample_id, read.digest)]:
                continue
            source = run.written(step, name, record.sample_id, split, before=record.header.stage)
            if source is None:
                continue
            written = read_digests(source)[name]
            if written.digest != read.digest:
                unequal = np.flatnonzero(written.marks != record.marks(name))
                ids = [record.sample_id[int(i)] for i in unequal]
                out.append(
                    Difference(
                        record.header.stage, at, name, "inputs", ids[0] if ids else None, None,
                        "as written by the stage before", f"another value, in samples {', '.join(ids[:8])}",
                        len(ids), len(record.sample_id),
                    )
                )  # fmt: skip
    return out


def gap_at(run: RunTape, step: int, call: int = 0, split: Split = "train") -> GapView:
    """The sampler's against the trainer's log-probs of the recorded tokens of one step.

    The trainer's are those of ``old_log_prob``, or of the update where that stage did not run (``trainer_column``).
    ``call``: of the stage that they are from. Raises ``RecordMissing`` when neither was recorded.
    """
    record, name = _trainer_record(run, step, call, split)
    mixed = tuple(d for d in input_differences(run, step, split) if d.stage == record.header.stage)
    if mixed:
        return GapView(step, "inputs differ", mixed[0].line(), inputs=mixed, column=name)
    trainer = record.only([name])
    columns = {n: run.written(step, n, trainer.sample_id, split) for n in (SAMPLER_COLUMN, "response_mask")}
    sampler, mask = columns[SAMPLER_COLUMN], columns["response_mask"]
    if sampler is None or mask is None:
        return GapView(step, "nothing to compare", "the rollout of these samples was not recorded", column=name)
    pair = sampler.meanings.get(SAMPLER_COLUMN), trainer.meanings.get(name)
    if pair[0] is None or pair[1] is None:
        return GapView(step, "nothing to compare", "a log-prob column does not say what it means", column=name)
    lag = _lag(run, step, trainer, pair[1], split)
    verdict, reason = meaning_verdict(*pair)  # type: ignore[arg-type]
    if verdict == "different meaning":
        return GapView(step, verdict, reason, lag=lag, column=name)
    gap = measure_gap(
        sampler.ragged(SAMPLER_COLUMN), trainer.ragged(name), mask.ragged("response_mask"), trainer.sample_id
    )
    if gap is None:
        return GapView(step, "nothing to compare", "no response token", lag=lag, column=name)
    return GapView(step, verdict, reason, gap, lag, column=name)


def _trainer_record(run: RunTape, step: int, call: int, split: Split) -> tuple[Record, str]:
    """The record that holds the trainer's log-probs of this step, and the field."""
    records = [record for _, record in run.records(step, split)]
    meanings = {n: m for record in records for n, m in record.header.meanings.items()}
    name = trainer_column({n for record in records for n in record.header.fields}, meanings)
    for record in records:
        if name is not None and name in record.header.fields and record.header.call == call:
            return record, name
    there = ", ".join(f"{r.header.stage}.{r.header.call}" for r in records) or "nothing"
    raise RecordMissing(
        f"{run.layout.root}: no log-probs of the trainer (of old_log_prob or update, call {call}) at step {step} "
        f"({split}); recorded: {there}"
    )


def _lag(run: RunTape, step: int, trainer: Batch, meaning: Meaning, split: Split) -> int | None:
    versions = run.written(step, "rollout_weight_version", trainer.sample_id, split)
    if versions is None or meaning.weight_version < 0 or not len(trainer):
        return None
    column = versions["rollout_weight_version"]
    values = column.values if isinstance(column, Ragged) else column
    return meaning.weight_version - int(values.min())
