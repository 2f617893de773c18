"""The learning curve of a run, as a picture and in the terminal, from its ``metrics.jsonl``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crossrl.report.metrics_file import ReportError, read_metrics, series

REWARD = ("critic/score/mean", "critic/rewards/mean")
BLUE, ORANGE = "#2563a8", "#d9622b"


@dataclass(frozen=True, slots=True)
class Curve:
    """``steps`` ``[K]`` and ``values`` ``[K]`` of one metric; ``name`` as in the metrics file."""

    name: str
    steps: list[int]
    values: list[float]


@dataclass(frozen=True, slots=True)
class Curves:
    """What a learning curve shows: the training reward of each step, and one held-out metric (or none)."""

    reward: Curve
    held_out: Curve | None


def load_curves(metrics_file: Path) -> Curves:
    """Raises ``ReportError`` when there is nothing to draw."""
    rows = read_metrics(metrics_file)
    reward = next((Curve(name, *series(rows, name)) for name in REWARD if series(rows, name)[0]), None)
    if reward is None:
        raise ReportError(f"{metrics_file} has no reward to draw: want a line with {' or '.join(REWARD)}")
    name = _held_out_name(rows)
    return Curves(reward, Curve(name, *series(rows, name)) if name else None)


def _held_out_name(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The first of verl's core validation metrics; means before best-of-n, greedy first as it was written first."""
    names = list(dict.fromkeys(n for row in rows for n in row if n.startswith("val-core/") and row[n] is not None))
    return next((n for n in names if "/mean@" in n), names[0] if names else None)


def window(curve: Curve) -> int:
    """Over how many points a curve is smoothed: a sixteenth of them."""
    return max(1, len(curve.steps) // 16)


def smooth(values: Sequence[float], width: int) -> np.ndarray:
    """Mean over the ``width`` values around each, fewer at the ends; ``[K]`` to ``[K]``.

    >>> smooth([0.0, 3.0, 0.0, 3.0], 3).tolist()
    [1.5, 1.0, 2.0, 1.5]
    """
    ones = np.ones(min(width, len(values)))
    full = np.convolve(np.asarray(values, np.float64), ones)
    counts = np.convolve(np.ones(len(values)), ones)
    start = (len(ones) - 1) // 2
    return (full / counts)[start : start + len(values)]


def learning_curve(metrics_file: Path, picture: Path, title: str = "") -> Path:
    """Draw training reward and held-out accuracy over steps to ``picture`` (PNG, or what its suffix says)."""
    curves = load_curves(metrics_file)
    # Figure, not pyplot: no display, no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    reward = curves.reward
    width = window(reward)
    if width > 1:
        axes.plot(reward.steps, reward.values, color=BLUE, alpha=0.25, linewidth=1, label="reward of each step")
    label = f"training reward (mean of {width} steps)" if width > 1 else "training reward"
    axes.plot(reward.steps, smooth(reward.values, width), color=BLUE, linewidth=2, label=label)
    if curves.held_out is not None:
        points = curves.held_out
        axes.plot(
            points.steps, points.values, color=ORANGE, linewidth=1.5, marker="o", label=f"held-out {short(points.name)}"
        )
        _mark_ends(axes, points)
    axes.set(xlabel="training step", ylabel="reward, accuracy (1 = all right)", title=title)
    axes.margins(x=0.02)
    if _is_share([reward, *([curves.held_out] if curves.held_out else [])]):
        axes.set_ylim(0, 1.05)
    else:
        axes.set_ylabel("reward, accuracy")
    axes.grid(axis="y", color="#e3e5e8", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="best", frameon=False)
    return _save(figure, picture)


def _mark_ends(axes: Any, points: Curve) -> None:
    for at in dict.fromkeys((0, len(points.steps) - 1)):
        axes.annotate(
            f"{points.values[at]:.2f}", (points.steps[at], points.values[at]), xytext=(6, -14) if at == 0 else (0, 8),
            textcoords="offset points", ha="left" if at == 0 else "right", color=ORANGE, fontweight="bold",
        )  # fmt: skip


def _save(figure: Any, picture: Path) -> Path:
    temporary = picture.with_name(f".{picture.stem}.{os.getpid()}{picture.suffix}")
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, dpi=150)
        temporary.replace(picture)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ReportError(f"cannot write the plot {picture}: {error.strerror}") from error
    return picture


def short(name: str) -> str:
    """``val-core/sort/acc/mean@1`` is the accuracy of one answer: ``accuracy``; others keep their own name."""
    tail = name.removeprefix("val-core/")
    if tail.endswith("/acc/mean@1"):
        return "accuracy"
    return tail


def _is_share(curves: Sequence[Curve]) -> bool:
    return all(0 <= value <= 1 for curve in curves for value in curve.values)


def terminal_curve(metrics_file: Path, width: int = 78, height: int = 15) -> str:
    """The same as text: ``height`` lines of at most ``width`` characters, and a line that says what is what."""
    import plotext

    curves = load_curves(metrics_file)
    held_out, reward = curves.held_out, curves.reward
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    line = figure.signal(reward.steps, smooth(reward.values, window(reward)).tolist(), marker="braille")
    line.lines()
    figure.draw(line)
    if held_out is not None:
        figure.draw(figure.signal(held_out.steps, held_out.values, marker="O"))
    every = [reward, *([held_out] if held_out else [])]
    low, high = (0.0, 1.0) if _is_share(every) else _range(every)
    ticks = np.linspace(low, high, 6)
    figure.ruler("y").lim(low, high)
    figure.ruler("y").ticks(ticks.tolist(), [f"{tick:.3g}" for tick in ticks])
    last = max(curve.steps[-1] for curve in every)
    steps = sorted({0, *(round(last * k / 4) for k in range(1, 5))})
    figure.ruler("x").lim(0, max(last, 1))
    figure.ruler("x").ticks(steps, [str(step) for step in steps])
    text = plotext.uncolorize(str(figure.build().string()))
    legend = "  ⠒ training reward" + (f"   O held-out {short(held_out.name)}" if held_out else "") + "   (x: step)"
    return "\n".join(row.rstrip() for row in text.splitlines()) + "\n" + legend


def _range(curves: Sequence[Curve]) -> tuple[float, float]:
    values = [value for curve in curves for value in curve.values]
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
