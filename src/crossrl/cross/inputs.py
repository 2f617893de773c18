"""What a stage was given at a recorded call, from the records of the stages before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from crossrl.batch import Batch, Meaning
from crossrl.tape.api import RunTape
from crossrl.tape.capture import read_digests
from crossrl.tape.record import Record


class NotJudged(Exception):
    """This call cannot be judged; the message says why, in words for the finding's sentence."""


def inputs_for(
    run: RunTape,
    reads: Iterable[str],
    record: Record,
    writes: Iterable[str] = (),
    extra: Mapping[str, Batch] | None = None,
) -> Batch:
    """The fields ``reads`` of the samples of ``record``, as its stage was given them; ``writes``: what it made itself.

    A field comes from the record itself (rollout's carries the prompts), else from the stage before it that wrote it,
    else from ``extra`` (field to a batch that has it). Raises ``NotJudged`` when there is none, and when the run's own
    stage was given another value than the stage before it wrote, so that what it worked on is not on the tape.
    """
    header = record.header
    columns: dict[str, Any] = {}
    meanings: dict[str, Meaning] = {}
    made = set(writes)
    for name in reads:
        own = record.only([name]) if name in header.fields and name not in made else None
        source = own or run.written(header.step, name, record.sample_id, before=header.stage)
        if source is None and extra and name in extra:
            source = extra[name].take(extra[name].index_of(record.sample_id))
        if source is None:
            raise NotJudged(f"its input {name} is not on the tape: record the stage that writes it (tape.stages)")
        columns[name] = source[name]
        meanings |= {n: m for n, m in source.meanings.items() if n == name}
    batch = Batch(record.sample_id, columns, meanings)
    mixed = [n for n, r in read_digests(batch).items() if n in header.reads and r.digest != header.reads[n].digest]
    if mixed:
        raise NotJudged(f"it was given another {', '.join(mixed)} than the stages before it wrote")
    return batch
