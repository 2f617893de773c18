"""Running a side where it belongs: in this process, or in its own interpreter and environment (``cross.python``)."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from crossrl.cross.probe.dump import Opened, ProbeError, read_dump
from crossrl.cross.probe.side import Request, make_dump

TIMEOUT = 3600.0  # seconds: far beyond one sample through any model that a single process holds
MAIN = "import sys; from crossrl.cli.main import main; sys.exit(main())"


def dump_sides(requests: Sequence[Request], named: Sequence[bool]) -> list[Opened]:
    """Make the dumps, one after the other, and read them back.

    ``named``: whether the user named the side's configuration. One that lies in a run's folder may be somebody else's,
    and the interpreter that it asks for is not started.

    Waits for each side's process, unblocked by its end, at most ``TIMEOUT``. Raises ``ProbeError`` when one fails; and,
    before anything runs, for a side with ``cross.remote``, with the command to run there.
    """
    found = [_cross_keys(r.config or r.run / "config.yaml") for r in requests]
    sections = [keys if yes else {} for keys, yes in zip(found, named, strict=True)]
    for request, cross in zip(requests, sections, strict=True):
        if cross.get("remote"):
            command = shlex.join(["crossrl", *arguments(request)])
            raise ProbeError(
                f"this side runs elsewhere (cross.remote). Run\n  {cross['remote']} {command}\n"
                "dump the other side here (crossrl probe dump), and compare: crossrl probe compare DUMP_A DUMP_B"
            )
    return [_dump_side(request, cross) for request, cross in zip(requests, sections, strict=True)]


def _dump_side(request: Request, cross: Mapping[str, Any]) -> Opened:
    if not cross.get("python") and not cross.get("env"):
        make_dump(request)
        return read_dump(request.out)
    # The side may see another working directory's packages, so nothing but absolute paths goes to it.
    paths = {n: getattr(request, n).absolute() for n in ("run", "out", "config") if getattr(request, n) is not None}
    request = dataclasses.replace(request, **paths)
    python = Path(cross.get("python") or sys.executable).expanduser()
    words = [str(python), "-c", MAIN, *arguments(request)]
    environment = {**os.environ, **{k: str(v) for k, v in (cross.get("env") or {}).items()}}
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    except OSError as error:
        raise ProbeError(
            f"cross.python={cross.get('python')}: {error.strerror}. Name an interpreter that has crossrl"
        ) from None
    except subprocess.TimeoutExpired:
        raise ProbeError(f"{shlex.join(words)} took more than {TIMEOUT:.0f} s and was stopped") from None
    if done.returncode:
        raise ProbeError(f"{shlex.join(words)} ended with {done.returncode}:\n{done.stderr.strip()[-2000:]}")
    return read_dump(request.out)


def arguments(request: Request) -> list[str]:
    """The command line that makes this dump, after ``crossrl``."""
    words = ["probe", "dump", str(request.run), "--step", str(request.step), "--path", request.way]
    for option, value in (("--sample", request.sample), ("--config", request.config), ("--tokens", request.tokens)):
        words += [option, str(value)] if value is not None else []
    return [*words, "--out", str(request.out)]


def _cross_keys(config: Path) -> dict[str, Any]:
    """The section ``cross`` of a side's file, unchecked: the side's own version of CrossRL knows what is valid."""
    try:
        body = yaml.safe_load(config.read_text("utf-8"))
    except FileNotFoundError:
        raise ProbeError(
            f"{config} is not there: want a run's folder (trainer.default_local_dir), or a side's file (--config)"
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ProbeError(f"{config} cannot be read: {error}") from None
    section = body.get("cross") if isinstance(body, dict) else None
    return section if isinstance(section, dict) else {}
