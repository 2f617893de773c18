"""rollout: generated again with the same seeds, and the recorded tokens scored by the examiner's trainer.

Identity first (ids, meanings), then tokens, then log-probs. Under rounding noise a sampled token may flip, after which
the two responses have nothing in common: log-probs are compared up to the first token that differs, and what is judged
is how often that happens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from crossrl.batch import Batch
from crossrl.cross import noise
from crossrl.cross.case import Case
from crossrl.cross.findings import Finding, Gap, Judgement
from crossrl.cross.hypotheses import explain
from crossrl.cross.inputs import inputs_for
from crossrl.cross.measure import SHOWN, Measured, describe, judge, measure
from crossrl.cross.noise import Kind
from crossrl.stages.base import At, apply
from crossrl.stages.rollout import Rollout
from crossrl.tape.record import Record

LOG_PROBS = "rollout_log_probs"
# What the weight sync has to answer for, and what follows from the tokens.
NOT_COMPARED = ("rollout_weight_version",)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Two sets of responses to the same requests. ``flipped``: sample and position of the first token that differs;
    ``ended``: of the place at which one goes on and the other does not. ``compared``: tokens up to there.
    ``gaps``: absolute differences of the log-probs before it, nat; ``where``: their samples and positions."""

    flipped: tuple[tuple[str, int], ...]
    ended: tuple[tuple[str, int], ...]
    compared: int
    gaps: np.ndarray
    where: tuple[tuple[str, int], ...]


def judge_rollout(case: Case, record: Record) -> Finding:
    """Raises ``NotJudged``."""
    case.need_state()
    stage = case.stage("rollout")
    _use_seed(stage, record)
    given = inputs_for(case.run, stage.reads, record, stage.writes)
    written = [n for n in record.header.fields if n in stage.writes and n not in NOT_COMPARED]
    recorded = record.only(written)
    again = Batch(()) if case.unsynced else apply(stage, given, At(case.step, record.header.call)).only(written)
    score = score_recorded(case, given, recorded)
    if case.unsynced:
        return _by_score(case, record, score, case.unsynced)
    judged, sentence, measured = _compare(case, recorded, again, record)
    other_engine = _engine(recorded) != _engine(again)
    if judged == "differs" and other_engine and score is not None:
        # Two engines need not draw the same token from the same number; what they must agree on is the distribution.
        return _by_score(case, record, score, f"another engine ({_engine(recorded)}, here {_engine(again)})")
    if judged != "equal" and score is not None:
        sentence += f"; {_score_text(case, score)}"
        if judged == "noise" and not score.explained and case.by == "B":
            # The examiner's own rounding, however coarse, says nothing about tokens that the run drew by its own: what
            # the reference's trainer makes of these must fit. (A's trainer, scoring B's, may be what is at fault.)
            judged = "differs"
    if judged != "differs":
        return case.finding(record, "rollout", judged, sentence, measured)
    if case.sync_fault:
        sentence = f"follows from the weight sync ({case.sync_fault}), so it is no finding of its own: {sentence}"
        return case.finding(record, "rollout", "not judged", sentence, measured)
    gaps = sorted([*measured, *([score] if score else [])], key=lambda m: m.explained)
    return case.finding(record, "rollout", judged, sentence, gaps, hint=_hint(case, given, recorded, record))


def score_recorded(case: Case, given: Batch, recorded: Batch) -> Measured | None:
    """The recorded tokens' log-probs by the examiner's trainer, at the temperature that the record states.

    None where they do not mean the same: after top-k or top-p the sampler's are renormalised, and of greedy responses
    nothing was drawn.
    """
    meaning = recorded.meanings.get(LOG_PROBS)
    if meaning is None or meaning.truncation != "none" or not recorded.ragged("response_ids").values.size:
        return None
    batch = Batch(given.sample_id, {"group_id": given["group_id"], "prompt_ids": given["prompt_ids"],
                                    "response_ids": recorded["response_ids"]})  # fmt: skip
    values, _ = case.parts.trainer.log_probs(batch, meaning.temperature, False)
    told = recorded.ragged(LOG_PROBS).values
    on = recorded.ragged("response_mask").values > 0
    size = np.abs(values.values.astype(np.float64) - told) * on
    limit = noise.LOG_PROBS[case.numerics.score]
    worst = int(size.argmax())
    sample = int(values.sample_index[worst])
    largest, mean = float(size[worst]), float(size[on].mean()) if on.any() else 0.0
    gap = Gap(
        LOG_PROBS, "score", int((size > limit.largest).sum()), int(on.sum()), recorded.sample_id[sample],
        worst - int(values.offsets[sample]), float(told[worst]), float(values.values[worst]),
        largest=largest, mean=mean, allowed=limit.largest if largest > limit.largest else limit.mean, unit="nat",
    )  # fmt: skip
    return Measured(gap, limit.explains(largest, mean))


