"""crossrl cross: both sides recorded, examined by each other, halves swapped live, and a verdict over all of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from crossrl.cli.main import main
from crossrl.cross.experiment import ExperimentError, Runner
from crossrl.cross.findings import Examination, Finding, Verdict, from_json, to_json
from crossrl.cross.plan import PlanError, make_plan


@pytest.fixture
def side(demo_files, tmp_path):
    """A configuration file for both sides, and what makes a plan of it."""
    config = tmp_path / "side.yaml"
    config.write_text(
        f"""
data:
  train_files: {demo_files}/train.parquet
  train_max_samples: 32
  train_batch_size: 4
  max_prompt_length: 8
  max_response_length: 6
actor_rollout_ref:
  model: {{path: {demo_files}/model}}
  actor: {{ppo_mini_batch_size: 2, optim: {{lr: 1.0e-3}}}}
  rollout: {{n: 4}}
reward:
  custom_reward_function: {{path: {demo_files}/sort_reward.py}}
  num_workers: 1
trainer: {{device: cpu, num_threads: 1, total_training_steps: 8}}
"""
    )
    return str(config)


def quick(root: Path, config: str, *a: str, b: tuple[str, ...] = ()) -> Verdict:
    plan = make_plan(root, a, b, 2, None, (config, config))
    said: list[str] = []
    return Runner(plan, lambda lines: None, said.append, lambda early: None, 300.0, main).run(quick=True)


def test_a_planted_fault_is_located_by_two_recorded_steps_of_each_side(side, tmp_path):
    found = quick(tmp_path / "x", side, "cross.plant=training.lr_times_ten")
    assert (found.conclusion, found.side, found.step, found.stages) == ("training", "A", 1, ("update",))
    assert found.exit_code == 1
    assert from_json(Verdict, json.loads((tmp_path / "x" / "verdict.json").read_text())) == found


def test_two_equal_sides_give_no_difference(side, tmp_path):
    found = quick(tmp_path / "x", side)
    assert (found.conclusion, found.exit_code) == ("no difference", 0)


def test_a_run_whose_length_is_given_in_epochs_goes_on_after_its_recorded_steps(side, tmp_path):
    epochs = ["trainer.total_training_steps=null", "trainer.total_epochs=1"]
    plan = make_plan(tmp_path / "x", epochs, epochs, 2, None, (side, side))
    runner = Runner(plan, lambda lines: None, lambda text: None, lambda early: None, 300.0, main)
    for until in (2, None):
        runner.together(plan.alone("BB", until))
    assert [p.state for p in runner.lines] == ["done", "done"]
    assert len((plan.folder.arm("BB") / "metrics.jsonl").read_text().splitlines()) == 8


def test_b_is_called_deterministic_only_where_its_own_examination_judged_what_the_weights_decide(side, tmp_path):
    plan = make_plan(tmp_path / "x", [], [], 2, None, (side, side))
    runner = Runner(plan, lambda lines: None, lambda text: None, lambda early: None, 300.0, main)
    path = plan.folder.examined("B", "B")
    path.parent.mkdir(parents=True)

    def deterministic(**judged: str) -> bool:
        stages = {"rollout": "equal", "update": "equal", "reward": "equal", "sync": "equal"} | judged
        found = tuple(Finding("B", "B", s, 1, j, "") for s, j in stages.items())
        path.write_text(json.dumps(to_json(Examination("B", "B", (1,), "exact", (), found))))
        return runner.deterministic()

    assert deterministic() and deterministic(data="not judged")
    for stage in ("rollout", "update", "old_log_prob", "ref_log_prob"):
        assert not deterministic(**{stage: "not judged"}), stage
    assert not deterministic(update="noise") and not deterministic(reward="differs")
    path.write_text(
        json.dumps(to_json(Examination("B", "B", (1,), "exact", (), (Finding("B", "B", "data", 1, "equal", ""),))))
    )
    assert not runner.deterministic()  # nothing that the weights decide was judged
    path.unlink()
    assert not runner.deterministic()


def test_a_side_that_cannot_start_is_an_error_with_its_reason_and_no_verdict(side, tmp_path):
    with pytest.raises(ExperimentError, match=r"A alone: nothing was recorded\. exit code 2: error: .*no such model"):
        quick(tmp_path / "x", side, "actor_rollout_ref.model.path=/nowhere")
    assert not (tmp_path / "x" / "verdict.json").exists()


def test_what_is_done_is_kept_and_another_experiment_in_the_folder_is_refused(side, tmp_path):
    quick(tmp_path / "x", side)
    records = sorted((tmp_path / "x").rglob("record.json"))
    before = {p: p.stat().st_mtime_ns for p in records}
    quick(tmp_path / "x", side)
    assert {p: p.stat().st_mtime_ns for p in records} == before
    with pytest.raises(PlanError, match="side A has other settings"):
        quick(tmp_path / "x", side, "trainer.seed=5")


def test_sides_whose_halves_do_not_fit_together_are_not_swapped_and_the_keys_are_named(side, tmp_path):
    plan = make_plan(tmp_path / "x", ["actor_rollout_ref.rollout.n=2"], [], 2, None, (side, side))
    assert "actor_rollout_ref.rollout.n: A 2, B 4" in plan.forbidden
    assert make_plan(tmp_path / "y", ["actor_rollout_ref.actor.optim.lr=1"], [], 2, None, (side, side)).forbidden == ""


def test_a_remote_side_s_command_is_one_shell_line_with_its_environment(side, tmp_path):
    far = ["cross.remote=ssh gpu7", "cross.env={OMP_NUM_THREADS: '4'}", "cross.python=/opt/py"]
    job = make_plan(tmp_path / "x", far, [], 2, None, (side, side)).alone("AA", 2)
    line = job.shell()
    assert line.startswith("ssh gpu7 ")
    # What the shell there would run, run here but for the interpreter.
    inner = line.removeprefix("ssh gpu7 ").replace("/opt/py", sys.executable)
    subprocess.run(["bash", "-c", f"mkdir -p {job.log.parent}; eval {inner}"], check=True, timeout=120)
    assert job.exit_file.read_text().strip() == "0", job.log.read_text()[-2000:]
    assert len((job.run / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_experiment_runs_all_arms_and_writes_verdict_and_report(side, tmp_path):
    command = [
        sys.executable, "-m", "crossrl", "cross", "--a", side, "--b", side, "--out", str(tmp_path / "x"),
        "--record-steps", "2", "--set-a", "cross.plant=inference.rotary_base",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=580, env={**os.environ, "COLUMNS": "120"}, check=False
    )
    assert done.returncode == 1, done.stderr[-3000:]
    assert "inference of A is at fault, since step 1" in done.stdout
    assert "so far, from the recorded steps: inference of A" in done.stderr
    for arm in ("AA", "BB", "AB/infer", "AB/train", "BA/infer", "BA/train"):
        rows = (tmp_path / "x" / "arms" / arm / "metrics.jsonl").read_text().splitlines()
        assert len(rows) == 8, arm
    assert not (tmp_path / "x" / "arms" / "BB2").exists()  # B is deterministic: a repeat would be the same run
    assert "</html>" in (tmp_path / "x" / "report.html").read_text(encoding="utf-8")
