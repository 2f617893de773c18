"""Rollout samples as JSON Lines, one file per step, with verl's names: input, output, gts, score, step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crossrl.files import publish_text
from crossrl.report.metrics_file import ReportError


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt and response, for people.

    ``score``: NaN when it could not be scored. ``extra``: what the verifier returned besides, and whatever
    else is worth a look (``sample_id``, ``finish_reason``); its names become names in the file. ``question``: what
    the console shows of the prompt (the last message, without its template); empty: all of it.

    >>> Sample("524163>", "123456", "123456", 1.0, {"acc": True}).row(40)
    {'input': '524163>', 'output': '123456', 'gts': '123456', 'score': 1.0, 'step': 40, 'acc': True}
    """

    prompt: str
    response: str
    ground_truth: Any
    score: float
    extra: Mapping[str, Any] = field(default_factory=dict)
    question: str = ""

    def row(self, step: int) -> dict[str, Any]:
        score = float(self.score)
        base = {
            "input": self.prompt,
            "output": self.response,
            "gts": self.ground_truth,
            "score": score if math.isfinite(score) else None,
            "step": step,
        }
        more = {name: value for name, value in self.extra.items() if name not in base}
        return {name: _plain(value) for name, value in {**base, **more}.items()}


def write_samples(folder: Path, step: int, samples: Iterable[Sample]) -> Path:
    """Write ``{step}.jsonl`` whole, in place of an earlier one (the step was done again after a resume).

    Non-ASCII text is kept readable. A value that JSON cannot hold is written as its text.
    """
    path = folder / f"{step}.jsonl"
    lines = [json.dumps(sample.row(step), ensure_ascii=False, allow_nan=False) for sample in samples]
    try:
        publish_text(path, "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise ReportError(f"cannot write samples to {path}: {error.strerror}") from error
    return path


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The rows of one file that ``write_samples`` wrote."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _plain(value: Any) -> Any:
    """``value`` as JSON has it: NumPy and torch values as numbers and lists, what is unknown as its text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value).encode("utf-8", "backslashreplace").decode()  # half a surrogate pair has no UTF-8
