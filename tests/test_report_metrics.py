"""metrics.jsonl: flat, valid JSON, complete after kill -9, moved aside on resume, never dropped in silence."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from crossrl.report import MetricsFile, ReportError, metrics_file, read_metrics
from crossrl.report.metrics_file import encode, series


@pytest.fixture
def log(tmp_path: Path) -> MetricsFile:
    return MetricsFile(tmp_path / "run" / "metrics.jsonl")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_one_flat_line(log: MetricsFile) -> None:
    log.log(1, {"actor/grad_norm": np.float32(0.5), "perf/total_num_tokens": 12})
    log.log(2, {"actor/grad_norm": 0.25})
    assert lines(log.path) == [
        {"step": 1, "actor/grad_norm": 0.5, "perf/total_num_tokens": 12},
        {"step": 2, "actor/grad_norm": 0.25},
    ]


@pytest.mark.parametrize(("value", "name"), [(float("nan"), "nan"), (float("inf"), "inf"), (-np.inf, "-inf")])
def test_what_is_not_finite_is_null_and_named(value: float, name: str) -> None:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    line = json.loads(encode(3, {"a": value, "b": 1.0}), parse_constant=refuse)
    assert line == {"step": 3, "a": None, "b": 1.0, "non_finite": {"a": name}}


def test_a_metric_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(ReportError, match="'actor/loss' is a str"):
        encode(1, {"actor/loss": "0.5"})  # type: ignore[dict-item]


def test_reading_puts_the_lines_of_a_step_together_in_order(log: MetricsFile) -> None:
    log.log(2, {"reward": 0.5})
    log.log(1, {"reward": 0.25})
    log.log(2, {"val-core/x/acc/mean@1": 0.75, "kl": float("nan")})
    rows = read_metrics(log.path)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["reward"] == 0.5
    assert rows[1]["val-core/x/acc/mean@1"] == 0.75
    assert series(rows, "reward") == ([1, 2], [0.25, 0.5])
    assert series(rows, "kl") == ([], [])


def test_resume_moves_later_steps_aside_and_keeps_the_rest(log: MetricsFile) -> None:
    for step in range(1, 6):
        log.log(step, {"reward": step / 10})
    notices = log.truncate_after(3)
    aside = log.path.with_name("metrics.superseded.jsonl")
    assert [row["step"] for row in lines(log.path)] == [1, 2, 3]
    assert [row["step"] for row in lines(aside)] == [4, 5]
    assert notices == ["metrics.jsonl: 2 lines of later steps moved to metrics.superseded.jsonl"]
    log.log(4, {"reward": 9.0})
    assert log.truncate_after(3) != []
    assert [row["reward"] for row in lines(aside)] == [0.4, 0.5, 9.0]


def test_resume_with_nothing_to_move_changes_nothing(log: MetricsFile) -> None:
    assert log.truncate_after(7) == []
    log.log(1, {"reward": 1.0})
    before = log.path.stat()
    assert log.truncate_after(1) == []
    assert log.path.stat().st_ino == before.st_ino
    assert list(log.path.parent.iterdir()) == [log.path]


def test_a_line_torn_at_any_byte_is_repaired_with_a_notice(log: MetricsFile) -> None:
    log.log(1, {"reward": 0.5})
    whole = log.path.read_bytes()
    last = (encode(2, {"reward": 0.75, "kl": float("nan")}) + "\n").encode()
    for cut in range(len(last) + 1):
        log.path.write_bytes(whole + last[:cut])
        log.path.with_name("metrics.superseded.jsonl").unlink(missing_ok=True)
        notices = log.truncate_after(2)
        torn = 0 < cut < len(last) - 1  # without its newline alone the line is whole
        assert bool(notices) == torn, cut
        log.log(3, {"reward": 1.0})
        assert [row["step"] for row in lines(log.path)] == ([1, 3] if cut < len(last) - 1 else [1, 2, 3])
        if torn:
            assert log.path.with_name("metrics.superseded.jsonl").read_bytes() == last[:cut] + b"\n"


@pytest.mark.parametrize("damage", ["{}", '{"step": "x"}', "[1]", '{"step": 1', "\x00\x00", "null"])
def test_damage_that_is_no_torn_end_is_refused_with_its_line(log: MetricsFile, damage: str) -> None:
    log.log(1, {"reward": 0.5})
    with log.path.open("a") as file:
        file.write(damage + "\n")
    log.log(2, {"reward": 0.5})
    before = log.path.read_bytes()
    for action in (lambda: log.truncate_after(1), lambda: read_metrics(log.path)):
        with pytest.raises(ReportError, match=r"metrics\.jsonl, line 2"):
            action()
    assert log.path.read_bytes() == before


def test_a_kill_between_copy_and_removal_loses_no_line(log: MetricsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        log.log(step, {"reward": step})
    real, calls = metrics_file.publish_text, []

    def die_at_the_second(path: Path, text: str) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(path, text)

    monkeypatch.setattr(metrics_file, "publish_text", die_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        log.truncate_after(1)
    assert [row["step"] for row in lines(log.path)] == [1, 2, 3]
    monkeypatch.undo()
    log.truncate_after(1)
    assert [row["step"] for row in lines(log.path)] == [1]


WRITER = """
import sys
from pathlib import Path
from crossrl.report.metrics_file import MetricsFile
log = MetricsFile(Path(sys.argv[1]))
for step in range(1, 10**9):
    log.log(step, {f"metric/{i}": step + i / 7 for i in range(50)})
    if step == 1:
        print("go", flush=True)
"""


def test_kill_9_leaves_a_file_that_reads_and_goes_on(log: MetricsFile) -> None:
    for pause in (0.0, 0.003, 0.02):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(log.path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(pause)
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
        log.truncate_after(1)
        assert [row["step"] for row in read_metrics(log.path, torn_ok=False)] == [1]
        log.path.unlink()


def test_a_full_disk_stops_the_run_and_says_where() -> None:
    with pytest.raises(ReportError, match="cannot write metrics to /dev/full: No space left on device"):
        MetricsFile(Path("/dev/full")).log(1, {"reward": 1.0})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"nothing\.jsonl: No such file"):
        read_metrics(tmp_path / "nothing.jsonl")
