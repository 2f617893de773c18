"""reward, old_log_prob, ref_log_prob and advantage, run again on their recorded inputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from crossrl.batch import Batch
from crossrl.cross import noise
from crossrl.cross.case import Case
from crossrl.cross.findings import Finding
from crossrl.cross.hypotheses import explain
from crossrl.cross.inputs import NotJudged, inputs_for
from crossrl.cross.measure import describe, judge, measure
from crossrl.cross.noise import Limit
from crossrl.models.digest import weights_digest
from crossrl.stages.base import At, apply
from crossrl.tape.record import Record

# Relative to the largest advantage: a constant added to a group's rewards leaves its advantages but for rounding.
SAME_ADVANTAGE = 1e-4


def judge_values(case: Case, record: Record) -> Finding:
    """Raises ``NotJudged``."""
    stage = record.header.stage
    if stage == "old_log_prob":
        case.need_state()
    if stage == "ref_log_prob":
        _need_reference(case, record)
    if stage == "advantage":
        _bring_controller(case)
    given, found = case.again(record)
    recorded = record.only(n for n in record.header.fields if n in case.parts.stages[stage].writes)
    measured = measure(recorded, found, stage, At(case.step, record.header.call), limits_of(case, stage))
    judged = judge(measured)
    if judged == "equal":
        return case.finding(record, stage, judged, f"{stage} is the same, bit for bit")
    if judged == "noise":
        return case.finding(record, stage, judged, f"{stage} differs by no more than rounding: {describe(measured)}",
                            measured)  # fmt: skip
    if stage == "reward" and (why := harmless_reward(case, record, found)):
        return case.finding(record, stage, judged, f"{describe(measured)}. {why}", measured, harmless=True)
    hint = ""
    if stage == "old_log_prob":
        hint = explain(case, given, recorded.ragged("old_log_probs"), case.numerics.of(stage), "old_log_prob")
    return case.finding(record, stage, judged, describe(measured), measured, hint=hint)


def limits_of(case: Case, stage: str) -> Mapping[str, Limit]:
    kind = case.kind(stage)
    if kind == "exact":
        return {}
    if stage in ("old_log_prob", "ref_log_prob"):
        limit = noise.LOG_PROBS[kind]
        # An entropy is a sum over the vocabulary of log-probs, weighted by how likely each is.
        return {"old_log_probs": limit, "ref_log_probs": limit, "entropy": limit}
    fields = ("score", "reward", "baseline_reward", "advantages", "is_weights")
    return dict.fromkeys(fields, noise.HOST)


def _need_reference(case: Case, record: Record) -> None:
    """The reference is each side's own initial model: two models give two references."""
    engine, told = case.parts.reference, record.header.fingerprints.get("weights")
    if engine is not None and told and case.states.same_types:
        mine = weights_digest(engine.named_weights())
        if mine != told:
            raise NotJudged("the run's reference model has other weights than this side's")


def _bring_controller(case: Case) -> None:
    """The coefficient of an adaptive KL penalty moves with each step; a fixed one is what this side's config says."""
    before = case.run.calls(case.step - 1) if case.step > 1 else []
    if ("advantage", At(case.step - 1)) in before:
        told = case.run.record(case.step - 1, "advantage").header.fingerprints.get("kl_coef")
        if isinstance(told, (int, float)):
            case.parts.advantage.load_state({"kl_coef": told})
    elif case.step > 1 and case.parts.advantage.controller.type == "adaptive" and case.parts.advantage.config.kl_kind:
        raise NotJudged(f"the coefficient of the KL penalty after step {case.step - 1} is not on the tape")


def harmless_reward(case: Case, record: Record, found: Batch) -> str:
    """A sentence if the advantages are the same with the rewards found here; "" if they are not, or that is not known.

    Each group's rewards are compared with their own mean only, so a constant added to all of one group is seen by none.
    """
    stage = case.parts.stages.get("advantage")
    if stage is None or ("advantage", At(case.step)) not in case.run.calls(case.step):
        return ""
    advantage = case.run.record(case.step, "advantage")
    try:
        _bring_controller(case)
        given = inputs_for(case.run, stage.reads, advantage, stage.writes)
    except NotJudged:
        return ""
    own = given.array("reward").copy()
    where = {sample: i for i, sample in enumerate(found.sample_id)}
    for i, sample in enumerate(given.sample_id):
        if sample in where:
            own[i] = found.array("reward")[where[sample]]
    changed = {**given.columns, "reward": own}
    before = case.parts.advantage.state()
    outs = []
    for batch in (given, Batch(given.sample_id, changed, given.meanings)):
        outs.append(apply(stage, batch, At(case.step)))
        case.parts.advantage.load_state(before)
    a, b = (out.ragged("advantages").values for out in outs)
    masks = [out.ragged("loss_mask").values for out in outs]
    largest = float(np.abs(a).max(initial=0.0))
    if not np.array_equal(masks[0], masks[1]) or not np.allclose(
        a, b, rtol=0.0, atol=SAME_ADVANTAGE * max(largest, 1.0)
    ):
        return ""
    return "No advantage changes by it (rewards count against the mean of their own group), so training does not see it"
