"""crossrl diff and crossrl inspect: what they say about recorded runs, and how they end."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossrl.batch import Batch, Meaning, Ragged
from crossrl.cli.main import main
from crossrl.stages.base import At
from crossrl.tape import RunLayout, Tape

SAMPLER, TRAINER = Meaning(1.0, "none", "hf", 0), Meaning(1.0, "none", "fsdp", 0)
MEANT = {"old_log_probs": TRAINER}


@pytest.fixture(scope="session")
def recorded(demo_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs of the demo's model: ``a`` and ``b`` alike, ``lr`` and ``warm`` with one setting changed, ``again``
    a replay of ``a`` under another temperature, which it was told to accept."""
    from crossrl.config import load_config
    from crossrl.report import Reporter
    from crossrl.trainer import Trainer

    root = tmp_path_factory.mktemp("recorded")
    base = [
        f"data.train_files={demo_files}/train.parquet", "data.train_max_samples=8", "data.train_batch_size=4",
        f"data.val_files={demo_files}/val.parquet", "data.val_max_samples=2",
        "data.max_prompt_length=8", "data.max_response_length=5", f"actor_rollout_ref.model.path={demo_files}/model",
        "actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4", f"reward.custom_reward_function.path={demo_files}/sort_reward.py",
        "reward.num_workers=1", "trainer.num_threads=1", "trainer.device=cpu", "trainer.logger=[]",
        "trainer.total_training_steps=2", "trainer.val_before_train=True",
    ]  # fmt: skip
    for name, overrides in {
        "a": ["tape.mode=record"],
        "b": ["tape.mode=record"],
        "lr": ["tape.mode=record", "actor_rollout_ref.actor.optim.lr=2e-3"],
        "warm": ["tape.mode=record", "actor_rollout_ref.rollout.temperature=0.7", "trainer.total_training_steps=1"],
        "again": [
            "tape.mode=replay", f"tape.replay_from={root}/a/tape", "tape.accept=[rollout.temperature,temperature]",
            "actor_rollout_ref.rollout.temperature=0.7", "trainer.total_training_steps=1",
        ],
    }.items():  # fmt: skip
        with Reporter() as reporter:
            loaded = load_config([*base, f"trainer.default_local_dir={root}/{name}", *overrides])
            assert Trainer(loaded, reporter).fit() == 0
    return root


@dataclass
class Given:
    """A stage with given output, for what no small model says."""

    name: str
    writes: tuple[str, ...]
    make: Callable[[Batch], Batch]
    reads: tuple[str, ...] = ("prompt",)

    def __call__(self, batch: Batch, at: At) -> Batch:
        return self.make(batch)


def made(
    folder: Path,
    responses: list[str],
    rewards: list[float] | None = None,
    sampler: Meaning = SAMPLER,
    gaps: list[float] | None = None,
    steps: tuple[int, ...] = (1,),
) -> Path:
    """A run in ``folder``: sample i answers ``responses[i]``, a token a character. ``gaps``: trainer minus sampler."""
    count = len(responses)
    ids = Ragged.from_rows([[ord(c) for c in r] for r in responses], np.int32)
    floats = Ragged.full_like(ids, -1.0, np.float32)
    shift = np.repeat(np.array(gaps or [0.0] * count, np.float32), ids.lengths)
    rollout = {
        "response": responses, "response_ids": ids, "response_mask": Ragged.full_like(ids, 1, np.uint8),
        "rollout_log_probs": floats,
    }  # fmt: skip
    old = {"old_log_probs": Ragged(floats.values + shift, floats.lengths)}
    reward = {"reward": np.array(rewards or [1.0] * count), "reward_status": ["ok"] * count}
    tape = Tape(RunLayout(folder / "tape"), "run", lambda stage, split: {}, weight_version=lambda: 0)
    for step in steps:
        batch = Batch(tuple(f"d.e0.r{i}.n0" for i in range(count)), {"prompt": [f"question {i}" for i in range(count)]})
        for name, columns, meanings in (
            ("rollout", rollout, {"rollout_log_probs": sampler}),
            ("reward", reward, {}),
            ("old_log_prob", old, MEANT),
        ):

            def make(b: Batch, columns: Any = columns, meanings: Any = meanings) -> Batch:
                return Batch(b.sample_id, columns, meanings)

            stage = tape.wrap(Given(name, tuple(columns), make), "record", carry=("prompt",))
            stage(batch, At(step))
    tape.close()
    return folder


