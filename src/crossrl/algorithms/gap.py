"""The gap between two log-prob columns of the same tokens, such as the sampler's and the trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crossrl.algorithms.errors import AlgorithmError, need_same_shape
from crossrl.batch import Batch, Meaning, Ragged

ABOVE = 0.1  # nat: a ratio of 1.1, half of PPO's usual clip


def need_comparable(sampler: Meaning, trainer: Meaning) -> tuple[str, ...]:
    """Raise unless two log-prob columns may be subtracted; return warnings about what makes ratios doubtful.

    Log-probs at two temperatures belong to two distributions: their difference looks like a policy that has
    moved, but is none. Truncation (top-p, top-k) renormalises what is left, so the sampler's numbers lie above
    the trainer's by design; there the ratio is shifted, but still what was sampled from, hence a warning.
    """
    if sampler.temperature != trainer.temperature:
        raise AlgorithmError(
            f"log-probs with different meaning: {sampler.engine or 'the sampler'} at temperature "
            f"{sampler.temperature}, {trainer.engine or 'the trainer'} at temperature {trainer.temperature}. Their "
            "ratio is not an importance ratio: score with the temperature of sampling on both sides"
        )
    if sampler.truncation != trainer.truncation:
        found = f"({sampler.truncation} against {trainer.truncation})"
        return (f"log-probs with different truncation {found}: ratios are shifted; sample with top_p=1.0, top_k=-1",)
    return ()


@dataclass(frozen=True, slots=True)
class Gap:
    """How far apart two log-prob columns are; d = trainer - sampler in nat, p their probabilities.

    ``mean_abs``, ``max_abs``: of d. ``kl``: mean of -d, an estimate of KL(sampler || trainer). ``k3``: mean of
    exp(d) - 1 - d, the same with less variance. ``prob_mean``, ``prob_max``, ``prob_std``: of the absolute
    difference of probabilities. ``share_above``: share of tokens with |d| > 0.1. ``max_sample``,
    ``max_token``: sample id and response position of the largest |d|. ``tokens``: compared;
    ``uncomputed``: left out because the trainer did not compute them (NaN).
    """

    tokens: int
    uncomputed: int
    mean_abs: float
    max_abs: float
    kl: float
    k3: float
    prob_mean: float
    prob_max: float
    prob_std: float
    share_above: float
    max_sample: str
    max_token: int


def measure_gap(sampler: Ragged, trainer: Ragged, mask: Ragged, sample_id: Sequence[str]) -> Gap | None:
    """The gap over the tokens with mask 1; None if there is no token to compare.

    NaN in ``trainer`` is a token that was not computed. Any other number that is not finite is an error. Whether
    the columns may be compared at all is for ``need_comparable`` to say.
    """
    need_same_shape("sampler log-probs", sampler, "mask", mask)
    need_same_shape("trainer log-probs", trainer, "mask", mask)
    on = mask.values > 0
    computed = ~np.isnan(trainer.values)
    where = np.flatnonzero(on & computed)
    if not where.size:
        return None
    ours, theirs = trainer.values[where].astype(np.float64), sampler.values[where].astype(np.float64)
    d = ours - theirs
    size = np.abs(d)
    worst = int(np.argmax(size))  # the first NaN, if there is one
    sample = int(np.searchsorted(mask.offsets, where[worst], side="right")) - 1
    token = int(where[worst] - mask.offsets[sample])
    if not np.isfinite(size[worst]):
        raise AlgorithmError(
            f"log-probs {theirs[worst]} (sampler) and {ours[worst]} (trainer) in sample {sample_id[sample]!r} "
            f"at token {token}: want finite numbers"
        )
    probs = np.abs(np.exp(ours) - np.exp(theirs))
    return Gap(
        tokens=int(where.size),
        uncomputed=int((on & ~computed).sum()),
        mean_abs=float(size.mean()),
        max_abs=float(size[worst]),
        kl=float(-d.mean()),
        k3=float((np.expm1(d) - d).mean()),
        prob_mean=float(probs.mean()),
        prob_max=float(probs.max()),
        prob_std=float(probs.std(ddof=1)) if where.size > 1 else 0.0,
        share_above=float((size > ABOVE).mean()),
        max_sample=sample_id[sample],
        max_token=token,
    )


def gap_metrics(batch: Batch, sampler: str, trainer: str) -> dict[str, float]:
    """Metrics of the gap between two columns of ``batch`` over ``response_mask``, under verl's names.

    ``training/rollout_probs_diff_valid`` is 1 when the numbers mean something: 0 when there is no token to
    compare (then there are no others) or the truncation differs. Raises ``AlgorithmError`` when a meaning is
    missing or the temperatures differ.
    """
    for name in (sampler, trainer):
        if name not in batch.meanings:
            raise AlgorithmError(f"column {name!r} does not say what its log-probs mean")
    warnings = need_comparable(batch.meanings[sampler], batch.meanings[trainer])
    gap = measure_gap(batch.ragged(sampler), batch.ragged(trainer), batch.ragged("response_mask"), batch.sample_id)
    if gap is None:
        return {"training/rollout_probs_diff_valid": 0.0}
    return {
        "training/rollout_probs_diff_valid": 0.0 if warnings else 1.0,
        "training/rollout_probs_diff_mean": gap.prob_mean,
        "training/rollout_probs_diff_max": gap.prob_max,
        "training/rollout_probs_diff_std": gap.prob_std,
        "training/rollout_log_probs_diff_mean": gap.mean_abs,
        "training/rollout_log_probs_diff_max": gap.max_abs,
        "training/rollout_log_probs_diff_above_0.1": gap.share_above,
        "rollout_corr/kl": gap.kl,
        "rollout_corr/k3_kl": gap.k3,
    }
