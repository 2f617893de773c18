"""How a mini-batch is split: members of a group stay together, so that their prompt is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crossrl.batch import Ragged
from crossrl.models.layout import Group


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """``groups``: what to compute. ``samples``: int64, positions in the batch, in the order of the responses."""

    groups: tuple[Group, ...]
    samples: np.ndarray
    tokens: int


def split(
    prompts: Ragged,
    responses: Ragged,
    keep: np.ndarray,
    max_sequences: int | None,
    max_tokens: int | None,
) -> list[MicroBatch]:
    """Micro-batches of at most ``max_sequences`` samples and ``max_tokens`` computed tokens, longest groups first.

    Samples with the same prompt tokens form a group. A group is split only when it does not fit by itself; a
    single sample beyond ``max_tokens`` gets a micro-batch of its own. ``keep``: bool ``[N]``, the samples to
    compute. The order is a function of the data alone.
    """
    members: dict[bytes, list[int]] = {}
    for i in np.flatnonzero(keep):
        members.setdefault(prompts.row(int(i)).tobytes(), []).append(int(i))
    pieces = [
        piece for group in members.values() for piece in _pieces(group, prompts, responses, max_sequences, max_tokens)
    ]
    pieces.sort(key=lambda piece: -_longest(piece, prompts, responses))  # stable: ties stay in batch order
    out: list[MicroBatch] = []
    current: list[list[int]] = []
    for piece in pieces:
        if current and not _fits([*current, piece], prompts, responses, max_sequences, max_tokens):
            out.append(_micro_batch(current, prompts, responses))
            current = []
        current.append(piece)
    if current:
        out.append(_micro_batch(current, prompts, responses))
    return out


def _pieces(
    group: list[int], prompts: Ragged, responses: Ragged, max_sequences: int | None, max_tokens: int | None
) -> list[list[int]]:
    group = sorted(group, key=lambda i: (-int(responses.lengths[i]), i))
    pieces: list[list[int]] = [[]]
    for i in group:
        if pieces[-1] and not _fits([[*pieces[-1], i]], prompts, responses, max_sequences, max_tokens):
            pieces.append([])
        pieces[-1].append(i)
    return pieces


def _fits(
    pieces: Sequence[list[int]], prompts: Ragged, responses: Ragged, max_sequences: int | None, max_tokens: int | None
) -> bool:
    if max_sequences is not None and sum(map(len, pieces)) > max_sequences:
        return False
    return max_tokens is None or sum(_tokens(p, prompts, responses) for p in pieces) <= max_tokens


def _tokens(piece: list[int], prompts: Ragged, responses: Ragged) -> int:
    """Computed tokens: the prompt once, each response without its last token."""
    return int(prompts.lengths[piece[0]]) + sum(max(0, int(responses.lengths[i]) - 1) for i in piece)


def _longest(piece: list[int], prompts: Ragged, responses: Ragged) -> int:
    return int(prompts.lengths[piece[0]]) + max(int(responses.lengths[i]) for i in piece)


def _micro_batch(pieces: list[list[int]], prompts: Ragged, responses: Ragged) -> MicroBatch:
    groups = tuple(Group(prompts.row(p[0]), tuple(responses.row(i) for i in p)) for p in pieces)
    samples = np.array([i for p in pieces for i in p], dtype=np.int64)
    return MicroBatch(groups, samples, sum(_tokens(p, prompts, responses) for p in pieces))
