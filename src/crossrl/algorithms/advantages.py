"""Advantages: how much better a response was than could be expected, per token.

All are pure functions from outcomes (one number per sample) or token rewards to one float32 per response
token; computed in float64. Rules that hold for all of them:

- a NaN reward is a missing score: the sample is ``excluded``, and no statistic contains it;
- advantages are 0 where ``mask`` is 0 (tokens that the policy did not sample);
- a group of one has no baseline: its advantage is 0, and a warning counts it (it would else be plain
  reward weighting, unseen);
- rewards that are all equal give exactly 0.0, not a rounding residue blown up by a tiny deviation;
- a non-finite advantage is an error that names the sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from crossrl.algorithms.errors import AlgorithmError, need_choice, need_finite, need_same_shape
from crossrl.batch import Ragged

ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax")
GROUPED = ("grpo", "rloo", "reinforce_plus_plus_baseline")


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What advantages are made of; N samples.

    ``rewards``: float64 ``[N]``, NaN where there is no score. ``groups``: the group of each sample.
    ``mask``: uint8, 1 where the policy sampled the token. ``token_rewards``: float64, rewards that belong to
    single tokens (the KL penalty of ``kl.kl_rewards``), on top of ``rewards``. ``baseline_rewards``:
    float64 ``[N]``, the score of the greedy response to the same prompt (ReMax alone).
    """

    sample_id: Sequence[str]
    rewards: np.ndarray
    groups: Sequence[str]
    mask: Ragged
    token_rewards: Ragged | None = None
    baseline_rewards: np.ndarray | None = None

    def __post_init__(self) -> None:
        sizes = {"rewards": len(self.rewards), "groups": len(self.groups), "mask": len(self.mask)}
        if self.baseline_rewards is not None:
            sizes["baseline_rewards"] = len(self.baseline_rewards)
        for name, size in sizes.items():
            if size != len(self.sample_id):
                raise AlgorithmError(f"{name} has {size} entries for {len(self.sample_id)} samples")
        if self.token_rewards is not None:
            need_same_shape("token_rewards", self.token_rewards, "mask", self.mask)
            need_finite("token reward", self.token_rewards, self.sample_id)
        for name, column in (("reward", self.rewards), ("baseline_reward", self.baseline_rewards)):
            if column is not None and np.isinf(column).any():
                at = int(np.flatnonzero(np.isinf(column))[0])
                raise AlgorithmError(f"{name} of sample {self.sample_id[at]!r} is {column[at]}: want a finite number")

    def totals(self) -> np.ndarray:
        """float64 ``[N]``: token rewards summed up to one outcome per sample, as GRPO and RLOO use them."""
        rewards = np.asarray(self.rewards, np.float64)
        return rewards if self.token_rewards is None else rewards + self.token_rewards.sums()

    def per_token(self) -> Ragged:
        """float64: token rewards, with the outcome added at the last token that the policy sampled."""
        values = np.zeros(len(self.mask.values))
        if self.token_rewards is not None:
            values += self.token_rewards.values
        positions = np.where(self.mask.values > 0, np.arange(len(values)), -1)
        filled = np.flatnonzero(self.mask.lengths)
        if len(filled):
            last = np.maximum.reduceat(positions, self.mask.offsets[:-1][filled])
            values[last[last >= 0]] += np.asarray(self.rewards, np.float64)[filled[last >= 0]]
        return Ragged(values, self.mask.lengths)