class Cli:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: str | Path) -> tuple[int, str]:
        """Exit code, and what was printed; an error's text follows the output."""
        code = main([str(w) for w in words])
        printed = self.capsys.readouterr()
        return code, printed.out + printed.err

    def json(self, *words: str | Path) -> Any:
        main([*(str(w) for w in words), "--json"])
        return json.loads(self.capsys.readouterr().out)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("COLUMNS", "100")
    return Cli(capsys)


def row_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


# diff


def test_runs_that_did_the_same_are_equal(recorded: Path, cli: Cli) -> None:
    code, text = cli("diff", recorded / "a", recorded / "b")
    assert code == 0
    assert "equal: " in text
    assert "differs" not in text
    data = cli.json("diff", recorded / "a" / "tape", recorded / "b")
    assert (data["verdict"], data["first"], data["settings"]) == ("equal", None, {})
    assert data["compared"] == len(list((recorded / "a" / "tape").glob("step_*/*")))


def test_the_first_difference_is_named_with_both_sides(recorded: Path, cli: Cli) -> None:
    code, text = cli("diff", recorded / "a", recorded / "lr")
    data = cli.json("diff", recorded / "a", recorded / "lr")
    first = data["first"]
    assert code == data["exit_code"] == 1
    assert (data["verdict"], first["at"]["step"], first["stage"]) == ("values differ", 1, "update")
    assert "values differ: first at step 1, stage update" in text
    for value in (first["recorded"], first["found"]):
        assert f"{value:.9g}" in text
    assert first["sample_id"] in text
    assert f"{first['differing']} of {first['total']} values differ" in text
    response = cli.json("inspect", recorded / "a", "--sample", first["sample_id"])["fields"]["response"]
    assert response in row_of(text, "response ")
    assert row_of(text, "optim.lr").split() == ["optim.lr", "update", "0.001", "0.002"]


def test_what_numbers_mean_comes_before_how_much_they_differ(recorded: Path, cli: Cli) -> None:
    code, text = cli("diff", recorded / "a", recorded / "warm")
    assert code == 1
    assert "meaning differs: first at step 1, stage rollout" in text
    assert row_of(text, "A  ").strip()
    assert "temperature 1, truncation none" in text
    assert "temperature 0.7, truncation none" in text
    assert "values differ" not in text
    assert row_of(text, "rollout.temperature").split() == ["rollout.temperature", "rollout", "1", "0.7"]


def test_two_responses_are_both_shown(tmp_path: Path, cli: Cli) -> None:
    a, b = made(tmp_path / "a", ["four", "five"]), made(tmp_path / "b", ["four", "fine"])
    code, text = cli("diff", a, b)
    assert code == 1
    assert "tokens differ: first at step 1, stage rollout" in text
    assert row_of(text, "prompt").split() == ["prompt", "question", "1"]
    assert row_of(text, "response A").split()[-1] == "five"
    assert row_of(text, "response B").split()[-1] == "fine"
    assert row_of(text, "A   ").split() == ["A", "id", "118"]
    assert row_of(text, "B   ").split() == ["B", "id", "110"]


def test_a_tolerance_lets_small_differences_pass_and_says_so(tmp_path: Path, cli: Cli) -> None:
    a, b = made(tmp_path / "a", ["x"], [0.5]), made(tmp_path / "b", ["x"], [0.5 + 1e-9])
    assert cli("diff", a, b)[0] == 1
    code, text = cli("diff", a, b, "--tolerance", "reward=1e-8")
    assert code == 0
    assert "differences let pass: reward up to 1e-08" in text
    assert cli("diff", a, b, "--tolerance", "reward=1e-10")[0] == 1


@pytest.mark.parametrize("command", [("diff", "a", "b"), ("verify", "a")])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [("reward", "FIELD=NUMBER"), ("reward=-1", "FIELD=NUMBER"), ("=1", "FIELD=NUMBER"), ("rewards=1", "'reward'")],
)
def test_a_wrong_tolerance_is_refused(command: tuple[str, ...], wrong: str, said: str, cli: Cli) -> None:
    with pytest.raises(SystemExit) as end:
        cli(*command, "--tolerance", wrong)
    assert end.value.code == 2
    assert said in cli.capsys.readouterr().err


