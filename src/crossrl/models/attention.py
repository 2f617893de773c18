"""Attention of packed rows, plugged into any transformers model through its ``AttentionInterface``.

``packed_attention`` is registered as "crossrl". A forward pass that hands over a ``Pattern`` by keyword gets that
pattern's attention; without one it is plain SDPA, so that the model can still be used as it came.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from crossrl.models.layout import Layout, Segments

NAME = "crossrl"
KEYWORD = "crossrl_pattern"


class UnsupportedAttention(RuntimeError):
    """The model asks its attention for something that the packed form does not do."""


class Pattern(Protocol):
    """Which token attends to which. Shapes: query ``[1, H, T, D]``, key and value ``[1, Hkv, T, D]``; out ``[T, H, D]``."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, extra: Extra
    ) -> torch.Tensor: ...


class Extra:
    """What some models add to plain attention: ``window`` (tokens seen, itself included), ``softcap``, ``sinks`` ``[H]``."""

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
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if dropout:
        raise UnsupportedAttention(f"attention dropout is {dropout}; packed attention needs 0")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedAttention("the model adds a position bias to its attention scores")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    extra = Extra(kwargs.get("sliding_window"), kwargs.get("softcap"), kwargs.get("s_aux"))
    return pattern.attend(module.layer_idx, query, key, value, scale, extra)[None], None  # type: ignore[arg-type]


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class LayoutPattern:
    """Training and prefill: prompts see themselves causally, responses their prompt and themselves causally."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._masks: dict[int | None, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, extra: Extra
    ) -> torch.Tensor:
        layout = self.layout
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        window = extra.window if extra.window is not None and extra.window < layout.longest else None
        prompt_mask, response_mask = self._mask(window)
        index = layout.prompts.index
        parts = [core(_rows(q, index), _rows(k, index), _rows(v, index), prompt_mask, scale, extra)]
        if layout.responses is not None:
            own = layout.responses.index
            seen = torch.cat([index[layout.group], own], 1)
            parts.append(core(_rows(q, own), _rows(k, seen), _rows(v, seen), response_mask, scale, extra))
        flat = torch.cat([p.transpose(1, 2).flatten(0, 1) for p in parts])
        return flat[layout.scatter]

    def _mask(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if window not in self._masks:
            prompts, responses = self.layout.prompts, self.layout.responses
            pos, valid = _positions(prompts)
            prompt_mask = _causal(pos, pos, valid, valid, window)
            response_mask = None
            if responses is not None:
                own, own_valid = _positions(responses)
                group = self.layout.group
                keys = torch.cat([pos[group], own], 1)
                response_mask = _causal(own, keys, own_valid, torch.cat([valid[group], own_valid], 1), window)
            self._masks[window] = (prompt_mask, response_mask)
        return self._masks[window]


def core(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, extra: Extra
) -> torch.Tensor:
    """Masked attention. q ``[B, H, M, D]``, k and v ``[B, Hkv, L, D]``, mask bool ``[B, 1, M, L]`` (True: seen)."""
    if extra.softcap is None and extra.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.transpose(2, 3) * scale
    if extra.softcap is not None:
        scores = torch.tanh(scores / extra.softcap) * extra.softcap
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if extra.sinks is not None:
        sinks = extra.sinks.float().reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``[T, H, D]`` rows to ``[n, H, longest, D]``."""
    return x.reshape(x.shape[0], -1)[index].view(*index.shape, *x.shape[1:]).transpose(1, 2)


def _positions(segments: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    step = torch.arange(segments.index.shape[1], device=segments.index.device)
    return segments.start[:, None] + step, step < segments.length[:, None]


def _causal(
    query: torch.Tensor, key: torch.Tensor, is_query: torch.Tensor, is_key: torch.Tensor, window: int | None
) -> torch.Tensor:
    """bool ``[n, 1, M, L]`` from positions. Padding queries see everything: an empty row would turn into NaN."""
    seen = (key[:, None] <= query[:, :, None]) & is_key[:, None]
    if window is not None:
        seen &= query[:, :, None] - key[:, None] < window
    return (seen | ~is_query[:, :, None])[:, None]
