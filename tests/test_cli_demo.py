"""The demo: ordinary files made once and checked, a policy that learns, and what a person sees of it."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from crossrl.cli import demo as command
from crossrl.cli.main import main
from crossrl.demo import files, model, task
from crossrl.demo.files import DemoError, needs, prepare
from crossrl.demo.sort_reward import compute_score
from crossrl.report import read_metrics
from crossrl.report.samples import read_samples


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def copy(demo_files: Path, tmp_path: Path) -> Path:
    """The demo's files where they may be spoiled."""
    return Path(shutil.copytree(demo_files, tmp_path / "data" / "demo"))


def test_problems_are_distinct_and_the_same_each_time() -> None:
    parts = task.problems(1, 50, 20, 30)
    strings = [text for part in parts for text in part]
    assert [len(part) for part in parts] == [50, 20, 30]
    assert len(set(strings)) == 100
    assert all(len(text) == 6 and text.isdigit() for text in strings)
    assert parts == task.problems(1, 50, 20, 30)
    assert parts != task.problems(2, 50, 20, 30)
    assert task.answer("524163") == "123456"
    assert task.answer("900090") == "000099"


@pytest.mark.parametrize(
    ("response", "score", "exact"),
    [
        ("123456", 1.0, True),
        ("123465", 0.5 * 4 / 6, False),
        ("123", 0.5 * 3 / 6, False),
        ("1234567", 0.5, False),
        ("", 0.0, False),
        ("654321", 0.0, False),
    ],
)
def test_the_reward_is_half_for_places_and_half_for_all(response: str, score: float, exact: bool) -> None:
    assert compute_score("sort_digits", response, "123456") == {"score": pytest.approx(score), "acc": exact}


def test_the_files_are_what_anybody_elses_run_would_have(demo_files: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_files / "model")
    policy = AutoModelForCausalLM.from_pretrained(demo_files / "model")
    ids = tokenizer.encode("524163>123456$")
    assert len(ids) == 14
    assert tokenizer.decode(ids, skip_special_tokens=True) == "524163>123456"
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template) == ("$", "_", None)
    assert policy.generation_config.eos_token_id == tokenizer.eos_token_id == policy.config.eos_token_id
    assert sum(parameter.numel() for parameter in policy.parameters()) == 107_648

    train, held_out = (pq.read_table(demo_files / f"{name}.parquet").to_pylist() for name in ("train", "val"))
    assert (len(train), len(held_out)) == (5120, 256)
    row = held_out[0]
    assert row["prompt"] == [{"role": "user", "content": row["prompt"][0]["content"]}]
    assert row["reward_model"]["ground_truth"] == task.answer(row["prompt"][0]["content"].removesuffix(">"))
    assert not {r["prompt"][0]["content"] for r in train} & {r["prompt"][0]["content"] for r in held_out}

    spec = importlib.util.spec_from_file_location("sort_reward", demo_files / "sort_reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.compute_score("x", "123456", "123456", None)["acc"]


def test_making_the_files_again_gives_the_same_bytes(demo_files: Path, tmp_path: Path) -> None:
    files.make(tmp_path / "again", warm_up_batches=2)
    assert tree(tmp_path / "again") == tree(demo_files)


def test_the_warm_up_learns() -> None:
    tokenizer, policy = model.make_tokenizer(), model.make_model(1)
    [digits] = task.problems(1, 4 * model.BATCH)
    seen: list[tuple[int, int]] = []
    first = model.warm_up(policy, tokenizer, digits[: model.BATCH])
    last = model.warm_up(policy, tokenizer, digits, lambda done, total: seen.append((done, total)))
    assert 2.4 < first < 2.7, "ln 13 is 2.56: it starts from knowing nothing"
    assert last < first - 0.2
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_files_are_made_once_and_used_as_they_are(
    demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "make", lambda folder, progress: shutil.copytree(demo_files, folder))
    said: list[str] = []
    prepare(said.append, tmp_path / "demo")
    prepare(said.append, tmp_path / "demo")
    assert said[0].startswith("making ")
    assert said[1].startswith("made ")
    assert said[2].endswith("unchanged since it was made")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("sort_reward.py", "reward.custom_reward_function.path=FILE"),
        ("train.parquet", "data.train_files=FILE"),
        ("val.parquet", "data.val_files=FILE"),
        ("model/model.safetensors", "actor_rollout_ref.model.path=FILE"),
    ],
)
def test_a_changed_file_is_refused_with_the_key_that_takes_ones_own(copy: Path, name: str, key: str) -> None:
    path = copy / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DemoError, match=f"{name} was changed") as error:
        prepare(print, copy)
    assert key in str(error.value)