@dataclass(frozen=True, slots=True)
class Advantages:
    """``advantages``: float32 per token. ``excluded``: bool ``[N]``, samples that must not be trained on.

    ``metrics``: counts, by metric name. ``warnings``: what a person should see, one line per kind.
    """

    advantages: Ragged
    excluded: np.ndarray
    metrics: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def estimate(
    estimator: str,
    outcomes: Outcomes,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    gamma: float = 1.0,
    group_size: int | None = None,
) -> Advantages:
    """Advantages by the estimator that ``algorithm.adv_estimator`` names, checked and counted.

    ``group_size``: the n that each group should have; another size is a warning, not an error, because samples
    may be missing for good reasons, but a wrong group key shows here first.
    """
    need_choice("algorithm.adv_estimator", estimator, ESTIMATORS)
    if estimator == "grpo":
        tokens = grpo(outcomes, norm_adv_by_std_in_grpo)
    elif estimator == "rloo":
        tokens = rloo(outcomes)
    elif estimator == "reinforce_plus_plus":
        tokens = reinforce_plus_plus(outcomes, gamma)
    elif estimator == "reinforce_plus_plus_baseline":
        tokens = reinforce_plus_plus_baseline(outcomes)
    else:
        tokens = remax(outcomes)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and an error below
        advantages = Ragged(tokens.values.astype(np.float32), tokens.lengths)
    need_finite("advantage", advantages, outcomes.sample_id)
    excluded = ~np.isfinite(outcomes.totals())
    if estimator == "remax" and outcomes.baseline_rewards is not None:
        excluded |= np.isnan(outcomes.baseline_rewards)
    metrics, warnings = _count(outcomes, excluded, group_size, grouped=estimator in GROUPED)
    return Advantages(advantages, excluded, metrics, warnings)


def grpo(outcomes: Outcomes, norm_by_std: bool = True, epsilon: float = 1e-6) -> Ragged:
    """(r - mean of the group) / (standard deviation of the group + epsilon); float64.

    Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, section 4.1.2. The deviation is the sample's (n - 1), as
    in verl. ``norm_by_std=False`` leaves the division out: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783.
    """
    totals = outcomes.totals()
    result = np.zeros(len(totals))
    for members in _groups_with_signal(totals, outcomes.groups):
        centred = totals[members] - totals[members].mean()
        result[members] = centred / (totals[members].std(ddof=1) + epsilon) if norm_by_std else centred
    return _spread(result, outcomes.mask)


def rloo(outcomes: Outcomes) -> Ragged:
    """r minus the mean of the other samples of the group; float64.

    Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740. With n samples: (r - mean) * n / (n - 1).
    """
    totals = outcomes.totals()
    result = np.zeros(len(totals))
    for members in _groups_with_signal(totals, outcomes.groups):
        n = len(members)
        result[members] = (totals[members] - totals[members].mean()) * n / (n - 1)
    return _spread(result, outcomes.mask)


def reinforce_plus_plus(outcomes: Outcomes, gamma: float = 1.0) -> Ragged:
    """Discounted return from each token on, whitened over all tokens of the batch; float64.

    Hu et al. 2025 (REINFORCE++), arXiv:2501.03262. Tokens of the environment are skipped: they are not
    discounted over.
    """
    present = np.isfinite(outcomes.totals())
    returns = _returns(outcomes.per_token(), outcomes.mask, gamma)
    return _whiten(returns, _keep(outcomes.mask, present))


def reinforce_plus_plus_baseline(outcomes: Outcomes) -> Ragged:
    """r minus the mean of the group, whitened over all tokens of the batch; float64.

    Hu et al. 2025 (REINFORCE++ with baseline), arXiv:2501.03262. Whitening subtracts the batch's mean, which is
    not 0 when responses differ in length; so a group of equal rewards gets exactly 0 only when the whole batch
    is without signal. A group of one gets 0 and is no part of the statistics.
    """
    totals = outcomes.totals()
    centred = np.zeros(len(totals))
    compared = np.zeros(len(totals), bool)
    for members in _members(totals, outcomes.groups):
        if len(members) > 1:
            compared[members] = True
            if _differ(totals[members]):
                centred[members] = totals[members] - totals[members].mean()
    return _whiten(_spread(centred, outcomes.mask), _keep(outcomes.mask, compared))


def remax(outcomes: Outcomes) -> Ragged:
    """Return from each token on minus the reward of the greedy response to the same prompt; float64.

    Li et al. 2023 (ReMax), arXiv:2310.10505, algorithm 1. No group is needed.
    """
    if outcomes.baseline_rewards is None:
        raise AlgorithmError("algorithm.adv_estimator=remax needs the column baseline_reward, which is not there")
    present = np.isfinite(outcomes.totals()) & np.isfinite(outcomes.baseline_rewards)
    returns = _returns(outcomes.per_token(), outcomes.mask, gamma=1.0)
    minus_baseline = returns.values - np.repeat(outcomes.baseline_rewards, returns.lengths)
    return Ragged(np.where(_keep(outcomes.mask, present), minus_baseline, 0.0), returns.lengths)


