"""The verl host on real verl. CROSSRL_TEST_VERL names an interpreter that has verl (`make verl`); else this is skipped.

The first tests take some seconds; the others train (examples/verl/run.py), a minute or two for each run of verl. CI
does the shortest of these, CROSSRL_LONG=1 all.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("CROSSRL_TEST_VERL", "")
ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="CROSSRL_TEST_VERL is not set: an interpreter with verl 0.9.1"),
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]


def run(*command: str | Path, limit: float) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [PYTHON, *map(str, command)], capture_output=True, text=True, timeout=limit,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    done = run(ROOT / "tests/verl_cases.py", tmp_path_factory.mktemp("verl"), limit=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_verl_generates_is_handed_on_as_it_is(cases):
    assert cases["passed through"] is True


def test_what_comes_from_a_record_is_what_verl_had_generated(cases):
    assert cases["generated again"] == 0
    assert cases["differs"] == []
    assert cases["reward keys"] == ["acc"]


def test_scores_of_loaded_responses_are_those_of_this_run_s_reward(cases):
    assert cases["scored anew"] == [3.0, 1.0, 5.0, 2.0]
    assert cases["scored keys"] == [["tokens"], [3, 1, 5, 2]]
    assert cases["besides"] == ["acc", "reward_extra_info", "rm_scores", "tokens"]


def test_a_tensor_that_a_record_cannot_give_back_is_refused_by_name(cases):
    assert "routed_experts of verl's rollout cannot be rebuilt from a record" in cases["unknown tensor"]


def test_samples_are_found_again_after_verl_has_reordered_its_batch(cases):
    assert cases["order of the update"] == ["11", "00", "01", "10"]
    assert cases["advantages"] == [15.0, 16.0]
    assert cases["score"] == [0.75, 0.0, 0.5, 0.25]


def test_real_verl_is_recorded_whole_and_with_the_weights_of_its_own_checkpoint(tmp_path):
    work = ("--work", tmp_path, "--steps", "2", "--trainer", "v0")
    done = run(ROOT / "examples/verl/run.py", "brief", *work, limit=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("ok   v0 record: ") == 4


@pytest.mark.long
@pytest.mark.parametrize("part", ["skip", "exchange"])
@pytest.mark.parametrize("trainer", ["v0", "v1"])
def test_real_verl_ends_with_the_weights_of_a_run_by_itself(tmp_path, trainer, part):
    work = ("--work", tmp_path, "--steps", "2", "--trainer", trainer)
    done = run(ROOT / "examples/verl/run.py", part, *work, limit=3000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "FAIL" not in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("part", ["killed", "resumed"])
@pytest.mark.parametrize("trainer", ["v0", "v1"])
def test_real_verl_that_was_killed_goes_on_as_if_nothing_had_happened(tmp_path, trainer, part):
    done = run(ROOT / "examples/verl/run.py", part, "--work", tmp_path, "--trainer", trainer, limit=3400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{trainer} {part}: ckpt ends as the run alone" in done.stdout
    assert f"{trainer} {part}: rollout ends as the run alone" in done.stdout


@pytest.mark.long
def test_planted_faults_of_real_verl_are_attributed_to_their_half(tmp_path):
    done = run(ROOT / "examples/verl/run.py", "faults", "--work", tmp_path, "--trainer", "v0", limit=3400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for fault in ("stale-weights", "rotary-base", "learning-rate", "slow-answers"):
        assert f"ok   v0 faults: {fault}" in done.stdout
