"""How a mini-batch is split: members of a group stay together, so that their prompt is computed once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from crossrl.batch import Ragged
from crossrl.models.layout import Group


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """``groups``: what to compute. ``samples``: int64, positions in the batch, in the order of the responses.
    ``tokens``: how many are computed (each prompt once, each response without its last token)."""

    groups: tuple[Group, ...]
    samples: np.ndarray
    tokens: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Samples with one prompt that are computed together."""

    samples: list[int]
    tokens: int
    longest: int


def split(
    prompts: Ragged,
    responses: Ragged,
    keep: np.ndarray,
    max_sequences: int | None,
    max_tokens: int | None,
    enough_tokens: int | None = None,
) -> list[MicroBatch]:
    """Micro-batches of at most ``max_sequences`` samples and ``max_tokens`` computed tokens, longest groups first.

    ``enough_tokens``: with so many a micro-batch is large enough; groups are not split for it, only kept apart.

    Samples with the same prompt tokens form a group. A group is split only when it does not fit by itself; a
    single sample beyond ``max_tokens`` gets a micro-batch of its own. ``keep``: bool ``[N]``, the samples to
    compute. The order is a function of the data alone.
    """
    sequences = math.inf if max_sequences is None else max_sequences
    tokens = math.inf if max_tokens is None else max_tokens
    enough = tokens if enough_tokens is None else min(tokens, enough_tokens)
    lengths = responses.lengths.tolist()
    members: dict[bytes, list[int]] = {}
    for i in np.flatnonzero(keep).tolist():
        members.setdefault(prompts.row(i).tobytes(), []).append(i)
    pieces: list[_Piece] = []
    for group in members.values():
        pieces += _pieces(group, int(prompts.lengths[group[0]]), lengths, sequences, tokens)
    pieces.sort(key=lambda piece: -piece.longest)  # stable: ties stay in batch order
    out: list[list[_Piece]] = []
    count = size = 0
    for piece in pieces:
        if not out or count + len(piece.samples) > sequences or size + piece.tokens > enough:
            out.append([])
            count = size = 0
        out[-1].append(piece)
        count, size = count + len(piece.samples), size + piece.tokens
    return [_micro_batch(parts, prompts, responses) for parts in out]


def _pieces(group: list[int], prompt: int, lengths: list[int], sequences: float, tokens: float) -> list[_Piece]:
    """``group`` in as few pieces as fit; one piece for almost every group."""
    out: list[_Piece] = []
    members: list[int] = []
    size = prompt
    for i in sorted(group, key=lambda i: -lengths[i]):
        more = max(0, lengths[i] - 1)
        if members and (len(members) + 1 > sequences or size + more > tokens):
            out.append(_Piece(members, size, prompt + lengths[members[0]]))
            members, size = [], prompt
        members.append(i)
        size += more
    return [*out, _Piece(members, size, prompt + lengths[members[0]])]


def _micro_batch(pieces: list[_Piece], prompts: Ragged, responses: Ragged) -> MicroBatch:
    groups = tuple(Group(prompts.row(p.samples[0]), tuple(responses.row(i) for i in p.samples)) for p in pieces)
    samples = np.array([i for p in pieces for i in p.samples], dtype=np.int64)
    return MicroBatch(groups, samples, sum(p.tokens for p in pieces))


def flat_index(column: Ragged, samples: np.ndarray) -> np.ndarray:
    """int64: where the values of ``samples``, one after the other, are in ``column.values``."""
    lengths = column.lengths[samples]
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) + np.repeat(column.offsets[samples] - (ends - lengths), lengths)
