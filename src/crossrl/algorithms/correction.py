"""Correction for the gap between the sampler's and the trainer's distribution: importance weights and rejection.

With log ratio d = trainer's log-prob - sampler's log-prob of a token. Keys: ``algorithm.rollout_correction.*``,
with verl's meaning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from crossrl.algorithms.errors import AlgorithmError, need_choice, need_same_shape
from crossrl.algorithms.gap import need_comparable
from crossrl.algorithms.kl import LOG_RATIO_MAX
from crossrl.batch import Meaning, Ragged

LEVELS = ("token", "sequence")
REJECTIONS = (
    *(f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean") for k in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
)
_PREFIX = "rollout_corr/"


@dataclass(frozen=True, slots=True)
class CorrectionConfig:
    """How to correct. Keys under ``algorithm.rollout_correction``.

    ``rollout_is``: weights per ``token`` or per ``sequence``; None: all weights 1.
    ``rollout_is_threshold``: a number u truncates weights at u; "l_u" sets weights outside [l, u] to 0.
    ``rollout_is_batch_normalize``: divide the weights by their mean over the batch.
    ``rollout_rs``: rejections, separated by commas (see ``reject``); None: none.
    ``rollout_rs_threshold``: one limit for all, or one each, separated by commas.
    """

    rollout_is: str | None = None
    rollout_is_threshold: float | str = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: float | str | None = None

    def __post_init__(self) -> None:
        if self.rollout_is is not None:
            need_choice("rollout_correction.rollout_is", self.rollout_is, LEVELS)
            self.is_bounds()
        self.rejections()

    def is_bounds(self) -> tuple[float | None, float]:
        """(lower, upper); lower is None when weights are truncated and not masked."""
        return _bounds("rollout_correction.rollout_is_threshold", self.rollout_is_threshold)

    def rejections(self) -> list[tuple[str, float | None, float]]:
        """(name, lower, upper) of each rejection; the bounds of k1 are log ratios, those of k2 and k3 are nat."""
        names = list(dict.fromkeys(n.strip() for n in (self.rollout_rs or "").split(",") if n.strip()))
        for name in names:
            need_choice("rollout_correction.rollout_rs", name, REJECTIONS)
        if not names:
            return []
        key = "rollout_correction.rollout_rs_threshold"
        specs = [] if self.rollout_rs_threshold is None else str(self.rollout_rs_threshold).split(",")
        if len(specs) not in (1, len(names)):
            raise AlgorithmError(
                f"{key}={self.rollout_rs_threshold!r}: want one limit, or {len(names)} separated by commas"
            )
        found: list[tuple[str, float | None, float]] = []
        for name, spec in zip(names, specs * len(names) if len(specs) == 1 else specs):
            lower, upper = _bounds(key, spec)
            if name.endswith("k1"):
                lower = 1.0 / upper if lower is None else lower
                if lower > upper:
                    raise AlgorithmError(f"{key}={spec!r} for {name}: one number must be 1 or more")
                found.append((name, math.log(lower), math.log(upper)))
            elif lower is not None:
                raise AlgorithmError(f"{key}={spec!r} for {name}: want one upper limit, no lower one")
            else:
                found.append((name, None, upper))
        return found


@dataclass(frozen=True, slots=True)
class Correction:
    """``is_weights``: float32 per token, to multiply its policy-gradient loss with; 0 where the mask is 0.
    ``mask``: uint8, the given mask without what was rejected. ``warnings``: lines for people."""

    is_weights: Ragged
    mask: Ragged
    metrics: dict[str, float]
    warnings: tuple[str, ...]


def correct(
    config: CorrectionConfig,
    trainer: Ragged,
    sampler: Ragged,
    mask: Ragged,
    trainer_meaning: Meaning,
    sampler_meaning: Meaning,
) -> Correction:
    """Importance weights and what is left of ``mask``, from log-probs (nat) of the same tokens.

    ``trainer``: under the weights before the update (``old_log_probs``). ``sampler``: ``rollout_log_probs``.
    Weights are made with ``mask`` as given; rejection comes after. Raises ``AlgorithmError`` when the two columns
    were computed at different temperatures or are not finite.
    """
    warnings = need_comparable(sampler_meaning, trainer_meaning)
    need_same_shape("trainer log-probs", trainer, "mask", mask)
    need_same_shape("sampler log-probs", sampler, "mask", mask)
    on = mask.values > 0
    d = trainer.values.astype(np.float64) - sampler.values.astype(np.float64)
    bad = np.flatnonzero(on & ~np.isfinite(d))
    if bad.size:
        at = int(mask.sample_index[bad[0]])
        raise AlgorithmError(f"the log ratio of trainer and sampler is not finite at sample position {at}")
    log_ratio = Ragged(d, mask.lengths)
    weights, metrics = importance_weights(config, log_ratio, mask)
    kept, rejected = reject(config, log_ratio, mask)
    return Correction(weights, kept, metrics | rejected, warnings)


def importance_weights(config: CorrectionConfig, log_ratio: Ragged, mask: Ragged) -> tuple[Ragged, dict[str, float]]:
    """exp(d) per token, or exp(sum of d) per sequence; truncated at an upper bound, or zeroed outside two.

    Truncated importance sampling (TIS): Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training". Masked on two sides (IcePop): Ling Team 2025, arXiv:2510.18855, and "Small Leak Can
    Sink a Great Ship"; a zeroed token keeps its place in the denominators of the loss.
    """
    on = mask.values > 0
    tokens = mask.sums()
    if config.rollout_is is None:
        return Ragged(on.astype(np.float32), mask.lengths), {}
    lower, upper = config.is_bounds()
    by_token = config.rollout_is == "token"
    exponent = np.where(on, log_ratio.values, 0.0)
    if not by_token:
        exponent = np.repeat(Ragged(exponent, mask.lengths).sums(), mask.lengths)
    raw = np.exp(np.clip(exponent, -LOG_RATIO_MAX, LOG_RATIO_MAX))
    weights = np.minimum(raw, upper) if lower is None else np.where((raw >= lower) & (raw <= upper), raw, 0.0)
    weights = np.where(on, weights, 0.0)
    if not on.any():
        return Ragged(weights.astype(np.float32), mask.lengths), {}
    used, seen = weights[on], raw[on]
    square = float(np.square(used).mean())
    metrics = {
        "rollout_is_mean": float(used.mean()),
        "rollout_is_max": float(used.max()),
        "rollout_is_min": float(used.min()),
        "rollout_is_std": float(used.std()),
        "rollout_is_eff_sample_size": float(used.mean()) ** 2 / square if square else 0.0,
        "rollout_is_ratio_fraction_high": float((seen > upper).mean()),
        "rollout_is_ratio_fraction_low": float((seen < (1.0 / upper if lower is None else lower)).mean()),
    }
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = float(((seen < lower) | (seen > upper)).mean())
    if config.rollout_is_batch_normalize:
        counted = tokens > 0
        mean = used.mean() if by_token else (Ragged(weights, mask.lengths).sums()[counted] / tokens[counted]).mean()
        factor = float(mean) if mean > 1e-8 else 1.0  # all masked: nothing to normalise
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return Ragged(weights.astype(np.float32), mask.lengths), {_PREFIX + k: v for k, v in metrics.items()}


def reject(config: CorrectionConfig, log_ratio: Ragged, mask: Ragged) -> tuple[Ragged, dict[str, float]]:
    """``mask`` without tokens or sequences whose divergence lies outside its limits; uint8.

    Per token k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (Schulman 2020). ``token_*`` rejects tokens; ``seq_sum_*``,
    ``seq_mean_*`` and ``seq_max_*`` reject a whole sequence by the sum, mean or largest of its tokens.
    ``seq_mean_k1`` bounds the geometric mean of the ratio. The limits of k1 are ratios, and, as in verl, of
    sampler to trainer (exp(-d)); one number u means 1/u to u. Masked importance sampling (MIS): Liu, Li et al.
    2025, "When Speed Kills Stability".
    """
    on = mask.values > 0
    keep = on.copy()
    d = np.clip(log_ratio.values, -LOG_RATIO_MAX, LOG_RATIO_MAX)
    per_token = {"k1": -d, "k2": 0.5 * np.square(d), "k3": np.expm1(d) - d}
    metrics: dict[str, float] = {}
    for name, lower, upper in config.rejections():
        level, _, estimator = name.rpartition("_")
        stat = np.where(on, per_token[estimator], 0.0)
        if level != "token":
            stat = np.repeat(_per_sequence(stat, mask, level), mask.lengths)
        inside = (stat <= upper) if lower is None else (stat >= lower) & (stat <= upper)
        metrics |= _rejected(f"rollout_rs_{name}", on & ~inside, mask)
        keep &= inside
    if metrics:
        metrics |= _rejected("rollout_rs", on & ~keep, mask)
    return Ragged(keep.astype(np.uint8), mask.lengths), metrics


def _per_sequence(stat: np.ndarray, mask: Ragged, level: str) -> np.ndarray:
    column = Ragged(stat, mask.lengths)
    if level == "seq_max":  # k2 and k3 are never negative, so masked tokens, at 0, do not matter
        return np.array([row.max(initial=0.0) for row in column.rows()])
    return column.sums() / (np.maximum(mask.sums(), 1.0) if level == "seq_mean" else 1.0)


def _rejected(name: str, rejected: np.ndarray, mask: Ragged) -> dict[str, float]:
    tokens = mask.sums()
    hit = Ragged(rejected, mask.lengths).sums() > 0
    return {
        f"{_PREFIX}{name}_masked_fraction": float(rejected.sum() / max(tokens.sum(), 1.0)),
        f"{_PREFIX}{name}_seq_masked_fraction": float(hit.sum() / max((tokens > 0).sum(), 1)),
    }


def _bounds(key: str, spec: float | str) -> tuple[float | None, float]:
    """(lower or None, upper) from 2.0, "2.0" or "0.5_2.0"; positive, lower <= upper."""
    parts = str(spec).strip().split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    ordered = len(numbers) == 1 or (len(numbers) == 2 and numbers[0] <= numbers[1])
    if isinstance(spec, bool) or not ordered or not all(0 < n < math.inf for n in numbers):
        raise AlgorithmError(f'{key}={spec!r}: want a number above 0, or two as "lower_upper", such as "0.5_2.0"')
    return (None if len(numbers) == 1 else numbers[0]), numbers[-1]
