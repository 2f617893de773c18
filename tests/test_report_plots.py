"""The learning curve says what metrics.jsonl says, as a picture and in 80 columns."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from crossrl.report import MetricsFile, ReportError
from crossrl.report.plots import Curve, learning_curve, load_curves, short, smooth, terminal_curve, window


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """160 steps that rise from 0.4 to 0.95, validated every 40."""
    log = MetricsFile(tmp_path / "metrics.jsonl")
    log.log(0, {"val-aux/sort/unscored": 0.0, "val-core/sort/acc/best@4": 0.9, "val-core/sort/acc/mean@1": 0.4})
    for step in range(1, 161):
        log.log(step, {"critic/score/mean": 0.95 - 0.55 * math.exp(-step / 50), "critic/rewards/mean": -1.0})
        if step % 40 == 0:
            log.log(step, {"val-core/sort/acc/mean@1": 0.4 + step / 300})
    return log.path


def test_curves_are_the_score_of_each_step_and_the_held_out_mean(metrics: Path) -> None:
    curves = load_curves(metrics)
    assert curves.reward.name == "critic/score/mean"
    assert curves.reward.steps == list(range(1, 161))
    assert curves.held_out is not None
    assert curves.held_out.name == "val-core/sort/acc/mean@1"
    assert curves.held_out.steps == [0, 40, 80, 120, 160]
    assert short(curves.held_out.name) == "accuracy"


def test_the_picture_shows_both_curves(metrics: Path, tmp_path: Path) -> None:
    from matplotlib.image import imread

    picture = learning_curve(metrics, tmp_path / "plots" / "curve.png", "sorting")
    pixels = np.asarray(imread(picture))[..., :3]
    assert pixels.shape == (630, 1080, 3)
    for colour in ("2563a8", "d9622b"):
        wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)])
        rows, columns = np.nonzero(np.abs(pixels - wanted).max(axis=2) < 0.02)
        assert columns.max() - columns.min() > 700
        left, right = rows[columns < 300].mean(), rows[(columns > 800) & (rows < 400)].mean()
        assert left - right > 100, "the curve rises"
    assert [p.name for p in picture.parent.iterdir()] == ["curve.png"]


def test_the_terminal_plot_fits_80_columns_and_rises(metrics: Path) -> None:
    text = terminal_curve(metrics)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 78
    assert len(lines) == 16
    assert "\x1b" not in text
    assert lines[1].startswith("  1┤")
    assert lines[-2].split() == ["0", "40", "80", "120", "160"]
    assert "held-out accuracy" in lines[-1]
    marks = [(row, line.index("O")) for row, line in enumerate(lines[:-1]) if "O" in line]
    assert len(marks) >= 4
    assert [column for _, column in sorted(marks, reverse=True)] == sorted(column for _, column in marks)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_short_run_is_drawn_too(tmp_path: Path, steps: int) -> None:
    log = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, steps + 1):
        log.log(step, {"critic/rewards/mean": -3.5})
    assert "training reward" in terminal_curve(log.path)
    assert "held-out" not in terminal_curve(log.path)
    assert learning_curve(log.path, tmp_path / "curve.png").stat().st_size > 5000


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    log = MetricsFile(tmp_path / "metrics.jsonl")
    log.log(1, {"actor/grad_norm": 1.0, "critic/score/mean": float("nan")})
    with pytest.raises(ReportError, match="no reward to draw"):
        learning_curve(log.path, tmp_path / "curve.png")


def test_a_picture_that_cannot_be_written_is_named(metrics: Path) -> None:
    with pytest.raises(ReportError, match=r"cannot write the plot .*metrics\.jsonl/curve\.png"):
        learning_curve(metrics, metrics / "curve.png")


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 20])
def test_smoothing_is_the_mean_of_the_neighbours(width: int) -> None:
    values = np.random.default_rng(0).normal(size=11)
    used = min(width, len(values))
    before, after = used - 1 - (used - 1) // 2, (used - 1) // 2
    expected = [values[max(0, i - before) : i + after + 1].mean() for i in range(len(values))]
    assert smooth(values.tolist(), width) == pytest.approx(expected)


def test_smoothing_takes_a_sixteenth() -> None:
    assert [window(Curve("x", list(range(n)), [0.0] * n)) for n in (1, 31, 32, 160)] == [1, 1, 2, 10]
