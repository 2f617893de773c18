"""Metrics of a run as curves: of CrossRL, verl, TRL, or whatever else wrote one row per step.

Read are ``metrics.jsonl`` of a run's folder; JSON Lines (a flat object per line, or verl's file logger:
``{"step": 3, "data": {...}}``); JSON (a list of rows, or an object with ``log_history``, the Hugging Face trainer's
state); CSV with a header (a column ``RUN - METRIC``, as in exports of Weights & Biases, is METRIC).
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What arms are compared by, and the names it goes by: verl's (and ours), then TRL's. The first that is there counts.
METRICS: dict[str, tuple[str, ...]] = {
    "reward": ("critic/score/mean", "critic/rewards/mean", "reward"),
    "gap": ("training/rollout_probs_diff_mean", "rollout_corr/k3_kl", "sampling/sampling_logp_difference/mean"),
    "entropy": ("actor/entropy", "entropy"),
    "gradient norm": ("actor/grad_norm", "grad_norm"),
    "response length": ("response_length/mean", "completions/mean_length"),
}
# The step's own names, the first that is there: ours and verl's, trainers' counters, Weights & Biases.
STEP = (re.compile("[Ss]tep"), re.compile("(train(ing|er)?/)?global_step"), re.compile("_step"))
NO_SIGNAL_STEPS = 5
"""So many steps in a row without a gradient, up to the last one, are a failure."""


class CurveError(ValueError):
    """Metrics cannot be read or hold nothing to compare; the message names the file and the next step."""


@dataclass(frozen=True, slots=True)
class Curves:
    """``series``: name to {step: value}; NaN and infinities are kept. ``source``: the file."""

    source: Path
    series: Mapping[str, Mapping[int, float]]

    def named(self, metric: str) -> str | None:
        """The name that ``metric`` (of ``METRICS``, or a name itself) has here."""
        return next((name for name in METRICS.get(metric, (metric,)) if name in self.series), None)

    def finite(self, name: str) -> dict[int, float]:
        """{step: value} of the series ``name``; empty when there is none."""
        return {step: v for step, v in self.series.get(name, {}).items() if math.isfinite(v)}

    @property
    def last_step(self) -> int:
        return max((max(values) for values in self.series.values() if values), default=0)


def common_name(metric: str, curves: Iterable[Curves]) -> str | None:
    """The first name of ``metric`` that all of ``curves`` have: mean score and mean shaped reward, say, are not the
    same and must not be compared."""
    known = list(curves)
    return next((n for n in METRICS.get(metric, (metric,)) if all(c.finite(n) for c in known)), None)


def read_curves(path: Path) -> Curves:
    """The metrics in ``path``, a run's folder or a file. A torn last line (a run may be writing it) is left out.

    Raises ``CurveError``.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        text = file.read_bytes().decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise CurveError(f"cannot read metrics from {file}: {error.strerror}") from error
    if file.suffix.lower() == ".csv":
        rows = _from_csv(file, text)
    elif file.suffix.lower() == ".json":
        rows = _from_json(file, text)
    else:
        rows = _from_lines(file, text)
    series: dict[str, dict[int, float]] = {}
    for row in rows:
        step, values = _numbers(row)
        if step is None:
            raise CurveError(
                f"{file}: a row has no step: want step or global_step, found the keys {', '.join(list(row)[:6])}"
            )
        for name, value in values.items():
            series.setdefault(name, {})[step] = value
    if not series:
        raise CurveError(f"{file} holds no metrics: want rows with a step and numbers")
    return Curves(file, series)


def non_finite(curves: Curves) -> dict[str, int]:
    """Metrics of the policy and its rewards that are NaN or infinite, each with the first step at which it is."""
    known = {name for names in METRICS.values() for name in names}
    return {
        name: min(odd)
        for name, values in curves.series.items()
        if (name in known or name.startswith(("actor/", "critic/")))
        and (odd := [step for step, v in values.items() if not math.isfinite(v)])
    }