def test_a_missing_file_is_refused(copy: Path) -> None:
    (copy / "model" / "config.json").unlink()
    with pytest.raises(DemoError, match=r"model/config\.json is missing; delete"):
        prepare(print, copy)


def test_a_folder_that_is_not_the_demos_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DemoError, match=r"without a manifest\.json"):
        prepare(print, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_only_a_configuration_that_names_them_needs_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert needs([None, "other/model", "data/demo/train.parquet"])
    assert needs([str(tmp_path / "data" / "demo" / "model")])
    assert not needs([None, "other/model", "data/demo2/train.parquet", "data/demo-x"])


def test_each_run_of_the_demo_gets_its_own_folder(tmp_path: Path) -> None:
    assert command.free_folder(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert command.free_folder(tmp_path / "demo") == tmp_path / "demo-3"


def test_before_and_after_pairs_answers_by_their_prompt(tmp_path: Path) -> None:
    def write(step: int, rows: list[dict[str, Any]]) -> None:
        (tmp_path / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    one = {"input": "21>", "gts": "12", "output": "12", "acc": True}
    two = {"input": "43>", "gts": "34", "output": "44", "acc": False}
    write(0, [one, two])
    assert command.before_and_after(tmp_path) is None, "nothing to compare with"
    write(10, [{**two, "output": "34", "acc": True}, one])
    write(9, [{**two, "output": "99"}, one])
    out = io.StringIO()
    Console(file=out, width=80).print(command.before_and_after(tmp_path))
    assert [line.split() for line in out.getvalue().splitlines()[1:]] == [
        ["43>", "44", "34", "34"],
        ["21>", "12", "12", "12"],
    ]


def test_the_demo_command_trains_and_shows_what_happened(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["trainer.total_training_steps=2", "data.val_max_samples=8", "actor_rollout_ref.rollout.n=4"]
    assert main(["demo", *words]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        f"crossrl train --config-name demo {' '.join(words)} trainer.default_local_dir=outputs/demo\n"
    )
    assert "using data/demo: unchanged" in text
    assert "step 2/2  reward 0." in text
    assert "held-out prompt  step 0" in text
    assert "training reward   O held-out accuracy" in text
    assert "what to try next" in text
    run = tmp_path / "outputs" / "demo"
    assert (run / "learning_curve.png").stat().st_size > 10_000
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2]
    assert len(read_samples(run / "validation" / "2.jsonl")) == 8


@pytest.mark.slow
def test_the_demo_learns_to_sort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a fresh folder, as the README has it; about a minute."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config-name", "demo"]) == 0
    rows = read_metrics(tmp_path / "outputs" / "demo" / "metrics.jsonl")
    accuracy = {
        row["step"]: row["val-core/sort_digits/acc/mean@1"] for row in rows if "val-core/sort_digits/acc/mean@1" in row
    }
    assert list(accuracy) == [0, 40, 80, 120, 160]
    assert 0.2 < accuracy[0] < 0.6
    assert accuracy[160] > 0.8
    assert accuracy[160] > accuracy[40] > accuracy[0]
    late = [row["critic/score/mean"] for row in rows[-20:]]
    early = [row["critic/score/mean"] for row in rows[1:21]]
    assert sum(late) / 20 > sum(early) / 20 + 0.3
    assert not list(tmp_path.rglob("*.superseded.jsonl"))
