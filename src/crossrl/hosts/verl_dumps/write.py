"""Dumps as a tape: complete when it is visible, and never in the place of another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from crossrl.batch import Batch
from crossrl.files import publish_folder
from crossrl.hosts.verl_dumps.dump import Dump
from crossrl.hosts.verl_dumps.errors import DumpError
from crossrl.stages.base import At
from crossrl.tape.api import Split
from crossrl.tape.capture import capture
from crossrl.tape.header import Header
from crossrl.tape.layout import RunLayout
from crossrl.tape.publish import Draft, write_record

IMPORTER = "crossrl import verl, version 1"


@dataclass(frozen=True, slots=True)
class Written:
    """``left_out``: what could not be stored, one line each."""

    records: int
    samples: int
    left_out: tuple[str, ...]


def require_free(out: Path) -> None:
    """Raise ``DumpError`` if there is something at ``out``: a tape, above all."""
    if RunLayout(out).steps() or RunLayout(out / "tape").steps():
        raise DumpError(f"{out} holds a tape already, and nothing is overwritten: give another --out")
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise DumpError(f"{out} is there already and not empty; --out is a new folder, filled and then renamed")


def write_tape(out: Path, dumps: Sequence[tuple[Split, Dump]]) -> Written:
    """A record ``rollout`` and, where there are scores, ``reward`` for each dump, with ``out`` as the tape's folder.

    All or nothing: the folder gets its name when everything is in it. Raises ``DumpError``, ``OSError``.
    """
    require_free(out)
    if out.is_dir():
        out.rmdir()  # empty: a rename needs the name
    run_id = "import-" + hashlib.sha256("".join(d.digest for _, d in dumps).encode()).hexdigest()[:8]
    records, left_out = 0, []
    with publish_folder(out) as folder:
        for split, dump in dumps:
            for stage, batch in (("rollout", dump.rollout), ("reward", dump.reward)):
                if not batch.columns:
                    continue
                draft = _draft(run_id, stage, split, dump, batch)
                write_record(RunLayout(folder).path(stage, At(dump.step, 0, split), 0), draft)
                left_out += [
                    f"{dump.path}: {each.field} of {each.count} sample(s): {each.what} cannot be stored"
                    for each in draft.snapshot.left_out
                ]
                records += 1
    return Written(records, sum(len(d.rollout) for _, d in dumps), tuple(left_out))


def _draft(run_id: str, stage: str, split: Split, dump: Dump, batch: Batch) -> Draft:
    info = {"imported": _origin(dump)}
    header = Header(
        run_id=run_id, stage=stage, step=dump.step, split=split,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        fingerprints={"tokenizer": {"digest": dump.tokenizer}} if dump.tokenizer else {},
        versions={"crossrl": version("crossrl")} | ({"verl": dump.read_with} if dump.read_with else {}),
    )  # fmt: skip
    return Draft(header, capture(Batch(batch.sample_id, batch.columns, batch.meanings, info)))


def _origin(dump: Dump) -> dict[str, Any]:
    """Keys that begin with ``path`` are not compared between runs: where a sample lay is another in each."""
    return {
        "by": IMPORTER,
        "form": {"jsonl": "JSON Lines of verl", "dp": "pickled DataProto of verl"}[dump.form],
        "token_ids": dump.tokens,
        "not_in_this_dump": list(dump.missing),
        "path": {"file": str(dump.path.absolute()), "digest": dump.digest, "cut": dump.cut, **dump.where},
    }


def count_lines(warnings: Iterable[str]) -> list[str]:
    """Equal warnings once, with their number."""
    counts: dict[str, int] = {}
    for each in warnings:
        counts[each] = counts.get(each, 0) + 1
    return [f"{text} ({n} times)" if n > 1 else text for text, n in counts.items()]
