"""The verdict over everything that is known: the examinations of the tapes first, the four arms' curves second. Of runs
that nobody examined, the arms' records go before their curves (``arm_records``).

An examination compares a stage on equal inputs, so where it locates a fault it counts, and the curves confirm or
contradict it. The curves decide where it finds nothing, or has not been made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from crossrl.cross.arm_records import ArmRecords, judge_arms
from crossrl.cross.arms import Experiment, load_experiment, read_config
from crossrl.cross.effects import FEWEST_STEPS, Numerics
from crossrl.cross.findings import PART, Evidence, Examination, Setting, Verdict, to_json
from crossrl.cross.located import Located, locate, place, step_range
from crossrl.cross.next_steps import NextSteps, next_steps
from crossrl.cross.scenario import Scenario, scenario
from crossrl.files import dump_json, publish_text

NOT_EXAMINED = Evidence("stages", "A's tape was not examined by B.")
ASSUMED = "B is taken for the healthy side. Were B at fault, the stages would differ in the same places."
ASSUMED_RECORDS = "B is taken for the healthy side. Were B at fault, the records would differ in the same places."
UNAFFECTED = "Training is not affected: no advantage changes by it."


class VerdictError(ValueError):
    """There is nothing to conclude from; the message says what is wanted."""


def recompute(
    root: Path | None, named: Mapping[str, Path] | None = None, metrics: Sequence[str] = ()
) -> tuple[Verdict, Experiment]:
    """The verdict on the experiment in ``root`` and on runs ``named`` one by one (arm to folder or file of metrics).

    ``metrics``: further metrics to compare. With ``root``, ``verdict.json`` there is replaced. Raises ``VerdictError``
    when there is nothing to compare, ``CurveError`` for what cannot be read.
    """
    experiment = load_experiment(root, named)
    steps = next_steps(experiment)
    curves = scenario(experiment.arms, steps, rounding_of(experiment.examinations), metrics)
    settings = () if experiment.examinations else settings_of_arms(experiment)
    records = None if experiment.examinations else _records_of(experiment)
    verdict = conclude(experiment.examinations, curves, settings, steps, records)
    if experiment.folder is not None:
        try:
            publish_text(experiment.folder.verdict, dump_json(to_json(verdict)))
        except OSError as error:  # somebody else's folder can be judged, too
            note = f"{experiment.folder.verdict} cannot be written: {error.strerror}."
            verdict = replace(verdict, notes=(*verdict.notes, note))
    return verdict, experiment


def conclude(
    examinations: Sequence[Examination],
    curves: Scenario | None = None,
    settings: Iterable[Setting] = (),
    steps: NextSteps | None = None,
    records: ArmRecords | None = None,
) -> Verdict:
    """One verdict. ``settings``: that differ, besides those which the examinations name. ``records``: of the arms, for
    runs of which no stage was examined.

    Raises ``VerdictError`` when there is neither an examination, nor a curve, nor an arm's record: a comparison of
    nothing fails.
    """
    steps = steps or NextSteps()
    located = locate(examinations)
    if located is None and curves is None and records is None:
        raise VerdictError(
            "nothing to compare: no examination, and no metrics of BB and of another arm. Run the experiment: "
            f"{steps.whole()}; or name runs: crossrl verdict --aa RUN --bb RUN"
        )
    differ = {s.key: s for s in (*settings, *(s for e in examinations for s in e.settings))}
    if located is not None and located.blamed and not _harmless_while_curves_differ(located, curves):
        verdict = _from_stages(located, curves, steps)
    elif located is not None and located.unstable:
        verdict = _unstable(located, curves, steps)
    elif located is not None:
        verdict = _stages_find_nothing(located, curves, steps)
    elif records is not None:
        verdict = _from_records(records, curves, steps)
    else:
        assert curves is not None
        verdict = _curves_alone(curves, steps)
    evidence = (*verdict.evidence, *_settings_that_explain(verdict, differ.values()))
    notes = (*verdict.notes, *_unseen(verdict, located))
    noise = " ".join(text for text in _noise(located, records, curves) if text)
    todo = verdict.todo or ((steps.whole(),) if verdict.exit_code == 2 else ())
    return replace(
        verdict, evidence=evidence, effects=curves.effects if curves else (), settings=tuple(differ.values()),
        noise=noise, todo=tuple(dict.fromkeys(todo)), notes=notes,
    )  # fmt: skip


def arm_records(root: Path) -> ArmRecords | None:
    """What the arms' tapes in the experiment's folder say."""
    return _records_of(load_experiment(root))


def _records_of(experiment: Experiment) -> ArmRecords | None:
    """Of a pair, the run that trains, which has recorded both halves; a file of metrics has no records."""
    runs = {name: arm.runs[-1] for name, arm in experiment.arms.items() if arm.runs and arm.runs[-1].is_dir()}
    return judge_arms({name: Path(read_config(run).get("tape.dir") or run) for name, run in runs.items()})


def _noise(located: Located | None, records: ArmRecords | None, curves: Scenario | None) -> tuple[str, ...]:
    return tuple(each.noise for each in (located, records, curves) if each is not None)


def _from_records(records: ArmRecords, curves: Scenario | None, steps: NextSteps) -> Verdict:
    """Equal bits, or the first that differ on equal inputs, count; the curves decide where they tell nothing."""
    notes = curves.notes if curves else ()
    if records.conclusion is None:
        verdict = _curves_alone(curves, steps) if curves else Verdict("not distinguishable")
        todo = (*steps.arm("BB2"), steps.again("BB2")) if records.repeat and verdict.exit_code == 2 else verdict.todo
        return replace(verdict, evidence=(*records.evidence, *verdict.evidence), todo=todo)
    if not records.claims:
        return Verdict(records.conclusion, evidence=records.evidence, notes=notes)
    first = records.claims[0]
    text = "A alone is B bit for bit, but a pair is not: the halves do not fit together, or the exchange is at fault."
    odd = (Evidence("records", text),) if records.conclusion == "not distinguishable" else ()
    look = () if odd or steps.root is None else _look_at(steps.root, first.walk.name, first.walk.stage, first.place[0])
    return Verdict(
        records.conclusion,
        None if odd else "A",
        tuple(dict.fromkeys(c.walk.stage for c in records.claims)),
        first.place[0],
        records.candidates if records.conclusion != "several" else records.parts,
        records.gaps,
        (*records.evidence, *odd, *_curves_on(records, curves)),
        todo=look,
        notes=(*notes, *(() if odd else (ASSUMED_RECORDS,))),
    )


def _look_at(root: Path, arm: str, stage: str, step: int) -> tuple[str, ...]:
    run, base = (load_experiment(root).arms[name].runs[-1] for name in (arm, "BB"))
    return (f"crossrl diff {run} {base}", f"crossrl inspect {run} --step {step} --stage {stage}")


def _curves_alone(curves: Scenario, steps: NextSteps) -> Verdict:
    verdict = _from_curves(curves)
    compared = max((e.steps for e in curves.effects), default=0)
    if verdict.conclusion == "no difference" and compared < FEWEST_STEPS:
        text = f"Equal in {compared} steps says too little: {FEWEST_STEPS} are needed, or an examination."
        return replace(verdict, conclusion="not distinguishable",
                       evidence=(*verdict.evidence, Evidence("curves", text)), todo=steps.examine())  # fmt: skip
    return verdict


def _from_stages(located: Located, curves: Scenario | None, steps: NextSteps) -> Verdict:
    parts, first = located.parts, located.blamed[0]
    notes = [f"{place(f)} differs, harmless: {f.sentence}" for f in located.harmless[:1]]
    if first.harmless:
        notes.append(UNAFFECTED)
    if located.side == "A" and first.by is not None:
        notes.append(ASSUMED)
    listed = []
    for part in parts if len(parts) > 1 else ():
        found = next(f for f in located.blamed if f.part == part)
        listed.append(Evidence("stages", f"{part}: since step {found.step}, in {found.stage}."))
    return Verdict(
        "several" if len(parts) > 1 else parts[0],
        located.side,
        located.stages,
        first.step,
        parts,
        first.gaps,
        (*listed, *located.evidence, *_curves_on(located, curves)),
        consequences=located.consequences,
        todo=_look_closer(located, steps),
        notes=(*notes, *(curves.notes if curves else ())),
    )


def _harmless_while_curves_differ(located: Located, curves: Scenario | None) -> bool:
    """What the stages show changes nothing, and the curves show a fault in another part."""
    if curves is None or not curves.differs or not located.blamed[0].harmless:
        return False
    return not set(curves.candidates) & set(located.parts)


def _curves_on(located: Located | ArmRecords, curves: Scenario | None) -> Iterable[Evidence]:
    """What the curves add to a fault that the examination located."""
    if curves is None:
        return
    if curves.differs is None:
        yield from (e for e in curves.evidence if "too short" in e.sentence)
        return
    if curves.differs is False:
        yield Evidence("curves", "The curves of A and B alone do not show it, so far.")
        return
    yield from curves.evidence
    if not curves.candidates:
        return
    said = curves.conclusion
    agree = set(curves.candidates) & set(located.parts)
    if agree and (said == "several") == (len(located.parts) > 1):
        yield Evidence("curves", f"The four arms, which say {said}, agree.")
    elif agree:
        yield Evidence("curves", f"The four arms say {said}, which agrees in part.")
    else:
        yield Evidence(
            "curves", f"The four arms say {said}, which contradicts it. The examination counts: its inputs are equal."
        )


def _look_closer(located: Located, steps: NextSteps) -> tuple[str, ...]:
    """Where the first difference can be looked at."""
    first = located.blamed[0]
    if steps.root is None:
        return ()
    run = steps.root / "arms" / (first.of * 2)
    sample = next((f" --sample {g.sample_id}" for g in first.gaps if g.sample_id), "")
    stage = "" if first.stage == "data" or sample else f" --stage {first.stage}"
    return (f"crossrl inspect {run} --step {first.step}{stage}{sample}", f"crossrl report {steps.root}")


def _unstable(located: Located, curves: Scenario | None, steps: NextSteps) -> Verdict:
    """All differences between the sides are about as large as those of B from itself."""
    what = ", ".join(located.unstable)
    own = Evidence("stages", f"{what}: A and B differ by about as much as B from itself, run twice.")
    evidence = (*located.evidence, own)
    if curves is None or curves.differs is None:
        return _nothing_by_stages(located, curves, evidence, steps)
    found = _from_curves(curves)
    agree = tuple(p for p in curves.candidates if p in located.unstable)
    if found.conclusion != "several" and agree:  # the half is known from the curves, the part in it from the stages
        found = replace(found, conclusion=agree[0], parts=agree)
    return replace(found, evidence=(*evidence, *found.evidence))


def _stages_find_nothing(located: Located, curves: Scenario | None, steps: NextSteps) -> Verdict:
    but = f", but for what is harmless ({', '.join(located.parts)})" if located.blamed else ""
    nothing = Evidence("stages", f"{_examined(located)}: no stage differs by more than rounding{but}.")
    own = (*((nothing,) if located.judged else ()), *located.evidence)
    if curves is None or curves.differs is None:
        return _nothing_by_stages(located, curves, own, steps)
    found = _from_curves(curves)
    found = replace(found, evidence=(*own, *found.evidence))
    if found.conclusion == "no difference" and "A" not in located.crossed:  # a failed examination is no evidence
        return replace(found, conclusion="not distinguishable", evidence=(*found.evidence, NOT_EXAMINED),
                       todo=steps.examine())  # fmt: skip
    if curves.differs is False or not located.judged:
        return found
    last, since = max(located.steps, default=0), curves.step
    if since is not None and since > last:
        text = f"The curves differ since step {since}, after the last examined step ({last})."
        return replace(found, evidence=(*found.evidence, Evidence("curves", text)),
                       todo=(*found.todo, *steps.examine_to(since + 1)))  # fmt: skip
    if found.exit_code == 1 and not _could_have_missed(located, curves):
        text = (
            f"The curves say {found.conclusion}, but every stage of it gives the same on equal inputs: two sound runs "
            "may drift apart so far. A repeat of B tells how far."
        )
        return Verdict("not distinguishable", step=since, evidence=(*found.evidence, Evidence("curves", text)),
                       notes=found.notes, todo=(*steps.arm("BB2"), steps.again("BB2")))  # fmt: skip
    return found


def _nothing_by_stages(
    located: Located, curves: Scenario | None, evidence: Sequence[Evidence], steps: NextSteps
) -> Verdict:
    """No difference only where B has judged every stage of A's tape, at every examined step."""
    extra = curves.evidence if curves else ()
    if "A" not in located.crossed:  # B's tape alone says that B is as A expects, not that A is as it should be
        return Verdict("not distinguishable", evidence=(*evidence, NOT_EXAMINED, *extra), todo=steps.examine())
    if located.judged and not located.unjudged:
        return Verdict("no difference", evidence=(*evidence, *extra), notes=curves.notes if curves else ())
    return Verdict("not distinguishable", evidence=(*evidence, *extra), todo=steps.examine())


