"""Two train ranks and two rollout engines, in processes of their own: the same run, whoever is killed in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster_cases import gone
from cluster_runs import RAY, STEPS, Ended, digests, process_of, train

from crossrl.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TWO = ["trainer.n_gpus_per_node=2"]


class Runs:
    """Each is done when the first test asks for it."""

    def __init__(self, demo: Path, folder: Path) -> None:
        self.demo, self.folder = demo, folder
        self._done: dict[str, Ended] = {}

    def path(self, name: str) -> Path:
        return self.folder / name

    def get(self, name: str, folder: str, *more: str, **kill: str) -> Ended:
        if name not in self._done:
            at = {int(step[1:]): who.replace("_", "-") for step, who in kill.items()}
            self._done[name] = train(self.demo, self.path(folder), more, at)
        return self._done[name]

    def straight(self) -> Ended:
        return self.get("straight", "straight", *TWO, "cluster.launcher=local")

    def alone(self) -> Ended:
        return self.get("alone", "alone")

    def one_engine_killed_then_one_rank(self) -> Ended:
        return self.get("killed", "ray", *TWO, *RAY, s1="rollout_1", s2="train_0")

    def driver_killed(self) -> Ended:
        self.one_engine_killed_then_one_rank()
        return self.get("driver", "ray", *TWO, *RAY, s3="driver")

    def resumed(self) -> Ended:
        self.driver_killed()
        return self.get("resumed", "ray", *TWO, *RAY)


@pytest.fixture(scope="module")
def runs(demo_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    pytest.importorskip("ray")
    return Runs(Path(demo_files), tmp_path_factory.mktemp("cluster"))


def test_a_rollout_engine_that_is_killed_costs_nothing_but_time(runs: Runs) -> None:
    ended = runs.one_engine_killed_then_one_rank()
    assert "rollout-1 (process" in ended.text and "has died at generate" in ended.text
    assert "samples go to the 1 replicas that are left" in ended.text
    assert "started anew: rollout-1" in ended.text


def test_a_train_rank_that_is_killed_is_named_and_stops_the_run(runs: Runs) -> None:
    ended = runs.one_engine_killed_then_one_rank()
    assert ended.code not in (0, -9)
    assert "error: train-0 (process" in ended.text and "goes on from its last checkpoint" in ended.text
    assert len(ended.killed) == 2


def test_a_driver_that_is_killed_leaves_no_worker(runs: Runs) -> None:
    ended = runs.driver_killed()
    assert ended.code == -9 and "resumed from" in ended.text
    workers = ("reward-0", "train-0", "train-1", "reference-0", "reference-1", "rollout-0", "rollout-1")
    assert all(gone(process_of(runs.path("ray"), worker), 30) for worker in workers)


def test_killed_and_resumed_is_bit_equal_to_never_stopped_also_under_another_launcher(runs: Runs) -> None:
    straight, resumed = runs.straight(), runs.resumed()
    assert (straight.code, resumed.code) == (0, 0), straight.text + resumed.text
    assert f"resumed from {runs.path('ray')}/global_step_" in resumed.text
    assert digests(runs.path("ray")) == digests(runs.path("straight"))


def diff(runs: Runs, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    code = main(["diff", str(runs.path("alone")), str(runs.path("straight")), "--json", *more])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


def test_its_tape_agrees_with_that_of_one_process_but_for_the_last_bits_of_an_update(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runs.alone().code == runs.straight().code == 0
    code, found = diff(runs, capsys)
    assert code == 1 and found["first"]["stage"] == "update", found
    # The gradient of two ranks is another sum of the same numbers.
    tolerances = [f"--tolerance={field}=1e-4" for field in ("log_probs", "old_log_probs", "rollout_log_probs")]
    code, found = diff(runs, capsys, *tolerances)
    first = found["first"]
    assert code == 1 and first["stage"] == "update" and first["field"].startswith("info."), found


def test_its_tape_verifies_against_itself_bit_for_bit(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.straight().code == 0
    assert main(["verify", str(runs.path("straight"))]) == 0
    assert f"in {STEPS + 1} steps" in capsys.readouterr().out


def test_verified_by_one_process_only_updates_differ(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.straight().code == 0
    args = [str(runs.path("straight")), "trainer.n_gpus_per_node=1", "cluster.launcher=auto"]
    for stage in ("rollout", "reward", "ref_log_prob", "old_log_prob", "advantage"):
        assert main(["verify", *args, "--stage", stage, "--steps", "1"]) == 0, stage
    assert main(["verify", *args, "--stage", "update", "--steps", "1"]) == 1
    assert "update, step 1" in capsys.readouterr().out
    assert main(["verify", *args, "--stage", "update", "--steps", "1", "--tolerance", "log_probs=1e-5"]) == 1
    assert "update, step 1, call 0: info." in capsys.readouterr().out  # no field does any more, a digest in any case
