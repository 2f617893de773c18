"""Runs the jobs of an experiment as processes, two at a time, and knows how far each has got."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from crossrl.cross.plan import Job
from crossrl.cross.watch import GRACE_S, QUIET_S, clear, first_match
from crossrl.files import publish_text, read_json

POLL_S = 0.25
LOOK_S = 3.0
State = Literal["waiting", "running", "done", "failed"]


@dataclass(slots=True)
class Progress:
    """One line of the live view. ``detail``: the last reward, or why the job failed."""

    job: Job
    state: State = "waiting"
    step: int | None = None
    detail: str = ""
    began: float | None = None
    seconds: float = 0.0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    looked: float = 0.0
    failing: float | None = None
    """When its log was read for what it says before it hangs, and since when it has said so."""

    @property
    def active(self) -> bool:
        return self.state == "running"


def run_together(jobs: Sequence[Job], show: Callable[[Sequence[Progress]], None], limit_s: float) -> list[Progress]:
    """Run ``jobs`` at the same time; return when all have ended, well or not. A job that was done before is not run.

    A job of a side that runs elsewhere is started by the user: its command is in ``Job.shell``. Waits for: each job's
    process, or its exit code file. Time limit: ``limit_s`` for all, after which they are stopped and failed.
    """
    lines = [Progress(job) for job in jobs]
    end = time.monotonic() + limit_s
    with _stopped_at_the_end(lines):
        for line in lines:
            _start(line)
        show(lines)
        while any(line.active for line in lines):
            time.sleep(POLL_S)
            for line in lines:
                _look(line)
            show(lines)
            if time.monotonic() > end:
                for line in lines:
                    if line.active:
                        line.state, line.detail = "failed", f"did not end within {limit_s:g} s (--timeout)"
    return lines


def run_here(job: Job, show: Callable[[Sequence[Progress]], None], execute: Callable[[Sequence[str]], int]) -> Progress:
    """``job`` in this process, by ``execute``; its output goes to the same log, and what comes of it is the same."""
    line = Progress(job, "running", began=time.monotonic())
    show([line])
    if _skipped(line):
        return line
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with (
        job.log.open("a", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        code = execute(job.command[3:])
    line.seconds = time.monotonic() - (line.began or 0.0)
    _ended(line, code)
    show([line])
    return line


def _skipped(line: Progress) -> bool:
    if not was_done(line.job):
        return False
    line.state, line.step, line.detail = "done", _last(line.job)[0], "done before"
    return True


def _start(line: Progress) -> None:
    job = line.job
    if _skipped(line):
        return
    job.log.parent.mkdir(parents=True, exist_ok=True)
    job.exit_file.unlink(missing_ok=True)
    if job.fresh and job.run is not None:
        shutil.rmtree(job.run, ignore_errors=True)
        job.log.unlink(missing_ok=True)
    line.began, line.state = time.monotonic(), "running"
    if job.side.remote is not None:
        line.detail = "start it there: see the command above"
        return
    with job.log.open("ab") as log:
        env = {**os.environ, **job.side.env, **job.env, "PYTHONUNBUFFERED": "1"}
        # A session of its own: Ctrl-C in the terminal reaches this process, which then asks the others to end, once.
        line.process = subprocess.Popen(
            job.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        )


def _look(line: Progress) -> None:
    if not line.active:
        return
    job, code = line.job, None
    line.seconds = time.monotonic() - (line.began or time.monotonic())
    step, reward = _last(job)
    line.step = step
    if line.process is not None:
        code = line.process.poll()
    elif job.exit_file.is_file():
        with contextlib.suppress(ValueError):
            code = int(job.exit_file.read_text())
    if code is not None:
        _ended(line, code)
    elif _hangs(line):
        line.state = "failed"
    elif reward is not None:
        line.detail = f"reward {reward:.3f}"


def _hangs(line: Progress) -> bool:
    """Whether the process is still there ``GRACE_S`` after its log said that it failed, or ``QUIET_S`` after the last
    that it did when its log says what may mean that."""
    job, now = line.job, time.monotonic()
    if job.fatal is not None and line.failing is None and now - line.looked > LOOK_S:
        line.looked = now
        if told := first_match(job.fatal, job.log):
            line.failing, line.detail = now, told
        elif job.trouble is not None and _quiet(job) > QUIET_S and (told := first_match(job.trouble, job.log)):
            line.detail = f"nothing happens for {QUIET_S:g} s after: {told}"
            return True
    return line.failing is not None and now - line.failing > GRACE_S


def _quiet(job: Job) -> float:
    """Seconds since the job wrote a line into its log or its metrics."""
    paths = [job.log, *([job.run / "metrics.jsonl"] if job.run else [])]
    return time.time() - max((p.stat().st_mtime for p in paths if p.exists()), default=time.time())


def _ended(line: Progress, code: int) -> None:
    job = line.job
    clear(job.env)
    publish_text(job.exit_file, f"{code}\n")
    line.step, reward = _last(job)
    if ended_well(job, code):
        line.state, line.detail = "done", f"reward {reward:.3f}" if reward is not None else ""
    else:
        line.state, line.detail = "failed", f"exit code {code}: {last_line(job.log)}"


def ended_well(job: Job, code: int) -> bool:
    """An examination that finds a difference ends with 1, which is a result."""
    return code == 0 if job.result is None else code in (0, 1) and job.result.is_file()


def was_done(job: Job) -> bool:
    if job.result is not None:
        return _is_of_the_tape(job)
    try:
        code = int(job.exit_file.read_text())
    except (OSError, ValueError):
        return False
    return code == 0 and (job.steps is None or (_last(job)[0] or 0) >= job.steps) and (not job.fresh or recorded(job))


def recorded(job: Job) -> bool:
    """Whether there is a record of the rollout of any step."""
    return job.run is not None and any((job.run / "tape").glob("step_*/rollout.*"))


def _is_of_the_tape(job: Job) -> bool:
    """Whether an examination is there and no record is younger: a run that was repeated is examined again."""
    if job.result is None or not job.result.is_file() or job.tape is None:
        return False
    made = job.result.stat().st_mtime_ns
    records = list(job.tape.glob("step_*/*/record.json"))
    steps = {int(path.parts[-3].removeprefix("step_")) for path in records} - {0}
    examined = set(read_json(job.result).get("steps", ()))
    return steps == examined and all(path.stat().st_mtime_ns < made for path in records)


def _last(job: Job) -> tuple[int | None, float | None]:
    """Step and mean reward of the last line of the run's metrics."""
    path = job.run / "metrics.jsonl" if job.run else None
    if path is None or not path.is_file():
        return None, None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16384))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                return int(row["step"]), float(row["critic/rewards/mean"])
    return None, None


def last_line(log: Path, limit: int = 300) -> str:
    """The last line of a log that says something."""
    with contextlib.suppress(OSError):
        lines = [t for t in log.read_text(encoding="utf-8", errors="replace").splitlines() if t.strip()]
        if lines:
            return lines[-1][:limit]
    return f"see {log}"


@contextlib.contextmanager
def _stopped_at_the_end(lines: Sequence[Progress]) -> Iterator[None]:
    """However this ends, no process is left: first they are asked (their peers then hear why), then killed."""
    try:
        yield
    finally:
        alive = [line.process for line in lines if line.process is not None and line.process.poll() is None]
        try:
            for process in alive:
                process.terminate()
            end = time.monotonic() + 15
            while any(process.poll() is None for process in alive) and time.monotonic() < end:
                time.sleep(0.05)
        finally:  # also when Ctrl-C is pressed again
            for process in alive:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            for line in lines:
                if line.process is not None:
                    clear(line.job.env)
