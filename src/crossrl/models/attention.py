"""Attention of packed rows, plugged into any transformers model through its ``AttentionInterface``.

``packed_attention`` is registered as "crossrl". A forward pass that hands over a ``Pattern`` by keyword gets that
pattern's attention; without one it gets the attention that the model came with, so that the model can still be used
by anybody as before.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Extra:
    """What some models add to attention: ``window`` (tokens seen, itself included), ``softcap``, ``sinks`` ``[H]``."""

    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


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
    """Training and prefill: prompts see themselves causally, responses their prompt and themselves causally.

    The g query heads that share a key head are rows of one product, ``[n, Hkv, M * g, D]``, so that keys and values
    are never repeated for them.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._parts = [p for p in (layout.prompts, layout.responses) if p is not None]
        self._tables: dict[int, list[HeadTables]] = {}
        self._biases: dict[tuple[int | None, int, torch.dtype], list[torch.Tensor]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, extra: Extra
    ) -> torch.Tensor:
        heads, groups = query.shape[1], key.shape[1]
        window = extra.window if extra.window is not None and extra.window < self.layout.longest else None
        q, k, v = (x[0].transpose(0, 1).reshape(x.shape[2] * groups, -1) for x in (query, key, value))
        out = []
        for table, bias in zip(self._table(groups), self._bias(window, heads // groups, q.dtype), strict=True):
            rows = q.index_select(0, table.rows).view(*table.shape, -1, query.shape[3])
            rows = rows.flatten(2, 3)
            keys = k.index_select(0, table.keys).view(*table.shape[:2], -1, key.shape[3])
            values = v.index_select(0, table.keys).view(*table.shape[:2], -1, value.shape[3])
            attended = core(rows, keys, values, bias, scale, extra)
            out.append(attended.reshape(table.rows.numel(), -1).index_select(0, table.places))
        return torch.cat(out).view(query.shape[2], heads, -1)

    def _table(self, groups: int) -> list[HeadTables]:
        if groups not in self._tables:
            self._tables[groups] = [HeadTables.of(p, groups) for p in self._parts]
        return self._tables[groups]

    def _bias(self, window: int | None, shared: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """For each part: 0 where a key is seen, else -inf, ``[n, 1, M * shared, L]``. Made once for all layers."""
        at = (window, shared, dtype)
        if at not in self._biases:
            biases = [causal_bias(p, window, dtype) for p in self._parts]
            self._biases[at] = [b.repeat_interleave(shared, 2) for b in biases]
        return self._biases[at]


@dataclass(frozen=True, slots=True)
class HeadTables:
    """``Segments`` for rows that are (token, key head) pairs: flat int64 tables; ``shape``: (n, Hkv, M)."""

    rows: torch.Tensor
    keys: torch.Tensor
    places: torch.Tensor
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, part: Segments, groups: int) -> HeadTables:
        head = torch.arange(groups, device=part.rows.device)
        pieces, length = part.rows.shape
        rows, keys = (x[:, None, :] * groups + head[:, None] for x in (part.rows, part.keys))
        piece, inside = part.places // length, part.places % length
        places = (piece[:, None] * groups + head) * length + inside[:, None]
        return cls(rows.reshape(-1), keys.reshape(-1), places.reshape(-1), (pieces, groups, length))


def core(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float, extra: Extra
) -> torch.Tensor:
    """Attention. q ``[B, Hkv, R, D]``: R rows, (query, shared head) pairs in this order; k, v ``[B, Hkv, L, D]``;
    bias ``[B, 1, R or 1, L]`` (0 or -inf)."""
    if extra.softcap is None and extra.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    scores = q @ k.transpose(2, 3) * scale
    if extra.softcap is not None:
        scores = torch.tanh(scores / extra.softcap) * extra.softcap
    scores = scores.float() + bias
    if extra.sinks is not None:
        sinks = extra.sinks.float().view(k.shape[1], -1)  # [Hkv, shared heads]
        sinks = sinks.repeat(1, q.shape[2] // sinks.shape[1])[None, :, :, None].expand(len(q), -1, -1, 1)
        scores = torch.cat([scores, sinks], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v


def causal_bias(part: Segments, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """0 where a row sees a key, else -inf, ``[n, 1, M, L]``. Padding rows see everything: an empty row would turn
    into NaN."""
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
