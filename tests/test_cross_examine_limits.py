"""What an examination cannot judge, what it says about settings and other models, and its command."""

import json

import pytest
import torch
from cross_runs import ACTOR, MODEL, ROLLOUT, Runs, differing, of_stage

from crossrl.cli.main import main
from crossrl.cross.examine import ExamineError
from crossrl.cross.findings import Examination, from_json
from crossrl.models.loading import load_causal_lm, load_tokenizer, save_hf
from crossrl.tape.errors import CorruptRecord


@pytest.fixture(scope="module")
def runs(demo_files, tmp_path_factory):
    return Runs(demo_files, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def clean(runs):
    return runs.record("clean")


OTHER_ORDER = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"]


def test_without_the_state_on_the_tape_the_examiner_walks_as_far_as_it_is_sure(runs):
    runs.record("stateless", "tape.state=False")
    assert {f.judged for f in runs.examine("stateless").findings} == {"equal"}
    rounded = runs.examine("stateless", *OTHER_ORDER)
    assert differing(rounded) == {} and of_stage(rounded, "update", "noise")
    assert "tape.state=True" in of_stage(rounded, "update")[0].sentence
    other = runs.examine("stateless", f"{ACTOR}.optim.lr=1e-2")
    assert differing(other) == {"update": 1}
    assert {f.step for f in of_stage(other, "rollout", "not judged")} == {2}
    assert "tape.state=True" in of_stage(other, "rollout", "not judged")[0].sentence


def test_what_cannot_be_judged_says_why_and_nothing_to_compare_is_an_error(runs, clean, tmp_path):
    runs.record("late", "tape.steps=2")
    late = runs.examine("late")
    assert {f.judged for f in of_stage(late, "rollout") + of_stage(late, "update")} == {"not judged"}
    assert {f.judged for f in of_stage(late, "data") + of_stage(late, "advantage")} == {"equal"}
    runs.record("only", "tape.stages=[update]", "tape.steps=2")
    with pytest.raises(ExamineError, match=r"nothing was compared(.|\n)*tape\.stages"):
        runs.examine("only")
    runs.record("untaped", "tape.mode=off", "tape.state=False")
    with pytest.raises(ExamineError, match=r"tape\.mode=record tape\.state=True"):
        runs.examine("untaped")
    with pytest.raises(ExamineError, match=r"holds 0, 1, 2"):
        runs.examine("clean", steps=frozenset({9}))
    with pytest.raises(ExamineError, match=r"config\.yaml"):
        runs.examine("nowhere")


def test_a_damaged_record_is_an_error_and_no_finding(runs):
    folder = runs.record("damaged")
    file = folder / "tape" / "step_000001" / "update.0" / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptRecord, match=r"state\.safetensors"):
        runs.examine("damaged")


def test_stages_that_one_side_does_not_run_are_not_judged_and_what_they_would_give_is_made_here(runs, clean):
    single = [f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.use_kl_loss=False"]
    runs.record("single", *single)
    examined = runs.examine("single", f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.kl_loss_coef=0.1")
    [missing, *_] = of_stage(examined, "ref_log_prob")
    assert missing.judged == "not judged" and "the run has no record of it" in missing.sentence
    [*_, last] = of_stage(examined, "update")  # at step 1 the policy is the reference, and the KL has no gradient
    assert last.judged == "differs" and "use_kl_loss" in last.sentence
    examined = runs.examine("clean", *single)
    assert "does not run this stage" in of_stage(examined, "old_log_prob", "not judged")[0].sentence


def test_a_difference_names_the_settings_that_explain_it_and_whose_they_are(runs, clean):
    examined = runs.examine("clean", f"{ACTOR}.optim.lr=2e-3", "reward.timeout_s=29", of="B", by="A")
    assert {(s.key, s.a, s.b, s.part) for s in examined.settings} == {
        (f"{ACTOR}.optim.lr", 2e-3, 1e-3, "training"), ("reward.timeout_s", 29.0, 30.0, "reward"),
    }  # fmt: skip
    assert differing(examined) == {"update": 1}
    sentence = of_stage(examined, "update")[0].sentence
    assert f"{ACTOR}.optim.lr (A: 0.002, B: 0.001)" in sentence and "timeout" not in sentence


def test_another_model_is_said_to_be_one_and_the_steps_after_the_first_are_judged(runs, clean, demo_files, tmp_path):
    model = load_causal_lm(demo_files / "model")
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    save_hf(model, load_tokenizer(demo_files / "model"), tmp_path / "model")
    examined = runs.examine("clean", f"{MODEL}.path={tmp_path}/model")
    assert {f.step for f in of_stage(examined, "rollout", "not judged")} == {1}
    assert {f.step for f in of_stage(examined, "rollout", "equal")} == {2}
    assert "other weights" in of_stage(examined, "rollout")[0].sentence
    assert {s.key for s in examined.settings} == {f"{MODEL}.path", "initial weights"}
    assert {f.judged for f in of_stage(examined, "ref_log_prob")} == {"not judged"}


@pytest.mark.parametrize("overrides", [
    ["algorithm.filter_groups.enable=True", "data.gen_batch_size=3", "data.train_max_samples=64"],
    ["algorithm.adv_estimator=remax", f"{ROLLOUT}.top_p=0.9"],
    ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=20"],
    ["algorithm.rollout_correction.bypass_mode=True", "trainer.save_freq=2", f"{ACTOR}.shuffle=True"],
], ids=["dynamic sampling", "remax", "adaptive KL", "bypass"])  # fmt: skip
def test_every_kind_of_run_is_equal_to_itself(runs, overrides):
    name = f"kind_{overrides[0].replace('=', '_')}"
    runs.record(name, *overrides)
    assert {f.judged for f in runs.examine(name, *overrides).findings} == {"equal"}


def test_the_command_writes_json_and_its_exit_code_says_what_was_found(runs, clean, tmp_path, capsys):
    config = str(clean / "config.yaml")
    out = tmp_path / "examined" / "A_by_B.json"
    assert main(["examine", str(clean), "--config", config, "--steps", "1-2", "--out", str(out)]) == 0
    assert from_json(Examination, json.loads(out.read_text())).steps == (1, 2)
    assert main(["examine", str(clean), "--config", config, "--steps", "1", f"{ACTOR}.optim.lr=2e-3"]) == 1
    shown = capsys.readouterr().out
    assert "step 1, update differs" in shown and "Hint: the run's learning rate was 0.001" in shown
    assert main(["examine", str(tmp_path), "--config", config]) == 2
    assert main(["examine", str(clean), "--config", config, "--steps", "1", "cross.plant=reward.flipped"]) in (0, 1)
