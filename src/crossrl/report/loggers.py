"""Where metrics go besides the console: chosen by ``trainer.logger``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from crossrl.report.metrics_file import MetricsFile, ReportError

NAMES = ("console", "file", "tensorboard", "wandb", "mlflow")


class MetricLogger(Protocol):
    """A place for metrics. What cannot be written is a ``ReportError``, never dropped."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def truncate_after(self, step: int) -> list[str]:
        """The run goes on after ``step``: make what was logged for later steps give way. Returns notices."""
        ...

    def close(self, ok: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class RunName:
    """What a logger calls this run. ``folder``: ``trainer.default_local_dir``. ``config``: plain, resolved."""

    folder: Path
    project: str = "crossrl"
    experiment: str = "run"
    config: Mapping[str, Any] = field(default_factory=dict)


def open_loggers(names: Sequence[str] | str, run: RunName) -> list[MetricLogger]:
    """The loggers behind ``trainer.logger``, the console left out. Raises ``ReportError`` for an unknown name."""
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ReportError(f"trainer.logger: {name!r} is not a logger; {hint}There are: {', '.join(NAMES)}")
    return [_open(name, run) for name in dict.fromkeys(names) if name != "console"]


def _open(name: str, run: RunName) -> MetricLogger:
    if name == "file":
        return MetricsFile(run.folder / "metrics.jsonl")
    if name == "tensorboard":
        from crossrl.report.tensorboard import TensorBoard

        return TensorBoard(run)
    from crossrl.report import trackers

    return trackers.Wandb(run) if name == "wandb" else trackers.MLflow(run)
