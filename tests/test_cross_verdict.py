"""The verdict over examinations and curves: what is blamed, what never is, exit codes, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cross_cases import arms, examination, finding, gap, metrics, write_jsonl

from crossrl.cli.main import main
from crossrl.cross.findings import Examination, Gap, Setting, Verdict, from_json, to_json
from crossrl.cross.next_steps import NextSteps
from crossrl.cross.scenario import Scenario, scenario
from crossrl.cross.verdict import VerdictError, conclude, rounding_of

BAD = {"reward": (31, -0.3)}


def curves(**given) -> Scenario | None:
    return scenario(arms(**given), NextSteps())


def text(verdict: Verdict) -> str:
    return " ".join([*(e.sentence for e in verdict.evidence), *verdict.notes, *verdict.consequences, verdict.noise])


# What is located


@pytest.mark.parametrize(
    ("stage", "part"),
    [("rollout", "inference"), ("reward", "reward"), ("old_log_prob", "training"), ("advantage", "training"),
     ("update", "training"), ("sync", "weight sync"), ("data", "data")],
)  # fmt: skip
def test_a_stage_that_differs_is_the_part_at_fault(stage, part):
    found = finding(stage, 2, hint="matches the weights of one step before")
    verdict = conclude([examination(found), examination(finding(stage, 2, of="B", by="A"), of="B", by="A")])
    assert (verdict.conclusion, verdict.parts, verdict.stages) == (part, (part,), (stage,))
    assert (verdict.side, verdict.step, verdict.exit_code) == ("A", 2, 1)
    assert verdict.gaps == found.gaps
    assert "Matches the weights of one step before." in text(verdict)


def test_several_stages_of_one_part_are_one_fault_since_the_first_of_them():
    verdict = conclude([examination(finding("update", 1), finding("advantage", 2), finding("update", 2))])
    assert (verdict.conclusion, verdict.stages, verdict.step) == ("training", ("update", "advantage"), 1)
    assert "in 2 of the examined steps" in text(verdict)


def test_parts_that_do_not_follow_from_each_other_are_several_the_earliest_first():
    verdict = conclude([examination(finding("reward", 3), finding("rollout", 2))])
    assert (verdict.conclusion, verdict.parts, verdict.step) == ("several", ("inference", "reward"), 2)
    listed = [e.sentence for e in verdict.evidence[:2]]
    assert listed == ["inference: since step 2, in rollout.", "reward: since step 3, in reward."]


def test_rollouts_after_a_failed_sync_are_its_consequence():
    failed = [finding("sync", 1), finding("sync", 2), finding("rollout", 2), finding("rollout", 3)]
    verdict = conclude([examination(*failed)])
    assert (verdict.conclusion, verdict.stages, verdict.step) == ("weight sync", ("sync",), 1)
    assert verdict.consequences == (
        "rollout differs since step 2: it was drawn with what the sync of step 1 left behind.",
    )


def test_a_failed_sync_excuses_no_rollout_after_the_next_good_one_and_none_of_the_other_side():
    verdict = conclude([examination(finding("sync", 1), finding("rollout", 2), finding("rollout", 3))])
    assert (verdict.conclusion, verdict.parts) == ("several", ("weight sync", "inference"))
    assert any(e.sentence == "inference: since step 3, in rollout." for e in verdict.evidence)
    of_b = examination(finding("sync", 1, of="B", by=None), of="B", by="A")
    verdict = conclude([examination(finding("rollout", 2)), of_b])
    assert (verdict.conclusion, verdict.side, verdict.consequences) == ("several", None, ())


def test_a_rollout_before_the_failed_sync_is_a_fault_of_its_own():
    assert conclude([examination(finding("rollout", 1), finding("sync", 1))]).conclusion == "several"


def test_other_prompts_are_a_consequence_of_the_data_and_other_responses_are_not():
    prompts = finding("rollout", 1, gaps=(gap("prompt_ids", None, kind="ids"),))
    verdict = conclude([examination(finding("data", 1), prompts)])
    assert (verdict.conclusion, len(verdict.consequences)) == ("data", 1)
    responses = finding("rollout", 1, gaps=(gap("response_ids", None), gap("prompt_ids", None)))
    assert conclude([examination(finding("data", 1), responses)]).conclusion == "several"


def test_a_checkpoint_holds_what_the_update_made():
    verdict = conclude([examination(finding("update", 2), finding("checkpoint", 2))])
    assert (verdict.stages, len(verdict.consequences)) == (("update",), 1)
    assert conclude([examination(finding("checkpoint", 2))]).stages == ("checkpoint",)


def test_a_setting_that_differs_is_named_as_the_explanation():
    lr = Setting("actor_rollout_ref.actor.optim.lr", 6e-3, 6e-4, "training")
    threads, other = Setting("trainer.num_threads", 1, 2), Setting("reward.function", "x", "y", "reward")
    verdict = conclude([examination(finding("update"), settings=(lr, threads, other))])
    said = [e.sentence for e in verdict.evidence if e.source == "settings"]
    assert said == ["A has actor_rollout_ref.actor.optim.lr 0.006, B 0.0006: it concerns training, and may explain it."]
    assert set(verdict.settings) == {lr, threads, other}


# Which side


def test_the_reference_is_at_fault_when_its_own_records_contradict_each_other():
    own = finding("sync", 1, of="B", by=None)
    verdict = conclude([examination(own, of="B", by="A"), examination()])
    assert (verdict.conclusion, verdict.side) == ("weight sync", "B")
    assert conclude([examination(finding("sync", 1, by=None))]).side == "A"


def test_the_reference_is_not_at_fault_because_it_does_not_repeat_itself_where_the_sides_differ_by_far_more():
    itself = examination(finding("update", of="B", by="B", gaps=(gap(largest=1e-6),)), of="B", by="B")
    verdict = conclude([examination(finding("update")), examination(of="A", by="A"), itself])
    assert (verdict.conclusion, verdict.side) == ("training", "A")


def test_faults_of_both_sides_are_of_no_single_side():
    b = examination(finding("sync", 1, of="B", by=None), of="B", by="A")
    assert conclude([examination(finding("update")), b]).side is None


# What is never blamed


def test_noise_is_never_blamed():
    noise = finding("rollout", 1, "noise", gaps=(gap(largest=1e-6, allowed=2e-4, unit="nat"),))
    verdict = conclude([examination(noise, numerics="float32", because=("trainer.num_threads: 1 against 2",))])
    assert (verdict.conclusion, verdict.exit_code) == ("no difference", 0)
    assert "trainer.num_threads: 1 against 2" in verdict.noise and "at most 1e-06 nat" in verdict.noise


def test_nothing_that_differs_is_no_difference():
    verdict = conclude([examination(), examination(of="B", by="A")])
    assert (verdict.conclusion, verdict.exit_code, verdict.todo) == ("no difference", 0, ())
    assert "Examined steps 1 to 3" in text(verdict)


def test_a_difference_about_as_large_as_that_of_b_from_itself_is_not_blamed():
    """B's is one draw: another of the same noise is now smaller, now larger."""
    small, large = (finding("update", gaps=(gap("w", size),)) for size in (0.4, 3.0))
    by_b = examination(finding("update", of="B", by="B", gaps=(gap("w", 0.3),)), of="B", by="B")
    verdict = conclude([examination(small), by_b])
    assert (verdict.conclusion, verdict.exit_code) == ("no difference", 0)
    assert "differ by about as much as B from itself" in text(verdict) and "not blamed" in verdict.noise
    assert conclude([examination(large), by_b]).conclusion == "training"
    other_field = finding("update", gaps=(gap("v", 0.2),))
    assert conclude([examination(other_field), by_b]).conclusion == "training"


