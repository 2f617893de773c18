"""The controls of case C16 on a real engine: vLLM's package, and the engine process that it spawns.

Run by the Python that has vLLM (``engines_cases.vllm_python``). One program does them all, as importing vLLM and
starting its engine take most of the time. What is changed is a copy of the package, in front of it on the path; all but
one of its files are links.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines_cases import saved_model, vllm_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TARGET = "vllm.v1.engine.core:EngineCore.add_request"
FILE = Path("v1/engine/core.py")
ASK = """
import importlib.util, json
from importlib.metadata import packages_distributions, version
from crossrl.patching.listing import fingerprint_of
(name,) = set(packages_distributions()["vllm"])
folder = importlib.util.find_spec("vllm").submodule_search_locations[0]
print(json.dumps([folder, name, version(name), fingerprint_of("TARGET")]))
"""
FIXES = """
import os
from crossrl.patching import Patch

def seen(original):
    def add_request(self, *args, **kwargs):
        with open(os.environ["SEEN"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        return original(self, *args, **kwargs)
    return add_request

def patch(name, **more):
    return Patch(name=name, target="TARGET", distribution="DISTRIBUTION", fingerprints={"VERSION": "PRINT"},
                 wrapper=seen, why="a test", **more)

PATCHES = (patch("vllm.seen"),)
"""
PREPARED = """
import importlib, json, os, shutil, sys
from pathlib import Path
from crossrl import patching

CORE, COPY = "vllm.v1.engine.core", Path("copy/vllm/v1/engine/core.py")

def start():
    from vllm import LLM
    return LLM("MODEL", dtype="float32", enforce_eager=True, max_model_len=64, block_size=32, max_num_seqs=2,
               skip_tokenizer_init=True)

def ask(llm):
    from vllm import SamplingParams
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)

def seen():
    return [int(line) for line in Path("seen.txt").read_text().split()] if Path("seen.txt").exists() else []

def attempt(what, *args):
    try:
        what(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""
CONTROLS = """
from fixes import patch

def write(wave):  # for who imports it next; another value than 0 is a change of one character
    old = Path("published.py").read_text()
    new = old.replace("request_wave: int = 0", f"request_wave: int = {wave}", 1)
    assert sum(a != b for a, b in zip(old, new)) == (wave != 0)
    COPY.write_text(new)
    shutil.rmtree(COPY.parent / "__pycache__", ignore_errors=True)

def said(name):
    return next(s.as_json() for s in patching.live() if s.name == name)

if __name__ == "__main__":
    found = {"me": os.getpid()}
    write(1)
    mended = patching.source_has("request_wave: int = 1", "the first wave is 1")
    patching.install(patch("vllm.mended", obsolete=mended))
    found["copy"] = Path(importlib.import_module(CORE).__file__) == COPY.absolute()
    found["mended"] = said("vllm.mended")
    patching.revert()

    sys.modules.pop(CORE)
    patching.install("fixes:PATCHES")
    found["refused"] = attempt(importlib.import_module, CORE)
    found["loaded"] = CORE in sys.modules
    patching.revert()

    write(0)
    for _ in range(3):
        patching.install("fixes:PATCHES")
        importlib.import_module(CORE)
        patching.live()
    from crossrl.patching.apply import marks
    found["applied"] = said("vllm.seen")
    found["marks"] = [mark.patch for mark in marks(importlib.import_module(CORE).EngineCore.add_request)]
    found["conflict"] = attempt(patching.install, patch("vllm.other"))

    patching.carry(Path("reports"))
    write(1)  # for the child alone
    found["start"] = attempt(start)
    engines = [pid for pid, r in patching.reports(Path("reports")).items() if r.process.startswith("EngineCore")]
    found["engines"] = engines
    found["not live"] = attempt(patching.wait_until_live, Path("reports"), engines, 1)

    write(0)
    ask(start())
    found["seen"] = seen()
    reports = patching.reports(Path("reports")).values()
    found["live"] = {r.pid: r.process for r in reports if all(s.live for s in r.statuses)}
    print(json.dumps(found))
"""
NOT_CARRIED = """
if __name__ == "__main__":
    import multiprocessing
    patching.install("fixes:PATCHES")
    llm = start()
    ask(llm)
    pids = [child.pid for child in multiprocessing.active_children()]
    told = attempt(patching.wait_until_live, Path("reports"), pids, 0.1)
    print(json.dumps({"pids": pids, "seen": seen(), "told": told}))
"""


@dataclass(frozen=True)
class Vllm:
    """What is installed there, and a folder to run programs in."""

    python: str
    folder: Path
    version: str
    print: str

    def run(self, text: str) -> Any:
        """What the program prints last, as JSON."""
        (self.folder / "program.py").write_text((PREPARED + text).replace("MODEL", saved_model()))
        done = run(self.python, ["program.py"], self.folder)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def vllm(tmp_path: Path) -> Vllm:
    python = vllm_python()
    asked = run(python, ["-c", ASK.replace("TARGET", TARGET)], tmp_path)
    assert asked.returncode == 0, asked.stderr
    package, name, version, found = json.loads(asked.stdout.splitlines()[-1])
    fixes = FIXES.replace("TARGET", TARGET).replace("DISTRIBUTION", name).replace("VERSION", version)
    (tmp_path / "fixes.py").write_text(fixes.replace("PRINT", found))
    linked(Path(package), tmp_path / "copy/vllm", FILE.parts)
    (tmp_path / "published.py").write_text(Path(package, FILE).read_text())
    (tmp_path / "copy/vllm" / FILE).write_text(Path(package, FILE).read_text())
    return Vllm(python, tmp_path, version, found)


def linked(package: Path, copy: Path, without: tuple[str, ...]) -> None:
    """``copy`` of links to what is in ``package``, but for the one file ``without``."""
    copy.mkdir(parents=True)
    for entry in package.iterdir():
        if entry.name == without[0] and len(without) > 1:
            linked(entry, copy / entry.name, without[1:])
        elif entry.name not in (without[0], "__pycache__"):
            (copy / entry.name).symlink_to(entry)


def run(python: str, command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    source = Path(__file__).parents[1] / "src"
    env = {key: value for key, value in os.environ.items() if not key.startswith("CROSSRL_PATCH")}
    env |= {
        "PYTHONPATH": os.pathsep.join([str(folder / "copy"), str(source)]), "SEEN": str(folder / "seen.txt"),
        "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # What other tests of vLLM note there: it takes seconds to look at an architecture for the first time.
        "VLLM_CACHE_ROOT": f"{tempfile.gettempdir()}/crossrl-test-vllm-{os.getuid()}",
    }  # fmt: skip
    return subprocess.run([python, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_the_controls_of_c16_hold_on_vllm_and_the_engine_process_that_it_spawns(vllm: Vllm) -> None:
    said = vllm.run(CONTROLS)

    assert said["copy"], "what was imported is the copy"
    mended = said["mended"]
    assert (mended["state"], mended["version"]) == ("not needed", vllm.version)
    assert mended["note"] == "the first wave is 1", "(v) a version that has the fix: skipped, with a note"

    refused = said["refused"]
    assert refused.startswith(f"PatchRefused: patch vllm.seen refuses {TARGET}: expected fingerprint {vllm.print[:32]}")
    assert f"{vllm.version} is not as it was published" in refused, "(i) one character: refused"
    assert (
        "found " in refused and "is changed: `def add_request(self, request: Request, request_wave: int=1)" in refused
    )
    assert not said["loaded"], "its import failed, so the engine's start does"

    assert (said["applied"]["state"], said["applied"]["live"]) == ("applied", True)
    assert said["marks"] == ["vllm.seen"], "(ii) applied once, asked three times"
    assert said["conflict"].startswith(f"PatchConflict: patches vllm.seen and vllm.other are both for {TARGET}"), (
        "(iii)"
    )

    # (iv) where the child's source is another than the parent's, the engine does not start, and it is said why
    assert said["start"] is not None and len(said["engines"]) == 1
    assert said["not live"].startswith(f"PatchNotLive: EngineCore (process {said['engines'][0]}): required patches")
    assert f"vllm.seen ({TARGET}) is refused: patch vllm.seen refuses" in said["not live"]

    (engine,) = said["seen"]  # one request, seen once
    assert engine not in (said["me"], *said["engines"])
    assert said["live"][str(engine)] == f"EngineCore (process {engine})"


@pytest.mark.long
def test_an_engine_process_to_which_nothing_was_carried_is_named(vllm: Vllm) -> None:
    """The control: the parent has the patch, the engine does not, and it answers as if nothing were amiss."""
    said = vllm.run(NOT_CARRIED)
    assert said["seen"] == [] and len(said["pids"]) == 1
    assert said["told"].startswith(f"PatchNotLive: process {said['pids'][0]} did not report its patches in reports")
