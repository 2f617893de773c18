"""What a person sees: live on a terminal, one line per step elsewhere, and nothing that a sample's text can break."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from crossrl.report import MetricsFile, Reporter, ReportError, RunName, Sample
from crossrl.report.columns import COLUMNS, seconds, stage_times
from crossrl.report.console import LiveDisplay, PlainDisplay, one_line, open_display

METRICS = {
    "critic/score/mean": 0.4231, "actor/kl_loss": 0.00123, "actor/ppo_kl": 1.2e-5, "actor/pg_clipfrac": 0.031,
    "actor/entropy": 0.834, "training/rollout_probs_diff_mean": 2.1e-7, "actor/grad_norm": 12.345,
    "response_length/mean": 1234.5, "perf/throughput": 182345.0, "timing_s/gen": 0.1, "timing_s/update_actor": 0.3,
    "timing_s/adv": 0.0001, "timing_s/step": 0.42,
}  # fmt: skip
SAMPLES = [
    Sample("524163>", "123456", "123456", 1.0),
    Sample("[red]b[/red]\n\x1b[31mc é " + "x" * 99, "[/nonsense]", None, float("nan")),
]


def plain(width: int = 80) -> tuple[PlainDisplay, io.StringIO]:
    out = io.StringIO()
    display = open_display(Console(file=out, width=width, highlight=False))
    assert type(display) is PlainDisplay
    return display, out


def live(width: int = 80) -> tuple[LiveDisplay, io.StringIO]:
    out = io.StringIO()
    display = open_display(Console(file=out, width=width, force_terminal=True, highlight=False))
    assert type(display) is LiveDisplay
    return display, out


def as_seen(text: str) -> list[str]:
    """What a terminal shows of the last frame: escape sequences removed, split into lines."""
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).splitlines()]


def test_without_a_terminal_a_step_is_one_line_with_all_that_matters() -> None:
    display, out = plain()
    reporter = Reporter(display)
    reporter.start(160, {"model": "m"})
    reporter.step(40, METRICS)
    line = out.getvalue().splitlines()[-1]
    assert line.startswith("step 40/160  reward 0.423  KL ref 1.2e-3  KL old 1.2e-5  clip 3.1%  entropy 0.834")
    assert "gap 2.1e-7  grad 12.3  length 1234  tok/s 182k  0.42 s (update 0.30 s, rollout 0.10 s)  ETA " in line


def test_a_terminal_of_80_columns_holds_the_table() -> None:
    display, out = live(80)
    with Reporter(display) as reporter:
        reporter.start(12, {})
        for step in range(1, 13):
            reporter.stage("rollout", 100, 512)
            reporter.step(step, METRICS)
    seen = as_seen(out.getvalue())
    assert max(map(len, seen)) <= 80
    table = seen[-11:]
    assert " ".join(table[0].split()) == "step reward KL ref KL old clip entropy gap grad length tok/s time"
    assert [line.split()[0] for line in table[1:9]] == [str(step) for step in range(5, 13)]
    assert not any("…" in line for line in table[:9])
    assert table[10].startswith("step 12/12 ━━━")


def test_progress_inside_a_stage_is_shown() -> None:
    display, out = live()
    reporter = Reporter(display)
    reporter.start(3, {})
    reporter.stage("rollout", 128, 512)
    display._live.refresh()  # type: ignore[union-attr]
    reporter.close()
    assert "rollout 128/512" in "\n".join(as_seen(out.getvalue()))


def test_without_console_in_the_loggers_steps_are_not_shown_but_warnings_are(tmp_path: Path) -> None:
    out = io.StringIO()
    for terminal in (False, True):
        reporter = Reporter(open_display(Console(file=out, force_terminal=terminal), steps=False))
        reporter.start(3, {})
        reporter.stage("rollout", 1, 2)
        reporter.step(1, METRICS)
        reporter.validation(1, {"val-core/x/acc/mean@1": 0.5})
        reporter.warn("all rewards equal")
        reporter.close()
    assert [line.strip() for line in as_seen(out.getvalue())] == ["warning: all rewards equal"] * 2


def test_validation_shows_core_metrics_and_the_samples_asked_for(tmp_path: Path) -> None:
    display, out = plain(100)
    reporter = Reporter(display, show_samples=1)
    reporter.start(3, {})
    reporter.validation(2, {"val-core/openai/gsm8k/acc/mean@1": 0.5, "val-aux/length": 7.0}, SAMPLES)
    text = out.getvalue()
    assert "validation at step 2: openai/gsm8k/acc/mean@1 0.500\n" in text
    assert "val-aux" not in text
    assert "524163>" in text
    assert "nonsense" not in text


def test_the_text_of_a_sample_cannot_change_how_it_is_shown() -> None:
    display, out = plain()
    display.samples("two", SAMPLES)
    row = out.getvalue().splitlines()[3]
    assert row.startswith(r"[red]b[/red]\n…xxx")
    assert "[/nonsense]" in row
    assert "\x1b" not in row
    assert len(row.rstrip()) <= 80


def test_of_a_templated_prompt_the_question_is_shown() -> None:
    display, out = plain()
    display.samples("one", [Sample("<|im_start|>user\n2 + 3 = ?<|im_end|>\n", "5", "5", 1.0, question="2 + 3 = ?")])
    assert out.getvalue().splitlines()[-1].split() == ["2", "+", "3", "=", "?", "5", "5", "1"]


@pytest.mark.parametrize("text", ["", "abc", "a" * 24, "a" * 25, "é\u200b\n\t" * 20])
def test_one_line_is_one_printable_line_of_the_width(text: str) -> None:
    short = one_line(text, 24)
    assert short.isprintable()
    assert len(short) <= 24
    if text.isprintable() and len(text) <= 24:
        assert short == text


def test_keys_without_effect_are_listed_once() -> None:
    display, out = plain()
    Reporter(display).start(3, {}, no_effect=["trainer.nnodes=2", "critic.lr=1"])
    assert out.getvalue() == "accepted, without effect here: trainer.nnodes=2, critic.lr=1\n"


def test_values_that_are_not_finite_are_shown_as_such() -> None:
    grad = next(column for column in COLUMNS if column.title == "grad")
    assert [grad.text({"actor/grad_norm": v}) for v in (float("nan"), float("inf"), 0.0)] == ["nan", "inf", "0"]
    assert grad.text({}) is None


@pytest.mark.parametrize("value", [0.0, 1e-12, 9.99e-4, 1e-3, 0.12345, 9.999, 999.9, 9999.6, 1e4, 1.5e12])
def test_small_numbers_fit_their_column(value: float) -> None:
    gap = next(column for column in COLUMNS if column.title == "gap")
    text = gap.text({"training/rollout_probs_diff_mean": value})
    assert text is not None
    assert len(text) <= 6
    assert float(text) == pytest.approx(value, rel=0.06, abs=0)


def test_durations() -> None:
    assert [seconds(s) for s in (0.004, 9.99, 12.3, 99.4, 187, 7387)] == [
        "0.00 s",
        "9.99 s",
        "12 s",
        "99 s",
        "3:07",
        "2:03:07",
    ]
    assert stage_times({"timing_s/gen": 1.0, "timing_s/adv": 0.001}) == "rollout 1.00 s"
    assert stage_times({}) == ""


class Recorder:
    """A logger that remembers how it was closed."""

    name = "recorder"
    closed: bool | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def truncate_after(self, step: int) -> list[str]:
        return []

    def close(self, ok: bool) -> None:
        self.closed = ok


def test_an_error_closes_the_loggers_as_failed() -> None:
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError), Reporter(plain()[0], [recorder]):
        raise ZeroDivisionError
    assert recorder.closed is False


def test_closing_twice_does_nothing_more() -> None:
    display, out = plain()
    recorder = Recorder()
    with Reporter(display, [recorder]) as reporter:
        reporter.close(ok=False, status="stopped after 2 of 3 steps")
    assert recorder.closed is False
    assert re.fullmatch(r"stopped after 2 of 3 steps \(0\.\d\d s\)\n", out.getvalue())


def test_a_logger_that_fails_fails_the_step() -> None:
    reporter = Reporter(plain()[0], [MetricsFile(Path("/dev/full"))])
    with pytest.raises(ReportError, match="No space left"):
        reporter.step(1, METRICS)


def test_a_fresh_run_moves_an_earlier_ones_metrics_aside_and_says_so(tmp_path: Path) -> None:
    for _ in range(2):
        display, out = plain()
        reporter = Reporter(display, [MetricsFile(tmp_path / "metrics.jsonl")])
        reporter.start(1, {})
        reporter.validation(0, {"val-core/x/acc/mean@1": 0.5})
        reporter.step(1, METRICS)
        reporter.close()
    assert "2 lines of later steps moved" in out.getvalue()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_open_takes_what_trainer_logger_says(tmp_path: Path) -> None:
    reporter = Reporter.open("file", RunName(tmp_path), rollout_folder=str(tmp_path / "rollouts"))
    assert reporter.wants_samples()
    reporter.start(1, {})
    reporter.samples(1, SAMPLES)
    reporter.step(1, METRICS)
    reporter.close()
    assert (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "rollouts" / "1.jsonl").exists()
    assert not Reporter(plain()[0]).wants_samples()
