"""A small engine package that tests patch, and programs that start it in children."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

from crossrl.patching.fingerprint import definitions, fingerprint

ENGINE = '''
"""A stand-in engine."""
import functools


def scale(x):
    """Twice what it should be."""
    y = x * 2  # the fault
    return y


def traced(function):
    @functools.wraps(function)
    def call(*args):
        return ("traced", function(*args))
    return call


def hidden(function):
    def call(*args):
        return function(*args)
    return call


@traced
def decorated(x):
    return x


@hidden
def masked(x):
    return x


@functools.lru_cache
def cached(x):
    return x


class Worker:
    def wake_up(self, tags=None):
        return ["woken", tags]

    again = wake_up

    @staticmethod
    def static(x):
        return x

    @classmethod
    def made(cls, x):
        return cls.__name__, x

    @property
    def state(self):
        """Asleep or awake."""
        return self._state

    @state.setter
    def state(self, value):
        self._state = value

    class Inner:
        def depth(self):
            return 2


class Child(Worker):
    pass


length = len
'''


def write_engine(folder: Path, name: str, text: str = ENGINE) -> Path:
    """``folder/NAME/worker.py`` with ``text``, and ``folder/NAME/user.py``, which did ``from ... import scale``."""
    package = folder / name
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "worker.py").write_text(text)
    (package / "user.py").write_text(f"from {name}.worker import scale\n\ndef use(x):\n    return scale(x)\n")
    return package / "worker.py"


def print_of(text: str, qualname: str) -> str:
    """The fingerprint of ``qualname`` in a module's source."""
    (node,) = definitions(ast.parse(text), qualname)
    return fingerprint(node)


def engine(name: str, part: str = "worker") -> ModuleType:
    importlib.invalidate_caches()
    return importlib.import_module(f"{name}.{part}")


FIXES = """
from crossrl.patching import Patch

def half(original):
    def scale(x):
        return original(x) / 2
    return scale

PATCHES = (
    Patch(name="engine.scale", target="{engine}.worker:scale", fingerprints={{"1.0": "{print}"}}, wrapper=half,
          why="doubles what it gets", {more}),
)
"""


def write_fixes(folder: Path, name: str, engine_name: str, found: str, more: str = "") -> None:
    """``folder/NAME.py`` with PATCHES: one that halves what ``scale`` gives."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(FIXES.format(engine=engine_name, print=found, more=more))


def run_program(folder: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``text`` as a script in ``folder``, in a Python of its own."""
    (folder / "program.py").write_text(textwrap.dedent(text))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CROSSRL_PATCH") and k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder, env={**clean, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
