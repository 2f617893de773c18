"""One sample in two runs: which tokens differ, and each token's log-probs in both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from crossrl.report.texts import TokenTexts
from crossrl.tape.api import SampleView

WINDOW, BEFORE = 400, 100  # tokens of a long response that are shown, and how many of them before the difference
# Upper ends of the classes of a gap, nat; what is larger than the last is in the class after it.
CLASSES = (0.0, 1e-6, 1e-4, 1e-2, 0.1, 1.0)


@dataclass(frozen=True, slots=True)
class Token:
    """A response token. Log-probs in nat, None where not computed. ``other``: the other run's sampler, None unless
    its tokens are the same up to here and at this place (else it had another context)."""

    position: int
    id: int
    text: str | None
    sampler: float | None
    trainer: float | None
    other: float | None
    differs: bool

    @property
    def own_gap(self) -> float | None:
        return _gap(self.trainer, self.sampler)

    @property
    def other_gap(self) -> float | None:
        return _gap(self.sampler, self.other)


def _gap(one: float | None, two: float | None) -> float | None:
    return None if one is None or two is None else one - two


def gap_class(gap: float | None) -> int | None:
    """
    >>> gap_class(0.0), gap_class(-0.05), gap_class(7.0), gap_class(None)
    (0, 4, 6, None)
    """
    if gap is None or math.isnan(gap):
        return None
    return next((i for i, end in enumerate(CLASSES) if abs(gap) <= end), len(CLASSES))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position at which two token sequences differ; the end of the shorter one if it begins the longer.

    >>> first_difference([1, 2, 3], [1, 5]), first_difference([1], [1, 2]), first_difference([1], [1])
    (1, 1, None)
    """
    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return None if at == len(a) == len(b) else at


def differing(a: Sequence[int], b: Sequence[int]) -> tuple[set[int], set[int]]:
    """Positions in ``a`` and in ``b`` that have no counterpart in the other, by the longest common blocks.

    >>> differing([1, 2, 3], [1, 9, 2, 3])
    (set(), {1})
    """
    in_a, in_b = set(range(len(a))), set(range(len(b)))
    for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        in_a -= set(range(block.a, block.a + block.size))
        in_b -= set(range(block.b, block.b + block.size))
    return in_a, in_b


def window(length: int, at: int | None) -> range:
    """Which tokens to show of a response of ``length`` whose interesting token is ``at``.

    >>> window(50, None), window(5000, 3000), window(5000, 4990)
    (range(0, 50), range(2900, 3300), range(4600, 5000))
    """
    start = max(0, min((at or 0) - BEFORE, length - WINDOW))
    return range(start, min(length, start + WINDOW))


def tokens(view: SampleView, other: SampleView | None, shown: range, texts: TokenTexts) -> list[Token]:
    """The tokens ``shown`` of ``view``, seen next to the same sample of the ``other`` run."""
    mine = view.tokens()
    theirs = other.tokens() if other is not None else []
    ids, other_ids = [t[1] for t in mine], [t[1] for t in theirs]
    same = first_difference(ids, other_ids) if other is not None else 0
    same = len(ids) if same is None else same
    # Only what is shown is matched: the matching takes time that grows with the square of the length.
    inside = range(shown.start, min(len(other_ids), shown.stop))
    unmatched, _ = differing([ids[i] for i in shown], [other_ids[i] for i in inside]) if other else (set(), set())
    return [
        Token(
            i, mine[i][1], texts(mine[i][1]), mine[i][2], mine[i][3], theirs[i][2] if i < same else None,
            i - shown.start in unmatched,
        )
        for i in shown
    ]  # fmt: skip
