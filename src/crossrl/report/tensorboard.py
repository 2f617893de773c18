"""TensorBoard event files, written at once and in this thread, so that a full disk stops the run.

``tensorboardX.SummaryWriter`` writes in a thread of its own, whose errors nobody hears; its parts below do not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossrl.report.loggers import RunName
from crossrl.report.metrics_file import ReportError, as_number


class TensorBoard:
    """Scalars under ``$TENSORBOARD_DIR``, or ``tensorboard/`` in the run's folder."""

    name = "tensorboard"

    def __init__(self, run: RunName) -> None:
        self.folder = Path(os.environ.get("TENSORBOARD_DIR") or run.folder / "tensorboard")
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=as_number(name, v)) for name, v in metrics.items()]
        # TensorBoard draws NaN and infinity as gaps with a marker: they are logged as they are.
        self._write(step=step, summary=Summary(value=values))

    def truncate_after(self, step: int) -> list[str]:
        """Tell TensorBoard to hide what earlier files hold for later steps (it never rewrites files)."""
        if not any(self.folder.glob("events.out.tfevents.*")):
            return []
        from tensorboardX.proto.event_pb2 import SessionLog

        self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        return [f"tensorboard: what an earlier run logged {f'after step {step}' if step >= 0 else 'there'} is hidden"]

    def close(self, ok: bool) -> None:
        if self._writer is not None:
            self._guard(self._writer.close)
            self._writer = None

    def _write(self, **fields: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        def write() -> None:
            if self._writer is None:
                self._writer = self._open()
            self._writer.write_event(Event(wall_time=time.time(), **fields))
            self._writer.flush()

        self._guard(write)

    def _open(self) -> Any:
        from tensorboardX.event_file_writer import EventsWriter

        self.folder.mkdir(parents=True, exist_ok=True)
        # The suffix keeps two writers that start within one second apart.
        return EventsWriter(str(self.folder / "events"), f".{os.getpid()}.{time.monotonic_ns()}")

    def _guard(self, action: Any) -> None:
        try:
            action()
        except OSError as error:
            raise ReportError(
                f"cannot write TensorBoard events to {self.folder}: {error.strerror or error}. Free some space there, "
                f"set TENSORBOARD_DIR to another folder, or leave tensorboard out of trainer.logger"
            ) from error