def compare_tokens(recorded: Batch, again: Batch) -> Tokens:
    """Both with ``response_ids`` and log-probs, for the same samples in the same order."""
    flipped, ended, where, gaps = [], [], [], []
    compared = 0
    columns = [batch.ragged(name).rows() for name in ("response_ids", LOG_PROBS) for batch in (recorded, again)]
    for sample, a, b, p, q in zip(recorded.sample_id, *columns, strict=True):
        common = min(len(a), len(b))
        unequal = np.flatnonzero(a[:common] != b[:common])
        until = int(unequal[0]) if unequal.size else common
        if unequal.size:
            flipped.append((sample, until))
        elif len(a) != len(b):
            ended.append((sample, until))
        compared += until + bool(unequal.size)
        where += [(sample, i) for i in range(until)]
        gaps.append(np.abs(p[:until].astype(np.float64) - q[:until]))
    return Tokens(tuple(flipped), tuple(ended), compared, np.concatenate(gaps) if gaps else np.zeros(0), tuple(where))


def flips_allowed(kind: Kind, tokens: int, vocabulary: int) -> int:
    """So many responses may diverge by rounding: the rate, three standard deviations, and one."""
    if kind == "exact":
        return 0
    constant, per_entry = noise.FLIPS[kind]
    expected = min(1.0, constant + per_entry * vocabulary) * tokens
    return math.floor(expected + 3.0 * math.sqrt(expected)) + 1


def _compare(case: Case, recorded: Batch, again: Batch, record: Record) -> tuple[Judgement, str, list[Measured]]:
    kind, at = case.kind("rollout"), At(case.step, record.header.call)
    exact = measure(recorded, again, "rollout", at)
    meaning = [m for m in exact if m.gap.kind == "meaning"]
    if meaning:
        return "differs", describe(meaning), meaning
    if not exact:
        return "equal", f"generated again, all {len(recorded)} responses and log-probs are the same, bit for bit", []
    tokens = compare_tokens(recorded, again)
    limit = noise.LOG_PROBS.get(kind, noise.Limit(0.0, 0.0))
    measured: list[Measured] = []
    allowed = flips_allowed(kind, tokens.compared, case.parts.trainer.facts.vocab_size)
    if tokens.flipped:
        gap = _token_gap(recorded, again, tokens.flipped, "value", allowed)
        measured.append(Measured(gap, len(tokens.flipped) <= allowed))
    if tokens.ended:
        measured.append(Measured(_token_gap(recorded, again, tokens.ended, "length", 0)))
    if tokens.gaps.any():
        measured.append(_log_prob_gap(recorded, again, tokens, limit))
    same = [i for i, s in enumerate(recorded.sample_id) if s not in {s for s, _ in (*tokens.flipped, *tokens.ended)}]
    names = [n for n in recorded.columns if n != LOG_PROBS]
    rest = measure(recorded.only(names).take(same), again.only(names).take(same), "rollout", at, info=False)
    measured += rest  # of responses with the same tokens: text, finish reason, mask
    judged = judge(measured)
    return judged, _sentence(judged, recorded, tokens, limit, rest), measured


