"""reward: score the responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from crossrl.batch import Batch
from crossrl.rewards.scorer import Score, ScoreItem
from crossrl.stages.base import At

# length in tokens of a response -> what is added to its score (DAPO's overlong shaping)
Shaping = Callable[[np.ndarray], np.ndarray]


class Scores(Protocol):
    """What scores: ``Scorer``, or ``SpreadScorer`` over several machines. ``digest``: of the code."""

    digest: str

    def score(self, items: Sequence[ScoreItem]) -> list[Score]: ...

    def close(self) -> None: ...


class Reward:
    """Scores each response with the verifier of its ``data_source``.

    A sample that could not be scored (its verifier raised, timed out, returned something else than a finite
    number) gets NaN and its status; it is excluded from training and counted, and never stops the others.

    ``show_shaping``: ``reward_extra`` also says what was added for length, under verl's names ``overlong_reward`` (at
    most 0) and ``overlong`` (whether it is below 0).
    """

    name = "reward"
    reads: tuple[str, ...] = ("response", "response_ids", "data_source", "ground_truth", "extra_info")
    writes: tuple[str, ...] = ("score", "reward", "reward_status", "reward_extra")

    def __init__(
        self, scorer: Scores, shaping: Shaping | None = None, baseline: bool = False, show_shaping: bool = False
    ) -> None:
        self.scorer, self.shaping, self.baseline, self.show_shaping = scorer, shaping, baseline, show_shaping
        if baseline:
            self.reads = (*Reward.reads, "baseline_response")
            self.writes = (*Reward.writes, "baseline_reward")

    def __call__(self, batch: Batch, at: At) -> Batch:
        scores = self._score(batch, "response")
        score = np.array([s.value for s in scores], np.float64)
        added = self.shaping(batch.ragged("response_ids").lengths) if self.shaping else None
        extras = [s.extra for s in scores]
        if added is not None and self.show_shaping:
            extras = [
                e | {"overlong_reward": x, "overlong": x < 0} for e, x in zip(extras, added.tolist(), strict=True)
            ]
        columns: dict[str, Any] = {
            "score": score,
            "reward": score.copy() if added is None else score + added,
            "reward_status": [s.status for s in scores],
            "reward_extra": extras,
        }
        if self.baseline:
            columns["baseline_reward"] = np.array([s.value for s in self._score(batch, "baseline_response")])
        counts = Counter(s.status for s in scores)
        errors = {s.status: s.error for s in reversed(scores) if s.error}
        metrics = {f"reward/{status}": float(count) for status, count in sorted(counts.items())}
        return Batch(batch.sample_id, columns, {}, {"metrics": metrics, "errors": errors})

    def _score(self, batch: Batch, column: str) -> list[Score]:
        rows = zip(
            batch.sample_id,
            batch["data_source"],
            batch[column],
            batch["ground_truth"],
            batch["extra_info"],
            strict=True,
        )
        return self.scorer.score([ScoreItem(*row) for row in rows])
