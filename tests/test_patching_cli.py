"""``crossrl patches``: what is installed, what a spawned child makes of it, and what goes into an environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patching_cases import ENGINE, print_of, write_engine, write_fixes

from crossrl.patching.listing import source_file


@pytest.fixture
def folder(tmp_path):
    write_engine(tmp_path, "engine")
    write_fixes(tmp_path, "fixes", "engine", print_of(ENGINE, "scale"))
    return tmp_path


def crossrl(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CROSSRL_PATCH") and k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-m", "crossrl", "patches", *words],
        cwd=folder, env={**clean, "COLUMNS": "200", **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def states(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    assert done.stdout, done.stderr
    return {key: [s["state"] for s in statuses] for key, statuses in json.loads(done.stdout).items()}


def test_a_patch_that_fits_is_applied_in_a_spawned_child(folder):
    done = crossrl(folder, "check", "fixes:PATCHES", "--json")
    assert done.returncode == 0, done.stderr
    assert states(done) == {"patches": ["waiting"], "child": ["applied"]}
    assert json.loads(done.stdout)["child"][0]["live"]


def test_a_patch_that_does_not_fit_is_refused_on_disk_and_in_the_child(folder):
    write_engine(folder, "engine", ENGINE.replace("x * 2", "x * 3"))
    done = crossrl(folder, "check", "fixes:PATCHES")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[1].split()[-2:] == ["refused", "refused"]
    assert "line 8 is changed: `y = x * 3`" in " ".join(done.stdout.split())
    assert crossrl(folder, "list", "fixes:PATCHES").returncode == 0, "a list is a list"


def test_listing_imports_no_target(folder):
    write_engine(folder, "engine", ENGINE + "\nraise ImportError('no device')\n")
    assert states(crossrl(folder, "list", "fixes:PATCHES", "--json")) == {"patches": ["waiting"]}
    done = crossrl(folder, "check", "fixes:PATCHES")
    assert done.returncode == 1
    assert "its import failed: ImportError: no device" in done.stdout


@pytest.mark.parametrize(
    ("more", "environment", "state"),
    [
        ("", {"CROSSRL_PATCH_ENGINE_SCALE": "0"}, "off"),
        ("obsolete=lambda installed: 'mended'", {}, "not needed"),
        ("obsolete=lambda installed: 1 / 0", {}, "refused"),
    ],
)
def test_states_on_disk(folder, more, environment, state):
    write_fixes(folder, "fixes", "engine", print_of(ENGINE, "scale"), more)
    assert states(crossrl(folder, "list", "fixes:PATCHES", "--json", **environment)) == {"patches": [state]}


def test_nothing_to_check_is_not_a_success(folder):
    write_fixes(folder, "absent", "no_such_package", print_of(ENGINE, "scale"))
    done = crossrl(folder, "check", "absent:PATCHES")
    assert done.returncode == 2
    assert "nothing to check" in done.stdout
    assert states(crossrl(folder, "list", "absent:PATCHES", "--json")) == {"patches": ["not installed"]}


def test_without_references_ours_and_the_environment_s_are_shown(folder):
    done = crossrl(folder, "list", "--json", CROSSRL_PATCHES="fixes:PATCHES", CROSSRL_PATCHES_PREFIX="/not/this/one")
    names = [s["name"] for s in json.loads(done.stdout)["patches"]]
    assert names == ["vllm-ascend.sleep", "vllm-ascend.wake-up", "engine.scale"]


@pytest.mark.parametrize("reference", ["fixes", "nowhere:PATCHES", "fixes:NONE", "fixes:half"])
def test_a_wrong_reference_is_an_error(folder, reference):
    done = crossrl(folder, "list", reference)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")


def test_the_fingerprint_is_that_which_a_patch_needs(folder):
    assert crossrl(folder, "fingerprint", "engine.worker:scale").stdout.strip() == print_of(ENGINE, "scale")
    for target, message in (
        ("engine.worker:nothing", "0 definitions in"),
        ("engine.worker:Worker.state", "2 definitions in"),
        ("engine.nothing:scale", "no package engine with a source file for engine.nothing"),
        ("engine.worker", "want 'module:qualname'"),
    ):
        done = crossrl(folder, "fingerprint", target)
        assert done.returncode == 2
        assert message in done.stderr


def test_the_environment_carries_patches_into_a_program_that_knows_nothing(folder):
    lines = crossrl(folder, "env", "fixes:PATCHES").stdout
    python = f"{sys.executable} -c 'import engine.worker; print(engine.worker.scale(3))'"
    for script, printed in ((lines + python, "3.0\n"), (python, "6\n")):
        done = subprocess.run(["bash", "-ec", script], cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.stdout == printed, done.stderr


def test_source_files_are_found_without_importing():
    assert source_file("email.mime.text").name == "text.py"
    assert "email.mime.audio" not in sys.modules
    assert source_file("email.mime").name == "__init__.py"
    assert source_file("fractions").name == "fractions.py"
    assert source_file("itertools") is None
    assert source_file("no_such.thing") is None