def test_a_fault_that_does_not_repeat_when_its_run_starts_afresh_is_blamed_all_the_same():
    by_a = examination(finding("rollout", 2, by="A", gaps=(gap(largest=0.9),)), of="A", by="A")
    verdict = conclude(
        [examination(finding("rollout", 2, gaps=(gap(largest=0.5),))), by_a, examination(of="B", by="B")]
    )
    assert (verdict.conclusion, verdict.side, verdict.step) == ("inference", "A", 2)
    assert "A, started afresh on its own tape, differs from it as well" in text(verdict)


def test_within_b_s_own_noise_the_curves_decide():
    by_b = examination(finding("update", of="B", by="B", gaps=(gap("w", 0.3),)), of="B", by="B")
    examined = [examination(finding("update", gaps=(gap("w", 0.2),))), by_b]
    with_curves = conclude(examined, curves(AA=metrics(1, **BAD), AB=metrics(2), BA=metrics(3, **BAD)))
    assert (with_curves.conclusion, with_curves.parts) == ("training", ("training",))
    assert conclude(examined, curves(AA=metrics(1))).conclusion == "no difference"


def test_records_that_contradict_each_other_are_excused_by_no_noise():
    own = finding("update", by=None, gaps=(gap("w", 0.1),))
    by_b = examination(finding("update", of="B", by="B", gaps=(gap("w", 0.3),)), of="B", by="B")
    assert conclude([examination(own), by_b]).conclusion == "training"


