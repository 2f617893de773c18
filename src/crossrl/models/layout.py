"""How a micro-batch lies in one row of tokens without padding, each group's prompt once.

All prompts come first, then all responses, those of a group together. The last token of a response is no
input, because nothing after it is predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# float32 linear gives a row the same bits whatever the number of rows once there are 8 (shared measurement,
# AVX2), so that a token's log-prob does not depend on how little company it has.
MIN_ROWS = 8


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt and the responses to it: int token ids ``[P]`` (P >= 1) and ``[R_i]`` each."""

    prompt: np.ndarray
    responses: Sequence[np.ndarray] = ()


@dataclass(frozen=True, slots=True)
class Segments:
    """A set of same-kind segments: ``index`` int64 ``[n, longest]`` rows of the token row (padding points at row 0),
    ``start`` int64 ``[n]`` position of the first token, ``length`` int64 ``[n]``."""

    index: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """T tokens of G groups with S sequences and N response tokens to score.

    ``input_ids``, ``position_ids``: int64 ``[1, T]``. ``prompts``: the G prompts (one more when rows had to be
    filled up). ``responses``: the S responses' inputs, or None when there are none. ``group``: int64 ``[S]``,
    the prompt of each. ``scatter``: int64 ``[T]``, where each token's output is among the padded prompts
    followed by the padded responses. ``predict``: int64 ``[N]``, the row whose hidden state predicts each
    response token. ``targets``: int64 ``[N]``. ``sequence``: int64 ``[N]``, which of the S sequences.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    prompts: Segments
    responses: Segments | None
    group: torch.Tensor
    scatter: torch.Tensor
    predict: torch.Tensor
    targets: torch.Tensor
    sequence: torch.Tensor
    prompt_last: torch.Tensor
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
    group = np.array([i for i, g in enumerate(groups) for _ in g.responses], dtype=np.int64)
    last_prompt_token = np.cumsum([len(p) for p in prompts]) - 1
    inputs = [r[:-1] for r in responses]
    missing = MIN_ROWS - sum(map(len, prompts)) - sum(map(len, inputs))
    if missing > 0:
        prompts.append(np.zeros(missing, dtype=np.int64))
    plen = np.array([len(p) for p in prompts], dtype=np.int64)
    rlen = np.array([len(r) for r in inputs], dtype=np.int64)
    prompt_rows, prompt_scatter = _padded(plen, 0)
    parts, positions, scatter = [*prompts, *inputs], [np.arange(n) for n in plen], [prompt_scatter]
    positions += [np.arange(n) + plen[g] for n, g in zip(rlen, group, strict=True)]
    segments = None
    if rlen.size and int(rlen.max()) > 0:
        response_rows, response_scatter = _padded(rlen, int(plen.sum()))
        scatter.append(response_scatter + prompt_rows.size)
        segments = Segments(_tensor(response_rows), _tensor(plen[group]), _tensor(rlen))
    predict, sequence = _predictors(responses, group, last_prompt_token, int(plen.sum()))
    return Layout(
        input_ids=_tensor(np.concatenate(parts))[None],
        position_ids=_tensor(np.concatenate(positions))[None],
        prompts=Segments(_tensor(prompt_rows), torch.zeros(len(prompts), dtype=torch.int64), _tensor(plen)),
        responses=segments,
        group=_tensor(group),
        scatter=_tensor(np.concatenate(scatter)),
        predict=_tensor(predict),
        targets=_tensor(np.concatenate(responses) if responses else np.zeros(0, np.int64)),
        sequence=_tensor(sequence),
        prompt_last=_tensor(last_prompt_token),
        longest=int(max([*plen, *(plen[group] + rlen)], default=0)),
    )


def _padded(lengths: np.ndarray, first_row: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers ``[n, longest]`` of consecutive segments (padding: 0), and each row's place in that table."""
    inside = np.arange(int(lengths.max()))[None, :] < lengths[:, None]
    rows = np.zeros(inside.shape, dtype=np.int64)
    rows[inside] = np.arange(int(lengths.sum())) + first_row
    return rows, np.flatnonzero(inside)


def _predictors(
    responses: list[np.ndarray], group: np.ndarray, last_prompt_token: np.ndarray, first_row: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each response token: the row that predicts it, and its sequence."""
    rows, row = [np.zeros(0, np.int64)], first_row
    for response, g in zip(responses, group, strict=True):
        if len(response):
            rows.append(np.concatenate([[last_prompt_token[g]], np.arange(row, row + len(response) - 1)]))
            row += len(response) - 1
    lengths = np.array([len(r) for r in responses], dtype=np.int64)
    return np.concatenate(rows), np.repeat(np.arange(len(responses)), lengths)


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
