"""What the trainer tells a person, and where it writes it down."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from crossrl.report.columns import seconds
from crossrl.report.console import Display, open_display
from crossrl.report.loggers import MetricLogger, RunName, open_loggers
from crossrl.report.metrics_file import MetricsFile
from crossrl.report.samples import Sample, write_samples


class Reporter:
    """Everything that a run reports goes through here: console, metrics, samples.

    Calls, in order: ``start``; per step any of ``stage`` (progress), ``samples``, ``step``, ``validation``,
    ``warn``, ``message``; ``close``. Use it in a ``with`` block, so that an error closes it too. Raises
    ``ReportError`` when something cannot be written.

    ``rollout_folder``, ``validation_folder``: where ``{step}.jsonl`` with all samples goes; None: nowhere.
    ``show_samples``: how many samples of each validation are printed.

    >>> with Reporter(loggers=[MetricsFile(folder / "metrics.jsonl")]) as reporter:  # doctest: +SKIP
    ...     reporter.start(total=160, summary={"model": "data/demo/model"})
    ...     engine.generate(prompts, seeds, sampling, progress=functools.partial(reporter.stage, "rollout"))
    ...     reporter.step(1, {"critic/score/mean": 0.4, "timing_s/gen": 0.1})
    """

    def __init__(
        self,
        display: Display | None = None,
        loggers: Sequence[MetricLogger] = (),
        rollout_folder: Path | None = None,
        validation_folder: Path | None = None,
        show_samples: int = 0,
    ) -> None:
        self._display = display if display is not None else open_display()
        self._loggers = list(loggers)
        self._folders = {"rollout": rollout_folder, "validation": validation_folder}
        self._show = show_samples
        self._total = 0
        self._took: deque[float] = deque(maxlen=20)
        self._began = self._last = time.monotonic()
        self._open = True

    @classmethod
    def open(
        cls,
        names: Sequence[str] | str,
        run: RunName,
        rollout_folder: str | None = None,
        validation_folder: str | None = None,
        show_samples: int = 0,
    ) -> Reporter:
        """A reporter with the loggers that ``trainer.logger`` names."""
        wanted = [names] if isinstance(names, str) else list(names)
        loggers = open_loggers(wanted, run)
        folders = [Path(f) if f else None for f in (rollout_folder, validation_folder)]
        return cls(open_display(steps="console" in wanted), loggers, folders[0], folders[1], show_samples)

    def start(
        self,
        total: int,
        summary: Mapping[str, object],
        no_effect: Sequence[str] = (),
        notes: Sequence[str] = (),
        resumed: int | None = None,
    ) -> None:
        """Say what will run. ``total``: steps planned. ``resumed``: the step of the checkpoint, None for a fresh run.

        What an earlier run logged after that step is moved aside.
        """
        self._total = total
        width = max((len(name) for name in summary), default=0)
        for name, value in summary.items():
            self._display.text(f"{name:<{width}}  {value}")
        for note in notes:
            self._display.text(note)
        if no_effect:
            self._display.text(f"accepted, without effect here: {', '.join(no_effect)}", "dim")
        for logger in self._loggers:
            for notice in logger.truncate_after(-1 if resumed is None else resumed):
                self._display.text(notice, "yellow")
        self._last = time.monotonic()

    def stage(self, name: str, done: int = 0, total: int | None = None) -> None:
        """Where the current step is: ``stage("rollout", 128, 512)``. Cheap: call it as often as you like."""
        self._display.stage(name, done, total)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A training step is done; ``metrics`` is written as it is (names: verl's)."""
        for logger in self._loggers:
            logger.log(step, metrics)
        now = time.monotonic()
        took, self._last = now - self._last, now
        self._took.append(took)
        eta = sum(self._took) / len(self._took) * (self._total - step)
        self._display.step(step, self._total, metrics, metrics.get("timing_s/step", took), eta)

    def validated(self, step: int) -> bool:
        """Whether metrics.jsonl holds a validation of ``step``."""
        return any(isinstance(each, MetricsFile) and each.holds(step, "val-core/") for each in self._loggers)

    def complete(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics to metrics.jsonl if a run that was killed after saving did not come to it."""
        for logger in self._loggers:
            if isinstance(logger, MetricsFile) and not logger.holds(step, next(iter(metrics))):
                logger.log(step, metrics)

    def validation(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample] = ()) -> None:
        """The held-out data was answered with the weights after ``step`` (0: before training)."""
        for logger in self._loggers:
            logger.log(step, metrics)
        self._display.validation(step, metrics)
        self._keep("validation", step, samples)
        if self._show and samples:
            self._display.samples(f"validation samples, step {step}", samples[: self._show])
        if not self._took:
            self._last = time.monotonic()  # the first step's time is not that of start-up

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """The samples of a training step: written if ``trainer.rollout_data_dir`` says where."""
        self._keep("rollout", step, samples)

    def wants_samples(self) -> bool:
        """Whether ``samples`` does anything, for a caller to whom making them costs time."""
        return self._folders["rollout"] is not None

    def warn(self, message: str) -> None:
        self._display.text(f"warning: {message}", "yellow")

    def message(self, message: str) -> None:
        self._display.text(message)

    def close(self, ok: bool = True, status: str = "") -> None:
        """End the report; ``status`` is its last line, with the time the run took. Calling it again does nothing."""
        if not self._open:
            return
        self._open = False
        self._display.close()
        for logger in self._loggers:
            logger.close(ok)
        if status:
            status = f"{status} ({seconds(time.monotonic() - self._began)})"
            self._display.text(status, "bold green" if ok else "bold red")

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(ok=kind is None)

    def _keep(self, what: str, step: int, samples: Sequence[Sample]) -> None:
        folder = self._folders[what]
        if folder is not None and samples:
            write_samples(folder, step, samples)
