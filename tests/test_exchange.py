"""Two live runs exchange halves: the result is that of one run, and every disturbance ends in a clear error."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
KILLS = int(os.environ.get("CROSSRL_EXCHANGE_KILLS", "4"))
SIDES = ("ckpt", "rollout")


@pytest.fixture(scope="module")
def results(demo_files, tmp_path_factory):
    work = tmp_path_factory.mktemp("exchange")
    command = [sys.executable, str(Path(__file__).with_name("exchange_cases.py")), demo_files, work, str(KILLS)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=3500)
    if done.returncode:
        pytest.fail(done.stderr[-5000:])
    print(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def check_equal(found, results):
    for side in SIDES:
        for what, value in results["straight"].items():
            assert found[side].get(what) == value, (side, what)


@pytest.mark.parametrize("which", ["pair", "late"])
def test_both_sides_end_as_one_process_would_bit_for_bit_whichever_starts_first(results, which):
    assert results["alone"] == 0
    assert set(results[which]["codes"].values()) == {0}
    check_equal(results[which], results)


@pytest.mark.parametrize("which", ["dynamic", "remax"])
def test_the_same_with_several_calls_of_generation_in_a_step_and_with_a_greedy_baseline(results, which):
    found = results["variants"][which]
    assert found["alone"] == 0
    assert set(found["codes"].values()) == {0}
    check_equal(found, found)
    assert found["entries"] > 4 if which == "dynamic" else found["entries"] == 4


def test_the_runs_did_train(results):
    """Or all of the above would be true of runs that do nothing."""
    assert len({row[1] for row in results["straight"]["curve"]}) > 1


@pytest.mark.parametrize("side", SIDES)
def test_every_record_of_both_sides_equals_that_of_one_process(results, side):
    assert results["tapes"][side].endswith("33 pairs of records compared: equal")


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_anywhere_the_other_side_ends_with_the_reason_and_the_restarted_pair_as_if_undisturbed(results, number):
    found = results["kills"][number]
    role = found["role"]
    other = "rollout" if role == "ckpt" else "ckpt"
    if found["first"][role] == -signal.SIGKILL and found["first"][other] != 0:  # 0: it had all that it needed
        assert found["first"][other] == 2
        assert "died: its process is gone" in found["reason"]
        assert found["took_s"] < 10
    assert set(found["again"].values()) == {0}
    assert found["left"] == []
    check_equal(found, results)


def test_most_kills_hit_a_run_at_work(results):
    hit = [k for k in results["kills"] if k["first"][k["role"]] == -signal.SIGKILL and k["reason"]]
    assert len(hit) >= KILLS // 2


def test_a_side_that_hangs_is_dead_after_the_heartbeat_s_limit(results):
    found = results["disturbed"]["stopped"]
    assert found["codes"]["ckpt"] == 2
    assert "died: no sign of life for 3 s (trainer.share_data_heartbeat)" in found["errors"]["ckpt"]


def test_a_side_that_is_interrupted_says_so_to_the_other(results):
    found = results["disturbed"]["interrupted"]
    assert found["codes"]["rollout"] == 2
    assert "failed: stopped by Ctrl-C" in found["errors"]["rollout"]


def test_a_folder_that_vanishes_ends_both_sides_and_brought_back_they_go_on(results):
    found = results["disturbed"]["vanished"]
    assert set(found["codes"].values()) == {2}
    assert all("has vanished: the folder of the exchange was removed or moved" in e for e in found["errors"].values())
    assert set(found["again"].values()) == {0}
    check_equal(found, results)


def test_a_full_disk_ends_both_sides_with_the_reason_and_nothing_is_corrupted(results):
    found = results["disturbed"]["full"]
    assert set(found["codes"].values()) == {2}
    assert "ckpt_0 could not be written" in found["errors"]["rollout"]
    assert "ckpt_0 could not be written" in found["errors"]["ckpt"]
    assert set(found["again"].values()) == {0}
    check_equal(found, results)


def test_an_hour_between_the_clocks_does_not_matter(results):
    assert set(results["disturbed"]["skew"]["codes"].values()) == {0}
    check_equal(results["disturbed"]["skew"], results)


def test_entries_that_both_sides_are_done_with_are_removed_if_asked(results):
    found = results["disturbed"]["keep"]
    assert set(found["codes"].values()) == {0}
    check_equal(found, results)
    entries = [n for n in found["left"] if n != "peers"]
    assert "rollout_0" not in entries
    assert "ckpt_0" not in entries
    assert {"rollout_3", "ckpt_3"} <= set(entries)


def test_a_side_that_is_started_again_with_what_must_not_differ_is_refused(results):
    found = results["restarted"]["changed"]
    assert found["codes"] == {"rollout": 2, "ckpt": 2}
    assert "trainer.seed: here 2, there 1" in found["errors"]["ckpt"]


def test_once_what_differed_is_mended_the_pair_runs_whichever_side_starts_first(results):
    found = results["restarted"]["mended"]
    assert set(found["first"].values()) == {2}
    assert set(found["again"].values()) == {0}
    check_equal(found, results)


def test_a_trainer_that_is_started_again_takes_its_own_checkpoints_though_its_rewards_do_not_repeat(results):
    assert set(results["restarted"]["fickle"]["codes"].values()) == {0}


def test_a_second_exchange_of_a_run_begins_at_0_also_after_a_kill_before_its_first_checkpoint(results):
    found = results["restarted"]["second"]
    assert set(found["first"].values()) == {0}
    assert set(found["again"].values()) == {0}
    check_equal(found, results)
    assert found["entries"] == ["ckpt_0", "ckpt_1", "peers", "rollout_0", "rollout_1"]


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        ("seed", ["trainer.seed: here 2, there 1"]),
        ("several", ["actor_rollout_ref.rollout.n: here 2, there 4", "data.max_response_length: here 4, there 5"]),
        ("data", ["data.digest: here "]),
        ("model", ["model.config.rms_norm_eps: here 0.001, there "]),
    ],
)
def test_what_must_not_differ_is_named_key_by_key_on_both_sides(results, case, keys):
    found = results["refused"][case]
    assert found["codes"] == [2, 2]
    for key in keys:
        assert key.replace("config.", "") in found["errors"][0].replace("config.", "")
        assert key.split(":")[0].replace("config.", "") in found["errors"][1].replace("config.", "")


def test_settings_of_the_half_that_is_examined_may_differ(results):
    assert results["refused"]["training"]["codes"] == [0, 0]


@pytest.mark.parametrize(("case", "role"), [("old", "ckpt"), ("older", "rollout")])
def test_a_finished_exchange_in_the_folder_is_refused(results, case, role):
    found = results["refused"][case]
    assert found["codes"] == [2]
    assert f"already has a run with trainer.share_data={role}" in found["errors"][0]
    assert "which has ended" in found["errors"][0]


def test_leftover_entries_of_another_exchange_are_refused(results):
    assert results["refused"]["half"]["codes"] == [2]
    assert "which is no side of this exchange: it is left from an older one" in results["refused"]["half"]["errors"][0]


def test_a_third_run_in_the_folder_is_refused_and_does_not_disturb_the_pair(results):
    assert results["refused"]["third"]["codes"] == [2, 0, 0]
    assert "already has a run with trainer.share_data=rollout" in results["refused"]["third"]["errors"][0]


def test_a_folder_that_cannot_be_used_is_an_error_at_start(results):
    assert results["refused"]["file"]["codes"] == [2]
    assert "(trainer.share_data_dir) cannot be used" in results["refused"]["file"]["errors"][0]
