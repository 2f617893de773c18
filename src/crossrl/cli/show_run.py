"""What ``crossrl inspect`` says about a run and its records: steps, stages, sizes, digests, fingerprints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from crossrl.cli.recorded import as_json, size_text, value_text, visible
from crossrl.schema import FIELDS
from crossrl.stages.base import At
from crossrl.tape import CorruptRecord, Record, RecordMissing, RunTape
from crossrl.tape.api import Split, stage_rank
from crossrl.tape.compare import flatten, volatile
from crossrl.tape.digest import plain_digest
from crossrl.tape.errors import Mismatch
from crossrl.tape.header import RECORD_VERSION, Header
from crossrl.tape.imported import notes
from crossrl.tape.values import dumps, normal

SPLITS: tuple[Split, ...] = ("train", "val")


@dataclass(frozen=True, slots=True)
class Entry:
    """One record. ``digest``: of what the stage put out and reported, times left out; equal for two runs that did the
    same. ``damage``: why the record is not readable; then the numbers say nothing."""

    stage: str
    at: At
    nbytes: int = 0
    samples: int = 0
    weight_version: int | None = None
    digest: str = ""
    created: str = ""
    damage: str | None = None


@dataclass(slots=True)
class Overview:
    """``entries``: in the order of the run. ``run_ids``: several for a run that was resumed. ``versions``: of packages;
    several maps when they changed on the way. ``accepted``: a run with any is not a valid reproduction. ``notes``: of
    records that were imported from another program's dump."""

    root: Path
    entries: list[Entry] = field(default_factory=list)
    run_ids: list[str] = field(default_factory=list)
    versions: list[Mapping[str, str]] = field(default_factory=list)
    accepted: list[Mismatch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def damaged(self) -> list[Entry]:
        return [e for e in self.entries if e.damage]

    def json(self) -> dict[str, Any]:
        calls = [asdict(e) | asdict(e.at) for e in self.entries]
        for call in calls:
            del call["at"]
        return as_json(
            {
                "tape": str(self.root),
                "valid_reproduction": not self.accepted,
                "accepted": [asdict(m) for m in self.accepted],
                "run_ids": self.run_ids,
                "versions": self.versions,
                "notes": self.notes,
                "nbytes": sum(e.nbytes for e in self.entries),
                "records": calls,
            }
        )


def outcome_digest(header: Header) -> str:
    """Of the stage's output and of what it reported: digests of weights are in the latter."""
    info = {k: v for k, v in sorted(flatten(normal(header.info)).items()) if not volatile(k)}
    return plain_digest(dumps({"content": header.content, "info": info})).removeprefix("sha256:")


def overview(tape: RunTape, stages: Sequence[str] = ()) -> Overview:
    """Read every ``record.json`` (of ``stages``, if any are named); data are not read."""
    found = Overview(tape.layout.root)
    for stage, at in places(tape):
        if stages and stage not in stages:
            continue
        try:
            record = tape.record(at.step, stage, at.call, at.split)
        except CorruptRecord as error:
            found.entries.append(Entry(stage, at, damage=str(error)))
            continue
        header = record.header
        found.entries.append(
            Entry(
                stage, at, record.nbytes, len(header.sample_id), header.weight_version, outcome_digest(header),
                header.created,
            )
        )  # fmt: skip
        if header.run_id not in found.run_ids:
            found.run_ids.append(header.run_id)
        if header.versions not in found.versions:
            found.versions.append(header.versions)
        found.notes += [note for note in notes(header) if note not in found.notes]
        found.accepted += [m for m in header.accepted if m not in found.accepted]
    if not found.entries:
        there = ", ".join(dict.fromkeys(stage for stage, _ in places(tape))) or "nothing"
        raise RecordMissing(f"{tape.layout.root} has no record of {', '.join(stages)}; recorded: {there}")
    return found


def places(tape: RunTape) -> Iterator[tuple[str, At]]:
    for step in tape.steps():
        for split in SPLITS:
            yield from tape.calls(step, split)


def show_overview(found: Overview) -> list[RenderableType]:
    return [_facts(found), *_warnings(found), Text(), _matrix(found.entries)]


def show_stage(found: Overview) -> list[RenderableType]:
    """The records of one stage, one a line."""
    table = Table("step", "call", "samples", "weights", "size", "digest", "recorded", box=None, pad_edge=False)
    for name in ("call", "samples", "weights", "size"):
        next(c for c in table.columns if c.header == name).justify = "right"
    for e in found.entries:
        place = f"{e.at.step} val" if e.at.split == "val" else str(e.at.step)
        if e.damage:
            table.add_row(place, str(e.at.call), Text("damaged", "bold red"))
            continue
        version = "" if e.weight_version is None else str(e.weight_version)
        table.add_row(
            place, str(e.at.call), str(e.samples), version, size_text(e.nbytes), e.digest[:16], _time(e.created)
        )
    return [*_warnings(found), table]


def _facts(found: Overview) -> RenderableType:
    whole = [e for e in found.entries if not e.damage]
    steps = sorted({e.at.step for e in found.entries})
    times = sorted(e.created for e in whole)
    weights = sorted({e.weight_version for e in whole if e.weight_version is not None})
    sizes: Counter[str] = Counter()
    for e in whole:
        sizes[e.stage] += e.nbytes
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("tape", str(found.root))
    table.add_row("run", ", ".join(found.run_ids) + (" (resumed)" if len(found.run_ids) > 1 else ""))
    if times:
        table.add_row("recorded", f"{_time(times[0])} to {_time(times[-1])[11:]} UTC, format version {RECORD_VERSION}")
    table.add_row("steps", f"{_span(steps)}, {len(found.entries)} records, weight versions {_span(weights)}")
    largest = ", ".join(f"{stage} {size_text(size)}" for stage, size in sizes.most_common())
    table.add_row("on disk", f"{size_text(sum(sizes.values()))}: {largest}")
    for versions in found.versions:
        table.add_row("with", ", ".join(f"{name} {version}" for name, version in versions.items()))
    return table


def _span(numbers: Sequence[int]) -> str:
    if not numbers:
        return "none"
    dense = numbers[-1] - numbers[0] + 1 == len(numbers)
    text = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
    return text if dense else f"{text} (not all)"


def _warnings(found: Overview) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if found.accepted:
        parts.append(
            Text("not a valid reproduction: records were loaded although they differed (tape.accept)", "bold red")
        )
        parts += [Text("  " + visible(m.line())) for m in found.accepted]
    parts += [Text(visible(note), "yellow") for note in found.notes]
    for e in found.damaged:
        parts.append(Text.assemble(("damaged", "bold red"), f": {visible(e.damage or '')}"))
    return parts


def _matrix(entries: Iterable[Entry]) -> RenderableType:
    """A row per step, a column per stage, in each cell the digest: two runs that did the same have the same table."""
    rows: dict[tuple[int, str], dict[str, list[Entry]]] = {}
    for e in entries:
        rows.setdefault((e.at.step, e.at.split), {}).setdefault(e.stage, []).append(e)
    stages = sorted({stage for row in rows.values() for stage in row}, key=stage_rank)
    table = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 1, 0, 0))
    table.add_column("step", no_wrap=True)
    for stage in stages:
        table.add_column(stage.replace("_", " ").replace("point", " point"), vertical="bottom", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    for (step, split), row in rows.items():
        size = sum(e.nbytes for calls in row.values() for e in calls)
        name = f"{step} val" if split == "val" else str(step)
        table.add_row(name, *(_cell(row.get(stage, [])) for stage in stages), size_text(size))
    return table


def _cell(calls: Sequence[Entry]) -> Text:
    if not calls:
        return Text("-", "dim")
    if any(e.damage for e in calls):
        return Text("damaged", "bold red")
    if len(calls) == 1:
        return Text(calls[0].digest[:6])
    together = plain_digest("".join(e.digest for e in calls).encode()).removeprefix("sha256:")
    return Text(f"{together[:6]} ({len(calls)} calls)")


def _time(created: str) -> str:
    return created[:19].replace("T", " ")


def record_json(record: Record) -> dict[str, Any]:
    """Everything in ``record.json``."""
    body = asdict(record.header) | {"path": str(record.path), "nbytes": record.nbytes}
    return as_json(body | {"digest": outcome_digest(record.header)})


def show_record(record: Record) -> list[RenderableType]:
    """One record: its columns, what was read, what the stage reported, what it depends on."""
    header = record.header
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim")
    facts.add_row("record", str(record.path))
    facts.add_row("run", f"{header.run_id}, recorded {_time(header.created)} UTC")
    facts.add_row("samples", f"{len(header.sample_id)}, weight version {header.weight_version}")
    facts.add_row("output", f"digest {outcome_digest(header)[:16]}, {size_text(record.nbytes)} on disk")
    parts: list[RenderableType] = [facts, *(Text(visible(note), "yellow") for note in notes(header))]
    if header.fields:
        table = Table("field", "type", "values", "digest", "meaning", box=None, pad_edge=False)
        table.columns[4].overflow = "fold"
        for name, entry in header.fields.items():
            count = "" if entry.values is None else str(entry.values)
            meaning = header.meanings.get(name)
            text = FIELDS[name].meaning if name in FIELDS else ""
            if meaning is not None:
                text += f" (temperature {meaning.temperature:g}, truncation {meaning.truncation}, {meaning.engine})"
            kind = "json" if entry.kind == "value" else f"{entry.kind} {entry.dtype}"
            table.add_row(name, kind, count, _short(entry.digest), text)
        parts += [Text(), table]
    if header.reads:
        table = Table("was given", "digest", box=None, pad_edge=False)
        for name, read in header.reads.items():
            table.add_row(name, _short(read.digest))
        parts += [Text(), table]
    for title, values in (
        ("reported", header.info),
        ("depends on", header.fingerprints),
        ("versions", header.versions),
    ):
        if values:
            parts += [Text(), _flat(title, values)]
    for each in header.left_out:
        parts.append(Text(visible(f"left out: {each.field} of {each.count} sample(s), {each.what} at {each.path}")))
    if header.accepted:
        parts.append(Text("not a valid reproduction; accepted: " + "; ".join(m.line() for m in header.accepted), "red"))
    return parts


def _flat(title: str, values: Mapping[str, Any]) -> RenderableType:
    table = Table(title, "", box=None, pad_edge=False)
    table.columns[1].overflow = "fold"
    for key, value in flatten(values).items():
        table.add_row(visible(key), value_text(value))
    return table


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]
