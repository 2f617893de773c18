"""What ``crossrl diff`` prints for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from crossrl.batch import Meaning
from crossrl.cli.recorded import Recorded, prompt_text, value_text, visible
from crossrl.schema import FIELDS
from crossrl.tape import Diff, Difference, RecordMissing, SampleView

TOKENS = ("response_ids", "prompt_ids")
# Results that have neither a first difference nor a reason to speak for them.
SENTENCES = {"equal": "all records", "settings differ": "all records are equal, although settings differ"}


def report(diff: Diff, a: Recorded, b: Recorded, tolerances: dict[str, float]) -> list[RenderableType]:
    """For people: what was compared, the first difference with both sides, the settings that differ."""
    parts: list[RenderableType] = [_runs(diff, a, b, tolerances), Text()]
    colour = {0: "bold green", 1: "bold red", 2: "bold yellow"}[diff.exit_code]
    said = SENTENCES.get(diff.verdict) or _place(diff.first) or visible(diff.reason)
    parts.append(Text.assemble((diff.verdict, colour), f": {said}"))
    if diff.first is not None:
        parts.append(_first(diff.first, a, b))
        if diff.reason:
            parts.append(Text(visible(diff.reason)))
    if diff.settings:
        parts += [Text(), _settings(diff)]
    parts += [Text.assemble(("warning", "yellow"), ": " + visible(w)) for w in diff.warnings]
    return parts


def _runs(diff: Diff, a: Recorded, b: Recorded, tolerances: dict[str, float]) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False)
    for side, each in (("A", a), ("B", b)):
        steps = each.tape.steps()
        table.add_row(side, str(each.folder), f"{len(steps)} recorded steps, {steps[0]} to {steps[-1]}")
    let = ", ".join(f"{name} up to {x:g}" for name, x in tolerances.items())
    how = f"differences let pass: {let}" if let else "bit for bit"
    table.add_row("", f"{diff.compared} pairs of records compared", how)
    return table


def _place(first: Difference | None) -> str:
    if first is None:
        return ""
    call = f", call {first.at.call}" if first.at.call else ""
    split = " of validation" if first.at.split == "val" else ""
    return f"first at step {first.at.step}, stage {first.stage}{split}{call}"


def _first(first: Difference, a: Recorded, b: Recorded) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    meaning = FIELDS[first.field].meaning if first.field in FIELDS else ""
    table.add_row("field", Text.assemble(first.field, (f"  {meaning}" if meaning else "", "dim")))
    if first.sample_id is not None:
        table.add_row("sample", Text(first.sample_id))
    views = _views(first, a, b)
    if first.position is not None:
        table.add_row("position", Text(_position(first, a, views)))
    for side, run, value in (("A", a, first.recorded), ("B", b, first.found)):
        table.add_row(side, _value(first, value, run))
    if first.kind in ("value", "length", "ids", "order") or (first.kind == "inputs" and first.sample_id):
        table.add_row("size", _size(first))
    for name, text in _texts(views):
        table.add_row(name, Text(text))
    return table


def _views(first: Difference, a: Recorded, b: Recorded) -> list[SampleView]:
    """The sample in both runs; nothing where one does not have it."""
    if first.sample_id is None:
        return []
    try:
        return [each.tape.sample(first.sample_id, first.at.step, first.at.split) for each in (a, b)]
    except RecordMissing:
        return []


def _position(first: Difference, a: Recorded, views: Sequence[SampleView]) -> str:
    """Counted from 0; with the token there, where the field has one value per response token."""
    along = FIELDS[first.field].along if first.field in FIELDS else None
    if first.kind != "value" or along not in TOKENS or not views or along not in views[0].columns:
        return str(first.position)
    ids = views[0].columns[along]
    return f"{first.position} of {len(ids)}, from 0; the token there: {_token(int(ids[first.position]), first, a)}"


def _token(token: int, first: Difference, run: Recorded) -> str:
    text = run.token_texts(first.at.step, first.at.split)(token)
    return f"id {token}" if text is None else f"id {token}, {text!r}"


def _value(first: Difference, value: object, run: Recorded) -> RenderableType:
    if first.field in TOKENS and first.kind == "value" and isinstance(value, int):
        return Text(_token(value, first, run))
    if isinstance(value, Meaning):
        return Text(
            f"temperature {value.temperature:g}, truncation {value.truncation}, engine {value.engine}, "
            f"weight version {value.weight_version}"
        )
    return Text(value_text(value) + (" tokens" if first.kind == "length" else ""))


def _size(first: Difference) -> str:
    what = "values" if first.kind == "value" else "samples"
    text = f"{first.differing} of {first.total} {what} differ"
    if first.max_abs is not None and first.max_rel is not None:
        text += f", by at most {first.max_abs:.3g} ({first.max_rel:.3g} of the larger one)"
    return text


def _texts(views: Sequence[SampleView]) -> Iterator[tuple[str, str]]:
    """Prompt and response of the sample, once where they are the same in both runs."""
    if not views:
        return
    prompts = [prompt_text(v.prompt) for v in views]
    for name, mine, theirs in (("prompt", *prompts), ("response", *(v.response or "" for v in views))):
        if mine == theirs:
            yield name, value_text(mine)
        else:
            yield f"{name} A", value_text(mine)
            yield f"{name} B", value_text(theirs)


def _settings(diff: Diff) -> RenderableType:
    table = Table("setting that differs", "of stage", "A", "B", box=None, pad_edge=False)
    for stage, found in diff.settings.items():
        for each in found:
            table.add_row(
                each.key, stage, Text(value_text(each.recorded, 100)), Text(value_text(each.found, 100)), style="yellow"
            )
    return table