def test_tokens_are_within_the_floor_by_how_many_differ():
    few, many = (finding("rollout", gaps=(gap("response_ids", None, mean=None),)) for _ in range(2))
    itself = examination(finding("rollout", of="B", by="B", gaps=few.gaps), of="B", by="B")
    assert conclude([examination(many), itself]).conclusion == "no difference"
    flips = [Gap("response_ids", "value", n, 64, largest=float(n), unit="responses") for n in (2, 4, 16)]
    own = examination(finding("rollout", of="B", by="B", gaps=flips[:1]), of="B", by="B")
    told = [conclude([examination(finding("rollout", gaps=(g,))), own]).conclusion for g in flips]
    assert told == ["no difference", "no difference", "inference"]  # counts scatter by their root, not eightfold
    nothing = finding("rollout", of="B", by="B", gaps=(gap("response_ids", 0.1),))
    assert conclude([examination(many), examination(nothing, of="B", by="B")]).conclusion == "inference"


def test_a_harmless_difference_is_reported_as_such():
    constant = finding("reward", harmless=True, sentence="reward differs by a constant of group g")
    verdict = conclude([examination(constant)])
    assert (verdict.conclusion, verdict.exit_code) == ("reward", 1)
    assert "Training is not affected: no advantage changes by it." in verdict.notes
    both = conclude([examination(constant, finding("update", 3))])
    assert (both.conclusion, both.step) == ("training", 3)
    assert "Training is not affected: no advantage changes by it." not in both.notes
    assert any("harmless" in n for n in both.notes)


# Both sources


def test_the_curves_confirm_what_the_examination_locates():
    agreeing = curves(AA=metrics(1, **BAD), AB=metrics(2, **BAD), BA=metrics(3))
    verdict = conclude([examination(finding("rollout"))], agreeing)
    assert verdict.conclusion == "inference" and "The four arms, which say inference, agree." in text(verdict)
    assert verdict.effects and "Curves, per step: reward" in verdict.noise


def test_the_examination_wins_where_the_curves_contradict_it():
    other = curves(AA=metrics(1, **BAD), AB=metrics(2), BA=metrics(3, **BAD))
    verdict = conclude([examination(finding("rollout"))], other)
    assert verdict.conclusion == "inference" and "contradicts it" in text(verdict)
    both = curves(AA=metrics(1, **BAD), AB=metrics(2, **BAD), BA=metrics(3, **BAD))
    assert "agrees in part" in text(conclude([examination(finding("rollout"))], both))
    quiet = conclude([examination(finding("rollout"))], curves(AA=metrics(1), AB=metrics(2), BA=metrics(3)))
    assert quiet.conclusion == "inference" and "do not show it, so far" in text(quiet)


def test_the_examination_tells_apart_what_looks_the_same_in_the_curves():
    training = curves(AA=metrics(1, **BAD), AB=metrics(2), BA=metrics(3, **BAD))
    assert conclude([examination(finding("reward"))], training).conclusion == "reward"
    inference = curves(AA=metrics(1, **BAD), AB=metrics(2, **BAD), BA=metrics(3))
    assert conclude([examination(finding("sync"))], inference).conclusion == "weight sync"


def test_curves_that_differ_after_the_last_examined_step_count_and_ask_to_examine_there():
    late = curves(AA=metrics(1, **BAD), AB=metrics(2), BA=metrics(3, **BAD))
    verdict = conclude([examination()], late)
    assert verdict.conclusion == "training" and "after the last examined step (3)" in text(verdict)
    assert any("--quick --record-steps 3" in c for c in verdict.todo)


