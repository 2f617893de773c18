"""Keys and values during generation, preallocated, and the attention of one new token per sequence over them."""

from __future__ import annotations

import torch

from crossrl.models.attention import Extra, LayoutPattern, as_bias, core
from crossrl.models.layout import PAD_KEYS, Layout, round_up

# A product with fewer rows rounds differently; heads that share keys and values are its rows here.
MIN_QUERY_ROWS = 4


class DecodeCache:
    """Keys and values of B sequences, prompt and response without a gap: ``[B, Hkv, capacity, D]`` for each layer.

    Filled by ``Prefill``, then one token per sequence and step by ``attend``. Memory in bytes: 2 * layers * B * Hkv *
    capacity * D * size of the dtype. ``group``: int64 ``[B]``, the prompt of each sequence. ``capacity``: prompt
    and response tokens at most.
    """

    def __init__(self, prompt_length: torch.Tensor, group: torch.Tensor, capacity: int) -> None:
        self.group, self.capacity = group, round_up(capacity, PAD_KEYS)
        self.length = prompt_length[group]
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._biases: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}
        self._rows = torch.arange(len(group), device=group.device)

    def store_prompts(self, layer: int, first: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep prompts ``first`` to ``first + G``: ``[G, Hkv, P, D]``."""
        rows = torch.nonzero((self.group >= first) & (self.group < first + len(key)))[:, 0]
        used = min(key.shape[2], self.capacity)  # what lies beyond is padding
        for store, new in ((self._keys, key), (self._values, value)):
            if layer not in store:
                store[layer] = new.new_zeros((len(self.group), new.shape[1], self.capacity, new.shape[3]))
            if len(rows) == len(self.group):
                store[layer][:, :, :used] = new.index_select(0, self.group - first)[:, :, :used]
            else:
                store[layer][rows, :, :used] = new[self.group[rows] - first, :, :used]

    def begin_step(self) -> None:
        """Make room for one more token per sequence."""
        longest = int(self.length.max())
        self._used = round_up(longest + 1, PAD_KEYS)
        # Where all sequences are equally long, one slice takes all new keys: much faster than a scatter.
        self._place = longest if int(self.length.min()) == longest else None
        self._biases.clear()

    def end_step(self) -> None:
        self.length = self.length + 1

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these sequences, in this order (one may be named several times)."""
        self.group, self.length = self.group[rows], self.length[rows]
        self._rows = torch.arange(len(rows), device=rows.device)
        for store in (self._keys, self._values):
            for layer, old in store.items():
                store[layer] = old[rows]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, extra: Extra
    ) -> torch.Tensor:
        """See ``Pattern``; the T tokens are one for each of the B sequences."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        keys, values = self._keys[layer], self._values[layer]
        if self._place is not None:
            keys[:, :, self._place], values[:, :, self._place] = k, v
        else:
            keys[self._rows, :, self.length], values[self._rows, :, self.length] = k, v
        keys, values = keys[:, :, : self._used], values[:, :, : self._used]
        bias = self._bias(extra.window, q.dtype)
        batch, heads, size = q.shape
        shared = heads // keys.shape[1]
        rows = q.reshape(batch, -1, shared, size)
        if shared < MIN_QUERY_ROWS and extra.sinks is None:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, MIN_QUERY_ROWS - shared))
        return core(rows, keys, values, bias, scale, extra)[:, :, :shared].reshape(batch, heads, -1)

    def _bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        if (window, dtype) not in self._biases:
            position = torch.arange(self._used, device=self.length.device)
            seen = position <= self.length[:, None]
            if window is not None:
                seen &= self.length[:, None] - position < window
            self._biases[window, dtype] = as_bias(seen, dtype)[:, None, None]
        return self._biases[window, dtype]


class Prefill(LayoutPattern):
    """``LayoutPattern`` that keeps its first ``count`` prompts in ``cache``, as prompts ``first`` and on."""

    def __init__(self, layout: Layout, cache: DecodeCache, first: int, count: int) -> None:
        super().__init__(layout)
        self._cache, self._first, self._count = cache, first, count

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, extra: Extra
    ) -> torch.Tensor:
        index = self.layout.prompts.keys[: self._count]
        self._cache.store_prompts(layer, self._first, *(x[0][:, index].transpose(0, 1) for x in (key, value)))
        return super().attend(layer, query, key, value, scale, extra)