def test_a_comparison_of_nothing_is_no_equality(tmp_path: Path, cli: Cli) -> None:
    a, b = made(tmp_path / "a", ["x"], steps=(1,)), made(tmp_path / "b", ["x"], steps=(2,))
    code, text = cli("diff", a, b)
    assert (code, "nothing to compare" in text) == (2, True)
    code, text = cli("diff", a, a / "tape")
    assert (code, "are the same run" in text) == (2, True)
    code, text = cli("diff", a, tmp_path / "nowhere")
    assert (code, "no recorded steps" in text) == (2, True)


def test_a_run_that_ends_earlier_or_lacks_a_step_is_not_plainly_equal(tmp_path: Path, cli: Cli) -> None:
    a = made(tmp_path / "a", ["x"], steps=(1, 2, 3))
    code, text = cli("diff", a, made(tmp_path / "b", ["x"], steps=(1, 2)))
    assert (code, "equal as far as both go: steps 1 to 2" in text) == (0, True)
    code, text = cli("diff", a, made(tmp_path / "c", ["x"], steps=(1, 3)))
    assert (code, "records missing: within steps 1 to 3" in text) == (1, True)
    assert "warning: everything of step 2 is recorded in A only" in text


def test_a_comparison_with_a_replay_that_accepted_something_says_so(recorded: Path, cli: Cli) -> None:
    code, text = cli("diff", recorded / "a", recorded / "again")
    assert code == 1
    assert "run B is not a valid reproduction; it accepted: rollout.temperature: recorded 1.0, found 0.7" in text
    assert "run A is not" not in text


def test_a_damaged_record_is_refused(tmp_path: Path, cli: Cli) -> None:
    a = made(tmp_path / "a", ["x"])
    shutil.copytree(a, tmp_path / "b")
    flip(tmp_path / "b" / "tape" / "step_000001" / "reward.0" / "tensors.safetensors")
    code, text = cli("diff", a, tmp_path / "b")
    assert code == 2
    assert "reward.0/tensors.safetensors" in text


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# inspect


def test_the_overview_of_equal_runs_is_equal_and_of_others_not(recorded: Path, cli: Cli) -> None:
    tables = {}
    for name in ("a", "b", "lr"):
        code, text = cli("inspect", recorded / name)
        assert code == 0
        rows = text[text.index("step  rollout") :].splitlines()
        tables[name] = [" ".join(row.split()[:-2]) for row in rows]  # sizes differ with the length of a path
    assert tables["a"] == tables["b"]
    assert [row.split()[0] for row in tables["a"]] == ["step", "0", "0", "1", "2"]
    same = [x == y for x, y in zip(tables["a"], tables["lr"], strict=True)]
    assert same == [True, True, True, False, False]


def test_the_overview_says_what_is_recorded(recorded: Path, cli: Cli) -> None:
    _, text = cli("inspect", recorded / "a")
    data = cli.json("inspect", recorded / "a")
    files = [p for p in (recorded / "a" / "tape").rglob("*") if p.is_file()]
    assert data["nbytes"] == sum(p.stat().st_size for p in files)
    assert len(data["records"]) == len([p for p in files if p.name == "record.json"])
    assert data["run_ids"][0] in text
    assert f"torch {data['versions'][0]['torch']}" in " ".join(text.split())
    assert "weight versions 0 to 2" in text
    assert data["valid_reproduction"]
    assert "not a valid reproduction" not in text


def test_accepted_deviations_are_no_valid_reproduction(recorded: Path, cli: Cli) -> None:
    code, text = cli("inspect", recorded / "again")
    assert code == 0
    assert "not a valid reproduction" in text
    assert "rollout.temperature: recorded 1.0, found 0.7" in text
    data = cli.json("inspect", recorded / "again")
    assert not data["valid_reproduction"]
    assert {"key": "rollout.temperature", "recorded": 1.0, "found": 0.7, "acceptable": True} in data["accepted"]


def test_a_damaged_record_is_shown_among_the_others(tmp_path: Path, cli: Cli) -> None:
    run = made(tmp_path / "a", ["x"], steps=(1, 2))
    flip(run / "tape" / "step_000002" / "reward.0" / "record.json")
    code, text = cli("inspect", run)
    assert code == 2
    assert "damaged" in row_of(text, "2 ")
    assert "damaged" not in row_of(text, "1 ")
    assert "step_000002/reward.0/record.json" in text
    flip(run / "tape" / "step_000001" / "rollout.0" / "tensors.safetensors")
    code, text = cli("inspect", run, "--step", "1")
    assert (code, "step_000001/rollout.0/tensors.safetensors" in text) == (2, True)


