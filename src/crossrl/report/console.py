"""What a person sees of a run: a live table on a terminal, one plain line per step anywhere else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from crossrl.report.columns import COLUMNS, held_out, seconds, stage_times
from crossrl.report.samples import Sample

ROWS = 8


class Display(Protocol):
    """``eta``: seconds left, None when unknown."""

    def text(self, line: str, style: str = "") -> None: ...

    def stage(self, name: str, done: int, total: int | None) -> None: ...

    def step(self, step: int, total: int, metrics: Mapping[str, float], took: float, eta: float | None) -> None: ...

    def validation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, title: str, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


def open_display(console: Console | None = None, steps: bool = True) -> Display:
    """The display that suits where output goes. ``steps`` False: without steps (``trainer.logger`` has no console)."""
    console = console or Console(highlight=False)
    return LiveDisplay(console, steps) if console.is_terminal else PlainDisplay(console, steps)


class PlainDisplay:
    """Lines only, for files and CI: nothing is redrawn, nothing is wrapped."""

    def __init__(self, console: Console, steps: bool = True) -> None:
        self.console, self.steps = console, steps

    def text(self, line: str, style: str = "") -> None:
        self.console.print(Text(line, style), soft_wrap=True)

    def stage(self, name: str, done: int, total: int | None) -> None:
        pass  # progress inside a step would be a line per micro-batch

    def step(self, step: int, total: int, metrics: Mapping[str, float], took: float, eta: float | None) -> None:
        if not self.steps:
            return
        shown = [(column.title, column.text(metrics)) for column in COLUMNS]
        parts = [f"step {step}/{total}", *(f"{title} {text}" for title, text in shown if text is not None)]
        where = stage_times(metrics)
        parts.append(seconds(took) + (f" ({where})" if where else ""))
        if eta:
            parts.append(f"ETA {seconds(eta)}")
        self.text("  ".join(parts))

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.steps:
            self.text(validation_line(step, metrics))

    def samples(self, title: str, samples: Sequence[Sample]) -> None:
        self.console.print(sample_table(title, samples))

    def close(self) -> None:
        pass


class LiveDisplay(PlainDisplay):
    """The last steps as a table with a progress line below, redrawn in place; all else scrolls by above it."""

    def __init__(self, console: Console, steps: bool = True) -> None:
        super().__init__(console, steps)
        self._rows: deque[tuple[int, Mapping[str, float], float]] = deque(maxlen=ROWS)
        self._step, self._total, self._eta = 0, 0, None  # type: tuple[int, int, float | None]
        self._stage: tuple[str, int, int | None] = ("", 0, None)
        self._stage_since = self._since = time.monotonic()
        self._live: Live | None = None

    def stage(self, name: str, done: int, total: int | None) -> None:
        if name != self._stage[0] or done < self._stage[1]:
            self._stage_since = time.monotonic()
        self._stage = (name, done, total)
        self._show()

    def step(self, step: int, total: int, metrics: Mapping[str, float], took: float, eta: float | None) -> None:
        self._rows.append((step, metrics, took))
        self._step, self._total, self._eta, self._stage = step, total, eta, ("", 0, None)
        self._show()

    def close(self) -> None:
        if self._live is not None:
            self._stage = ("", 0, None)
            self._live.stop()
            self._live = None

    def _show(self) -> None:
        if self._live is None and self.steps:
            # Its own refresh thread keeps the clock going while a stage says nothing.
            self._live = Live(
                console=self.console, get_renderable=self._render, refresh_per_second=4, vertical_overflow="crop"
            )
            self._live.start()

    def _render(self) -> RenderableType:
        rows = list(self._rows)  # a copy: the refresh thread draws while the run appends
        parts: list[RenderableType] = [step_table(rows)] if rows else []
        if rows and (where := stage_times(rows[-1][1])):
            parts.append(Text(f"step {rows[-1][0]}: {where}", "dim", no_wrap=True, overflow="ellipsis"))
        return Group(*parts, self._progress())

    def _progress(self) -> RenderableType:
        now = time.monotonic()
        line = Table.grid(padding=(0, 1))
        head = f"step {self._step}/{self._total}" if self._total else "starting"
        left = f"{seconds(now - self._since)} gone" + (f", {seconds(self._eta)} left" if self._eta is not None else "")
        name, done, total = self._stage
        doing = f"{name} {done}/{total}" if total else name
        doing += f" ({seconds(now - self._stage_since)})" if name and now - self._stage_since >= 1 else ""
        bar = ProgressBar(total=max(self._total, 1), completed=self._step, width=24)
        line.add_row(Text(head, "bold"), bar, Text(left), Text(doing, "dim", no_wrap=True, overflow="ellipsis"))
        return line


def step_table(rows: Sequence[tuple[int, Mapping[str, float], float]]) -> Table:
    """(step, metrics, seconds) of some steps; columns that no row has are left out."""
    columns = [c for c in COLUMNS if any(c.text(metrics) is not None for _, metrics, _ in rows)]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan", pad_edge=False)
    for title in ("step", *(c.title for c in columns), "time"):
        table.add_column(title, justify="right", no_wrap=True)
    for step, metrics, took in rows:
        table.add_row(str(step), *(c.text(metrics) or "" for c in columns), seconds(took))
    return table


def sample_table(title: str, samples: Sequence[Sample]) -> Table:
    """Prompt, response, answer and score, one line each; what is long is cut in the middle."""
    table = Table(title=escape(title), title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
    for name in ("prompt", "response", "answer", "score"):
        table.add_column(name, justify="right" if name == "score" else "left", no_wrap=True)
    for s in samples:
        cells = [
            one_line(s.question or s.prompt, 30),
            one_line(s.response, 24),
            one_line(str(s.ground_truth), 12),
            f"{s.score:.3g}",
        ]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def one_line(text: str, width: int) -> str:
    """``text`` on one line of at most ``width`` characters, control characters made visible.

    >>> one_line("What is\\n17 + 25? Answer with the number only.", 24)
    'What is\\\\n1…number only.'
    """
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[head + 1 - width :]}"


def validation_line(step: int, metrics: Mapping[str, float]) -> str:
    """``validation at step 40: sort/acc/mean@1 0.742``"""
    parts = [f"{name.removeprefix('val-core/')} {value:.3f}" for name, value in held_out(metrics).items()]
    return f"validation at step {step}: {', '.join(parts)}"
