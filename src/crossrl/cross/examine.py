"""Cross-examination of a tape: every recorded call of side ``of`` run again by the installation of side ``by``.

Each stage gets what the run's own stage was given, and the run's weights, so each is judged by its own work: a fault at
one stage does not make the next one look guilty.

    examined = examine(Path("outputs/a"), load_config([...], "b.yaml"), of="A", by="B")
    [f.sentence for f in examined.findings if f.judged == "differs"]
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from crossrl.algorithms.errors import AlgorithmError
from crossrl.assemble import Parts, assemble
from crossrl.batch import Batch, BatchError
from crossrl.config import load_config
from crossrl.config.load import LoadedConfig
from crossrl.config.root import RunConfig
from crossrl.cross.case import Case
from crossrl.cross.findings import PART, Examination, Finding, Setting, Side
from crossrl.cross.inputs import NotJudged, inputs_for
from crossrl.cross.judge_data import Draws, judge_data
from crossrl.cross.judge_records import (
    held_problems,
    judge_checkpoint,
    judge_inputs,
    judge_meaning,
    judge_sync,
    sync_problems,
)
from crossrl.cross.judge_rollout import judge_rollout
from crossrl.cross.judge_update import judge_update
from crossrl.cross.judge_values import judge_values
from crossrl.cross.noise import numerics_of, unseen
from crossrl.cross.setting_parts import facts_here, facts_recorded, flat_settings, parts_of, settings_between
from crossrl.cross.states import States
from crossrl.engines.base import EngineError
from crossrl.engines.threads import choose_threads
from crossrl.report import Reporter
from crossrl.stages.base import ORDER, At, apply
from crossrl.tape.api import RunTape, open_run
from crossrl.tape.errors import RecordMissing
from crossrl.tape.record import Record
from crossrl.tape.versions import versions

JUDGED: dict[str, Callable[[Case, Record], Finding]] = {
    "rollout": judge_rollout, "reward": judge_values, "old_log_prob": judge_values, "ref_log_prob": judge_values,
    "advantage": judge_values, "update": judge_update, "checkpoint": judge_checkpoint,
}  # fmt: skip
# What a stage of the examiner's may raise on another side's inputs: then that call is not judged, and the message says
# why. A corrupt record is an error of the whole examination.
REFUSALS = (EngineError, BatchError, AlgorithmError)


class ExamineError(RuntimeError):
    """There is nothing to examine; the message says what to record."""


def examine(
    run: Path,
    loaded: LoadedConfig,
    of: Side,
    by: Side,
    steps: frozenset[int] | None = None,
    reporter: Reporter | None = None,
    plant: Callable[[Parts], None] = lambda parts: None,
) -> Examination:
    """Judge the tape in run folder ``run`` (config.yaml, tape/), which is side ``of``'s, by ``loaded``, side ``by``'s.

    ``steps``: None for all that are recorded. ``plant``: changes the examiner's parts (``crossrl.cross.faults``). A
    difference is a finding, not an error. Nothing is written. Raises ``ExamineError`` when there is nothing to compare,
    what the configuration, the data and the models raise, and ``CorruptRecord``.
    """
    theirs, tape = _open(run)
    wanted = _steps(tape, steps)
    told = f"examining {of} by {by}"
    say = reporter.stage if reporter else lambda name, done=0, total=None: None
    # Engines make digests of what they hold when there is a tape to write them to.
    cfg = dataclasses.replace(loaded.config, tape=dataclasses.replace(loaded.config.tape, mode="record"))
    threads = torch.get_num_threads()
    say(told)
    parts = assemble(cfg, lambda stage, done, total: None)
    try:
        plant(parts)
        start = time.monotonic()
        bench = Bench(tape, theirs, cfg, parts, of, by, frozenset(wanted))
        findings: list[Finding] = []
        for done, step in enumerate(wanted):
            say(told, done, len(wanted))
            findings += bench.judge(step)
        say(told, len(wanted), len(wanted))
        settings = bench.settings()
        took = time.monotonic() - start
    finally:
        parts.close()
        torch.set_num_threads(threads)  # which assembling has set as this side wants it
    if all(f.judged == "not judged" for f in findings):
        reasons = "; ".join(dict.fromkeys(f.sentence for f in findings)) or "no stage is recorded"
        raise ExamineError(f"{tape.layout.root}: nothing was compared: {reasons:.1500}")
    return Examination(
        of, by, tuple(wanted), bench.numerics.loosest, bench.numerics.because,
        tuple(_with_settings(f, settings, of, by) for f in findings), settings, took, unseen(bench.numerics),
    )  # fmt: skip


class Bench:
    """The examiner's installation, with a tape on it. ``judge`` walks one step; steps must come in order."""

    def __init__(
        self,
        tape: RunTape,
        theirs: RunConfig,
        cfg: RunConfig,
        parts: Parts,
        of: Side,
        by: Side,
        wanted: frozenset[int],
    ) -> None:
        self.tape, self.theirs, self.cfg, self.parts, self.of, self.by = tape, theirs, cfg, parts, of, by
        self.wanted = wanted
        self.headers = [r.header for s in tape.steps()[:2] for _, r in tape.records(s)]
        self.versions = self.headers[0].versions if self.headers else {}
        # Where the run chose by itself, it is taken to have had as many cores as there are here.
        chosen = choose_threads(parts.trainer.facts.num_parameters)[0]
        threads = theirs.trainer.num_threads or chosen, torch.get_num_threads()
        self.here = versions(parts.trainer.facts.device)
        self.numerics = numerics_of(theirs, cfg, self.versions, self.here, threads)
        self.own_sync: Mapping[str, Any] = {}
        self.brought, self.unsynced = -1, ""
        self.states = States(tape, parts.trainer)
        self.draws = Draws(tape, parts, cfg)

    def judge(self, step: int) -> list[Finding]:
        """The findings of one step, in the order of its stages."""
        case = Case(self.tape, self.parts, self.of, self.by, self.numerics, self.states, step)
        calls = self.tape.calls(step)
        if step == 0:
            return [self._sync(case, self.tape.record(0, "sync"))] if ("sync", At(0)) in calls else []
        case.known = self.states.before(step)
        case.sync_fault = "; ".join(sync_problems(self.tape, step - 1))
        case.unsynced = self._bring(step - 1) if case.known.kind != "unknown" else ""
        found = [*judge_inputs(case), *judge_meaning(case), *self._data(case)]
        if case.sync_fault and step - 1 not in self.wanted:  # what follows from it would lack its cause
            before = Case(self.tape, self.parts, self.of, self.by, self.numerics, self.states, step - 1)
            found.append(judge_sync(before, self.tape.record(step - 1, "sync"), None))
        for stage, at in calls:
            record = self.tape.record(step, stage, at.call)
            if stage == "sync":
                found.append(self._sync(case, record))
            elif stage in JUDGED:
                found.append(self._judged(case, record))
        found += self._missing(case, {stage for stage, _ in calls})
        return sorted(found, key=lambda f: (f.step, _rank(f.stage), f.call))

    def settings(self) -> tuple[Setting, ...]:
        """What differs between the sides: configuration keys, facts of their files, versions."""
        prints = {h.stage: h.fingerprints for h in self.headers if h.split == "train"}
        recorded = {**flat_settings(self.theirs), **facts_recorded(prints)}
        facts = {k: v for k, v in facts_here(self.parts, self.cfg).items() if k in recorded}
        of = {**recorded, **{f"version of {k}": v for k, v in self.versions.items()}}
        by = {**flat_settings(self.cfg), **facts, **{f"version of {k}": v for k, v in self.here.items()}}
        if self.states.first.kind == "unknown":
            of["initial weights"], by["initial weights"] = self.states.first_recorded, self.states.initial_digest
        return settings_between(of, by, self.of == "A")

    def _bring(self, step: int) -> str:
        """The weights after ``step`` to the examiner's engine by its own sync; what is wrong with that, or "". Once per
        version, as in a run: an engine that is a version behind would catch up at the second time."""
        if self.brought != step:
            self.brought, self.unsynced = step, self._sync_own(step)
        return self.unsynced

    def _sync_own(self, step: int) -> str:
        stage = self.parts.stages.get("sync", self.parts.sync)
        facts = stage(Batch(()), At(step)).info.get("sync")
        self.own_sync = facts if isinstance(facts, Mapping) else {}
        if not isinstance(facts, Mapping) or self.parts.engine.weight_version != self.parts.trainer.weight_version:
            return f"side {self.by}'s own weight sync did not deliver"
        problems = held_problems(facts)
        return f"side {self.by}'s own weight sync is at fault: {problems[0]}" if problems else ""

    def _sync(self, case: Case, record: Record) -> Finding:
        """With the run's weights of that time in the examiner's trainer, to know what was to be sent."""
        own = None
        if self.states.before(case.step + 1).kind == "recorded" and self.states.same_types:
            self._bring(case.step)
            own = self.own_sync
        return judge_sync(case, record, own)

    def _data(self, case: Case) -> list[Finding]:
        calls = [at.call for stage, at in self.tape.calls(case.step) if stage == "rollout"]
        out = []
        try:
            drawn = self.draws.of(case.step)
            for call, batch in zip(calls, drawn, strict=False):
                out.append(judge_data(case, self.tape.record(case.step, "rollout", call), batch))
        except (NotJudged, *REFUSALS) as why:
            out.append(case.finding(None, "data", "not judged", str(why)))
        return out

    def _judged(self, case: Case, record: Record) -> Finding:
        stage = record.header.stage
        try:
            if stage == "update":
                self._complete(case, record)
            return JUDGED[stage](case, record)
        except NotJudged as why:
            return case.finding(record, stage, "not judged", str(why))
        except REFUSALS as error:
            return case.finding(record, stage, "not judged", f"side {case.by}'s stage refuses: {error}")

    def _complete(self, case: Case, update: Record) -> None:
        """Fields that the examiner's update reads and the run does not have, made by the examiner's own stages."""
        stages = self.parts.stages
        for name in ("old_log_prob", "ref_log_prob"):
            stage = stages.get(name)
            if stage is None or (name, At(case.step)) in self.tape.calls(case.step):
                continue
            given = inputs_for(self.tape, stage.reads, update)
            out = apply(stage, given, At(case.step)).only(stage.writes)
            case.extra |= dict.fromkeys(stage.writes, out)

    def _missing(self, case: Case, recorded: set[str]) -> Iterable[Finding]:
        for stage in ORDER:
            if stage in self.parts.stages and stage not in recorded and stage != "checkpoint":
                why = f"side {self.by} runs this stage, the run has no record of it (tape.stages, or no use for it)"
                yield case.finding(None, stage, "not judged", why)


