"""Policy losses: the loss of each token before it is weighted and added up (``aggregation.py``).

All tensors are flat, ``[T]``. A loss is minimised: it is minus the objective of the paper. The names are those
of verl's key ``actor.policy_loss.loss_mode``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from crossrl.algorithms.kl import LOG_RATIO_MAX

LOSS_MODES = ("vanilla", "gspo", "cispo")
GSPO_LOG_RATIO_MAX = 10.0


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """``loss``: with gradient. ``low``, ``high``: bool, the ratio was clipped at that side. ``dual``: bool, the
    dual clip took effect (None: this loss has none). Of masked tokens too: the caller masks."""

    loss: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    dual: torch.Tensor | None = None


def ppo_clip(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float | None,
) -> TokenLoss:
    """max(-r A, -clip(r, 1 - low, 1 + high) A), limited to -c A where A < 0.

    Schulman et al. 2017 (PPO), arXiv:1707.06347, eq. 7; unequal sides (clip-higher): Yu et al. 2025 (DAPO),
    arXiv:2503.14476, section 3.1; dual clip: Ye et al. 2019, arXiv:1912.09729. ``clip_c`` None: no dual clip.
    """
    ratio = (log_probs - old_log_probs).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    loss = _clipped(ratio, advantages, clip_low, clip_high)
    negative = advantages < 0
    low, high = (ratio < 1 - clip_low) & negative, (ratio > 1 + clip_high) & (advantages > 0)
    if clip_c is None:
        return TokenLoss(loss, low, high)
    dual = torch.where(negative, torch.minimum(loss, -advantages * clip_c), loss)
    return TokenLoss(dual, low, high, (ratio > clip_c) & negative)


def gspo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    num_sequences: int,
) -> TokenLoss:
    """PPO's clip on the ratio of the whole sequence, normalised by its length.

    s_i = exp(mean over the tokens of sequence i of log_probs - old_log_probs); each token uses
    sg[s_i] * pi(token) / sg[pi(token)], whose value is s_i and whose gradient goes through the token.
    Zheng et al. 2025 (GSPO), arXiv:2507.18071, the GSPO-token form; with one advantage per sequence and
    ``seq-mean-token-mean`` its gradient is that of GSPO. ``mask``: float, 1 where a token counts.
    """
    log_ratio = (log_probs - old_log_probs).detach() * mask
    sums = log_ratio.new_zeros(num_sequences).index_add_(0, sequence, log_ratio)
    tokens = mask.new_zeros(num_sequences).index_add_(0, sequence, mask)
    log_s = (sums / tokens.clamp(min=1.0))[sequence].clamp(max=GSPO_LOG_RATIO_MAX)
    ratio = log_s.exp() * (log_probs - log_probs.detach()).exp()
    loss = _clipped(ratio, advantages, clip_low, clip_high)
    return TokenLoss(loss, (ratio < 1 - clip_low) & (advantages < 0), (ratio > 1 + clip_high) & (advantages > 0))


def cispo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-sg[clip(r, 1 - low, 1 + high)] A log_probs: the weight is clipped, and no token loses its gradient.

    MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4 and 5. The paper sets no lower side (``clip_low`` >= 1).
    """
    ratio = (log_probs.detach() - old_log_probs).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-weight * advantages * log_probs, ratio < 1 - clip_low, ratio > 1 + clip_high)


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
