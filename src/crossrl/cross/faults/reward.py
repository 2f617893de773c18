"""Faults of the reward: the verifier is fine, what it is given or what becomes of its scores is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from crossrl.cross.faults.base import Fault, Site
from crossrl.rewards.scorer import Score, ScoreItem
from crossrl.seeds import generator

OFFSET = 0.5
FLIPPED = 0.1


def group_of(sample_id: str) -> str:
    """The sample id without its repeat index."""
    return sample_id.rpartition(".n")[0]


def _scores(site: Site, change: Callable[[list[Score], Sequence[ScoreItem]], list[Score]]) -> None:
    """Other scores for the same responses."""

    def score(inner: Callable[..., list[Score]], items: Sequence[ScoreItem]) -> list[Score]:
        return change(inner(items), items)

    site.method(site.parts.scorer, "score", score)


def _items(site: Site, change: Callable[[Sequence[ScoreItem]], list[ScoreItem]]) -> None:
    """The verifier is given something else than was sampled or asked for."""
    site.method(site.parts.scorer, "score", lambda inner, items: inner(change(items)))


def constant_offset(site: Site) -> None:
    def change(scores: list[Score], items: Sequence[ScoreItem]) -> list[Score]:
        first = group_of(scores[0].sample_id) if scores else ""
        return [replace(s, value=s.value + OFFSET) if group_of(s.sample_id) == first else s for s in scores]

    _scores(site, change)


def answers_shifted(site: Site) -> None:
    def change(items: Sequence[ScoreItem]) -> list[ScoreItem]:
        before = [*items[-1:], *items[:-1]]
        return [replace(item, ground_truth=b.ground_truth) for item, b in zip(items, before, strict=True)]

    _items(site, change)


def flipped(site: Site) -> None:
    def change(scores: list[Score], items: Sequence[ScoreItem]) -> list[Score]:
        can = [i for i, s in enumerate(scores) if s.status == "ok" and s.value != 1 - s.value]
        draw = generator(site.cfg.trainer.seed, "flipped", site.clock.step)
        # A share of them and not each with a chance, so that it acts in every step, however small the batch.
        chosen = set(draw.permutation(can)[: max(1, round(FLIPPED * len(scores)))].tolist())
        return [replace(s, value=1 - s.value) if i in chosen else s for i, s in enumerate(scores)]

    _scores(site, change)


def timeouts_wrong(site: Site) -> None:
    def change(scores: list[Score], items: Sequence[ScoreItem]) -> list[Score]:
        scored = [i for i, s in enumerate(scores) if s.status == "ok" and s.value > 0]
        slowest = sorted(scored, key=lambda i: -len(items[i].response))[: max(1, len(scores) // 8)]
        return [replace(s, value=0.0) if i in slowest else s for i, s in enumerate(scores)]

    _scores(site, change)


def cached_by_prompt(site: Site) -> None:
    def change(scores: list[Score], items: Sequence[ScoreItem]) -> list[Score]:
        first: dict[str, Score] = {}
        for s in scores:
            first.setdefault(group_of(s.sample_id), s)
        return [replace(first[group_of(s.sample_id)], sample_id=s.sample_id) for s in scores]

    _scores(site, change)


def length_bonus(site: Site) -> None:
    def change(scores: list[Score], items: Sequence[ScoreItem]) -> list[Score]:
        pairs = zip(scores, items, strict=True)
        return [replace(s, value=s.value + 0.01 * len(item.response)) for s, item in pairs]

    _scores(site, change)


def text_cut(site: Site) -> None:
    _items(site, lambda items: [replace(item, response=item.response[:-1]) for item in items])


def _fault(name: str, symptom: str, plant: Callable[[Site], None], **more: Any) -> Fault:
    return Fault(f"reward.{name}", "reward", "reward", symptom, plant, **more)


REWARD = (
    _fault(
        "constant_offset",
        "the mean reward is higher than it should be; advantages are the same, and so is all that is learned",
        constant_offset, harmless=True,
    ),
    _fault(
        "answers_shifted",
        "good responses get no reward at the borders of groups; learning is slower, more so with small groups",
        answers_shifted,
    ),
    _fault("flipped", "the reward stops well below the best that the task allows", flipped),
    _fault(
        "timeouts_wrong",
        "long, correct responses are unlearned; responses get shorter; no verifier ever times out",
        timeouts_wrong,
    ),
    _fault("cached_by_prompt", "all responses of a group score the same; nothing is learned", cached_by_prompt),
    _fault("length_bonus", "responses get longer while the task is solved no better", length_bonus),
    _fault("text_cut", "correct answers score 0 when they end at the very end of the response", text_cut),
)  # fmt: skip