def test_the_samples_of_a_step_are_listed(recorded: Path, cli: Cli) -> None:
    code, text = cli("inspect", recorded / "a", "--step", "2")
    data = cli.json("inspect", recorded / "a", "--step", "2")
    assert code == 0
    assert len(data) == 16
    prefix = row_of(text, "sample ids begin with").split()[-1]
    for row in data:
        cells = row_of(text, row["sample_id"].removeprefix(prefix) + " ")
        assert {row["prompt"], row["response"], str(row["length"])} <= {*cells.split(), ""}
        assert row["gap"] < 1e-5
    assert f"mean reward {np.mean([r['reward'] for r in data]):.3f}" in text


def test_samples_are_found_by_their_text(tmp_path: Path, cli: Cli) -> None:
    run = made(tmp_path / "a", ["The answer is 4", "no idea", "ANSWER: 5"], steps=(1, 2))
    found = cli.json("inspect", run, "--find", "answer")
    assert [(r["step"], r["response"]) for r in found] == [
        (s, r) for s in (1, 2) for r in ("The answer is 4", "ANSWER: 5")
    ]
    assert [r["step"] for r in cli.json("inspect", run, "--find", "Question 1", "--step", "2")] == [2]
    code, text = cli("inspect", run, "--find", "quux")
    assert (code, "nothing to show" in text) == (1, True)


def test_the_worst_samples_come_first(tmp_path: Path, cli: Cli) -> None:
    run = made(tmp_path / "a", ["aa", "bb", "cc", "dd"], gaps=[0.25, -0.5, 0.0, 0.125])
    assert [(r["response"], r["gap"]) for r in cli.json("inspect", run, "--worst", "2")] == [("bb", 0.5), ("aa", 0.25)]
    _, text = cli("inspect", run, "--worst", "2")
    assert row_of(text, "r1.n0").split() == ["r1.n0", "question", "1", "bb", "1", "2", "5.0e-01"]
    assert "the 2 of 4 samples in which sampler and trainer differ most" in text


def test_log_probs_of_another_meaning_are_not_subtracted(tmp_path: Path, cli: Cli) -> None:
    run = made(tmp_path / "a", ["aa", "bb"], sampler=Meaning(0.6, "none", "hf", 0), gaps=[0.5, 0.5])
    code, text = cli("inspect", run, "--step", "1")
    assert code == 0
    assert "temperature 0.6" in text
    assert [r["gap"] for r in cli.json("inspect", run, "--step", "1")] == [None, None]
    assert cli("inspect", run, "--worst", "3")[0] == 1
    _, text = cli("inspect", run, "--sample", "r0.n0")
    assert row_of(text, "    0 ").split() == ["0", "97", "-1.000000", "-0.500000", "-"]


def test_log_probs_of_mixed_up_samples_are_not_subtracted(tmp_path: Path, cli: Cli) -> None:
    """C05: the trainer scored other responses than the sampler's; that is no gap."""
    run = made(tmp_path / "a", ["aa", "bb"])
    assert [r["gap"] for r in cli.json("inspect", run, "--step", "1")] == [0.0, 0.0]
    old = Batch(("d.e0.r0.n0", "d.e0.r1.n0"), {"old_log_probs": Ragged.from_rows([[-2.0] * 2] * 2, np.float32)})
    stage = Given("old_log_prob", ("old_log_probs",), lambda b: Batch(b.sample_id, old.columns, MEANT), ("response",))
    tape = Tape(RunLayout(run / "tape"), "run", lambda stage, split: {})
    shutil.rmtree(run / "tape" / "step_000001" / "old_log_prob.0")
    tape.wrap(stage, "record")(Batch(old.sample_id, {"response": ["bb", "aa"]}), At(1))
    tape.close()
    code, text = cli("inspect", run, "--step", "1")
    assert code == 0
    assert "inputs differ at step 1: old_log_prob was given another response" in text
    assert [r["gap"] for r in cli.json("inspect", run, "--step", "1")] == [None, None]
    data = cli.json("inspect", run, "--sample", "r0.n0")
    assert [t["difference"] for t in data["tokens"]] == [None, None]
    assert "for 2 of 2 samples" in data["note"]


