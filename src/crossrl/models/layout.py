"""How a micro-batch lies in one row of tokens without padding, each group's prompt once.

All prompts come first, then all responses, those of a group together. The last token of a response is no
input, because nothing after it is predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# In float32 on CPU a row of a matrix product has the same bits whatever the number of rows, once there are 12
# (measured: MKL on AVX2, one and two threads; 1 to 11 rows differ), and attention does not depend on how far queries
# and keys are padded, once that is to multiples of 4 and 16. With some margin, a token's log-prob depends on its own
# sequence only, and is the same number when it is sampled and when it is trained on.
MIN_ROWS = 16
PAD_ROWS = 8
PAD_KEYS = 16


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt and the responses to it: int token ids ``[P]`` (P >= 1) and ``[R_i]`` each."""

    prompt: np.ndarray
    responses: Sequence[np.ndarray] = ()


@dataclass(frozen=True, slots=True)
class Segments:
    """Attention over n pieces of the token row, padded to multiples of ``PAD_ROWS`` and ``PAD_KEYS``.

    ``rows``: int64 ``[n, M]``, the rows that ask (padding: 0). ``keys``: int64 ``[n, L]``, the rows that may be seen,
    in the order of their positions, which start at 0. ``first``: int64 ``[n]``, the position of the first row that
    asks. ``count``: int64 ``[n]``, how many rows ask. ``places``: int64 ``[sum(count)]``, where each token is in
    ``rows``, flattened; tokens in the order of the token row.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """T tokens of G groups with S sequences and N response tokens to score.

    ``input_ids``, ``position_ids``: int64 ``[1, T]``. ``prompts``: the G prompts (one more when rows had to be
    filled up). ``responses``: those of the S sequences that have inputs, or None when there are none.
    ``prompt_last``: int64 ``[G]``, the row of each prompt's last token. ``predict``: int64 ``[N]``, the row whose
    hidden state predicts each response token. ``targets``: int64 ``[N]``. ``sequence``: int64 ``[N]``, which of the
    S sequences. ``longest``: the largest number of positions of a sequence.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    prompts: Segments
    responses: Segments | None
    prompt_last: torch.Tensor
    predict: torch.Tensor
    targets: torch.Tensor
    sequence: torch.Tensor
    longest: int

    def to(self, device: torch.device) -> Layout:
        """The same layout with its tables on ``device``."""
        if device.type == "cpu":
            return self

        def move(value: object) -> object:
            if isinstance(value, torch.Tensor):
                return value.to(device)
            if isinstance(value, Segments):
                return Segments(*(getattr(value, n).to(device) for n in Segments.__slots__))
            return value

        return Layout(*(move(getattr(self, name)) for name in Layout.__slots__))  # type: ignore[arg-type]


def lay_out(groups: Sequence[Group]) -> Layout:
    """The layout of ``groups``. Raises ``ValueError`` for an empty prompt."""
    prompts = [np.asarray(g.prompt, dtype=np.int64) for g in groups]
    if any(len(p) == 0 for p in prompts):
        raise ValueError("a prompt has no tokens; there is nothing that the first response token could depend on")
    responses = [np.asarray(r, dtype=np.int64) for g in groups for r in g.responses]
    group = np.repeat(np.arange(len(groups)), [len(g.responses) for g in groups])
    inputs = [r[:-1] for r in responses]
    missing = MIN_ROWS - sum(map(len, prompts)) - sum(map(len, inputs))
    if missing > 0:
        prompts.append(np.zeros(missing, dtype=np.int64))
    p_count = np.array([len(p) for p in prompts], dtype=np.int64)
    r_count = np.array([len(r) for r in inputs], dtype=np.int64)
    p_first, r_first = _starts(p_count), _starts(r_count) + p_count.sum()
    rows, places = _table(p_first, p_count, PAD_ROWS)
    keys, _ = _table(p_first, p_count, PAD_KEYS)
    prompt_part = _segments(rows, keys, np.zeros(len(prompts)), p_count, places)
    response_part = None
    if r_count.any():
        some = np.flatnonzero(r_count)
        rows, places = _table(r_first[some], r_count[some], PAD_ROWS)
        of = group[some]
        keys = _joined(p_first[of], p_count[of], r_first[some], r_count[some])
        response_part = _segments(rows, keys, p_count[of], r_count[some], places)
    prompt_last = (p_first + p_count - 1)[: len(groups)]
    predict, sequence = _predictors(responses, prompt_last[group], r_first)
    ends = p_count[group] + r_count
    return Layout(
        input_ids=_tensor(np.concatenate([*prompts, *inputs]))[None],
        position_ids=_tensor(np.concatenate([_ramp(p_count), _ramp(r_count, p_count[group])]))[None],
        prompts=prompt_part,
        responses=response_part,
        prompt_last=_tensor(prompt_last),
        predict=_tensor(predict),
        targets=_tensor(np.concatenate(responses) if responses else np.zeros(0, np.int64)),
        sequence=_tensor(sequence),
        longest=int(max(p_count.max(), ends.max(initial=0))),
    )


def round_up(count: int, unit: int) -> int:
    """To a multiple of ``unit``."""
    return -(-count // unit) * unit


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


def _ramp(counts: np.ndarray, first: np.ndarray | None = None) -> np.ndarray:
    """``first[i], first[i] + 1, ...`` (``counts[i]`` numbers) for each i, one after the other."""
    offset = _starts(counts) if first is None else _starts(counts) - first
    return np.arange(int(counts.sum())) - np.repeat(offset, counts)


def _table(first: np.ndarray, counts: np.ndarray, unit: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers ``[n, M]`` of pieces that follow each other (padding: 0), and each row's place in that table."""
    inside = np.arange(round_up(int(counts.max()), unit))[None, :] < counts[:, None]
    rows = np.zeros(inside.shape, dtype=np.int64)
    rows[inside] = _ramp(counts, first)
    return rows, np.flatnonzero(inside)


def _joined(p_first: np.ndarray, p_count: np.ndarray, r_first: np.ndarray, r_count: np.ndarray) -> np.ndarray:
    """Row numbers ``[n, L]``: each prompt's, then its response's, without a gap (padding: 0)."""
    column = np.arange(round_up(int((p_count + r_count).max()), PAD_KEYS))[None, :]
    prompt = p_first[:, None] + column
    response = (r_first - p_count)[:, None] + column
    rows = np.where(column < p_count[:, None], prompt, response)
    return np.where(column < (p_count + r_count)[:, None], rows, 0)


def _predictors(responses: list[np.ndarray], last: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each response token: the row that predicts it (the prompt's last, then the response's), its sequence."""
    counts = np.array([len(r) for r in responses], dtype=np.int64)
    rows = _ramp(counts, first - 1) if len(counts) else np.zeros(0, np.int64)
    starts = _starts(counts)[counts > 0]
    rows[starts] = last[counts > 0]
    return rows, np.repeat(np.arange(len(responses)), counts)


def _segments(*tables: np.ndarray) -> Segments:
    return Segments(*map(_tensor, tables))


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
