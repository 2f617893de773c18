"""A run killed with SIGKILL at any stage and started again ends as if it had never stopped, bit for bit."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

STAGES = ("rollout", "reward", "old_log_prob", "ref_log_prob", "advantage", "update", "checkpoint", "sync")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CASES = [f"{stage}-{when}" for stage in STAGES for when in ("before", "after")] + [f"random-{i}" for i in range(4)]


@pytest.fixture(scope="module")
def results(demo_files, tmp_path_factory):
    work = tmp_path_factory.mktemp("resume")
    script = Path(__file__).with_name("resume_cases.py")
    done = subprocess.run(
        [sys.executable, str(script), str(demo_files), str(work)], capture_output=True, text=True, timeout=800
    )
    if done.returncode:
        logs = "\n".join(f"{p}:\n{p.read_text()[-1500:]}" for p in sorted(work.glob("*.log"))[-2:])
        pytest.fail(f"{done.stderr[-3000:]}\n{logs}")
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_is_bit_equal_to_never_stopped(results, case):
    found, straight = results["cases"][case], results["straight"]
    assert results["straight_status"] == 0
    assert found["killed"] == signal.SIGKILL, "the case did not kill the run, so it shows nothing"
    assert found["again"] == 0
    for what in ("digest", "loader", "advantage", "engine", "rewards", "checkpoints"):
        assert found[what] == straight[what], what
    assert found["steps"] == [1, 2, 3, 4]
    assert found["left"] == []


def test_a_finished_run_started_again_does_nothing(results):
    assert results["nothing_to_do"] == 0
    assert results["after_nothing"] == results["straight"]


def test_the_runs_did_train(results):
    """Or all of the above would be true of runs that do nothing."""
    assert len(set(results["straight"]["rewards"])) > 1
    assert results["straight"]["advantage"]["kl_coef"] != 0.001