def test_a_sample_is_shown_token_by_token(recorded: Path, cli: Cli) -> None:
    row = max(cli.json("inspect", recorded / "a", "--step", "2"), key=lambda r: r["length"])
    data = cli.json("inspect", recorded / "a", "--sample", row["sample_id"])
    _, text = cli("inspect", recorded / "a", "--sample", row["sample_id"].partition(".")[2], "--worst", "2")
    fields = data["fields"]
    for token in data["tokens"]:
        cells = row_of(text, f"{token['position']:5} ").split()
        assert cells[:3] == [str(token["position"]), str(token["id"]), repr(token["text"])]
        assert float(cells[3]) == pytest.approx(token["sampler"], abs=1e-6)
        assert float(cells[4]) == pytest.approx(token["trainer"], abs=1e-6)
    assert "".join(t["text"] for t in data["tokens"]).startswith(fields["response"])
    assert [t["sampler"] for t in data["tokens"]] == pytest.approx(fields["rollout_log_probs"])
    assert [t["trainer"] for t in data["tokens"]] == pytest.approx(fields["old_log_probs"])
    assert row_of(text, "answer").split()[-1] == fields["ground_truth"]
    assert row_of(text, "finish").split()[-1] == fields["finish_reason"]
    assert float(row_of(text, "reward").split()[-1]) == pytest.approx(fields["reward"], abs=1e-5)
    assert f"\nprompt\n{row['prompt']}\n" in text
    assert f"\nresponse\n{row['response']}\n" in text


def test_tokens_that_differ_most_are_marked_in_order(tmp_path: Path, cli: Cli) -> None:
    run = made(tmp_path / "a", ["abc"])
    shutil.rmtree(run / "tape" / "step_000001" / "old_log_prob.0")
    old = Batch(
        ("d.e0.r0.n0",),
        {"old_log_probs": Ragged.from_rows([[-1.0, -1.5, -0.75]], np.float32)},
        MEANT,
    )
    tape = Tape(RunLayout(run / "tape"), "run", lambda stage, split: {})
    tape.wrap(Given("old_log_prob", ("old_log_probs",), lambda b: old), "record")(
        Batch(old.sample_id, {"prompt": ["question 0"]}), At(1)
    )
    tape.close()
    assert cli.json("inspect", run, "--sample", "r0.n0")["worst_positions"] == [1, 2]
    _, text = cli("inspect", run, "--sample", "r0.n0", "--worst", "1")
    assert row_of(text, "    1 ").split()[-3:] == ["-5.0e-01", "←", "1"]
    assert "←" not in row_of(text, "    2 ")


def test_another_tokenizer_than_the_recorded_gives_no_texts(
    recorded: Path, demo_files: Path, tmp_path: Path, cli: Cli
) -> None:
    run, model = tmp_path / "a", tmp_path / "model"
    shutil.copytree(recorded / "a", run)
    shutil.copytree(demo_files / "model", model)
    config = (run / "config.yaml").read_text()
    sample = cli.json("inspect", run, "--step", "1")[0]["sample_id"]
    assert cli.json("inspect", run, "--sample", sample)["tokens"][0]["text"]
    changed = (model / "tokenizer.json").read_text().replace('"1"', '"x"')
    (model / "tokenizer.json").write_text(changed)
    for folder, said in ((model, "another digest"), (tmp_path / "gone", "cannot be loaded")):
        (run / "config.yaml").write_text(config.replace(str(demo_files / "model"), str(folder)))
        code, text = cli("inspect", run, "--sample", sample)
        assert (code, said in text.replace("\n", " ")) == (0, True)
        assert cli.json("inspect", run, "--sample", sample)["tokens"][0]["text"] is None


def test_a_response_cannot_steer_the_terminal(tmp_path: Path, cli: Cli) -> None:
    run = made(tmp_path / "a", ["\x1b[2Jboo \u202e[bold]x[/bold]", "\x1b]0;title\x07"])
    other = made(tmp_path / "b", ["\x1b[3Jboo", "y"])
    for words in (("inspect", run, "--step", "1"), ("inspect", run, "--sample", "r0.n0"), ("diff", run, other)):
        _, text = cli(*words)
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
        assert "\\x1b[2Jboo \\u202e[bold]x[/bold]" in text


def test_an_id_must_name_one_sample(tmp_path: Path, cli: Cli) -> None:
    run = made(tmp_path / "a", ["x", "y"])
    code, text = cli("inspect", run, "--sample", "n0")
    assert code == 2
    assert "2 samples of step 1" in text
    assert "d.e0.r0.n0, d.e0.r1.n0" in text
    code, text = cli("inspect", run, "--sample", "r7.n0")
    assert (code, "'r7.n0'" in text) == (2, True)
    assert cli("inspect", run, "--sample", "0.n0")[0] == 2, "an id is not cut within a part"


