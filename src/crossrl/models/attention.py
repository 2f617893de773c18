"""Attention of packed rows, plugged into any transformers model through its ``AttentionInterface``.

``packed_attention`` is registered as "crossrl". A forward pass that hands over a ``Pattern`` by keyword gets that
pattern's attention; without one it gets the attention that the model came with, so that the model can still be used
by anybody as before.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from crossrl.models.layout import Layout, Segments

NAME = "crossrl"
KEYWORD = "crossrl_pattern"


class UnsupportedAttention(RuntimeError):
    """The model asks its attention for something that the packed form does not do."""


class Pattern(Protocol):
    """Which token attends to which. query: ``[1, H, T, D]``; key, value: ``[1, Hkv, T, D]``; result: ``[T, H, D]``."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, extra: Extra
    ) -> torch.Tensor: ...


class Extra:
    """What some models add to attention: ``window`` (tokens seen, itself included), ``softcap``, ``sinks`` ``[H]``."""

    __slots__ = ("sinks", "softcap", "window")

    def __init__(self, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> None:
        self.window, self.softcap, self.sinks = window, softcap, sinks


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls; returns ``[1, T, H, D]``."""
    pattern: Pattern | None = kwargs.pop(KEYWORD, None)
    if pattern is None:
        return _own(module)(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    if dropout:
        raise UnsupportedAttention(f"attention dropout is {dropout}; packed attention needs 0")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedAttention("the model adds a position bias to its attention scores")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    extra = Extra(kwargs.get("sliding_window"), kwargs.get("softcap"), kwargs.get("s_aux"))
    return pattern.attend(module.layer_idx, query, key, value, scale, extra)[None], None  # type: ignore[arg-type]


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, eager_mask)  # an additive mask, which any attention understands

# Kept on each module, so that a copy of the model has it too.
_CAME_WITH = "_attention_it_came_with"


def switch(model: PreTrainedModel, packed: bool) -> None:
    """Give ``model`` packed attention, or back the one that it came with."""
    if not hasattr(model, _CAME_WITH):
        for module in model.modules():
            setattr(module, _CAME_WITH, model.config._attn_implementation)
    model.set_attn_implementation(NAME if packed else getattr(model, _CAME_WITH))


def _own(module: torch.nn.Module) -> Any:
    """The attention function that ``module`` came with."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(getattr(module, _CAME_WITH), eager)  # type: ignore[arg-type]


class LayoutPattern:
    """Training and prefill: prompts see themselves causally, responses their prompt and themselves causally."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._biases: dict[tuple[int | None, torch.dtype], list[torch.Tensor]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, extra: Extra
    ) -> torch.Tensor:
        layout = self.layout
        window = extra.window if extra.window is not None and extra.window < layout.longest else None
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = []
        for part, bias in zip(self._parts(), self._bias(window, q.dtype), strict=True):
            out.append(core(_rows(q, part.rows), _rows(k, part.keys), _rows(v, part.keys), bias, scale, extra))
        flat = torch.cat([o.transpose(1, 2).flatten(0, 1) for o in out])
        return flat.index_select(0, layout.scatter)

    def _parts(self) -> list[Segments]:
        return [p for p in (self.layout.prompts, self.layout.responses) if p is not None]

    def _bias(self, window: int | None, dtype: torch.dtype) -> list[torch.Tensor]:
        """For each part: 0 where a key is seen, else -inf, ``[n, 1, M, L]``. Made once, used by all layers."""
        if (window, dtype) not in self._biases:
            self._biases[window, dtype] = [causal_bias(p, window, dtype) for p in self._parts()]
        return self._biases[window, dtype]


def core(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float, extra: Extra
) -> torch.Tensor:
    """Attention. q ``[B, H, M, D]``, k and v ``[B, Hkv, L, D]``, bias ``[B, 1, M or 1, L]`` (0 or -inf)."""
    if extra.softcap is None and extra.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.transpose(2, 3) * scale
    if extra.softcap is not None:
        scores = torch.tanh(scores / extra.softcap) * extra.softcap
    scores = scores.float() + bias
    if extra.sinks is not None:
        sinks = extra.sinks.float().reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v


def causal_bias(part: Segments, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """0 where a row sees a key, else -inf. Padding rows see everything: an empty row would turn into NaN."""
    device = part.rows.device
    step = torch.arange(part.rows.shape[1], device=device)
    key = torch.arange(part.keys.shape[1], device=device)
    query = part.first[:, None] + step
    seen = key <= query[:, :, None]
    if window is not None:
        seen &= query[:, :, None] - key < window
    seen |= (step >= part.count[:, None])[:, :, None]
    return as_bias(seen, dtype)[:, None]


def as_bias(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 for True, -inf for False."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``[T, H, D]`` rows to ``[n, H, M, D]``."""
    picked = x.reshape(x.shape[0], -1).index_select(0, index.reshape(-1))
    return picked.view(*index.shape, *x.shape[1:]).transpose(1, 2)
