"""The benchmarks of engines, processes and GPUs run, refuse nonsense, and say what went wrong. Nothing is timed."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def run(script: str, *args: object, limit_s: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=env, check=False)


@pytest.mark.parametrize("script", ["rollout_engines", "cluster_step", "gpu"])
def test_help_says_what_is_measured_and_how_to_start_it(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0 and f"python benchmarks/{script}.py" in done.stdout


@pytest.mark.parametrize(
    ("script", "args", "says"),
    [
        ("rollout_engines", ["--model", "nowhere"], "nowhere has no config.json"),
        ("rollout_engines", ["--ways", "hf,hff"], "unknown hff; known: hf, generate"),
        ("rollout_engines", ["--model", "DEMO", "--prompt-tokens", "64-32"], "'64-32', want such as 32-64"),
        ("rollout_engines", ["--model", "DEMO", "--rounds", "0"], "want at least 1 of each"),
        ("rollout_engines", ["--model", "DEMO", "--vllm-python", "nowhere/python"], "nowhere/python is not a program"),
        ("cluster_step", ["--variants", "two"], "unknown two; known: one, child"),
        ("cluster_step", ["--prompts", "3", "--variants", "one,ray-2x2"], "want an even number for ray-2x2"),
        ("gpu", ["--parts", "transfers"], "unknown transfers; known: facts"),
        ("gpu", ["--model", "nowhere"], "nowhere has no config.json"),
        ("gpu", ["--gib", "0"], "want 0.001 to 64"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(script: str, args: list[str], says: str, demo_files: Path) -> None:
    done = run(script, *[str(demo_files / "model") if a == "DEMO" else a for a in args])
    assert done.returncode == 2 and says in done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_engines_are_compared_and_one_that_does_not_start_is_named(demo_files: Path, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    broken.chmod(0o755)
    done = run(
        "rollout_engines", "--model", demo_files / "model", "--ways", "hf,generate,trl", "--prompts", 2, "--n", 2,
        "--prompt-tokens", "3-5", "--new-tokens", 3, "--rounds", 1, "--threads", 1, "--trl-python", broken,
        "--json", tmp_path / "out.json",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "not measured: trl: trl ended with code 3" in done.stdout and "no such module" in done.stdout
    assert "| hf to generate |" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert {way: len(rounds) for way, rounds in found["rounds"].items()} == {"hf": 1, "generate": 1}


def test_a_ratio_says_how_many_times_as_fast_the_first_is(load: Any) -> None:
    def rounds(*seconds: float) -> list[dict[str, float]]:
        return [{"seconds": s, "cpu_seconds": 2 * s} for s in seconds]

    found = {"hf": rounds(1.0, 2.0), "generate": rounds(3.0, 4.0), "vllm": rounds(1.0, 1.0)}
    ratios = list(load("rollout_engines").ratios(found))
    assert ratios == [("hf", "generate", [3.0, 2.0], 3.0, pytest.approx(7 / 3))]


@pytest.mark.slow
def test_a_step_in_one_process_is_measured_by_stage(tmp_path: Path) -> None:
    sizes = ["--prompts", 2, "--n", 2, "--new-tokens", 3, "--steps", 1, "--rounds", 1]
    done = run("cluster_step", *sizes, "--variants", "one", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads((tmp_path / "out.json").read_text())["steps"]["one"]
    assert len(steps) == 1 and len(steps[0]) == 1  # one round, of which the first step is not counted
    assert {"gen", "update_actor", "step"} <= steps[0][0].keys()


def test_steps_that_are_missing_or_did_other_work_are_not_measured(load: Any, tmp_path: Path) -> None:
    module, file = load("cluster_step"), tmp_path / "metrics.jsonl"
    args = argparse.Namespace(steps=1, new_tokens=4)
    rows = [{"timing_s/step": 9.0, "timing_s/gen": 1.0, "response_length/mean": 4.0}] * 2

    def read(rows: list[dict[str, float]]) -> Any:
        file.write_text("\n".join(map(json.dumps, rows)))
        return module.read_steps(file, args)

    assert read(rows) == [{"step": 9.0, "gen": 1.0}]
    with pytest.raises(RuntimeError, match="has 1 steps, want 2"):
        read(rows[:1])
    with pytest.raises(RuntimeError, match=r"responses had \[3.5\] tokens, want 4"):
        read([*rows[:1], rows[0] | {"response_length/mean": 3.5}])


def test_the_overhead_is_what_a_step_takes_beyond_one_process(load: Any) -> None:
    found = {"one": [[{"gen": 1.0, "step": 2.0}]], "ray": [[{"gen": 1.0, "step": 2.5}]]}
    lines = list(load("cluster_step").table(found, {"one": [9.0], "ray": [20.0]}))
    assert "+0.500 s | 1.25 | 20.0 s" in lines[-1]


def test_the_gpu_script_has_a_dry_run_and_refuses_a_machine_without_one(tmp_path: Path) -> None:
    dry = run("gpu", "--dry", "--parts", "transfer,memory")
    assert dry.returncode == 0, dry.stderr
    assert "CUDA IPC between two processes" in dry.stdout and "colocated" not in dry.stdout
    done = run("gpu", "--parts", "facts", "--out", tmp_path / "gpu.json")
    assert done.returncode == 1 and "there is no GPU here" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.long
def test_the_gpu_script_rehearses_its_parts_and_keeps_the_others_when_one_fails(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    (tmp_path / "config.json").write_text("{}")  # no model: training cannot start
    parts = "transfer,train,memory,digests"
    done = run("gpu", "--rehearse", "--parts", parts, "--model", tmp_path, "--out", out, limit_s=550)
    found = json.loads(out.read_text())
    assert found["rehearsal"]
    states = {name: part["state"] for name, part in found["parts"].items()}
    assert states == {"transfer": "ok", "train": "failed", "memory": "ok", "digests": "ok"}, done.stdout
    assert "crossrl train ended with code" in found["parts"]["train"]["log"]
    assert "has died" in found["parts"]["memory"]["mib"]["dying: last error"]
    assert done.returncode == 1


def test_memory_that_is_not_given_back_is_found(load: Any) -> None:
    module = load("gpu_parts")

    def side(allocated: float = 100.0, reserved: float = 200.0, free: float = 5000.0) -> dict[str, float]:
        return {"allocated": allocated, "reserved": reserved, "free": free}

    both = {"sender": side(), "receiver": side()}
    good = {"before": both, "after 1": both, f"after {module.SYNCS}": both, "without receiver": {"sender": side()}}
    for kind in ("refusing", "dying"):
        good |= {f"after {kind}": {"sender": side()}, f"{kind}: last error": "it has died"}
    assert list(module.grown(good, 64)) == []
    bad = good | {
        f"after {module.SYNCS}": {"sender": side(allocated=228.0, free=4000.0), "receiver": side(reserved=900.0)},
        "after dying": {"sender": side(allocated=484.0)},
        "refusing: last error": "",
    }
    assert [line.split(":")[0] for line in module.grown(bad, 64)] == [
        "sender", "receiver", f"1000 MiB fewer free on the device after {module.SYNCS}",
        "a transfer to a refusing receiver succeeded",
        f"384 MiB more after transfers to {module.FAILURES} dying receivers (two buckets",
    ]  # fmt: skip