def test_curves_that_differ_where_every_stage_is_equal_are_not_blamed():
    early = {"reward": (1, -0.3)}
    found = curves(AA=metrics(1, **early), AB=metrics(2), BA=metrics(3, **early))
    verdict = conclude([examination()], found)
    assert (verdict.conclusion, verdict.exit_code) == ("not distinguishable", 2)
    assert "two sound runs may drift apart" in text(verdict) and any("BB2" in c for c in verdict.todo)
    unjudged = [finding("update", s, "not judged", sentence="no state on the tape", gaps=()) for s in (1, 2, 3)]
    assert conclude([examination(*unjudged)], found).conclusion == "training"


def test_a_harmless_difference_does_not_hide_what_the_curves_show_elsewhere():
    constant = finding("reward", harmless=True)
    inference = curves(AA=metrics(1, **BAD), AB=metrics(2, **BAD), BA=metrics(3))
    assert conclude([examination(constant)], inference).conclusion == "inference"


# What cannot be told


def test_a_stage_that_nobody_could_judge_leaves_it_open():
    unjudged = [finding("update", s, "not judged", sentence="no state on the tape", gaps=()) for s in (1, 2, 3)]
    verdict = conclude([examination(*unjudged)])
    assert (verdict.conclusion, verdict.exit_code) == ("not distinguishable", 2)
    assert "Not judged of A's tape: update, steps 1, 2, 3 (no state on the tape)." in text(verdict)
    assert any(c.startswith("crossrl examine ") for c in verdict.todo)
    assert conclude([examination(*unjudged)], curves(AA=metrics(1))).conclusion == "no difference"


@pytest.mark.parametrize("b", [(), (examination(of="B", by="A"),)])
def test_a_stage_that_was_not_judged_at_one_step_of_a_s_tape_leaves_it_open_whatever_b_s_tape_says(b):
    unjudged = finding("update", 2, "not judged", sentence="no state", gaps=())
    verdict = conclude([examination(unjudged), *b])
    assert (verdict.conclusion, verdict.exit_code) == ("not distinguishable", 2)
    assert "update, step 2 (no state)" in text(verdict)
    assert conclude([examination(), *b]).exit_code == 0
    of_b = finding("update", 2, "not judged", of="B", by="A", gaps=())
    assert conclude([examination(), examination(of_b, of="B", by="A")]).exit_code == 0  # A's own tape is all judged


def test_b_s_own_noise_in_one_stage_does_not_stand_in_for_a_stage_that_was_not_judged():
    within = finding("update", gaps=(gap("w", 0.2),))
    by_b = examination(finding("update", of="B", by="B", gaps=(gap("w", 0.3),)), of="B", by="B")
    unjudged = finding("rollout", 2, "not judged", sentence="no state", gaps=())
    assert conclude([examination(within), by_b]).exit_code == 0
    assert conclude([examination(within, unjudged), by_b]).exit_code == 2
    of_b = examination(replace(within, of="B", by="A"), of="B", by="A")
    assert conclude([of_b, by_b]).exit_code == 2  # A's tape was not examined


def test_no_difference_says_what_it_could_not_have_seen():
    limits = ("inference (bfloat16): log-probs off by 0.6 nat",)
    verdict = conclude([replace(examination(), unseen=limits)])
    assert verdict.exit_code == 0 and any("would not have been seen: inference" in n for n in verdict.notes)
    assert conclude([examination()]).notes == ()
    assert not any("seen" in n for n in conclude([replace(examination(finding("update")), unseen=limits)]).notes)


def test_an_examination_that_judged_nothing_is_no_examination():
    nothing = [finding("update", 1, "not judged", sentence="no state", gaps=())]
    verdict = conclude([examination(*nothing, stages=())])
    assert verdict.exit_code == 2 and "Examined" not in text(verdict)
    itself = conclude([examination(of="A", by="A")])  # that A repeats itself says nothing about B
    assert itself.exit_code == 2
    own = examination(finding("sync", 1, "equal", by=None), of="A", by="A")
    assert conclude([own]).exit_code == 2  # nor does that its records fit together


