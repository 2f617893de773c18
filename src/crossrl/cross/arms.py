"""The arms of an experiment as they are on the disk: which there are, how far each has got, and their curves."""

from __future__ import annotations

import contextlib
import fcntl
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from crossrl.cross.curves import CurveError, Curves, no_signal_since, non_finite, read_curves
from crossrl.cross.findings import Examination, from_json
from crossrl.cross.folder import ALONE, PAIRS, Folder
from crossrl.files import read_json
from crossrl.tape.compare import flatten

ARMS = (*ALONE, *PAIRS)
# Reasons that a side gives for its end (``tape/exchange.py``, ``peers.py``, ``publish.py``) which say nothing about
# what it computes: the other side is gone or differs where it must not, the folder or the disk, somebody stopped it.
OF_EXCHANGE = re.compile(
    r"the run that (infers|trains)|share_data|have in common|this exchange|has vanished|now belongs to|still mounted"
    r"|cannot be written|Make room|[Nn]o space left|did not appear within|stopped by Ctrl-C"
)
# What an arm is, for people.
MEANING = {
    "AA": "A alone", "BB": "B alone", "BB2": "B once more", "AB": "inference of A, training of B",
    "BA": "inference of B, training of A",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arm:
    """``runs``: its folders (or its one file of metrics). ``curves``: of the run that trains; None if there are none.

    ``state``: ``done`` also stands for a file of metrics, of which nothing more is known; ``running``: also where that
    cannot be told from here; ``failed``: it stopped before its planned end, and nothing is running there. A pair is
    ``missing``, too, when it stopped without a step, or because of the exchange and not of what it computed.
    ``reason``: why, for ``missing`` and ``failed``; for ``running``, why it cannot be told. ``non_finite``:
    metric to the first step at which it is not a number; ``no_signal``: since when there is nothing to learn from.
    """

    name: str
    runs: tuple[Path, ...]
    curves: Curves | None
    state: Literal["missing", "running", "done", "failed"]
    reason: str = ""
    non_finite: Mapping[str, int] | None = None
    no_signal: int | None = None


@dataclass(frozen=True, slots=True)
class Experiment:
    """Everything that a verdict or a report is made of. ``folder``: None for runs that were named one by one."""

    folder: Folder | None
    arms: Mapping[str, Arm]
    examinations: tuple[Examination, ...]


def load_experiment(root: Path | None, named: Mapping[str, Path] | None = None) -> Experiment:
    """What is in the experiment's folder ``root``, with the arms in ``named`` (a run's folder or a file of metrics)
    in place of its own. Raises ``CurveError`` for a folder that is not there, or a file that cannot be read."""
    named = named or {}
    if root is not None and not root.is_dir():
        raise CurveError(f"{root} is no folder. Want what crossrl cross made (--out), or runs: --aa RUN --bb RUN")
    folder = Folder(root) if root is not None else None
    arms = {}
    for name in ARMS:
        if name in named:
            arms[name] = _named_arm(name, named[name])
        elif folder is not None:
            arms[name] = _arm(name, folder.runs(name), folder.arm(name))
        else:
            arms[name] = Arm(name, (), None, "missing", "not named")
    return Experiment(folder, arms, load_examinations(folder) if folder else ())


def load_examinations(folder: Folder) -> tuple[Examination, ...]:
    """Those that there are, the ones of a side by the other side first."""
    found = []
    for of, by in (("A", "B"), ("B", "A"), ("A", "A"), ("B", "B")):
        path = folder.examined(of, by)
        if path.exists():
            try:
                each = from_json(Examination, read_json(path))
            except (ValueError, OSError) as error:
                raise CurveError(f"{path} is damaged: {error}. Remove it and examine again") from error
            if (each.of, each.by) != (of, by):
                raise CurveError(
                    f"{path} holds the examination of {each.of} by {each.by}, not of {of} by {by}: it was copied or "
                    "renamed. Remove it and examine again"
                )
            found.append(each)
    return tuple(found)


def _named_arm(name: str, path: Path) -> Arm:
    if not path.exists():
        raise CurveError(f"--{name.lower()} {path}: no such folder or file")
    if path.is_dir() and not (path / "metrics.jsonl").exists() and (path / "train").is_dir():
        return _arm(name, (path / "infer", path / "train"), path / "train")
    if path.is_dir() and not (path / "config.yaml").is_file():
        path = path / "metrics.jsonl"  # of another program: only its metrics are known
    if path.is_dir():
        return _arm(name, (path,), path)
    return _with_curves(name, (path,), read_curves(path), "done", "")


def _arm(name: str, runs: tuple[Path, ...], main: Path) -> Arm:
    if not any(run.is_dir() for run in runs):
        return Arm(name, runs, None, "missing", f"{main} is not there")
    states = [_state(run) for run in runs]
    curves = read_curves(main) if _has_lines(main / "metrics.jsonl") else None
    if name in PAIRS:
        own, exchange = _told(main.parent / "share")
        failed = [reason for state, reason in states if state == "failed"]
        if own or exchange or failed:
            reason = "; ".join(own or exchange) or failed[0]
            if curves is None:
                return Arm(name, runs, None, "missing", f"it never ran: {reason}")
            if exchange and not own:
                return Arm(name, runs, curves, "missing", f"the exchange failed, not what is exchanged: {reason}")
            states.insert(0, ("failed", reason))
    for wanted in ("failed", "running", "missing"):
        for state, reason in states:
            if state == wanted:
                # A half that has not started is waited for, unless the other one has ended.
                state = "failed" if state == "missing" else state
                return _with_curves(name, runs, curves, state, reason)
    return _with_curves(name, runs, curves, "done", "")


def _told(share: Path) -> tuple[list[str], list[str]]:
    """What the sides of a pair told each other about how they failed: of themselves, and of the exchange."""
    own: list[str] = []
    exchange: list[str] = []
    for role, half in (("ckpt", "inference half"), ("rollout", "training half")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            body = read_json(share / "peers" / f"{role}.json")
            if body["state"] == "failed":
                found = exchange if OF_EXCHANGE.search(body["reason"]) else own
                found.append(f"{half}: {body['reason']}")
    return own, exchange


def _with_curves(name: str, runs: tuple[Path, ...], curves: Curves | None, state: Any, reason: str) -> Arm:
    if curves is None:
        return Arm(name, runs, None, state, reason or "it has no metrics yet")
    return Arm(name, runs, curves, state, reason, non_finite(curves), no_signal_since(curves))


def _state(run: Path) -> tuple[str, str]:
    """State of one run of CrossRL and the reason. A run that ends well leaves its model in huggingface/."""
    if not run.is_dir():
        return "missing", f"{run} is not there"
    locked = _locked(run)
    if locked:
        return "running", ""
    if not (run / "metrics.jsonl").is_file() and any(run.glob("global_step_*")):
        return "missing", f"{run} has checkpoints, but no metrics.jsonl"
    last, planned = _steps_done(run), _planned(run)
    if (run / "huggingface").is_dir() or (planned and last >= planned):
        return "done", ""
    if locked is None:
        return "running", f"whether a process still writes to {run} cannot be told from this machine"
    return "failed", f"{run} stopped after step {last}" + (f" of {planned}" if planned else "") + ", before its end"


def _locked(run: Path) -> bool | None:
    """Whether a process writes there; None: not known. A run holds ``.lock`` (``Trainer``, which writes its machine and
    process into it) until it ends, however it ends; not every file system tells that to other machines."""
    try:
        with (run / ".lock").open() as file:
            host = file.readline().partition(" ")[0].strip()
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False if host in ("", socket.gethostname()) else None


def _steps_done(run: Path) -> int:
    return read_curves(run).last_step if _has_lines(run / "metrics.jsonl") else 0


def _has_lines(file: Path) -> bool:
    return file.is_file() and b"\n" in file.read_bytes()


def _planned(run: Path) -> int | None:
    config = read_config(run)
    asked = [config.get(f"trainer.{key}") for key in ("total_training_steps", "stop_after_steps")]
    return min((n for n in asked if isinstance(n, int)), default=None)


def read_config(run: Path) -> dict[str, Any]:
    """The resolved configuration of a run as ``a.b.c`` to value; empty when none lies there. Raises ``CurveError``."""
    file = run / "config.yaml"
    if not file.is_file():
        return {}
    try:
        body = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise CurveError(f"{file} cannot be read: {error}") from error
    return flatten(body) if isinstance(body, dict) else {}
