"""The rest of the page: noise floor, configuration differences, and how to reproduce what it shows."""

from __future__ import annotations

import shlex
from importlib.metadata import version
from typing import Any

from crossrl.cross.findings import Examination, Setting
from crossrl.cross.report.arms import curve_data, largest_difference
from crossrl.cross.report.gather import SIDES, Material
from crossrl.cross.report.markup import Html, command, number, section, table, tag
from crossrl.cross.report.stages import SIGNS
from crossrl.cross.setting_parts import settings_between
from crossrl.tape.api import RunTape
from crossrl.tape.errors import TapeError

PARTS = ("data", "inference", "reward", "training", "weight sync")


def noise_section(material: Material) -> Html:
    """What difference means nothing here, and how that is known."""
    verdict = material.verdict
    sentences = [tag("p", verdict.noise)] if verdict and verdict.noise else []
    rows = [_judged(name, e) for name, e in material.examined.items()]
    repeats = _repeats(material)
    nothing = "Unknown: there is no verdict, no examination and no repeat of B (arm BB2)."
    return section(
        "noise",
        "Noise floor",
        sentences,
        None if sentences or rows or repeats else tag("p", nothing, class_="absent"),
        table("What rounding may do in each examination", ("tape by installation", "rounding", "because", *SIGNS), rows)
        if rows
        else None,
        table("B against its repeat", ("metric", "largest difference"), repeats, "numbers") if repeats else None,
    )


def _judged(name: str, examination: Examination) -> list[str]:
    counts = [str(sum(f.judged == judged for f in examination.findings)) for judged in SIGNS]
    return [name.replace("_", " "), examination.numerics, "; ".join(examination.because) or "–", *counts]


def _repeats(material: Material) -> list[list[str]]:
    rows = []
    for metric in curve_data(material)["metrics"]:
        largest = largest_difference(metric["points"])
        if largest is not None:
            rows.append([metric["name"], "0 (equal)" if largest == 0 else number(largest)])
    return rows


def settings_section(material: Material) -> Html:
    """What differs between the sides, by the part of the run that it concerns."""
    settings, title = _settings(material), "Configuration differences"
    if settings is None:
        text = "Unknown: there is neither an examination nor the configuration of both sides."
        return section("settings", title, tag("p", text, class_="absent"))
    if not settings:
        return section("settings", title, tag("p", "None.", class_="absent"))
    groups = [
        tag("div", tag("h3", part.capitalize()), _setting_table(f"Settings that concern {part}", mine))
        for part in PARTS
        if (mine := [s for s in settings if s.part == part])
    ]
    rest = [s for s in settings if s.part is None]
    harmless = _setting_table("Settings that change no result beyond rounding", rest)
    folded = tag("details", tag("summary", f"{len(rest)} that change no result beyond rounding"), harmless)
    return section("settings", title, groups, folded if rest else None)


def _settings(material: Material) -> list[Setting] | None:
    """Each key once: as the verdict and the examinations found them, else from both sides' configuration; None when
    nothing is known."""
    found: dict[str, Setting] = {}
    sources = [material.verdict.settings if material.verdict else (), *(e.settings for e in material.examined.values())]
    for settings in sources:
        for setting in settings:
            found.setdefault(setting.key, setting)
    if found or material.examined:
        return list(found.values())
    a, b = (material.sides[side] for side in SIDES)
    return list(settings_between(a, b, True)) if a and b else None


def _setting_table(caption: str, settings: list[Setting]) -> Html:
    rows = [[tag("code", s.key), tag("code", number(s.a)), tag("code", number(s.b))] for s in settings]
    return table(caption, ("key", "A", "B"), rows, "settings")


def reproduce_section(material: Material) -> Html:
    folder, root = material.folder, shlex.quote(str(material.folder.root))
    lines = []
    if all(folder.side(side).is_file() for side in SIDES):
        a, b = (shlex.quote(str(folder.side(side))) for side in SIDES)
        lines += ["# the whole experiment, elsewhere", f"crossrl cross --a {a} --b {b} --out NEW_FOLDER", ""]
    lines += ["# from what is here: the verdict, and this page", f"crossrl verdict {root}", f"crossrl report {root}"]
    recorded = [folder.arm(name) for name in ("AA", "BB") if name in material.tapes]
    if recorded:
        lines += ["", "# each side against itself: must be equal bit for bit"]
        lines += [f"crossrl verify {shlex.quote(str(run))}" for run in recorded]
    facts = [_facts(side, material) for side in SIDES]
    keys = list(dict.fromkeys(key for each in facts for key in each))
    rows = [[tag("code", key), *(number(each.get(key)) for each in facts)] for key in keys]
    asked = [[tag("code", key), tag("code", number(value))] for key, value in material.asked.items()]
    wanted = table("What was asked for", ("key", "value"), asked, "settings")
    return section(
        "reproduce",
        "How to reproduce",
        command(*lines),
        table("Sides: folders, seeds, versions", ("", "A", "B"), rows, "settings") if rows else None,
        tag("details", tag("summary", "experiment.json"), wanted) if asked else None,
    )


def _facts(side: str, material: Material) -> dict[str, Any]:
    run, config = material.folder.arm(side * 2), material.sides[side]
    facts: dict[str, Any] = {"run": str(run)} if run.is_dir() else {}
    for key in ("trainer.seed", "actor_rollout_ref.model.path", "data.train_files", "cross.plant", "cross.python"):
        if config.get(key) is not None:
            facts[key] = config[key]
    tape = material.tapes.get(side * 2)
    return facts if tape is None else facts | _versions(tape)


def _versions(tape: RunTape) -> dict[str, str]:
    """Package versions that the first record names."""
    step = tape.steps()[0]
    try:
        stage, at = [*tape.calls(step), *tape.calls(step, "val")][0]
        return dict(tape.record(step, stage, at.call, at.split).header.versions)
    except (TapeError, IndexError) as error:
        return {"versions": f"cannot be read: {error}"}


def written_by() -> str:
    return f"crossrl {version('crossrl')}"