def test_a_comparison_of_nothing_fails():
    with pytest.raises(VerdictError, match="nothing to compare"):
        conclude([])


def test_whatever_cannot_be_told_says_what_to_run():
    for found in (curves(AA=metrics(1, **BAD)), curves(AA=metrics(1, 5)), curves(AA=metrics(1), AB=metrics(2, **BAD))):
        verdict = conclude([], found)
        assert verdict.exit_code == 2 and verdict.todo and all(c.startswith("crossrl ") for c in verdict.todo)


def test_rounding_of_curves_is_at_least_float32():
    assert rounding_of([]) == "bfloat16"
    assert rounding_of([examination(numerics="exact")]) == "float32"
    assert rounding_of([examination(numerics="bfloat16")]) == "bfloat16"


@pytest.mark.parametrize(
    ("change", "says"),
    [({"stage": "rolout"}, "Finding: stage: want one of data, rollout.*found 'rolout'"),
     ({"judged": "same"}, "Finding: judged: want one of equal, noise.*found 'same'"),
     ({"of": "C"}, "Finding: of: want one of A, B, found 'C'"), ({"step": "1"}, "Finding: step: want int, found '1'"),
     ({"step": True}, "Finding: step"), ({"gaps": None}, "Finding: gaps: want a list"),
     ({"extra": 1}, "want the keys")],
)  # fmt: skip
def test_values_that_no_finding_has_are_refused_by_name_when_they_are_read(change, says):
    body = json.loads(json.dumps(to_json(examination(finding("rollout")))))
    assert from_json(Examination, body) == examination(finding("rollout"))
    body["findings"][0] |= change
    with pytest.raises(ValueError, match=says):
        from_json(Examination, body)


def test_a_part_or_a_conclusion_that_there_is_none_of_is_refused():
    for key, value in (("conclusion", "luck"), ("parts", ["gpu"]), ("side", "C")):
        with pytest.raises(ValueError, match=f"Verdict: {key}: want one of"):
            from_json(Verdict, {**to_json(Verdict("training", "A")), key: value})


def test_a_verdict_survives_the_disk():
    verdict = conclude([examination(finding("rollout"))], curves(AA=metrics(1, 5)))
    assert from_json(Verdict, json.loads(json.dumps(to_json(verdict), allow_nan=False))) == verdict


# The command


def experiment(root: Path, *examined, **series) -> Path:
    for name, each in series.items():
        run = root / "arms" / name / ("train" if name in ("AB", "BA") else "")
        write_jsonl(run / "metrics.jsonl", each)
        (run / "config.yaml").write_text(f"trainer:\n  total_training_steps: {max(each['critic/score/mean'])}\n")
        if name in ("AB", "BA"):
            (run.parent / "infer/huggingface").mkdir(parents=True)
    (root / "examined").mkdir(parents=True, exist_ok=True)
    for each in examined:
        (root / f"examined/{each.of}_by_{each.by}.json").write_text(json.dumps(to_json(each)))
    return root