def _unseen(verdict: Verdict, located: Located | None) -> tuple[str, ...]:
    """Under which limits a verdict of no difference stands."""
    if verdict.exit_code or located is None or not located.unseen:
        return ()
    return (f"What is smaller than these limits would not have been seen: {'; '.join(located.unseen)}.",)


def _could_have_missed(located: Located, curves: Scenario) -> bool:
    """Whether a stage of what the curves name was not judged, if at one step only."""
    return any(PART[s] in curves.candidates for s in located.unjudged)


def _examined(located: Located) -> str:
    return f"Examined {step_range(located.steps)}"


def _from_curves(curves: Scenario) -> Verdict:
    return Verdict(
        curves.conclusion,
        "A" if curves.candidates else None,
        step=curves.step,
        parts=curves.candidates,
        evidence=curves.evidence,
        notes=curves.notes,
        todo=curves.todo,
    )


def _settings_that_explain(verdict: Verdict, settings: Iterable[Setting]) -> list[Evidence]:
    """Of the parts at fault: a setting that differs is the first thing to look at, and perhaps no defect at all."""
    if verdict.exit_code == 0:
        return []
    return [
        Evidence("settings", f"A has {s.key} {_value(s.a)}, B {_value(s.b)}: it concerns {s.part}, and may explain it.")
        for s in settings
        if s.part is not None and s.part in verdict.parts
    ]


def _value(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def rounding_of(examinations: Sequence[Examination]) -> Numerics:
    """For curves. Sampler and trainer are two computations of one number, so at least float32; without an examination
    bfloat16, the widest that is harmless."""
    found = {e.numerics for e in examinations if e.of != e.by}
    return "bfloat16" if not found or "bfloat16" in found else "float32"


def settings_of_arms(experiment: Experiment) -> tuple[Setting, ...]:
    """From the configurations of A alone and B alone, where both lie with their runs."""
    configs = [read_config(a.runs[0]) if (a := experiment.arms[n]).runs else {} for n in ("AA", "BB")]
    if not all(configs):
        return ()
    from crossrl.cross.setting_parts import settings_between

    return settings_between(configs[0], configs[1], of_is_a=True)
