"""Imported by Python at the start of a child process that has this folder on its PYTHONPATH: see children.py."""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that would have been imported were this one not there."""
    elsewhere = [p for p in sys.path if Path(p or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        try:
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        except Exception as error:  # as Python does with one; the patches come all the same
            print(f"Error in {spec.origin}: {type(error).__name__}: {error}", file=sys.stderr)


def _boot() -> None:
    """Install the patches. Python only prints an exception here and goes on without; so the process ends instead."""
    package = str(_HERE.parents[2])
    if package not in sys.path:  # crossrl is not installed but run from a folder; last, so it shadows nothing
        sys.path.append(package)
    try:
        from crossrl.patching.children import boot

        boot()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}\nThis process was not started.", file=sys.stderr, flush=True)
        os._exit(1)


_run_hidden()
# Another interpreter that inherits the environment (a virtual environment of its own) is not what was asked for.
if os.environ.get("CROSSRL_PATCHES") and os.environ.get("CROSSRL_PATCHES_PREFIX", sys.prefix) == sys.prefix:
    _boot()
