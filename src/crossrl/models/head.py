"""The output head: log-probs of given tokens without keeping logits for all positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Softmax numerators are kept from forward to backward up to this size, else recomputed in the backward pass.
KEEP_BYTES = 256 << 20
CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Head:
    """How a model turns hidden states into logits: ``softcap(scale * (h @ weight.T + bias))``.

    ``weight``: ``[V, hidden]``; ``bias``: ``[V]`` or None. ``softcap`` c stands for ``c * tanh(x / c)``.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: Any) -> Head:
        """The head of a transformers causal LM, from its output embeddings and the config keys in use for this."""
        config = model.config.get_text_config()
        linear = model.get_output_embeddings()
        if linear is None or not hasattr(linear, "weight"):
            raise ValueError(f"{type(model).__name__} has no output embeddings that are one linear layer")
        scale = 1.0
        if getattr(config, "logits_scaling", None):  # Granite
            scale /= config.logits_scaling
        for key in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
            if isinstance(getattr(config, key, None), float):
                scale *= getattr(config, key)
        softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
        return cls(linear.weight, getattr(linear, "bias", None), scale, softcap)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 ``[T, V]``."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def log_probs(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob (nat, float32) of ``targets`` ``[N]`` after dividing logits by ``temperature``; entropy if asked.

    ``hidden``: ``[N, hidden]``. Differentiable in ``hidden`` and the head's weight and bias.
    """
    rows = max(1, CHUNK_BYTES // (4 * head.weight.shape[0]))
    values, entropies = [], []
    for start in range(0, len(targets), rows):
        logits = head.logits(hidden[start : start + rows]) / temperature
        log_p = torch.log_softmax(logits, -1)
        values.append(log_p.gather(1, targets[start : start + rows, None])[:, 0])
        if entropy:
            entropies.append(-(log_p.exp() * log_p).sum(-1))
    if not values:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return empty, (empty if entropy else None)
    return torch.cat(values), (torch.cat(entropies) if entropy else None)
