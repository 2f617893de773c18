"""Loggers: the ones asked for, installed or refused by name, resumed, and never failing in silence."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crossrl.report import ReportError, RunName
from crossrl.report.loggers import open_loggers
from crossrl.report.tensorboard import TensorBoard


@pytest.fixture(autouse=True)
def _no_outside_places(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENSORBOARD_DIR", "MLFLOW_TRACKING_URI", "WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def read_events(folder: Path) -> Iterator[Any]:
    """Events as TensorBoard reads them: records of length, checksum, data, checksum, in order of the files."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def test_an_unknown_logger_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(
        ReportError, match=r"'tensorbord' is not a logger; did you mean 'tensorboard'\? There are: console"
    ):
        open_loggers(["console", "tensorbord"], RunName(tmp_path))


def test_each_logger_is_opened_once_and_the_console_is_none_of_them(tmp_path: Path) -> None:
    loggers = open_loggers(["console", "file", "tensorboard", "file"], RunName(tmp_path))
    assert [logger.name for logger in loggers] == ["file", "tensorboard"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # Python's own way to say: not to be imported
    with pytest.raises(ReportError, match=rf"trainer.logger has '{name}'.*pip install 'crossrl\[loggers\]'"):
        open_loggers([name], RunName(tmp_path))


def test_tensorboard_gets_each_value_at_its_step(tmp_path: Path) -> None:
    board = TensorBoard(RunName(tmp_path))
    board.log(1, {"actor/grad_norm": 0.5, "actor/kl_loss": float("nan")})
    board.log(2, {"actor/grad_norm": 0.25})
    found = [(e.step, v.tag, v.simple_value) for e in read_events(tmp_path / "tensorboard") for v in e.summary.value]
    assert found[0] == (1, "actor/grad_norm", 0.5)
    assert found[1][:2] == (1, "actor/kl_loss")
    assert math.isnan(found[1][2])
    assert found[2] == (2, "actor/grad_norm", 0.25)
    board.close(True)


def test_tensorboard_hides_the_steps_that_a_resumed_run_does_again(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import SessionLog

    first = TensorBoard(RunName(tmp_path))
    assert first.truncate_after(-1) == []
    for step in (1, 2, 3):
        first.log(step, {"reward": step})
    first.close(True)
    second = TensorBoard(RunName(tmp_path))
    assert second.truncate_after(2) == ["tensorboard: what an earlier run logged after step 2 is hidden"]
    second.log(3, {"reward": 9.0})
    starts = [e.step for e in read_events(tmp_path / "tensorboard") if e.session_log.status == SessionLog.START]
    assert starts == [3]
    second.close(True)


def test_tensorboard_on_a_full_disk_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = TensorBoard(RunName(tmp_path))
    board.log(1, {"reward": 1.0})
    board._writer._py_recordio_writer._writer = open("/dev/full", "wb")  # noqa: SIM115, PTH123
    with pytest.raises(ReportError, match=r"cannot write TensorBoard events to .*No space left"):
        board.log(2, {"reward": 1.0})


def test_tensorboard_in_a_place_that_is_no_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(ReportError, match="cannot write TensorBoard events"):
        TensorBoard(RunName(tmp_path)).log(1, {"reward": 1.0})


def test_wandb_offline_goes_on_in_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra `loggers` is not part of the test environment")
    ids = []
    for steps in ((1, 2), (2, 3)):
        [logger] = open_loggers(["wandb"], RunName(tmp_path, "project", "name", {"trainer": {"seed": 1}}))
        for step in steps:
            logger.log(step, {"reward": step, "actor/kl_loss": float("nan")})
        logger.close(True)
        ids.append((tmp_path / "wandb_run_id").read_text())
    assert ids[0] == ids[1]
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2


def test_mlflow_without_a_server_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mlflow = pytest.importorskip("mlflow", reason="the extra `loggers` is not part of the test environment")
    for steps in ((1, 2), (2, 3)):
        [logger] = open_loggers(["mlflow"], RunName(tmp_path, "project", "name", {"trainer": {"seed": 1}}))
        for step in steps:
            logger.log(step, {"val-core/x/acc/mean@1": step / 10, "actor/kl_loss": float("nan")})
        logger.close(True)
    run_id = (tmp_path / "mlflow_run_id").read_text().strip()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    history = client.get_metric_history(run_id, "val-core/x/acc/mean_at_1")
    assert sorted({(m.step, m.value) for m in history}) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert client.get_run(run_id).info.status == "FINISHED"
    assert (tmp_path / "mlflow_files" / run_id / "artifacts" / "config.json").exists()
