"""``metrics.jsonl``: one JSON object per line, flat: ``{"step": 3, "actor/grad_norm": 0.71, ...}``.

A step may have two lines (training and validation); ``read_metrics`` puts them together. JSON has no word
for NaN and infinity: such a value is written as null and named in ``"non_finite"``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crossrl.files import publish_text, sync_folder


class ReportError(RuntimeError):
    """Metrics, samples or plots could not be written or read; the message says where and why."""


def encode(step: int, metrics: Mapping[str, float]) -> str:
    """One line, without the newline. Raises ``ReportError`` for a value that is not a number.

    >>> encode(3, {"actor/entropy": 0.5, "actor/kl_loss": float("nan")})
    '{"step": 3, "actor/entropy": 0.5, "actor/kl_loss": null, "non_finite": {"actor/kl_loss": "nan"}}'
    """
    line: dict[str, Any] = {"step": step}
    odd: dict[str, str] = {}
    for name, value in metrics.items():
        line[name] = number = as_number(name, value)
        if not math.isfinite(number):
            line[name], odd[name] = None, str(number)
    if odd:
        line["non_finite"] = odd
    return json.dumps(line, ensure_ascii=False, allow_nan=False)


def as_number(name: str, value: Any) -> float | int:
    """``value`` as a plain number (NumPy scalars and one-element tensors too)."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (bool, int, float)):
        return value
    raise ReportError(f"metric {name!r} is a {type(value).__name__}, want a number")


class MetricsFile:
    """Appends to ``path``. Each line reaches the system at once: ``kill -9`` tears the last line at most."""

    name = "file"

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        line = encode(step, metrics) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                _write_all(handle, line.encode())
            finally:
                os.close(handle)
        except OSError as error:
            raise ReportError(
                f"cannot write metrics to {self.path}: {error.strerror}. Free some space there, or set "
                f"trainer.default_local_dir to another folder, and start again: the run resumes from its checkpoint"
            ) from error

    def holds(self, step: int, name: str) -> bool:
        """Whether a line of ``step`` has a metric whose name begins with ``name``."""
        rows = read_metrics(self.path) if self.path.is_file() else []
        return any(row["step"] == step and any(key.startswith(name) for key in row) for row in rows)

    def truncate_after(self, step: int) -> list[str]:
        """Move the lines of steps after ``step`` to ``metrics.superseded.jsonl``; return notices for the user.

        For a run that goes on from the checkpoint of ``step`` (-1: from nothing). A last line that was torn by
        a kill is moved along. Raises ``ReportError`` for a damaged line anywhere else.
        """
        if not self.path.exists():
            return []
        lines, torn = _read_lines(self.path)
        later = [text for at, text in lines if at > step]
        if torn is None and not later and self.path.read_bytes()[-1:] in (b"", b"\n"):
            return []
        kept = [text for at, text in lines if at <= step]
        moved = [*later, *([torn] if torn is not None else [])]
        aside = self.path.with_name(f"{self.path.stem}.superseded.jsonl")
        if moved:
            before = aside.read_text(encoding="utf-8", errors="replace") if aside.exists() else ""
            # First the copy, then the removal: a kill between the two leaves lines twice, never nowhere.
            publish_text(aside, before + "".join(f"{text}\n" for text in moved))
        publish_text(self.path, "".join(f"{text}\n" for text in kept))
        notices = []
        if later:
            notices.append(f"{self.path.name}: {len(later)} lines of later steps moved to {aside.name}")
        if torn is not None:
            notices.append(f"{self.path.name}: the last line was torn when the run was stopped; moved to {aside.name}")
        return notices

    def close(self, ok: bool) -> None:
        """Bring all lines to the disk."""
        if self.path.exists():
            handle = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            sync_folder(self.path.parent)


def read_metrics(path: Path, torn_ok: bool = True) -> list[dict[str, Any]]:
    """One mapping per step, in order of step, the lines of a step put together; null stays None.

    ``torn_ok``: leave out a torn last line (a run may be writing it). Raises ``ReportError`` when there is no
    such file or a line is damaged.
    """
    lines, torn = _read_lines(path)
    if torn is not None and not torn_ok:
        raise ReportError(f"{path}: the last line is torn")
    steps: dict[int, dict[str, Any]] = {}
    for step, text in lines:
        steps.setdefault(step, {}).update(json.loads(text))
    return [steps[step] for step in sorted(steps)]


def series(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one metric, where it is there and finite."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [float(value) for _, value in points]


def _read_lines(path: Path) -> tuple[list[tuple[int, str]], str | None]:
    """(step, text) of each whole line, and the torn last line if there is one."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ReportError(f"cannot read metrics from {path}: {error.strerror}") from error
    *whole, rest = content.split(b"\n")
    lines = []
    for number, raw in enumerate(whole, 1):
        step = _step_of(raw)
        if step is None:
            raise ReportError(
                f"{path}, line {number}: want a JSON object with a step, found {raw[:60]!r}. "
                f"Mend or remove the line, or move the file away"
            )
        lines.append((step, raw.decode()))
    if rest and (step := _step_of(rest)) is not None:  # torn between the object and its newline: it is whole
        return [*lines, (step, rest.decode())], None
    return lines, rest.decode(errors="replace") if rest else None


def _step_of(raw: bytes) -> int | None:
    try:
        return int(json.loads(raw)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]
