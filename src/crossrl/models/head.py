"""The output head: log-probs of given tokens without keeping logits for all positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from crossrl.models.layout import MIN_ROWS
from crossrl.models.linear import adds_directly, linear

# Softmax numerators are kept from forward to backward up to this size, else recomputed in the backward pass.
KEEP_BYTES = 160 << 20
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
        """float32 ``[T, V]``, contiguous, the caller's to overwrite. For inference: no gradient."""
        logits = linear(hidden, self.weight, self.bias).float().contiguous()
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def log_softmax(self, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
        """float32 ``[T, V]``: log softmax(logits / temperature). A row's bits depend on nothing but the row."""
        logits = self.logits(hidden)
        if temperature != 1.0:
            logits.div_(temperature)
        return log_softmax_(logits)

    def through_scale(self, d: torch.Tensor, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
        """From the gradient of ``logits / temperature`` to that of ``h @ weight.T + bias``; ``d`` is overwritten."""
        if temperature != 1.0:
            d.div_(temperature)
        if self.softcap is not None:
            capped = self.logits(hidden).div_(self.softcap)
            d.mul_(1.0 - capped.square_())
        if self.scale != 1.0:
            d.mul_(self.scale)
        return d


def log_softmax_(logits: torch.Tensor) -> torch.Tensor:
    """Log softmax over the last dimension; on CPU in place (there a row is read to its end before it is written)."""
    return torch._log_softmax(logits, -1, False, out=logits if logits.device.type == "cpu" else None)


def log_probs(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob (nat, float32) of ``targets`` ``[N]`` after dividing logits by ``temperature``; entropy if asked.

    ``hidden``: ``[N, hidden]``. Differentiable in ``hidden`` and the head's weight and bias. Logits exist for a
    chunk of positions at a time; what the backward pass needs of them is kept where it is small.
    """
    count = len(targets)
    missing = max(0, MIN_ROWS - count)
    if missing:
        hidden, targets = F.pad(hidden, (0, 0, 0, missing)), F.pad(targets, (0, missing))
    values, entropies = _LogProbs.apply(hidden, head.weight, head.bias, targets, head, temperature, entropy)
    return values[:count], (entropies[:count] if entropy else None)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        head: Head,
        temperature: float,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(targets)
        values = hidden.new_empty(count, dtype=torch.float32)
        entropies = hidden.new_empty(count if entropy else 0, dtype=torch.float32)
        keep = any(ctx.needs_input_grad[:3]) and head.softcap is None and 4 * count * len(weight) <= KEEP_BYTES
        kept: list[torch.Tensor] = []
        for rows in _chunks(count, len(weight)):
            log_p = head.log_softmax(hidden[rows], temperature)
            values[rows] = log_p.gather(1, targets[rows, None])[:, 0]
            if entropy:
                entropies[rows] = -(log_p.exp() * log_p).sum(-1)
            if keep:
                kept.append(log_p)
        ctx.save_for_backward(hidden, targets, entropies)
        ctx.weight, ctx.head, ctx.temperature, ctx.entropy, ctx.kept = weight, head, temperature, entropy, kept
        return values, entropies

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, targets, entropies = ctx.saved_tensors
        weight = ctx.weight
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        direct = needs_weight and adds_directly(weight)
        d_weight = weight.grad if direct else torch.zeros_like(weight) if needs_weight else None
        d_bias = torch.zeros_like(ctx.head.bias) if needs_bias else None
        weight_as_hidden = weight.to(hidden.dtype)  # they differ under autocast
        kept = ctx.kept
        ctx.kept = []
        for i, rows in enumerate(_chunks(len(targets), len(weight))):
            log_p = kept[i] if kept else ctx.head.log_softmax(hidden[rows], ctx.temperature)
            if kept:
                kept[i] = None
            at, g = targets[rows], grad[rows]
            if ctx.entropy:  # d entropy / d logit = -p (log p + entropy)
                d = log_p.exp()
                log_p.add_(entropies[rows, None]).mul_(-grad_entropy[rows, None]).sub_(g[:, None])
                d.mul_(log_p)
            else:
                d = log_p.exp_().mul_(-g[:, None])
            d[torch.arange(len(g), device=d.device), at] += g
            d = ctx.head.through_scale(d, hidden[rows], ctx.temperature).to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(d, weight_as_hidden, out=d_hidden[rows])
            if d_weight is not None and d_weight.dtype == d.dtype:
                d_weight.addmm_(d.t(), hidden[rows])
            elif d_weight is not None:
                d_weight += d.t() @ hidden[rows]
            if d_bias is not None:
                d_bias += d.sum(0)
        return d_hidden, None if direct else d_weight, d_bias, None, None, None, None


def _chunks(count: int, vocabulary: int) -> list[slice]:
    """Equal parts (so that none has too few rows to be exact) of about ``CHUNK_BYTES`` of logits."""
    parts = max(1, min(count // MIN_ROWS, -(-4 * count * vocabulary // CHUNK_BYTES)))
    ends = [count * (i + 1) // parts for i in range(parts)]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
