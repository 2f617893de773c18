"""Everything that the report shows, read from the experiment's folder; what is not there, with the way to get it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from crossrl.cross.arms import MEANING, Arm, load_experiment, read_config
from crossrl.cross.findings import Examination, Verdict, from_json
from crossrl.cross.folder import Folder
from crossrl.cross.next_steps import commands_of, next_steps
from crossrl.report.metrics_file import ReportError
from crossrl.tape.api import RunTape, open_run
from crossrl.tape.errors import RecordMissing

T = TypeVar("T")
SIDES = ("A", "B")


@dataclass(frozen=True, slots=True)
class Missing:
    """Something the page lacks. ``command``: what would make it."""

    what: str
    command: str


@dataclass(frozen=True, slots=True)
class Material:
    """``verdict``: None when none was reached yet. ``examined``: by name, such as ``A_by_B``. ``arms``: all five.
    ``tapes``: arm to its records, where there are any. ``sides``: flat configuration of A and of B, empty where not
    known. ``asked``: experiment.json, flat."""

    folder: Folder
    verdict: Verdict | None
    examined: Mapping[str, Examination]
    arms: Mapping[str, Arm]
    tapes: Mapping[str, RunTape]
    sides: Mapping[str, Mapping[str, Any]]
    asked: Mapping[str, Any]
    missing: tuple[Missing, ...]


def gather(folder: Folder) -> Material:
    """Raises ``ReportError`` when the folder holds nothing to report on or a file in it is damaged, and ``CurveError``
    for damaged metrics, configurations and examinations."""
    if not folder.root.is_dir():
        raise ReportError(f"{folder.root} is not a folder. Want what crossrl cross --out {folder.root} makes")
    experiment = load_experiment(folder.root)
    verdict = _verdict(folder)
    examined = {f"{e.of}_by_{e.by}": e for e in experiment.examinations}
    tapes = {name: tape for name in experiment.arms if (tape := _tape(folder, name)) is not None}
    if verdict is None and not examined and not tapes and not any(a.curves for a in experiment.arms.values()):
        raise ReportError(
            f"{folder.root} has nothing to report on: no verdict.json, no examined/*.json, and no arm with metrics or "
            f"a tape below arms/. Want the folder of an experiment: crossrl cross --a A.yaml --b B.yaml --out DIR"
        )
    sides = {side: read_config(folder.arm(side * 2)) or _flat_yaml(folder.side(side)) for side in SIDES}
    missing = tuple(_missing(folder, verdict, examined, experiment.arms, tapes))
    return Material(folder, verdict, examined, experiment.arms, tapes, sides, _asked(folder), missing)


def _verdict(folder: Folder) -> Verdict | None:
    body = _json(folder.verdict)
    try:
        return None if body is None else from_json(Verdict, body)
    except ValueError as error:
        raise ReportError(
            f"{folder.verdict} is damaged: {error}. Make it again: crossrl verdict {folder.root}"
        ) from None


def _tape(folder: Folder, arm: str) -> RunTape | None:
    home = folder.arm(arm)
    try:
        return open_run(read_config(home).get("tape.dir") or home)
    except RecordMissing:
        return None


def _asked(folder: Folder) -> dict[str, Any]:
    body = _json(folder.experiment)
    if not isinstance(body, dict | None):
        raise ReportError(f"{folder.experiment}: want a JSON object, found {body!r:.60}")
    return flat(body or {})


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} cannot be read: {error}. Mend or remove it") from error


def _flat_yaml(path: Path) -> dict[str, Any]:
    try:
        body = yaml.safe_load(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ReportError(f"{path} cannot be read: {error}") from error
    if not isinstance(body, dict):
        raise ReportError(f"{path} is not the configuration of a run (a map of sections such as data and trainer)")
    return flat(body)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """
    >>> flat({"trainer": {"seed": 1}, "steps": 2})
    {'trainer.seed': 1, 'steps': 2}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _missing(
    folder: Folder,
    verdict: Verdict | None,
    examined: Mapping[str, Examination],
    arms: Mapping[str, Arm],
    tapes: Mapping[str, RunTape],
) -> list[Missing]:
    given = all(folder.side(side).is_file() for side in SIDES)
    a, b = (folder.side("A"), folder.side("B")) if given else ("A.yaml", "B.yaml")
    again = f"crossrl cross --a {a} --b {b} --out {folder.root}"
    commands = next_steps(load_experiment(folder.root)) if commands_of(folder)[0] else None
    if commands is not None:
        again = commands.whole()
    found = []
    if verdict is None:
        found.append(Missing("the verdict (verdict.json)", f"crossrl verdict {folder.root}"))
    for name in ("A_by_B", "B_by_A"):
        if name not in examined and commands is None:
            of, by = name.split("_by_")
            what = f"the tape of {of}, stage by stage, by the installation of {by} (examined/{name}.json)"
            found.append(Missing(what, again))
    # Of commands, the pairs are left out where A is B in every bit.
    settled = commands is not None and verdict is not None and verdict.conclusion == "no difference"
    for name in ("AA", "BB", "AB", "BA"):
        if arms[name].curves is None and not settled:
            found.append(Missing(f"curves of arm {name} ({MEANING[name]}): {arms[name].reason}", again))
        if name in ("AA", "BB") and name not in tapes:
            side = a if name == "AA" else b
            train = f"crossrl train --config-name {side} tape.mode=record tape.state=True"
            command = f"{train} trainer.default_local_dir={folder.arm(name)}" if commands is None else again
            found.append(Missing(f"the records of arm {name}, hence its texts", command))
    return found
