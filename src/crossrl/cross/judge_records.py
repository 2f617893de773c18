"""What the records of one run say about each other: the weight sync, mixed-up inputs, meanings, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossrl.cross.case import Case
from crossrl.cross.findings import Finding, Gap
from crossrl.cross.measure import Measured, describe_gap
from crossrl.stages.base import At
from crossrl.tape.api import SAMPLER_COLUMN, RunTape, trainer_column
from crossrl.tape.gap import input_differences, meaning_verdict
from crossrl.tape.record import Record


def sync_problems(run: RunTape, step: int) -> list[str]:
    """What is wrong with the weight sync after ``step``, in sentences; nothing if the record is not there.

    It must deliver the version that the update made, hold what was sent, and be what the next rollouts were drawn with.
    """
    if ("sync", At(step)) not in run.calls(step):
        return []
    facts = run.record(step, "sync").header.info.get("sync")
    if not isinstance(facts, Mapping):
        return ["the sync brought no weights to the rollout engine"]
    out = held_problems(facts)
    version, made = facts.get("weight_version"), _made(run, step)
    if made is not None and version != made:
        out.append(f"the rollout engine is left at weight version {version}, the update made version {made}")
    drawn = _drawn(run, step + 1)
    if drawn and made is not None and drawn != {made}:
        out.append(f"the responses of step {step + 1} were drawn with weight version {_list(drawn)}, the trainer had "
                   f"version {made}")  # fmt: skip
    return out


def held_problems(facts: Mapping[str, Any]) -> list[str]:
    """Of one record's facts alone: what was sent is what is held. Digests are "" where the memory is one and the same,
    or where none were asked for."""
    sent, held = facts.get("sent", ""), facts.get("held", "")
    if sent and held and sent != held:
        cast = f", after the cast {facts['cast']}" if facts.get("cast") else ""
        return [f"the rollout engine holds other weights ({held[:12]}) than were sent to it ({sent[:12]}){cast}"]
    return []


def judge_sync(case: Case, record: Record, own: Mapping[str, Any] | None) -> Finding:
    """``own``: the facts of the examiner's sync of the same weights, in the same data type, where it made one."""
    problems = sync_problems(case.run, case.step)
    facts = record.header.info.get("sync") or {}
    sent, mine = facts.get("sent", ""), (own or {}).get("sent", "")
    comparable = sent and mine and all(facts.get(key) == (own or {}).get(key) for key in ("cast", "digest"))
    if comparable and sent != mine:
        problems.append(f"the weights that were sent ({sent[:12]}) are not those after the update ({mine[:12]})")
    if problems:
        gap = Gap("weights", "value", 1, 1, recorded=facts.get("held"), found=sent or None)
        return case.finding(record, "sync", "differs", "; ".join(problems), [Measured(gap)], own=True)
    told = "weights and version" if sent else "the version (no digests were recorded)"
    return case.finding(record, "sync", "equal", f"the rollout engine has what the update made: {told}", own=True)


def judge_inputs(case: Case) -> list[Finding]:
    """A stage that was given another value, for the same sample, than the stage before it wrote (C05)."""
    out = []
    for each in input_differences(case.run, case.step):
        record = case.run.record(case.step, each.stage, each.at.call)
        gap = Gap(each.field, "inputs", each.differing, each.total, each.sample_id, samples=(each.sample_id or "",))
        sentence = (
            f"inputs differ: {each.stage} was given another {each.field} than the stages before it wrote, in "
            f"{each.differing} of {each.total} samples, first {each.sample_id}: mixed up or changed on the way"
        )
        out.append(case.finding(record, each.stage, "differs", sentence, [Measured(gap)], own=True))
    return out


def judge_meaning(case: Case) -> list[Finding]:
    """Sampler and trainer must mean the same by a log-prob (C07)."""
    run, step = case.run, case.step
    records = [record for _, record in run.records(step)]
    meanings = {n: m for record in records for n, m in record.header.meanings.items()}
    name = trainer_column({n for record in records for n in record.header.fields}, meanings)
    pair = meanings.get(SAMPLER_COLUMN), meanings.get(name or "")
    if pair[0] is None or pair[1] is None:
        return []
    verdict, reason = meaning_verdict(pair[0], pair[1])
    record = next(r for r in records if SAMPLER_COLUMN in r.header.meanings)
    if verdict == "different meaning":
        gap = Gap(SAMPLER_COLUMN, "meaning", 1, 1, recorded=repr(pair[0]), found=repr(pair[1]))
        return [case.finding(record, "rollout", "differs", f"different meaning: {reason}", [Measured(gap)], own=True)]
    return []


def judge_checkpoint(case: Case, record: Record) -> Finding:
    """A checkpoint is of the weights that the update left."""
    saved = record.header.info.get("checkpoint") or {}
    update = case.states.update(case.step)
    made = update.header.info.get("state", {}).get("after", {}) if update else {}
    both = [k for k in ("weights", "optimizer") if k in saved and k in made]
    if not saved:
        return case.finding(record, "checkpoint", "equal", "none was due", own=True)
    if not both:
        return case.finding(record, "checkpoint", "not judged", "its digests, or those of the update, are not recorded",
                            own=True)  # fmt: skip
    gaps = [Measured(Gap(k, "value", 1, 1, recorded=saved[k], found=made[k])) for k in both if saved[k] != made[k]]
    if gaps:
        sentence = "the checkpoint is not of the state after the update: " + "; ".join(describe_gap(g) for g in gaps)
        return case.finding(record, "checkpoint", "differs", sentence, gaps, own=True)
    return case.finding(record, "checkpoint", "equal", "it is of the state after the update, by digest", own=True)


def _made(run: RunTape, step: int) -> int | None:
    """The weight version that the update of ``step`` made."""
    if step == 0:
        return 0
    if ("update", At(step)) not in run.calls(step):
        return None
    header = run.record(step, "update").header
    version = header.info.get("state", {}).get("engine", {}).get("weight_version", header.weight_version)
    return version if isinstance(version, int) else None


def _drawn(run: RunTape, step: int) -> set[int]:
    found: set[int] = set()
    for stage, at in run.calls(step):
        if stage == "rollout":
            record = run.record(step, stage, at.call)
            if "rollout_weight_version" in record.header.fields:
                found |= set(record.only(["rollout_weight_version"]).array("rollout_weight_version").tolist())
    return found


def _list(values: set[int]) -> str:
    return ", ".join(map(str, sorted(values)))
