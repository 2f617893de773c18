"""The experiment of two commands: each alone, then the halves swapped, then what is still needed to conclude."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crossrl.cross.arm_records import ArmRecords
from crossrl.cross.commands import CommandPlan
from crossrl.cross.experiment import ExperimentError
from crossrl.cross.findings import Verdict
from crossrl.cross.plan import Job
from crossrl.cross.runner import Progress, recorded, run_together, was_done
from crossrl.cross.verdict import arm_records, recompute

LIKE_B = "A is B bit for bit in every record: the halves need not be swapped."


@dataclass(slots=True)
class CommandRunner:
    """As ``Runner``; one run at a time, but for the two of a pair, since each may take the whole machine."""

    plan: CommandPlan
    show: Callable[[Sequence[Progress]], None]
    say: Callable[[str], None]
    early: Callable[[Verdict], None]
    limit_s: float
    lines: list[Progress] = field(default_factory=list)

    def run(self, quick: bool) -> Verdict:
        """All of it; with ``quick`` each side alone, no arms."""
        for name in ("BB", "AA"):
            self.together(self.plan.alone(name))
            self.need_records(self.lines[-1])
        verdict = self.conclude()
        if quick:
            return verdict
        self.early(verdict)
        if verdict.conclusion == "no difference":
            self.say(LIKE_B)
            return verdict
        for name in ("AB", "BA"):
            self.together(*self.plan.pair(name))
            if all(was_done(job) for job in self.plan.pair(name)):
                for folder in self.plan.folder.share(name).glob("ckpt_*.verl"):  # each as large as a checkpoint
                    shutil.rmtree(folder, ignore_errors=True)
        found = self.records()
        if found is None or found.repeat or found.conclusion is None:
            self.together(self.plan.alone("BB2"))
        return self.conclude()

    def together(self, *jobs: Job) -> None:
        """A pair of which one half is not done runs again as a whole."""
        if not all(was_done(job) for job in jobs):
            for job in jobs:
                job.exit_file.unlink(missing_ok=True)
            if len(jobs) > 1:
                shutil.rmtree(self.plan.folder.share(jobs[0].name), ignore_errors=True)
        before = list(self.lines)
        new = run_together(jobs, lambda lines: self.show([*before, *lines]), self.limit_s)
        self.lines = [*before, *new]

    def need_records(self, line: Progress) -> None:
        """A run without records is no arm, whatever its exit code."""
        job = line.job
        if recorded(job):
            return
        told = line.detail
        if line.state == "done":
            told = (
                f"It ended well, but without CrossRL. Is crossrl installed for the interpreter of "
                f"--{job.side.name.lower()}-command, is it not switched off there "
                "(CROSSRL_VERL=0), and does a script hand its arguments on "
                '("$@")? See docs/how-to/use-with-verl.md'
            )
        raise ExperimentError(f"{job.what}: nothing was recorded. {told}\nlog: {job.log}")

    def records(self) -> ArmRecords | None:
        return arm_records(self.plan.folder.root)

    def conclude(self) -> Verdict:
        return recompute(self.plan.folder.root)[0]