@pytest.mark.parametrize("width", [80, 120])
def test_the_command_reads_the_folder_writes_the_verdict_and_shows_it(tmp_path, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    root = experiment(
        tmp_path / "x", examination(finding("rollout", 1), settings=(Setting("data.seed", 1, 2, "data"),)),
        AA=metrics(1, **BAD), BB=metrics(0), AB=metrics(2, **BAD), BA=metrics(3),
    )  # fmt: skip
    assert main(["verdict", str(root)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("verdict: inference of A is at fault, since step 1\n")
    shown = [line for line in out.splitlines() if not line.strip().startswith("crossrl ")]
    assert max(map(len, shown)) <= width
    for words in ("evidence", "against BB", "since step 3", "noise floor", "data.seed", "what to do next", "s0"):
        assert words in out
    stored = from_json(Verdict, json.loads((root / "verdict.json").read_text()))
    assert (stored.conclusion, stored.step, len(stored.effects)) == ("inference", 1, 15)


def test_the_command_takes_runs_that_were_launched_by_hand_also_foreign_ones(tmp_path, capsys):
    bb = tmp_path / "bb.jsonl"
    rows = [{"step": s, "data": {n: v[s] for n, v in metrics(0).items()}} for s in range(1, 61)]
    bb.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"aa": metrics(1, **BAD), "ab": metrics(2), "ba": metrics(3, **BAD)}
    words = ["verdict", "--bb", str(bb)]
    for name, series in names.items():
        words += [f"--{name}", str(write_jsonl(tmp_path / f"{name}.jsonl", series, torn='{"step": 61, "cr'))]
    assert main([*words, "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert (body["conclusion"], body["side"]) == ("training", "A")
    assert list(tmp_path.glob("verdict.json")) == []


def test_named_runs_stand_in_for_those_of_the_folder(tmp_path, capsys):
    root = experiment(tmp_path / "x", AA=metrics(1, **BAD), BB=metrics(0), AB=metrics(2))
    assert main(["verdict", str(root)]) == 2
    text = capsys.readouterr().out
    assert "BA (inference of B, training of A) is missing" in text and "\n  crossrl cross --a " in text
    ba = write_jsonl(tmp_path / "ba/metrics.jsonl", metrics(3, **BAD)).parent
    assert main(["verdict", str(root), "--ba", str(ba)]) == 1
    assert "verdict: training of A is at fault" in capsys.readouterr().out


def test_exit_code_0_when_nothing_differs(tmp_path, capsys):
    root = experiment(tmp_path / "x", examination(), AA=metrics(1), BB=metrics(0))
    assert main(["verdict", str(root)]) == 0
    assert capsys.readouterr().out.startswith("verdict: no difference beyond noise\n")


def test_settings_come_from_the_runs_where_no_examination_names_them(tmp_path, capsys):
    root = experiment(tmp_path / "x", AA=metrics(1, **BAD), BB=metrics(0), AB=metrics(2), BA=metrics(3, **BAD))
    for name, lr in (("AA", 0.006), ("BB", 0.0006)):
        path = root / f"arms/{name}/config.yaml"
        path.write_text(path.read_text() + f"actor_rollout_ref:\n  actor:\n    optim:\n      lr: {lr}\n")
    assert main(["verdict", str(root), "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert [s["key"] for s in body["settings"]] == ["actor_rollout_ref.actor.optim.lr"]
    assert any(e["source"] == "settings" and "0.006" in e["sentence"] for e in body["evidence"])


@pytest.mark.parametrize("words", [["nowhere"], [], ["--aa", "nowhere"]])
def test_nothing_to_compare_is_an_error_with_the_next_step(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    assert main(["verdict", *words]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    (tmp_path / "empty").mkdir()
    assert main(["verdict", "empty"]) == 2
    assert "crossrl cross" in capsys.readouterr().err
    assert not (tmp_path / "empty/verdict.json").exists()


def test_without_an_examination_of_a_s_tape_nothing_is_said_of_a():
    found = conclude([examination(of="B", by="A")])
    assert (found.conclusion, found.exit_code) == ("not distinguishable", 2)
    assert "A's tape was not examined by B." in [e.sentence for e in found.evidence]
    assert any("crossrl examine" in c for c in found.todo)


def test_equal_curves_do_not_stand_for_an_examination_that_is_missing():
    equal = curves(AA=metrics(0))
    found = conclude([examination(of="B", by="A")], equal)
    assert (found.conclusion, found.exit_code) == ("not distinguishable", 2)
    assert "A's tape was not examined by B." in text(found)
    assert conclude([examination(), examination(of="B", by="A")], equal).exit_code == 0


def test_a_few_equal_steps_of_curves_alone_say_too_little():
    short = {name: {step: value for step, value in values.items() if step <= 2} for name, values in metrics(0).items()}
    found = conclude([], curves(AA=short, BB=short))
    assert (found.conclusion, found.exit_code) == ("not distinguishable", 2)
    assert "Equal in 2 steps says too little" in text(found) and found.todo
    assert conclude([], curves(AA=metrics(0))).exit_code == 0  # long enough


def test_it_says_that_b_is_taken_for_the_healthy_side():
    assert any("B is taken for the healthy side" in n for n in conclude([examination(finding("update"))]).notes)
    assert conclude([examination(finding("sync", by=None))]).notes == ()  # a run's own records need no other side
