"""Which half of a run is at fault, from the records of the arms alone; and the commands of two sides of verl."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from verl_runs import faults, simulate

from crossrl.cli.main import main
from crossrl.cross import runner
from crossrl.cross.arm_records import judge_arms
from crossrl.cross.commands import ARM_KEYS, make_command_plan
from crossrl.cross.curves import CurveError
from crossrl.cross.plan import PlanError
from crossrl.cross.verdict import VerdictError, recompute
from crossrl.tape import CorruptRecord

PROGRAM = f"{sys.executable} {Path(__file__).parent / 'verl_runs.py'}"


def experiment(root: Path, a: str = "", again: str | None = None, leave_out: tuple[str, ...] = ()) -> Path:
    """The arms of A, with faults ``a``, and a healthy B. ``again``: faults of BB2, which is not there without."""
    arms = {
        "AA": (a, a, True), "BB": ("", "", True), "AB": (a, "", False), "BA": ("", a, False),
        "BB2": (again or "", again or "", True),
    }  # fmt: skip
    for name, (infers, trains, alone) in arms.items():
        if name not in leave_out and not (name == "BB2" and again is None):
            where = root / "arms" / name / ("" if alone else "train")
            simulate(where, faults(infers), faults(trains), alone)
            if not alone:
                shutil.copytree(where, where.parent / "infer")
    return root


@pytest.mark.parametrize(
    ("a", "conclusion", "step", "stages", "also"),
    [
        ("tokens@1", "inference", 1, ("rollout",), ()),
        ("stale@2", "inference", 2, ("rollout",), ("weight sync",)),
        ("sync@2", "weight sync", 2, ("rollout",), ()),
        ("prompts@2", "data", 2, ("rollout",), ()),
        ("reward@2", "reward", 2, ("reward",), ()),
        ("old@1", "training", 1, ("old_log_prob",), ()),
        ("sign@3", "training", 3, ("advantage",), ()),
        ("update@2", "training", 2, ("update",), ()),
    ],
)
def test_a_fault_is_attributed_to_its_part_and_first_step(tmp_path, a, conclusion, step, stages, also):
    verdict, _ = recompute(experiment(tmp_path, a))
    assert (verdict.conclusion, verdict.side, verdict.step, verdict.stages) == (conclusion, "A", step, stages)
    assert verdict.parts == (conclusion, *also)
    assert verdict.exit_code == 1
    assert verdict.gaps[0].field in " ".join(e.sentence for e in verdict.evidence)


def test_two_healthy_sides_are_no_difference(tmp_path):
    verdict, _ = recompute(experiment(tmp_path))
    assert (verdict.conclusion, verdict.exit_code) == ("no difference", 0)
    assert "AA (A alone) is BB bit for bit in all 15 records of steps 1 to 3." in [e.sentence for e in verdict.evidence]


def test_runs_that_are_named_one_by_one_are_judged_by_their_records(tmp_path):
    arms = experiment(tmp_path, "update@2") / "arms"
    named = {"AA": arms / "AA", "BB": arms / "BB", "AB": arms / "AB/train", "BA": arms / "BA/train"}
    assert recompute(None, named)[0].conclusion == "training"
    assert recompute(None, {**named, "AA": arms / "BB", "AB": arms / "BB", "BA": arms / "BB"})[0].exit_code == 0


def test_a_fault_that_hides_behind_another_one_is_found_in_the_pair(tmp_path):
    verdict, _ = recompute(experiment(tmp_path, "tokens@1,update@2", again=""))
    assert (verdict.conclusion, verdict.parts, verdict.step) == ("several", ("inference", "training"), 1)


def test_without_a_repeat_of_b_a_difference_is_not_blamed(tmp_path):
    root = experiment(tmp_path, "tokens@2", leave_out=("AB", "BA"))
    verdict, _ = recompute(root)
    assert (verdict.conclusion, verdict.exit_code) == ("not distinguishable", 2)
    assert "Nothing shows that B itself makes the same rollout of step 2 twice" in str(verdict.evidence)
    simulate(root / "arms/BB2", {}, {}, True)
    assert recompute(root)[0].conclusion == "inference"


@pytest.mark.parametrize(("own", "a"), [("tokens@3", "tokens@2"), ("update@3", "update@1")])
def test_where_b_does_not_repeat_itself_nothing_is_claimed(tmp_path, own, a):
    verdict, _ = recompute(experiment(tmp_path, a, again=own))
    assert verdict.exit_code == 2
    assert "B does not repeat itself: in BB2 (B once more)" in str(verdict.evidence)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"torch": "3"}, "torch: 3 against 2"),
        ({"dtype": "half"}, "actor_rollout_ref.rollout.dtype: half against float32"),
    ],
)
@pytest.mark.parametrize("fault", ["tokens@2", "update@2"])
def test_what_a_declared_difference_may_round_otherwise_is_not_blamed(tmp_path, fault, more, named):
    root = experiment(tmp_path, fault, leave_out=("AA",))
    simulate(root / "arms/AA", faults(fault), faults(fault), True, **more)
    verdict, _ = recompute(root)
    assert verdict.exit_code == 2
    assert f"A and B differ in {named}: rounding alone" in str(verdict.evidence)


def test_a_declared_difference_does_not_excuse_rewards_or_prompts(tmp_path):
    for fault, part in (("reward@2", "reward"), ("prompts@2", "data")):
        root = experiment(tmp_path / part, fault, leave_out=("AA",))
        simulate(root / "arms/AA", faults(fault), faults(fault), True, torch="3")
        assert recompute(root)[0].conclusion == part


def test_a_half_of_b_that_differs_in_a_pair_is_not_blamed_on_a(tmp_path):
    root = experiment(tmp_path, "update@1", leave_out=("AB",))
    simulate(root / "arms/AB/train", {}, faults("update@2"), False)  # B's training, and not as in BB
    verdict, _ = recompute(root)
    assert verdict.exit_code == 2
    assert "its own update of step 2 differs from BB's on equal inputs" in str(verdict.evidence)


def test_a_pair_that_differs_although_a_alone_does_not_is_blamed_on_no_side(tmp_path):
    root = experiment(tmp_path, leave_out=("AB",))
    simulate(root / "arms/AB/train", faults("tokens@2"), {}, False)
    verdict, _ = recompute(root)
    assert (verdict.conclusion, verdict.side) == ("not distinguishable", None)
    assert "the halves do not fit together" in str(verdict.evidence)


def test_other_initial_weights_are_nobody_s_fault(tmp_path):
    root = experiment(tmp_path, leave_out=("AA",), again="")
    simulate(root / "arms/AA", {}, {}, True, start=6)
    verdict, _ = recompute(root)
    assert verdict.exit_code == 2
    assert "rollout of step 1 was done with other weights" in str(verdict.evidence)


def test_where_no_record_says_with_which_weights_nothing_is_claimed(tmp_path):
    root = experiment(tmp_path, leave_out=("AA", "BB", "AB", "BA"))
    simulate(root / "arms/AA", faults("tokens@2"), {}, True, digests=False)
    for name in ("BB", "BB2"):
        simulate(root / "arms" / name, {}, {}, True, digests=False)
    verdict, _ = recompute(root)
    assert verdict.exit_code == 2
    assert "no record says with which weights" in str(verdict.evidence)


def test_a_shorter_run_that_is_equal_so_far_is_not_no_difference(tmp_path):
    root = experiment(tmp_path, leave_out=("AA", "AB", "BA"), again="")
    simulate(root / "arms/AA", {}, {}, True, steps=2)
    verdict, _ = recompute(root)
    assert verdict.exit_code == 2
    assert "it has fewer steps than BB" in str(verdict.evidence)


@pytest.mark.parametrize("skip", [("rollout",), ("update",), ("reward",)])
def test_records_that_lack_a_stage_prove_nothing(tmp_path, skip):
    root = experiment(tmp_path, leave_out=("AA", "BB", "AB", "BA"))
    for name in ("AA", "BB"):
        simulate(root / "arms" / name, {}, {}, True, skip=skip)
    found = judge_arms({name: root / "arms" / name for name in ("AA", "BB")})
    assert found is not None and found.conclusion is None


def test_a_comparison_of_nothing_fails(tmp_path):
    simulate(tmp_path / "arms/BB", {}, {}, True)
    assert judge_arms({"BB": tmp_path / "arms/BB", "BB2": tmp_path / "arms/BB"}) is None
    with pytest.raises(VerdictError, match="nothing to compare"):
        recompute(tmp_path)
    with pytest.raises(CurveError):
        recompute(tmp_path / "missing")


def test_a_damaged_record_is_an_error_and_no_difference(tmp_path):
    root = experiment(tmp_path, "tokens@3")
    file = root / "arms/AA/tape/step_000001/rollout.0/tensors.safetensors"
    body = bytearray(file.read_bytes())
    body[-1] ^= 1
    file.write_bytes(body)
    with pytest.raises(CorruptRecord):
        recompute(root)


def test_the_sampler_s_own_gap_is_evidence_for_inference(tmp_path):
    verdict, _ = recompute(experiment(tmp_path, "stale@2"))
    assert "log-probs 0.1 nat apart in the mean in AB, 0 in BB" in str(verdict.evidence)
    verdict, _ = recompute(experiment(tmp_path / "t", "update@2"))
    assert "nat apart" not in str(verdict.evidence)


# -- crossrl cross on two commands ------------------------------------------------------------------------------------


def cross(out: Path, a: str, b: str, *more: str) -> int:
    return main(["cross", "--out", str(out), "--a-command", a, "--b-command", b, *more])


@pytest.mark.slow
def test_a_fault_in_one_of_two_commands_is_judged_and_what_is_done_is_kept(tmp_path, capsys):
    sides = f"FAULTS=update@2 {PROGRAM}", PROGRAM
    assert cross(tmp_path, *sides, "--steps", "3") == 1
    assert "verdict: training of A is at fault, since step 2" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert "Training of A is at fault: stage update, since step 2" in page and "Missing from this page" not in page
    rows = {name: tmp_path / f"arms/{name}/metrics.jsonl" for name in ("AA", "AB/train", "BA/infer")}
    before = {name: path.stat().st_ino for name, path in rows.items()}
    (tmp_path / "logs/BA-train.exit_code").unlink()  # as if it was stopped there: the pair runs again, both halves
    assert cross(tmp_path, *sides, "--steps", "3") == 1
    same = {name: path.stat().st_ino == before[name] for name, path in rows.items()}
    assert same == {"AA": True, "AB/train": True, "BA/infer": False}


def test_two_equal_commands_need_no_pairs(tmp_path, capsys):
    assert cross(tmp_path, PROGRAM, PROGRAM) == 0
    assert "verdict: no difference beyond noise" in capsys.readouterr().out
    assert not (tmp_path / "arms/AB").exists()
    assert "Missing from this page" not in (tmp_path / "report.html").read_text()


def test_what_is_added_to_the_commands(tmp_path):
    a = "KEY=1 OTHER='two words' /opt/python -m verl.trainer.main_ppo data.train_files='[a b.parquet]'"
    plan = make_command_plan(tmp_path, (a, "python -m verl.trainer.main_ppo"), 7)
    alone, (infers, trains) = plan.alone("AA"), plan.pair("AB")
    given = ["/opt/python", "-m", "verl.trainer.main_ppo", "data.train_files=[a b.parquet]"]
    assert alone.command[:4] == given
    assert plan.a.env == {"KEY": "1", "OTHER": "two words"}
    for word in ("++tape.mode=record", "++trainer.total_training_steps=7", "trainer.resume_mode=disable",
                 f"trainer.default_local_dir={tmp_path}/arms/AA"):  # fmt: skip
        assert word in alone.command
    assert not any("share_data" in word for word in alone.command)
    assert (infers.side.name, trains.side.name) == ("A", "B")
    assert {"++trainer.share_data=ckpt", f"++trainer.share_data_dir={tmp_path}/arms/AB/share"} <= set(infers.command)
    assert {"++trainer.share_data=rollout", f"trainer.default_local_dir={trains.run}"} <= set(trains.command)
    assert trains.run == tmp_path / "arms/AB/train"
    assert infers.env["RAY_TMPDIR"] != trains.env["RAY_TMPDIR"] and len(infers.env["RAY_TMPDIR"]) < 20


@pytest.mark.parametrize(
    ("a", "message"),
    [
        ("python -m x ++tape.mode=record", "leave it out"),
        ("python -m x ++trainer.share_data=ckpt", "leave it out"),
        ("KEY=1", "want a program"),
        ("python 'x", "No closing quotation"),
    ],
)
def test_commands_that_cannot_be_crossed_are_refused(tmp_path, a, message):
    with pytest.raises(PlanError, match=message):
        make_command_plan(tmp_path, (a, "python -m x"), None)


def test_other_commands_in_the_same_folder_are_refused(tmp_path):
    make_command_plan(tmp_path, ("python a", "python b"), None)
    with pytest.raises(PlanError, match="other commands or steps"):
        make_command_plan(tmp_path, ("python a", "python c"), None)


@pytest.mark.parametrize("words", [["--a", "demo", "--b-command", "x"], ["--a-command", "x"], []])
def test_half_a_pair_of_sides_is_refused(tmp_path, capsys, words):
    assert main(["cross", "--out", str(tmp_path), *words]) == 2
    assert "both sides alike" in capsys.readouterr().err


def test_a_run_that_hangs_after_an_error_is_ended_with_all_that_it_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "GRACE_S", 0.5)
    monkeypatch.setattr(runner, "LOOK_S", 0.1)
    assert cross(tmp_path, f"{PROGRAM} hang={tmp_path}/child", PROGRAM) == 2
    assert re.search(r"A alone: nothing was recorded. .*Error executing job with overrides", capsys.readouterr().err)
    status = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_an_error_that_somebody_has_caught_ends_no_run_that_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "GRACE_S", 0.3)
    monkeypatch.setattr(runner, "LOOK_S", 0.1)
    assert cross(tmp_path, f"{PROGRAM} handled=1", PROGRAM) == 0
    monkeypatch.setattr(runner, "QUIET_S", 0.3)  # the control: one that says no more, and does no more
    assert cross(tmp_path / "quiet", f"LAST=RayTaskError {PROGRAM} hang={tmp_path}/child", PROGRAM) == 2
    assert "nothing happens for 0.3 s after: RayTaskError" in capsys.readouterr().err


def test_a_side_that_ends_well_without_a_record_is_an_error_before_the_other_is_run(tmp_path, capsys):
    for _ in range(2):  # also when it is started again
        assert cross(tmp_path, PROGRAM, f"{PROGRAM} forgotten=1") == 2
        told = capsys.readouterr().err
        assert "B alone: nothing was recorded. It ended well, but without CrossRL." in told
        assert "installed for the interpreter of --b-command" in told
        assert not (tmp_path / "x/arms/AA").exists() and "A alone" not in told


def test_an_arm_that_is_longer_than_a_alone_is_judged(tmp_path):
    root = experiment(tmp_path, "update@2")
    shutil.rmtree(root / "arms/AA/tape/step_000002")
    shutil.rmtree(root / "arms/AA/tape/step_000003")
    verdict, _ = recompute(root)
    assert (verdict.conclusion, verdict.step) == ("training", 2)


def test_an_arm_leaves_alone_what_the_user_s_own_run_has_written():
    for key in ("rollout_data_dir", "validation_data_dir"):
        assert f"++trainer.{key}=null" in ARM_KEYS


def test_the_next_command_is_the_experiment_s_own(tmp_path):
    root = experiment(tmp_path, "tokens@2", leave_out=("AB", "BA"))
    commands = ["FAULTS=tokens@2 python x", "python x"]
    (root / "experiment.json").write_text(json.dumps({"steps": 3, "commands": commands}))
    verdict, _ = recompute(root)
    assert verdict.todo[0] == (
        f"crossrl cross --a-command {shlex.quote(commands[0])} --b-command 'python x' --out {root} --steps 3"
    )


# -- what the host leaves for it --------------------------------------------------------------------------------------


def test_a_recorded_run_of_verl_says_how_far_it_was_to_go_and_whether_it_runs(tmp_path):
    from omegaconf import OmegaConf

    from crossrl.cross.arms import load_experiment
    from crossrl.hosts.verl.curves import Rows

    config = OmegaConf.create({"model_engine": "dp", "trainer": {"total_training_steps": None}, "data": {"seed": 1}})
    rows, arm = Rows(tmp_path / "arms/AA"), lambda: load_experiment(tmp_path).arms["AA"]
    rows.start(0, config, 2)
    assert (tmp_path / "arms/AA/config.yaml").read_text() == "trainer:\n  total_training_steps: 2\ndata:\n  seed: 1\n"
    rows.add({"step": 1, "critic/rewards/mean": 0.5})
    assert arm().state == "running"
    del rows  # as when its process ends
    assert arm().state == "failed" and "stopped after step 1 of 2" in arm().reason
    rows = Rows(tmp_path / "arms/AA")
    rows.start(1, config, 2)
    rows.add({"step": 2, "critic/rewards/mean": 0.5})
    del rows
    assert arm().state == "done"


def test_what_verl_puts_together_from_sets_is_recorded_in_one_order():
    from crossrl.hosts.verl.padded import _in_order

    given = {"b": {"y": 1, "x": 2}, "a": [3]}
    assert json.dumps(_in_order(given)) == '{"a": [3], "b": {"x": 2, "y": 1}}'