def _sentence(judged: Judgement, recorded: Batch, tokens: Tokens, limit: noise.Limit, rest: list[Measured]) -> str:
    parts = []
    if tokens.flipped:
        sample, position = min(tokens.flipped, key=lambda f: f[1])
        parts.append(
            f"generated again, {len(tokens.flipped)} of {len(recorded)} responses have other tokens, the earliest at "
            f"token {position} of sample {sample} ({tokens.compared} tokens compared)"
        )
    if tokens.ended:
        sample, position = tokens.ended[0]
        parts.append(
            f"{len(tokens.ended)} of {len(recorded)} responses end elsewhere, their tokens being the same up to there "
            f"(a stop token or the length limit is not heeded), first at token {position} of sample {sample}"
        )
    if tokens.gaps.any():
        parts.append(
            f"log-probs of the same tokens differ by up to {tokens.gaps.max():.3g} nat (mean {tokens.gaps.mean():.2g}"
            + (f"; noise explains {limit.largest:.2g} and {limit.mean:.2g})" if limit.largest else ")")
        )
    if rest:
        parts.append(describe(rest))
    return "; ".join(parts) + ("" if judged == "differs" else ": rounding explains that")


def _token_gap(recorded: Batch, again: Batch, places: tuple[tuple[str, int], ...], kind: str, allowed: int) -> Gap:
    sample, position = places[0]
    a, b = (batch.ragged("response_ids").row(recorded.sample_id.index(sample)) for batch in (recorded, again))
    return Gap(
        "response_ids", kind, len(places), len(recorded), sample, position,
        int(a[position]) if position < len(a) else None, int(b[position]) if position < len(b) else None,
        tuple(s for s, _ in places[:SHOWN]), float(len(places)), None, float(allowed), "responses",
    )  # fmt: skip


def _log_prob_gap(recorded: Batch, again: Batch, tokens: Tokens, limit: noise.Limit) -> Measured:
    unequal = np.flatnonzero(tokens.gaps > 0)
    sample, position = tokens.where[int(unequal[0])]
    a, b = (batch.ragged(LOG_PROBS).row(recorded.sample_id.index(sample)) for batch in (recorded, again))
    samples = tuple(dict.fromkeys(tokens.where[int(j)][0] for j in unequal))
    largest, mean = float(tokens.gaps.max()), float(tokens.gaps.mean())
    gap = Gap(
        LOG_PROBS, "value", len(unequal), tokens.gaps.size, sample, position, float(a[position]), float(b[position]),
        samples[:SHOWN], largest, mean, limit.largest if largest > limit.largest else limit.mean, "nat",
    )  # fmt: skip
    return Measured(gap, limit.explains(largest, mean))


def _by_score(case: Case, record: Record, score: Measured | None, why: str) -> Finding:
    if score is None:
        return case.finding(record, "rollout", "not judged", f"cannot be generated again ({why}), nor scored")
    judged: Judgement = "noise" if score.explained else "differs"
    if case.sync_fault and judged == "differs":
        judged, why = "not judged", f"{why}; and {case.sync_fault}"
    return case.finding(record, "rollout", judged, f"judged by its tokens alone, because of {why}: "
                        f"{_score_text(case, score)}", [score])  # fmt: skip


def _score_text(case: Case, score: Measured) -> str:
    gap = score.gap
    if not gap.largest:
        return f"side {case.by}'s trainer gives the recorded tokens the recorded log-probs"
    return (
        f"side {case.by}'s trainer gives the recorded tokens log-probs that differ by up to {gap.largest:.3g} nat "
        f"(mean {gap.mean:.2g})" + (", which rounding explains" if score.explained else f", {_too_much(case)}")
    )


def _too_much(case: Case) -> str:
    limit = noise.LOG_PROBS[case.numerics.score]
    return f"where rounding ({case.numerics.score}) explains {limit.largest:g} and {limit.mean:g}"


def _hint(case: Case, given: Batch, recorded: Batch, record: Record) -> str:
    meaning = recorded.meanings.get(LOG_PROBS)
    if meaning is None or meaning.truncation != "none":
        return ""
    batch = Batch(given.sample_id, {"group_id": given["group_id"], "prompt_ids": given["prompt_ids"],
                                    "response_ids": recorded["response_ids"]})  # fmt: skip
    return explain(case, batch, recorded.ragged(LOG_PROBS), case.numerics.score, "rollout")


def _use_seed(stage: object, record: Record) -> None:
    """The run's: the numbers drawn are no property of an installation."""
    seed = record.header.fingerprints.get("rollout", {}).get("seed")
    if isinstance(stage, Rollout) and isinstance(seed, int):
        stage.seed = seed


def _engine(batch: Batch) -> str:
    meaning = batch.meanings.get(LOG_PROBS)
    return meaning.engine if meaning else ""
