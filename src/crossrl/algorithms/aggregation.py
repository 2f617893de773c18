"""Aggregation: from per-token losses to the scalar of one optimizer step, as one weight per token.

The loss is ``sum(weight * token_loss)`` over the whole mini-batch. The weights are fixed before the mini-batch
is split, so every split into micro-batches or ranks gives the same gradient (ranks add up; they do not average).
"""

from __future__ import annotations

import numpy as np

from crossrl.algorithms.errors import AlgorithmError, need_choice
from crossrl.batch import Ragged

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def loss_weights(loss_mask: Ragged, mode: str, loss_scale_factor: float | None = None) -> Ragged:
    """The weight of each token of the mini-batch in the loss, float32; 0 where ``loss_mask`` is 0.

    T is the number of tokens with mask 1, T_i those of sequence i, S the number of sequences with T_i > 0:

    - ``token-mean``: 1 / T (DAPO, arXiv:2503.14476, eq. 8);
    - ``token-sum``: 1;
    - ``seq-mean-token-sum``: 1 / S;
    - ``seq-mean-token-mean``: 1 / (S * T_i) (GRPO, arXiv:2402.03300, eq. 3);
    - ``seq-mean-token-sum-norm``: 1 / (S * ``loss_scale_factor``), the factor being a constant such as
      ``data.max_response_length`` (Dr. GRPO, arXiv:2503.20783).

    ``loss_mask`` is the one effective mask: a sequence that is masked as a whole counts in no denominator. With
    everything masked all weights are 0, and so is the loss. Keys: ``actor.loss_agg_mode``,
    ``actor.loss_scale_factor``.
    """
    need_choice("actor.loss_agg_mode", mode, MODES)
    scale = 1.0
    if mode == "seq-mean-token-sum-norm":
        if loss_scale_factor is None or not loss_scale_factor > 0:
            raise AlgorithmError(
                f"actor.loss_agg_mode={mode} needs actor.loss_scale_factor > 0, found {loss_scale_factor}; "
                "data.max_response_length is the usual choice"
            )
        scale = float(loss_scale_factor)
    on = (loss_mask.values > 0).astype(np.float64)
    tokens = Ragged(on, loss_mask.lengths).sums()
    sequences = max(float((tokens > 0).sum()), 1.0)
    if mode == "token-mean":
        per_sequence = np.full(len(tokens), 1.0 / max(float(tokens.sum()), 1.0))
    elif mode == "token-sum":
        per_sequence = np.ones(len(tokens))
    elif mode == "seq-mean-token-mean":
        per_sequence = 1.0 / (sequences * np.maximum(tokens, 1.0))
    else:
        per_sequence = np.full(len(tokens), 1.0 / (sequences * scale))
    return Ragged((on * np.repeat(per_sequence, loss_mask.lengths)).astype(np.float32), loss_mask.lengths)


def mask_metrics(loss_mask: Ragged) -> dict[str, float]:
    """How many tokens and sequences the loss is made of, and how many sequences are masked as a whole."""
    tokens = loss_mask.sums()
    return {
        "actor/loss_tokens": float(tokens.sum()),
        "actor/loss_sequences": float((tokens > 0).sum()),
        "actor/masked_sequences": float((tokens == 0).sum()),
    }
