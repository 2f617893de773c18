"""Cross-examination of a tape: who is blamed for what, at its first step, and who is not."""

import json

import numpy as np
import pytest
from cross_runs import (
    ACTOR,
    ROLLOUT,
    Changed,
    Runs,
    differing,
    in_stage,
    lr_times_ten,
    mapped,
    next_group,
    of_stage,
    other_order,
    sampling,
    skip_sync,
    stale_weights,
)

from crossrl.cross.findings import Examination, from_json, to_json

STAGES = {"data", "rollout", "reward", "old_log_prob", "ref_log_prob", "advantage", "update", "checkpoint", "sync"}


@pytest.fixture(scope="module")
def runs(demo_files, tmp_path_factory):
    return Runs(demo_files, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def clean(runs):
    return runs.record("clean")


def test_a_clean_run_examined_by_itself_is_equal_bit_for_bit_in_every_stage(runs, clean):
    examined = runs.examine("clean", by="A")
    assert examined.numerics == "exact" and examined.because == () and examined.settings == ()
    assert {f.judged for f in examined.findings} == {"equal"}
    assert {(f.stage, f.step) for f in examined.findings} == {(s, t) for s in STAGES for t in (1, 2)} | {("sync", 0)}
    assert from_json(Examination, json.loads(json.dumps(to_json(examined)))) == examined


OWN_WEIGHTS = f"{ROLLOUT}.own_weights=True"
COOL = f"{ROLLOUT}.temperature=0.7"
FAULTS = {
    "rollout: temperature twice": (sampling(temperature=0.49), [COOL], {"rollout": 1}, "applied twice"),
    "rollout: hidden top-k": (sampling(top_k=3), [], {"rollout": 1}, "top_k=3"),
    "rollout: stale weights": (stale_weights, [OWN_WEIGHTS], {"rollout": 2}, "weights of one step before"),
    "rollout: log-probs shifted": (
        in_stage("rollout", lambda out: mapped(out, "rollout_log_probs", lambda v: np.roll(v, 1)), start=2),
        [], {"rollout": 2}, "shifted by one",
    ),
    "rollout: stop token missed": (sampling(ignore_eos=True), [], {"rollout": 1}, ""),
    "reward": (in_stage("reward", lambda out: mapped(out, "reward", lambda v: v[::-1])), [], {"reward": 1}, ""),
    "old_log_prob": (
        in_stage("old_log_prob", lambda out: mapped(out, "old_log_probs", lambda v: v - 0.01), start=2),
        [], {"old_log_prob": 2}, "",
    ),
    "ref_log_prob": (in_stage("ref_log_prob", given=next_group, start=2), [], {"ref_log_prob": 2}, ""),
    "advantage: sign": (
        in_stage("advantage", lambda out: mapped(out, "advantages", lambda v: -v), start=2), [], {"advantage": 2}, ""
    ),
    "update: learning rate": (lr_times_ten, [], {"update": 1}, "learning rate was 0.01, here it is 0.001"),
    "data: another order": (other_order, [], {"data": 1}, ""),
    "sync: skipped": (skip_sync(1), [OWN_WEIGHTS], {"sync": 1}, ""),
    "sync: skipped, same memory": (skip_sync(2), [], {"sync": 2}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_in_its_stage_at_its_first_step_and_nowhere_else(runs, name):
    plant, overrides, expected, hint = FAULTS[name]
    folder = name.replace(" ", "_").replace(":", "").replace(",", "")
    runs.record(folder, *overrides, plant=plant)
    examined = runs.examine(folder, *overrides)
    assert examined.numerics == "exact"
    assert differing(examined) == expected
    found = [f for f in examined.findings if f.judged == "differs"]
    assert all(f.gaps and f.sentence and not f.harmless for f in found)
    assert hint in found[0].hint


@pytest.mark.parametrize("name", ["rollout: hidden top-k", "reward", "update: learning rate", "data: another order"])
def test_the_faulty_side_as_examiner_differs_in_the_same_stage(runs, clean, name):
    examined = runs.examine("clean", of="B", by="A", plant=FAULTS[name][0])
    assert set(differing(examined)) == set(FAULTS[name][2])


def test_an_examiner_whose_own_sync_fails_does_not_blame_the_runs_inference(runs):
    runs.record("own", OWN_WEIGHTS)
    examined = runs.examine("own", OWN_WEIGHTS, of="B", by="A", plant=skip_sync(1))
    assert differing(examined) == {}
    [second] = [f for f in of_stage(examined, "rollout") if f.step == 2]
    assert second.judged == "noise" and "A's own weight sync" in second.sentence


def test_a_rollout_after_a_failed_sync_is_a_consequence_and_no_finding_of_its_own(runs):
    runs.record("sync_skipped", OWN_WEIGHTS, plant=skip_sync(1))
    for steps in (None, frozenset({2})):  # the cause is named though its step was not asked for
        examined = runs.examine("sync_skipped", OWN_WEIGHTS, steps=steps)
        assert differing(examined) == {"sync": 1}
        [rollout] = of_stage(examined, "rollout", "not judged")
        assert rollout.step == 2 and "follows from the weight sync" in rollout.sentence


def test_c05_mixed_up_inputs_are_said_to_be_that_and_not_called_an_inaccurate_inference(runs):
    runs.record("mixed", f"{ACTOR}.optim.lr=0", wrap=lambda stage: (
        Changed(stage, given=next_group, start=2) if stage.name == "old_log_prob" else stage
    ))  # fmt: skip
    examined = runs.examine("mixed", f"{ACTOR}.optim.lr=0")
    assert differing(examined) == {"old_log_prob": 2}
    [found] = [f for f in examined.findings if f.judged == "differs"]
    assert found.by is None and found.gaps[0].kind == "inputs" and "inputs differ" in found.sentence
    assert found.gaps[0].sample_id in found.sentence and "16 of 16" in found.sentence
    assert of_stage(examined, "old_log_prob", "not judged")[0].step == 2  # what it worked on is not on the tape


def test_c07_log_probs_of_another_temperature_are_a_different_meaning(runs):
    runs.record("meaning", plant=sampling(say_so=True, temperature=0.7))
    examined = runs.examine("meaning", steps=frozenset({1}))
    found = [f for f in examined.findings if f.judged == "differs"]
    assert {f.stage for f in found} == {"rollout"} and {f.by for f in found} == {None, "B"}
    assert all(f.gaps[0].kind == "meaning" for f in found)
    assert "temperature 0.7" in found[0].sentence and "temperature 0.7" in found[1].sentence


def test_a_constant_added_to_one_groups_rewards_is_a_harmless_difference(runs):
    def add(values):
        values[:4] += 0.5
        return values

    runs.record("constant", plant=in_stage("reward", lambda out: mapped(out, "reward", add), start=2))
    examined = runs.examine("constant")
    assert differing(examined) == {"reward": 2}
    found = of_stage(examined, "reward", "differs")
    assert all(f.harmless and "No advantage changes" in f.sentence for f in found)

    def add_to_one(values):
        values[0] += 0.5
        return values

    runs.record("one", plant=in_stage("reward", lambda out: mapped(out, "reward", add_to_one)))
    assert not any(f.harmless for f in runs.examine("one").findings)
