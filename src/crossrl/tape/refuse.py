"""Whether a record belongs to this call: every difference is found and named before anything is loaded or run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from crossrl.batch import Batch
from crossrl.tape.capture import Reads, read_digests
from crossrl.tape.compare import flatten, same
from crossrl.tape.errors import Mismatch
from crossrl.tape.record import Record
from crossrl.tape.values import normal

logger = logging.getLogger("crossrl.tape")
ABSENT = "(absent)"

# Recorded but not compared on load: rollout skip exists to train differently on the same responses, and from the
# first different update on the weights differ. `verify` does compare them.
NOT_COMPARED = {"rollout": ("weights",)}


def settings(recorded: Mapping[str, Any], found: Mapping[str, Any], ignore: Sequence[str] = ()) -> list[Mismatch]:
    """Fingerprint entries that differ, by dotted key; ``ignore``: first parts of keys that may differ."""
    mine, theirs = flatten(recorded), flatten(normal(found))
    keys = [k for k in sorted(set(mine) | set(theirs)) if k.split(".")[0] not in ignore]
    pairs = [(k, mine.get(k, ABSENT), theirs.get(k, ABSENT)) for k in keys]
    return [Mismatch(k, a, b) for k, a, b in pairs if not same(a, b)]


def samples(recorded: Sequence[str], found: Sequence[str]) -> list[Mismatch]:
    """Another set of samples (nothing to join, so not acceptable), or the same in another order."""
    mine, theirs = set(recorded), set(found)
    gone, new = [s for s in recorded if s not in theirs], [s for s in found if s not in mine]
    if gone or new:
        first = f"{len(recorded)} samples" + (f", of which {gone[0]!r} is not in this batch" if gone else "")
        second = f"{len(found)} samples" + (f", of which {new[0]!r} is not in the record" if new else "")
        return [Mismatch("sample_id", first, second, acceptable=False)]
    for i, (a, b) in enumerate(zip(recorded, found, strict=True)):
        if a != b:
            return [Mismatch("order", f"{a!r} at position {i}", f"{b!r} there")]
    return []


def inputs(record: Record, given: Batch) -> list[Mismatch]:
    """Fields that the stage read when it was recorded and that differ now; ``given`` has the record's samples."""
    if given.sample_id != record.sample_id:
        given = given.take(given.index_of(record.sample_id))
    now = read_digests(given)
    out = []
    for name in sorted(set(record.header.reads) | set(now)):
        before, here = record.header.reads.get(name), now.get(name)
        if before is None or here is None:
            out.append(Mismatch(f"reads.{name}", before.digest if before else ABSENT, here.digest if here else ABSENT))
        elif before.digest != here.digest:
            out.append(_input(record, given, name, here))
    return out


def _input(record: Record, given: Batch, name: str, here: Reads) -> Mismatch:
    """Names the first sample whose value differs, with the values where the record holds them."""
    unequal = np.flatnonzero(record.marks(name) != here.marks)
    if not unequal.size:
        return Mismatch(f"reads.{name}", record.header.reads[name].digest, here.digest)
    first = int(unequal[0])
    where = f"sample {record.sample_id[first]!r} ({len(unequal)} of {len(given)} samples differ)"
    if name not in record.header.fields:
        return Mismatch(f"reads.{name}", f"another value in {where}", here.digest)
    old, new = record.column(name), given[name]
    if isinstance(old, (list, np.ndarray)):
        return Mismatch(f"reads.{name}", f"{old[first]!r:.80} in {where}", f"{new[first]!r:.80}")
    return Mismatch(f"reads.{name}", f"{old.row(first).tolist()!r:.80} in {where}", f"{new.row(first).tolist()!r:.80}")


def outputs(record: Record, writes: Sequence[str]) -> list[Mismatch]:
    """Fields that the stage writes and the record lacks, or holds with something left out."""
    lack = [
        Mismatch(f"writes.{n}", ABSENT, "written by this stage", False) for n in writes if n not in record.header.fields
    ]
    partial = [m for m in record.header.left_out if m.field in writes and m.field in record.header.fields]
    return lack + [
        Mismatch(
            f"left_out.{m.field}", f"without {m.what} at {m.path} of sample {m.sample_id!r}", "needed in full", False
        )
        for m in partial
    ]


def mismatches(
    record: Record, stage: str, writes: Sequence[str], given: Batch, fingerprint: Mapping[str, Any], loading: bool
) -> list[Mismatch]:
    """All reasons why ``record`` is not the output of ``stage`` on ``given``.

    ``loading``: the record is to stand in for the stage (else: to be compared with its output).
    """
    out = []
    if record.header.stage != stage:
        out.append(Mismatch("stage", record.header.stage, stage, acceptable=False))
    out += settings(record.header.fingerprints, fingerprint, NOT_COMPARED.get(stage, ()) if loading else ())
    different = samples(record.sample_id, given.sample_id)
    out += different
    if all(m.acceptable for m in different):
        out += inputs(record, given)
    return out + outputs(record, writes)
