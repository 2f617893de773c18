"""The whole experiment: record, examine, exchange, conclude. Every part that is done is kept, so it can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crossrl.cross.arms import load_examinations
from crossrl.cross.findings import Verdict
from crossrl.cross.plan import Job, Plan
from crossrl.cross.runner import Progress, run_here, run_together, was_done
from crossrl.cross.verdict import recompute

# Stages that compute with the model.
OF_WEIGHTS = ("rollout", "old_log_prob", "ref_log_prob", "update")


class ExperimentError(RuntimeError):
    """A part failed without which there is nothing to conclude; the message says which and where its log is."""


@dataclass(slots=True)
class Runner:
    """``show``: is given the lines of all jobs so far, several times a second. ``say``: a message for the user.
    ``early``: is given the verdict from the recorded steps, before the arms have run. ``limit_s``: for each group of
    jobs that runs together. ``execute``: runs a command of ``crossrl`` in this process and returns its exit code; None:
    every job is a process."""

    plan: Plan
    show: Callable[[Sequence[Progress]], None]
    say: Callable[[str], None]
    early: Callable[[Verdict], None]
    limit_s: float
    execute: Callable[[Sequence[str]], int] | None = None
    lines: list[Progress] = field(default_factory=list)

    def run(self, quick: bool) -> Verdict:
        """All of it, or with ``quick`` only what the examination of the recorded steps needs."""
        if self.execute is not None and not quick:
            raise ValueError("the two runs of a pair wait for each other: they need a process each")
        plan = self.plan
        short = None if plan.steps == plan.record else plan.record
        until = plan.record if quick else short or plan.steps
        self.together(plan.alone("AA", until), plan.alone("BB", until))
        self.need_records()
        self.together(plan.examination("A", "B"), plan.examination("B", "A"))
        self.together(plan.examination("B", "B"), plan.examination("A", "A"))
        if quick:
            return self.conclude()
        self.early(self.conclude())
        if short is not None:
            self.together(plan.alone("AA", plan.steps), plan.alone("BB", plan.steps))
        if plan.forbidden:
            self.say(plan.forbidden)
        else:
            self.together(*plan.pair("AB"))
            self.together(*plan.pair("BA"))
        if not self.deterministic():
            self.together(plan.alone("BB2", plan.steps))
        return self.conclude()

    def together(self, *jobs: Job) -> None:
        for job in jobs:
            if job.side.remote is not None and not was_done(job):
                job.log.parent.mkdir(parents=True, exist_ok=True)
                self.say(f"to be run for side {job.side.name} ({job.what}):\n{job.shell()}")
        before = list(self.lines)

        def show(lines: Sequence[Progress]) -> None:
            self.show([*before, *lines])

        if self.execute is not None:
            new = [run_here(job, show, self.execute) for job in jobs]
        else:
            new = run_together(jobs, show, self.limit_s)
        self.lines = [*before, *new]

    def deterministic(self) -> bool:
        """Whether B's own examination of itself found all bits equal: then a repeat would be the same run. What was not
        judged is not known to be equal; it counts where the weights have a say, whose rounding is what may vary."""
        own = [e for e in load_examinations(self.plan.folder) if (e.of, e.by) == ("B", "B")]
        found = {(f.stage, f.judged) for e in own for f in e.findings}
        return {("rollout", "equal"), ("update", "equal")} <= found and all(
            judged == "equal" or (judged == "not judged" and stage not in OF_WEIGHTS) for stage, judged in found
        )

    def need_records(self) -> None:
        """A run that failed later is evidence; one that recorded nothing leaves nothing to compare."""
        for line in self.lines:
            if line.state == "failed" and line.job.run and not any((line.job.run / "tape").glob("step_*/rollout.*")):
                raise ExperimentError(f"{line.job.what}: nothing was recorded. {line.detail}\nlog: {line.job.log}")

    def conclude(self) -> Verdict:
        return recompute(self.plan.folder.root)[0]