def test_validation_is_apart(recorded: Path, cli: Cli) -> None:
    code, text = cli("inspect", recorded / "a", "--step", "0")
    assert (code, "--val" in text) == (1, True)
    data = cli.json("inspect", recorded / "a", "--step", "0", "--val")
    assert [r["split"] for r in data] == ["val", "val"]
    code, text = cli("inspect", recorded / "a", "--val", "--sample", data[0]["sample_id"])
    assert (code, "step 0 (validation)" in text) == (0, True)
    assert "no log-probs of the trainer are recorded" in text


def test_one_stage_over_the_steps_and_one_record_in_full(recorded: Path, cli: Cli) -> None:
    _, text = cli("inspect", recorded / "a", "--stage", "update")
    listed = cli.json("inspect", recorded / "a", "--stage", "update")["records"]
    assert [r["step"] for r in listed] == [1, 2]
    for r in listed:
        assert r["digest"][:16] in row_of(text, f"{r['step']} ")
    code, text = cli("inspect", recorded / "a", "--stage", "update", "--step", "2")
    full = cli.json("inspect", recorded / "a", "--stage", "update", "--step", "2")[0]
    assert code == 0
    assert full["digest"] == listed[1]["digest"]
    assert full["info"]["state"]["after"]["weights"] in text
    assert row_of(text, "optim.lr ").split()[-1] == "0.001"
    for name in (*full["fields"], *full["reads"]):
        assert row_of(text, f"{name} ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "9"], "no step 9; recorded: 0 to 2"),
        (["--stage", "critic"], "no record of critic; recorded: sync, rollout"),
        (["--stage", "critic", "--step", "1"], "recorded at step 1"),
    ],
)
def test_what_is_not_recorded_is_refused_with_what_is(words: list[str], said: str, recorded: Path, cli: Cli) -> None:
    code, text = cli("inspect", recorded / "a", *words)
    assert code == 2
    assert said in text


def test_a_tape_that_lies_elsewhere_is_found(recorded: Path, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "a"
    shutil.copytree(recorded / "a", run)
    (run / "tape").rename(tmp_path / "far")
    assert cli("inspect", run)[0] == 2
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        config.replace("tape:\n  mode: record\n  dir: null", f"tape:\n  dir: {tmp_path}/far")
    )
    assert cli("inspect", run)[0] == 0
    assert cli("diff", run, recorded / "a")[0] == 0


def test_a_broken_configuration_is_named(tmp_path: Path, cli: Cli) -> None:
    run = made(tmp_path / "a", ["x"])
    for text in ("a: [", "just text", "- 1", "tape: 3", "!!python/object:os.system {}"):
        (run / "config.yaml").write_text(text)
        code, said = cli("inspect", run)
        assert (code, str(run / "config.yaml") in said) == (2, True), text


@pytest.mark.parametrize("command", ["diff", "inspect"])
def test_help_shows_how(command: str, cli: Cli) -> None:
    with pytest.raises(SystemExit) as end:
        cli(command, "--help")
    text = cli.capsys.readouterr().out
    assert end.value.code == 0
    assert f"  crossrl {command} outputs/" in text
    assert "exit codes: 0 " in text
    assert max(map(len, text.splitlines())) <= 120


def in_terminal(lines: int, *words: str | Path) -> str:
    """What a terminal of this height gets, with a pager that marks its lines."""
    own, other = pty.openpty()
    code = "import sys; from crossrl.cli.main import main; sys.exit(main())"
    env = {**os.environ, "PAGER": "sed 's/^/PAGED /'", "COLUMNS": "80", "LINES": str(lines), "TERM": "xterm"}
    command = [sys.executable, "-c", code, *map(str, words)]
    process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=env)
    os.close(other)
    out = b""
    try:
        while part := os.read(own, 65536):
            out += part
    except OSError:  # the other end is closed
        pass
    os.close(own)
    assert process.wait(60) == 0
    return out.decode()


def test_what_is_longer_than_the_terminal_goes_through_the_pager(tmp_path: Path) -> None:
    run = made(tmp_path / "a", ["x"] * 30)
    assert "PAGED" in in_terminal(20, "inspect", run, "--step", "1")
    assert "PAGED" not in in_terminal(60, "inspect", run, "--step", "1")
