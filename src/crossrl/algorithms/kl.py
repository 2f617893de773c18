"""KL: estimators per token, the penalty in the reward, and the controller of its coefficient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from crossrl.algorithms.errors import AlgorithmError, need_choice, need_same_shape
from crossrl.batch import Ragged

# verl's names of the same estimators
_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
LOG_RATIO_MAX = 20.0  # exp(20) is 5e8: beyond it a ratio says no more than "far away", and float32 overflows at 88
K3_MAX = 10.0


def need_kl_type(key: str, kind: str) -> None:
    """Raise unless ``kind`` is one of ``KL_TYPES``, with or without a final ``+``."""
    need_choice(key, kind.removesuffix("+"), KL_TYPES)


def is_k3(kind: str) -> bool:
    """Whether values of this kind are limited to ``K3_MAX``."""
    kind = kind.removesuffix("+")
    return _ALIASES.get(kind, kind) == "k3"


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate KL(policy || reference) at each token that the policy sampled; same shape, nat.

    With d = log_probs - ref_log_probs (Schulman, "Approximating KL Divergence", 2020):

    - ``kl``, ``k1``: d. Unbiased value, and a gradient whose expectation is zero: useless as a loss.
    - ``abs``: |d|.
    - ``mse``, ``k2``: d^2 / 2. Biased value; its gradient is an unbiased one of the KL, on-policy.
    - ``low_var_kl``, ``k3``: exp(-d) - 1 + d. Unbiased, never negative; GRPO's (arXiv:2402.03300, eq. 4).
      -d is limited to +-20 and the value to 10, as in verl, so that one token cannot blow up a step. A token
      at a limit has no gradient.
    - with ``+`` appended (``k3+``): that value, with k2's gradient (straight through).
    """
    base = kind.removesuffix("+")
    need_kl_type("kl type", kind)
    d = log_probs - ref_log_probs
    match _ALIASES.get(base, base):
        case "k1":
            value = d
        case "abs":
            value = d.abs()
        case "k2":
            value = 0.5 * d.square()
        case _:
            minus_d = (-d).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
            value = (torch.expm1(minus_d) - minus_d).clamp(max=K3_MAX)
    if not kind.endswith("+"):
        return value
    slope = 0.5 * d.square()
    return slope - slope.detach() + value.detach()  # in this order: the first two cancel exactly


def kl_rewards(
    log_probs: Ragged, ref_log_probs: Ragged, mask: Ragged, beta: float, kind: str = "kl"
) -> tuple[Ragged, float]:
    """The KL penalty as token rewards, ``-beta * kl`` (0 where ``mask`` is 0), and the current KL.

    ``log_probs``: of the policy that sampled. Returns float64 rewards and the KL in nat per token, averaged
    over each sequence and then over sequences with at least one token, which is what the controller is fed.
    Ziegler et al. 2019, arXiv:1909.08593, eq. 2. Raises ``AlgorithmError`` if the KL is not finite.
    """
    need_same_shape("log_probs", log_probs, "mask", mask)
    need_same_shape("ref_log_probs", ref_log_probs, "mask", mask)
    policy, reference = (torch.from_numpy(c.values.astype(np.float64)) for c in (log_probs, ref_log_probs))
    kl = np.where(mask.values > 0, kl_estimate(policy, reference, kind).numpy(), 0.0)
    if not np.isfinite(kl).all():
        at = int(log_probs.sample_index[np.flatnonzero(~np.isfinite(kl))[0]])
        raise AlgorithmError(f"the KL to the reference is not finite at sample position {at}")
    sums, tokens = Ragged(kl, mask.lengths).sums(), mask.sums()
    counted = tokens > 0
    current = float((sums[counted] / tokens[counted]).mean()) if counted.any() else 0.0
    return Ragged(-beta * kl, mask.lengths), current


@dataclass(frozen=True, slots=True)
class KLController:
    """The coefficient of the KL penalty in the reward: ``fixed``, or ``adaptive`` towards ``target_kl``.

    Adaptive (Ziegler et al. 2019, arXiv:1909.08593, section 2.2): after n samples with KL x, the coefficient is
    multiplied by 1 + clip(x / target - 1, -0.2, 0.2) * n / horizon. Keys: ``algorithm.kl_ctrl.*``.

    >>> KLController("adaptive", 0.1, target_kl=1.0, horizon=100).updated(current_kl=2.0, samples=50).kl_coef
    0.11000000000000001
    """

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = 0.001
    target_kl: float = 0.1
    horizon: float = 10000.0

    def __post_init__(self) -> None:
        need_choice("algorithm.kl_ctrl.type", self.type, ("fixed", "adaptive"))
        if self.type == "adaptive" and not (self.horizon > 0 and self.target_kl > 0):
            raise AlgorithmError(
                f"algorithm.kl_ctrl: the adaptive controller needs horizon > 0 and target_kl > 0, "
                f"found {self.horizon} and {self.target_kl}"
            )

    def updated(self, current_kl: float, samples: int) -> KLController:
        """The controller after a step on ``samples`` samples whose KL (nat per token) was ``current_kl``."""
        if self.type == "fixed":
            return self
        error = min(max(current_kl / self.target_kl - 1.0, -0.2), 0.2)
        return replace(self, kl_coef=self.kl_coef * (1.0 + error * samples / self.horizon))

    def state(self) -> dict[str, float]:
        """What a checkpoint must keep; JSON."""
        return {"kl_coef": self.kl_coef}

    def restored(self, state: Mapping[str, Any]) -> KLController:
        """This controller with the coefficient of a checkpoint; a fixed one, and all else, stays the config's."""
        if set(state) != {"kl_coef"} or not isinstance(state["kl_coef"], (int, float)):
            raise AlgorithmError(f"state of the KL controller: want {{'kl_coef': number}}, found {dict(state)}")
        return replace(self, kl_coef=float(state["kl_coef"])) if self.type == "adaptive" else self
