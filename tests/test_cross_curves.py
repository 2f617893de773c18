"""Metrics of an experiment's arms and of foreign runs: what is read, what is refused, and how far a run has got."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from cross_cases import metrics, write_jsonl

from crossrl import trainer
from crossrl.cross.arms import Arm, load_experiment
from crossrl.cross.curves import CurveError, common_name, no_signal_since, non_finite, read_curves
from crossrl.trainer import Trainer, TrainingError

REWARD = "critic/score/mean"


def test_a_run_folder_is_read_validation_lines_and_non_finite_values_included(tmp_path):
    lines = [
        {"step": 0, "val-core/x/acc/mean@1": 0.5},
        {"step": 1, REWARD: 0.25},
        {"step": 1, "val-core/x/acc/mean@1": 0.6},
        {"step": 2, REWARD: None, "non_finite": {REWARD: "nan"}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    curves = read_curves(tmp_path)
    assert curves.finite(REWARD) == {1: 0.25}
    assert curves.finite("val-core/x/acc/mean@1") == {0: 0.5, 1: 0.6}
    assert non_finite(curves) == {REWARD: 2}
    assert curves.last_step == 2


def test_the_torn_last_line_of_a_live_run_is_left_out(tmp_path):
    path = write_jsonl(tmp_path / "metrics.jsonl", {REWARD: {1: 0.1, 2: 0.2}}, torn='{"step": 3, "critic/sco')
    assert read_curves(path).finite(REWARD) == {1: 0.1, 2: 0.2}


def test_a_damaged_line_in_the_middle_is_refused_with_its_number(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "reward": 0.1}\n{"step": 2, "rew\n{"step": 3, "reward": 0.1}\n')
    with pytest.raises(CurveError, match="line 2"):
        read_curves(path)


def test_verls_file_logger_is_read_and_its_null_is_not_a_number(tmp_path):
    path = tmp_path / "verl.jsonl"
    rows = [{"step": 1, "data": {REWARD: 0.5, "actor/entropy": 1.0}}, {"step": 2, "data": {REWARD: None}}]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    curves = read_curves(path)
    assert curves.finite(REWARD) == {1: 0.5} and math.isnan(curves.series[REWARD][2])
    assert curves.named("entropy") == "actor/entropy" and curves.named("gap") is None


def test_the_hugging_face_trainers_state_is_read(tmp_path):
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": [{"step": 1, "reward": 0.5, "grad_norm": 2.0, "entropy": 0.1}]}))
    curves = read_curves(path)
    assert [curves.named(m) for m in ("reward", "gradient norm", "entropy")] == ["reward", "grad_norm", "entropy"]


def test_csv_is_read_also_as_exported_from_a_tracker(tmp_path):
    path = tmp_path / "export.csv"
    path.write_text(f'"Step","run-7 - {REWARD}","run-7 - {REWARD}__MIN","note"\n1,0.5,0.5,x\n2,,,\n3,nan,0.1,y\n4,0.')
    curves = read_curves(path)
    assert curves.finite(REWARD) == {1: 0.5} and non_finite(curves) == {REWARD: 3}  # the torn line 4 is left out


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("m.jsonl", '{"reward": 0.5}\n', "has no step"),
        ("m.jsonl", "", "holds no metrics"),
        ("m.jsonl", '{"step": 1, "note": "x"}\n', "holds no metrics"),
        ("m.json", "{", "not JSON"),
        ("m.json", '{"a": 1}', "log_history"),
        ("m.jsonl", "[1]\n", "line 1"),
    ],
)
def test_a_file_without_metrics_is_refused(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(CurveError, match=says):
        read_curves(tmp_path / name)
    with pytest.raises(CurveError, match="cannot read"):
        read_curves(tmp_path / "nowhere.jsonl")


def test_score_and_shaped_reward_are_not_compared_with_each_other(tmp_path):
    both = read_curves(write_jsonl(tmp_path / "a.jsonl", {REWARD: {1: 1.0}, "critic/rewards/mean": {1: 0.5}}))
    one = read_curves(write_jsonl(tmp_path / "b.jsonl", {"critic/rewards/mean": {1: 0.5}}))
    assert common_name("reward", [both, one]) == "critic/rewards/mean"
    assert common_name("entropy", [both, one]) is None


def test_no_signal_is_a_gradient_of_exactly_0_or_equal_groups_up_to_the_end(tmp_path):
    def since(name: str, **series: dict[int, float]) -> int | None:
        named = {k.replace("_IN_", "/"): v for k, v in series.items()}
        return no_signal_since(read_curves(write_jsonl(tmp_path / f"{name}.jsonl", named)))

    steps = range(1, 11)
    assert since("a", actor_IN_grad_norm={s: float(s < 5) for s in steps}) == 5
    assert since("b", actor_IN_grad_norm={s: float(s < 7) for s in steps}) is None  # 4 steps: may be chance
    assert since("c", actor_IN_grad_norm={s: float(s == 10) for s in steps}) is None  # it came back
    groups = dict.fromkeys(steps, 4.0)
    equal = {s: 4.0 if s > 2 else 3.0 for s in steps}
    assert since("d", advantage_IN_groups=groups, advantage_IN_groups_all_equal=equal) == 3


def run_folder(path: Path, steps: int, planned: int | None, done: bool) -> Path:
    write_jsonl(path / "metrics.jsonl", metrics(0, steps))
    (path / "config.yaml").write_text(f"trainer:\n  total_training_steps: {planned or 'null'}\n")
    if done:
        (path / "huggingface").mkdir()
    return path


def test_how_far_each_arm_has_got(tmp_path):
    run_folder(tmp_path / "arms/AA", 7, 20, done=False)
    run_folder(tmp_path / "arms/BB", 20, 20, done=True)
    run_folder(tmp_path / "arms/BA/train", 20, None, done=True)
    run_folder(tmp_path / "arms/BA/infer", 20, None, done=True)
    run_folder(tmp_path / "arms/AB/train", 5, 20, done=False)
    with (tmp_path / "arms/AB/train/.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (tmp_path / "arms/AB/infer").mkdir()
        with (tmp_path / "arms/AB/infer/.lock").open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            found = load_experiment(tmp_path).arms
    assert {n: a.state for n, a in found.items()} == {
        "AA": "failed", "BB": "done", "BB2": "missing", "AB": "running", "BA": "done",
    }  # fmt: skip
    assert "stopped after step 7 of 20" in found["AA"].reason
    assert found["AB"].curves is not None and found["AB"].curves.last_step == 5


def test_a_pair_tells_why_it_failed_in_the_words_of_the_side_that_did(tmp_path):
    run_folder(tmp_path / "arms/AB/train", 5, 20, done=False)
    peers = tmp_path / "arms/AB/share/peers"
    peers.mkdir(parents=True)
    (peers / "ckpt.json").write_text(json.dumps({"state": "failed", "reason": "out of memory"}))
    (peers / "rollout.json").write_text(json.dumps({"state": "running"}))
    arm = load_experiment(tmp_path).arms["AB"]
    assert (arm.state, arm.reason) == ("failed", "inference half: out of memory")


def pair_that_failed(root: Path, steps: int, **reasons: str) -> Arm:
    for half in ("train", "infer"):
        run_folder(root / "arms/AB" / half, steps, 20, done=False)
        if not steps:
            (root / "arms/AB" / half / "metrics.jsonl").unlink()
    peers = root / "arms/AB/share/peers"
    peers.mkdir(parents=True)
    for role, reason in reasons.items():
        (peers / f"{role}.json").write_text(json.dumps({"state": "failed", "reason": reason}))
    return load_experiment(root).arms["AB"]


GONE = "the run that infers (/x on h, process 1) died: its process is gone"


@pytest.mark.parametrize(
    ("steps", "reasons"),
    [(0, {"ckpt": "out of memory"}), (0, {}), (5, {"rollout": GONE}),
     (5, {"ckpt": "No space left on device", "rollout": GONE.replace("infers", "trains")}),
     (5, {"ckpt": "this run and ... differ in what both sides of an exchange must have in common"}),
     (5, {"ckpt": "stopped by Ctrl-C"})],
)  # fmt: skip
def test_a_pair_that_never_ran_or_whose_exchange_failed_is_missing_with_its_reason(tmp_path, steps, reasons):
    arm = pair_that_failed(tmp_path, steps, **reasons)
    assert arm.state == "missing"
    assert all(reason in arm.reason for reason in reasons.values()) and arm.reason


def test_what_a_pair_computed_and_failed_by_is_a_failure_though_the_other_half_lost_its_peer(tmp_path):
    lost = "the run that infers (/x on h, process 1) failed: gradients are not finite"
    arm = pair_that_failed(tmp_path, 5, ckpt="gradients are not finite", rollout=lost)
    assert (arm.state, arm.reason) == ("failed", "inference half: gradients are not finite")


def test_a_run_of_another_machine_or_without_a_lock_that_can_be_asked_is_not_called_failed(tmp_path, monkeypatch):
    run = run_folder(tmp_path / "arms/AA", 7, 20, done=False)
    (run / ".lock").write_text("elsewhere 17\n")
    found = load_experiment(tmp_path).arms["AA"]
    assert found.state == "running" and "cannot be told from this machine" in found.reason
    (run / ".lock").write_text(f"{socket.gethostname()} 17\n")
    assert load_experiment(tmp_path).arms["AA"].state == "failed"

    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert load_experiment(tmp_path).arms["AA"].state == "running"


def test_looking_whether_a_run_is_alive_does_not_stop_one_that_is_about_to_start(tmp_path, monkeypatch):
    """``crossrl verdict`` holds the lock for the moment of its look."""
    starting = SimpleNamespace(folder=tmp_path)
    with (tmp_path / ".lock").open("w") as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        later = threading.Timer(0.3, fcntl.flock, (look, fcntl.LOCK_UN))
        later.start()
        with Trainer._lock(starting):
            assert (tmp_path / ".lock").read_text() == f"{socket.gethostname()} {os.getpid()}\n"
            monkeypatch.setattr(trainer, "LOCK_S", 0.1)
            with pytest.raises(TrainingError, match="another run is writing"), Trainer._lock(starting):
                pass
        later.join()


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(CurveError, match="is no folder"):
        load_experiment(tmp_path / "nowhere")
    with pytest.raises(CurveError, match="--aa"):
        load_experiment(None, {"AA": tmp_path / "nowhere"})
    (tmp_path / "examined").mkdir()
    (tmp_path / "examined/A_by_B.json").write_text('{"of": "A"}')
    with pytest.raises(CurveError, match="damaged"):
        load_experiment(tmp_path)


def test_the_trainers_own_counter_is_the_step_before_the_trackers(tmp_path):
    path = tmp_path / "wandb.jsonl"
    path.write_text('{"_step": 99, "train/global_step": 3, "timing_s/step": 2.5, "reward": 0.5}\n')
    curves = read_curves(path)
    assert curves.series == {"timing_s/step": {3: 2.5}, "reward": {3: 0.5}}


def test_a_table_that_is_not_one_run_s_is_refused_and_not_half_read(tmp_path):
    file = tmp_path / "two.csv"
    file.write_text("Step,r1 - critic/score/mean,r2 - critic/score/mean\n1,0.5,0.6\n")
    with pytest.raises(CurveError, match="2 columns of critic/score/mean: want the metrics of one run"):
        read_curves(file)
    file.write_bytes("step,critic/score/mean\r\n1,0.5\r\n".encode("utf-16"))
    with pytest.raises(CurveError):
        read_curves(file)
    file.write_bytes("step,critic/score/mean\r\n1,0.5\r\n".encode("utf-8-sig"))  # as spreadsheets write it
    assert read_curves(file).series == {"critic/score/mean": {1: 0.5}}