def no_signal_since(curves: Curves) -> int | None:
    """The step since when no group has had different rewards, or the gradient has been exactly 0, up to the last step;
    None unless that is ``NO_SIGNAL_STEPS`` steps or more. Whether that is bad, the reward says: a run that has solved
    its task has nothing to learn from either (``below``, ``reached``)."""
    groups, equal = curves.finite("advantage/groups"), curves.finite("advantage/groups_all_equal")
    empty = {step: equal[step] >= count for step, count in groups.items() if step in equal}
    norm = curves.named("gradient norm")
    for step, value in curves.finite(norm or "").items():
        empty[step] = empty.get(step, False) or value == 0.0
    since, count = None, 0
    for step in sorted(empty, reverse=True):
        if not empty[step]:
            break
        since, count = step, count + 1
    return since if count >= NO_SIGNAL_STEPS else None


def below(curves: Curves, other: Curves, since: int) -> bool:
    """Whether the mean reward from step ``since`` on is lower than ``other``'s at the same steps; True where there is
    none to compare."""
    name = common_name("reward", [curves, other])
    mine, theirs = (c.finite(name or "") for c in (curves, other))
    steps = [s for s in mine if s >= since and s in theirs]
    return not steps or sum(mine[s] for s in steps) < sum(theirs[s] for s in steps)


def reached(curves: Curves, since: int) -> bool:
    """Whether the mean reward from step ``since`` on is at least that of the steps before it: learned, and not lost."""
    rewards = curves.finite(curves.named("reward") or "")
    before, after = ([v for s, v in rewards.items() if (s >= since) == late] for late in (False, True))
    return bool(before and after) and sum(after) / len(after) >= sum(before) / len(before)


def _from_lines(file: Path, text: str) -> Iterable[dict[str, Any]]:
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines):  # no newline after it: torn
                return
            row = None
        if not isinstance(row, dict):
            raise CurveError(f"{file}, line {number}: want a JSON object with a step, found {line[:60]!r}")
        if isinstance(row.get("data"), dict):  # verl writes NaN as null
            data = {name: math.nan if value is None else value for name, value in row["data"].items()}
            row = {**data, "step": row.get("step")}
        yield row


def _from_json(file: Path, text: str) -> Iterable[dict[str, Any]]:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise CurveError(f"{file} is not JSON: {error}") from error
    rows = body.get("log_history") if isinstance(body, dict) else body
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise CurveError(f"{file}: want a list of rows, or an object with log_history")
    return rows


def _from_csv(file: Path, text: str) -> Iterable[dict[str, Any]]:
    """Columns by name; ``run name - metric``, as Weights & Biases writes it, by the metric. Raises ``CurveError``."""
    whole = text if text.endswith("\n") else text[: text.rfind("\n") + 1]  # a run may be writing the last line
    try:
        header, *rows = csv.reader(io.StringIO(whole))
    except (csv.Error, ValueError) as error:
        raise CurveError(f"{file} is not CSV with commas in UTF-8: {error}") from error
    names = [name.rpartition(" - ")[2] for name in header]
    twice = next((n for n in names if names.count(n) > 1 and n), None)
    if twice is not None:
        raise CurveError(f"{file} has {names.count(twice)} columns of {twice}: want the metrics of one run")
    return [{n: v for n, v in zip(names, row, strict=False) if n and v != ""} for row in rows if row]


def _numbers(row: Mapping[str, Any]) -> tuple[int | None, dict[str, float]]:
    """(step, metrics) of a row. What is neither a number nor reads as one is no metric."""
    values: dict[str, float] = {}
    odd = row.get("non_finite")
    for name, value in {**row, **(odd if isinstance(odd, dict) else {})}.items():
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            try:
                values[name] = float(value)
            except ValueError:
                continue
    steps = [name for pattern in STEP for name in values if pattern.fullmatch(name)]
    key = next((name for name in steps if math.isfinite(values[name])), None)
    if key is None:
        return None, {}
    return int(values[key]), {name: v for name, v in values.items() if name not in steps}
