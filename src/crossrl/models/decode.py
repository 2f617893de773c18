"""Keys and values during generation, preallocated, and the attention of one new token per sequence over them."""

from __future__ import annotations

import torch

from crossrl.models.attention import Extra, LayoutPattern, core
from crossrl.models.layout import Layout


class DecodeCache:
    """Keys and values of B sequences. Filled by ``Prefill``, then one token per sequence and step by ``attend``.

    ``group``: int64 ``[B]``, the prompt of each sequence. ``capacity``: prompt and response tokens at most.
    """

    def __init__(self, prompt_length: torch.Tensor, group: torch.Tensor, capacity: int) -> None:
        self.group, self.capacity = group, -(-capacity // 16) * 16
        self.length = prompt_length[group].clone()
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._rows = torch.arange(len(group), device=group.device)

    def store_prompts(self, layer: int, first: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep prompts ``first`` to ``first + G``: ``[G, Hkv, P, D]``."""
        rows = torch.nonzero((self.group >= first) & (self.group < first + len(key)))[:, 0]
        for store, new in ((self.keys, key), (self.values, value)):
            if layer not in store:
                store[layer] = new.new_zeros((len(self.group), new.shape[1], self.capacity, new.shape[3]))
            store[layer][rows, :, : new.shape[2]] = new[self.group[rows] - first]

    def begin_step(self) -> None:
        """Make room for one more token per sequence."""
        step = torch.arange(int(self.length.max()) // 16 * 16 + 16, device=self.length.device)
        self._seen = step <= self.length[:, None]
        self._step = step

    def end_step(self) -> None:
        self.length += 1

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these sequences only."""
        self.group, self.length = self.group[rows], self.length[rows]
        self._rows = torch.arange(len(rows), device=rows.device)
        for store in (self.keys, self.values):
            for layer in store:
                store[layer] = store[layer][rows]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, extra: Extra
    ) -> torch.Tensor:
        """See ``Pattern``; the T tokens are one for each of the B sequences, then padding rows."""
        count = len(self._rows)
        q, k, v = (x[0, :, :count].transpose(0, 1) for x in (query, key, value))
        self.keys[layer][self._rows, :, self.length] = k
        self.values[layer][self._rows, :, self.length] = v
        seen = self._seen
        if extra.window is not None:
            seen = seen & (self.length[:, None] - self._step < extra.window)
        used = len(self._step)
        keys, values = self.keys[layer][:, :, :used], self.values[layer][:, :, :used]
        out = core(q[:, :, None], keys, values, seen[:, None, None], scale, extra)[:, :, 0]
        missing = query.shape[2] - count
        return torch.cat([out, out.new_zeros((missing, *out.shape[1:]))]) if missing else out


class Prefill(LayoutPattern):
    """Prompts ``first`` and on of a ``DecodeCache``: attention as in ``LayoutPattern``, keys and values kept."""

    def __init__(self, layout: Layout, cache: DecodeCache, first: int, count: int) -> None:
        super().__init__(layout)
        self._cache, self._first, self._count = cache, first, count

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, extra: Extra
    ) -> torch.Tensor:
        index = self.layout.prompts.index[: self._count]
        self._cache.store_prompts(layer, self._first, *(x[0][:, index].transpose(0, 1) for x in (key, value)))
        return super().attend(layer, query, key, value, scale, extra)