def _open(run: Path) -> tuple[RunConfig, RunTape]:
    config = run.expanduser() / "config.yaml"
    if not config.is_file():
        raise ExamineError(f"{run} holds no config.yaml: not the folder of a run (trainer.default_local_dir)")
    theirs = load_config((), str(config)).config
    try:
        return theirs, open_run(theirs.tape.dir or run)
    except RecordMissing as error:
        raise ExamineError(
            f"{error}. Record the run first: crossrl train ... tape.mode=record tape.state=True"
        ) from None


def _steps(tape: RunTape, steps: frozenset[int] | None) -> list[int]:
    there = tape.steps()
    found = [s for s in there if steps is None or s in steps]
    if not any(found):
        raise ExamineError(
            f"none of the steps asked for is recorded; {tape.layout.root} holds {', '.join(map(str, there[:20]))}. "
            "Record with tape.mode=record tape.state=True, and tape.steps that include them"
        )
    return found


def _rank(stage: str) -> int:
    return -1 if stage == "data" else ORDER.index(stage)


def _with_settings(finding: Finding, settings: tuple[Setting, ...], of: Side, by: Side) -> Finding:
    """A difference that a differing setting explains says so."""
    if finding.judged != "differs" or of == by:
        return finding
    named = [s for s in settings if PART[finding.stage] in parts_of(s.key)]
    if not named:
        return finding
    pairs = ", ".join(f"{s.key} (A: {_value(s.a)}, B: {_value(s.b)})" for s in named[:6])
    more = f" and {len(named) - 6} more" if len(named) > 6 else ""
    return dataclasses.replace(finding, sentence=f"{finding.sentence}. Settings that concern it differ: {pairs}{more}")


def _value(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
