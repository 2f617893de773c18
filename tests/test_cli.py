"""The command line: quick to help, clear about errors, the same from crossrl and from train.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crossrl.cli import main as cli
from crossrl.cli import train_command
from crossrl.cli.main import main, parse
from crossrl.config.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]


def run(*words: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from crossrl.cli.main import main; sys.exit(main())", *words]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


def test_help_does_not_wait_for_heavy_packages() -> None:
    code = """
import sys
from crossrl.cli.main import main
try:
    main(["train", "--help"])
except SystemExit as end:
    assert end.code == 0
heavy = {"torch", "transformers", "numpy", "rich", "hydra", "omegaconf", "pyarrow"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "data.train_files=" in done.stdout


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["demo", "--help"], ["model", "--help"]])
def test_help_teaches_by_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert "crossrl " in text.split("usage:")[1].split("\n", 1)[1], "an example to copy"
    assert max(map(len, text.splitlines())) <= 120


def test_train_py_is_crossrl_train() -> None:
    script = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "trainer.sede=1"], capture_output=True, text=True, timeout=60
    )
    command = run("train", "trainer.sede=1")
    assert script.returncode == command.returncode == 2
    assert script.stderr == command.stderr
    assert "trainer.seed" in script.stderr


def test_a_users_mistake_is_a_message_without_traceback() -> None:
    done = run("train", "data.train_files=no.parquet", "trainer.loger=[file]")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "trainer.loger" in done.stderr
    assert "Traceback" not in done.stderr
    loud = run("train", "data.train_files=no.parquet", "trainer.loger=[file]", CROSSRL_DEBUG="1")
    assert loud.returncode == 2
    assert "Traceback" in loud.stderr
    assert "trainer.loger" in loud.stderr


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: object) -> int:
        raise KeyError("a defect")

    monkeypatch.setattr(train_command, "run", broken)
    with pytest.raises(KeyError, match="a defect"):
        main(["train"])


def test_our_own_errors_are_for_users_and_others_are_not() -> None:
    assert cli.is_for_user(ConfigError("x"))
    assert not cli.is_for_user(ValueError("x"))


def test_markup_in_a_message_is_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(args: object) -> int:
        raise ConfigError("trainer.logger=[red], found [/nonsense]")

    monkeypatch.setattr(train_command, "run", refuse)
    assert main(["train"]) == 2
    assert "trainer.logger=[red], found [/nonsense]" in capsys.readouterr().err


def test_overrides_may_stand_between_options() -> None:
    args = parse(["train", "a=1", "--config-name", "demo", "b=-1", "~c", "++d=[x,y]", "--config-path=conf", "e='f g'"])
    assert args.overrides == ["a=1", "b=-1", "~c", "++d=[x,y]", "e='f g'"]
    assert (args.config_name, args.config_path) == ("demo", "conf")


@pytest.mark.parametrize(
    "words", [[], ["trian"], ["train", "--confg-name", "demo"], ["model", "smollm2"], ["model", "x"]]
)
def test_a_wrong_command_line_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "usage: crossrl" in capsys.readouterr().err


def test_keys_are_listed_with_their_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--keys", "algorithm.kl_ctrl"]) == 0
    text = capsys.readouterr().out
    assert "algorithm.kl_ctrl.kl_coef=0.001" in text
    assert "trainer." not in text


@pytest.mark.parametrize(
    ("prefix", "near"),
    [
        ("optim", "actor_rollout_ref.actor.optim"),
        ("trainr.", "trainer"),
        ("rollout.n", "actor_rollout_ref.rollout.n"),
        ("qqqq", "actor_rollout_ref, algorithm, cluster, cross, data, reward, tape, trainer"),
    ],
)
def test_a_prefix_of_no_key_is_an_error_with_the_nearest(
    prefix: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--keys", prefix])
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    assert f"no key begins with '{prefix}'; nearest: {near}" in said.err


def test_a_reader_that_stops_reading_is_no_error() -> None:
    code = "import sys; from crossrl.cli.main import main; sys.exit(main(['train', '--keys']))"
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.read(1)
    writer.stdout.close()
    errors = writer.stderr.read().decode()
    assert writer.wait(60) in (0, 1)
    assert errors == ""


@pytest.mark.parametrize(("number", "code", "text"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")])
def test_a_signal_stops_with_its_code_and_no_traceback(tmp_path: Path, number: int, code: int, text: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "crossrl", "train", "--config-name", "demo"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert "making data/demo" in process.stdout.readline()
    time.sleep(1.0)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"stopped by {text}" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "data" / "demo").exists(), "half-made files never appear"
    assert list(tmp_path.glob("data/.*")) == []
