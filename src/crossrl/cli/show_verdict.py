"""What ``crossrl verdict`` prints for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from crossrl.cli.recorded import value_text, visible
from crossrl.cross.arms import MEANING, Experiment
from crossrl.cross.effects import identical, too_short
from crossrl.cross.findings import Effect, Evidence, Setting, Verdict

COLOUR = {0: "bold green", 1: "bold red", 2: "bold yellow"}
SOURCES = {"stages": "stages", "curves": "curves", "settings": "settings", "failure": "failure"}


def report(verdict: Verdict, experiment: Experiment) -> list[RenderableType]:
    """The verdict first; then where, the evidence, effects, noise, settings, consequences, and what to do next."""
    parts: list[RenderableType] = [_headline(verdict)]
    for title, body in (
        ("", _where(verdict)),
        ("evidence", _evidence(verdict.evidence)),
        ("four arms", _arms(experiment)),
        ("against BB", _effects(verdict.effects)),
        ("noise floor", _lines([verdict.noise] if verdict.noise else [])),
        ("settings that differ", _settings(verdict.settings)),
        ("follows from it", _lines(verdict.consequences)),
        ("note", _lines(verdict.notes)),
    ):
        if body is not None:
            parts += [Text(f"\n{title}", "bold")] if title else []
            parts.append(Padding(body, (0, 0, 0, 2)))
    if verdict.todo:
        parts.append(Text("\nwhat to do next", "bold"))
        parts += [Text(f"  {visible(c)}", "cyan") for c in verdict.todo]  # not wrapped: to be copied
    return parts


def headline(verdict: Verdict) -> str:
    """The verdict in a line.

    >>> headline(Verdict("training", "A", ("update",), 3, ("training",)))
    'training of A is at fault, since step 3'
    """
    since = f", since step {verdict.step}" if verdict.step is not None else ""
    of = f" of {verdict.side}" if verdict.side else ""
    if verdict.conclusion == "no difference":
        return "no difference beyond noise"
    if verdict.conclusion == "not distinguishable":
        return "not distinguishable" + (f", though A alone differs{since[1:]}" if since else "")
    if verdict.conclusion == "several":
        return f"several parts{of} are at fault ({', '.join(verdict.parts)}){since}"
    return f"{verdict.conclusion}{of} is at fault{since}"


def _headline(verdict: Verdict) -> Text:
    return Text.assemble(("verdict: ", "bold"), (headline(verdict), COLOUR[verdict.exit_code]))


def _where(verdict: Verdict) -> RenderableType | None:
    table = _grid()
    if verdict.stages:
        table.add_row("stage", ", ".join(verdict.stages))
    if len(verdict.parts) > 1 and verdict.conclusion not in ("several", "no difference"):
        table.add_row("would look the same", ", ".join(p for p in verdict.parts if p != verdict.conclusion))
    for gap in verdict.gaps[:1]:
        words = [f"{gap.differing} of {gap.total} differ"] if gap.total else []
        words += [f"by up to {gap.largest:.3g} {gap.unit}".rstrip()] if gap.largest is not None else []
        words += [f"noise explains {gap.allowed:.2g}"] if gap.allowed is not None else []
        table.add_row("field", visible(f"{gap.field}: {', '.join(words)}" if words else gap.field))
        if gap.sample_id is not None:
            at = f", position {gap.position}" if gap.position is not None else ""
            table.add_row("sample", visible(f"{gap.sample_id}{at}"))
        if gap.recorded is not None or gap.found is not None:
            # value_text cuts long texts and makes control characters visible.
            table.add_row("recorded", value_text(gap.recorded, 100))
            table.add_row("found", value_text(gap.found, 100))
    return table if table.row_count else None


def _evidence(evidence: Sequence[Evidence]) -> RenderableType | None:
    table = _grid()
    before = None
    for each in evidence:
        table.add_row(SOURCES.get(each.source, each.source) if each.source != before else "", visible(each.sentence))
        before = each.source
    return table if table.row_count else None


def _arms(experiment: Experiment) -> RenderableType | None:
    if all(arm.state == "missing" for arm in experiment.arms.values()):
        return None
    table = _grid()
    for name, arm in experiment.arms.items():
        if name == "BB2" and arm.state == "missing":
            continue
        steps = f"{arm.curves.last_step} steps, " if arm.curves else ""
        style = {"missing": "yellow", "failed": "red"}.get(arm.state, "")
        why = f": {arm.reason}" if arm.reason and arm.state != "missing" else ""
        table.add_row(name, Text.assemble(f"{MEANING[name]}: ", steps, (arm.state, style), visible(why)))
    return table


def _effects(effects: Sequence[Effect]) -> RenderableType | None:
    if not effects:
        return None
    table = Table("arm", "metric", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("difference", "95 % interval", "noise"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    before = ""
    for e in effects:
        table.add_row(e.arm if e.arm != before else "", e.metric, *_numbers(e), style="red" if e.beyond else "")
        before = e.arm
    return table


def _numbers(e: Effect) -> tuple[str, str, str, str]:
    noise = f"{e.noise:.2g}" if math.isfinite(e.noise) else ""
    if identical(e):
        return "0", "", noise, "bit for bit"
    if too_short(e):
        return f"{e.mean:+.2g}" if math.isfinite(e.mean) else "", "", noise, f"{e.steps} steps: too short"
    said = f"since step {e.first_step}" if e.beyond else "within noise"
    return f"{e.mean:+.2g}", f"{e.low:+.2g} … {e.high:+.2g}", noise, said


def _settings(settings: Sequence[Setting]) -> RenderableType | None:
    """Those that concern a part; of the others only how many there are."""
    table = Table("key", "A", "B", "concerns", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in table.columns[:3]:
        column.overflow = "fold"
    for s in settings:
        if s.part is not None:
            table.add_row(s.key, value_text(s.a, 60), value_text(s.b, 60), s.part)
    rest = [s.key for s in settings if s.part is None]
    if rest:
        table.caption = f"and {len(rest)} that change no result: {', '.join(rest[:4])}" + (", …" if rest[4:] else "")
        table.caption_justify = "left"
    if not table.row_count:
        return Text(table.caption) if isinstance(table.caption, str) else None
    return table


def _lines(lines: Iterable[str]) -> RenderableType | None:
    text = "\n".join(visible(line) for line in lines)
    return Text(text) if text else None


def _grid() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table