def _members(totals: np.ndarray, groups: Sequence[str]) -> list[np.ndarray]:
    """Positions of the samples of each group that have a score, groups in order of first appearance."""
    found: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members = found.setdefault(group, [])
        if np.isfinite(totals[i]):
            members.append(i)
    return [np.array(members, np.int64) for members in found.values()]


def _groups_with_signal(totals: np.ndarray, groups: Sequence[str]) -> list[np.ndarray]:
    return [m for m in _members(totals, groups) if _differ(totals[m])]


def _differ(values: np.ndarray) -> bool:
    return bool(values.size and values.max() > values.min())


def _keep(mask: Ragged, samples: np.ndarray) -> np.ndarray:
    """bool per token: sampled by the policy, and of one of ``samples`` (bool ``[N]``)."""
    return (mask.values > 0) & np.repeat(samples, mask.lengths)


def _spread(per_sample: np.ndarray, mask: Ragged) -> Ragged:
    return Ragged(np.repeat(per_sample, mask.lengths) * (mask.values > 0), mask.lengths)


def _returns(rewards: Ragged, mask: Ragged, gamma: float) -> Ragged:
    """G_t = r_t + gamma * G_{t+1} over the tokens with mask 1; 0 elsewhere."""
    on = mask.values > 0
    sizes = mask.sums().astype(np.int64)
    values = rewards.values[on]
    ends = np.cumsum(sizes) - 1
    running = np.zeros(len(sizes))
    for back in range(int(sizes.max(initial=0))):  # all samples at once, from their last token backwards
        rows = np.flatnonzero(sizes > back)
        at = ends[rows] - back
        running[rows] = values[at] + gamma * running[rows]
        values[at] = running[rows]
    out = np.zeros(len(mask.values))
    out[on] = values
    return Ragged(out, mask.lengths)


def _whiten(column: Ragged, keep: np.ndarray) -> Ragged:
    """(x - mean) / sqrt(var + 1e-8) over the tokens of ``keep``; 0 elsewhere, and 0 if all are equal."""
    out = np.zeros(len(column.values))
    kept = column.values[keep]
    if _differ(kept):
        out[keep] = (kept - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8)
    return Ragged(out, column.lengths)


def _count(
    outcomes: Outcomes, excluded: np.ndarray, group_size: int | None, grouped: bool
) -> tuple[dict[str, float], tuple[str, ...]]:
    totals = np.where(excluded, np.nan, outcomes.totals())
    members = _members(totals, outcomes.groups)
    names = list(dict.fromkeys(outcomes.groups))
    single = [name for name, m in zip(names, members) if len(m) == 1]
    equal = [name for name, m in zip(names, members) if len(m) > 1 and not _differ(totals[m])]
    metrics = {
        "advantage/groups": float(len(names)),
        "advantage/groups_of_one": float(len(single)),
        "advantage/groups_all_equal": float(len(equal)),
        "advantage/excluded_samples": float(excluded.sum()),
    }
    warnings = []
    if excluded.any():
        first = outcomes.sample_id[int(np.flatnonzero(excluded)[0])]
        warnings.append(f"{int(excluded.sum())} of {len(totals)} samples have no score: excluded (first: {first})")
    if grouped and single:
        warnings.append(
            f"{len(single)} of {len(names)} groups have one scored sample, so advantage 0 (first: {single[0]}); "
            "is actor_rollout_ref.rollout.n above 1, and is the group key shared by the samples of a prompt?"
        )
    if group_size is not None:
        sizes = Counter(outcomes.groups)
        odd = [name for name in names if sizes[name] != group_size]
        metrics["advantage/groups_of_other_size"] = float(len(odd))
        if odd:
            warnings.append(
                f"{len(odd)} of {len(names)} groups do not have n={group_size} samples "
                f"(first: {odd[0]} has {sizes[odd[0]]})"
            )
    return metrics, tuple(warnings)
