"""What a run of verl has left behind: its tape, its checkpoints, verl's own files and functions."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from watched import Run

from crossrl.tape import RecordMissing, open_run

WHOSE = """
import importlib, json, sys
from pathlib import Path
import verl
root, own = Path(verl.__file__).parent, {}
for target in sys.argv[1:]:
    module, _, name = target.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    own[target] = Path(found.__code__.co_filename).is_relative_to(root)
print(json.dumps(own))
"""


def digests(run: Run) -> list[str]:
    """The weights after each recorded step; empty if there are none."""
    try:
        tape = open_run(run.folder / "out")
        return [tape.record(s, "update").header.info["state"]["after"]["weights"] for s in tape.steps()]
    except RecordMissing:
        return []


def equal(a: list[str], b: list[str]) -> bool:
    """A comparison of nothing is no comparison."""
    return bool(a) and a == b


def last(found: list[str]) -> str:
    return found[-1][:16] if found else "nothing recorded"


def saved_digest(run: Run, step: int) -> str:
    """Of the weights in verl's own checkpoint, which is a pickle that this very run has written."""
    import torch

    from crossrl.models.digest import combined, weights_digest

    path = run.folder / f"out/global_step_{step}/actor/model_world_size_1_rank_0.pt"
    state = torch.load(path, weights_only=False)
    whole = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state.items()}
    return combined({name: weights_digest([(name, value)]) for name, value in whole.items()})


def package_digest() -> tuple[str, int]:
    """Of every file of the installed verl, and their number."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    root, total = Path(spec.origin).parent, hashlib.sha256()
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.suffix != ".pyc")
    for path in files:
        total.update(f"{path.relative_to(root)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest(), len(files)


def lines(path: Path) -> list[dict[str, Any]]:
    """Of a file of JSON lines; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def first_samples(run: Run) -> str:
    """What a run generated in its first step, in any order, from verl's own dump; empty if there is none."""
    rows = sorted(json.dumps([row["input"], row["output"], row["score"]]) for row in lines(run.folder / "dump/1.jsonl"))
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    return f"{len(rows)} samples of step 1, {digest[:16]}" if rows else ""


def diff(a: Path, b: Path) -> tuple[bool, str]:
    """Whether ``crossrl diff`` says that two runs are equal, and the line in which it does."""
    done = subprocess.run(
        [sys.executable, "-m", "crossrl", "diff", str(a), str(b)], capture_output=True, text=True, timeout=120
    )  # fmt: skip
    said = (done.stdout + done.stderr).strip().splitlines()
    told = [line for line in said if "equal:" in line or "differ" in line] or said or ["nothing said"]
    return done.returncode == 0, told[0]


def own_functions(targets: Iterable[str], environment: Mapping[str, str]) -> list[bool]:
    """Whether each of ``targets`` (``module:qualname``) is verl's own function in a process with ``environment``."""
    done = subprocess.run(
        [sys.executable, "-c", WHOSE, *targets], env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=300, check=True,
    )  # fmt: skip
    return list(json.loads(done.stdout.splitlines()[-1]).values())
