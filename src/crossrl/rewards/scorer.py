"""Scores for responses: verifiers by data source, or a function of the user's, in killable child processes."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from crossrl.rewards import verifiers
from crossrl.rewards.protocol import STATUSES, RewardError, Status
from crossrl.rewards.workers import Pool


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """What scores. ``sources``: the data_sources that occur; ``path``: a file with a function for all of them.

    ``name`` and ``kwargs``: that function, and further keyword arguments for it. It is called as in verl:
    ``name(data_source=, solution_str=, ground_truth=, extra_info=, **kwargs)``; it returns a number, or a dict
    with ``score`` and more.

    >>> RewardSpec(sources=("numeric",)).path is None
    True
    """

    sources: tuple[str, ...] = ()
    path: str | None = None
    name: str = "compute_score"
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """One sample to score; ``ground_truth`` and ``extra_info`` are JSON-like."""

    sample_id: str
    data_source: str
    response: str
    ground_truth: Any
    extra_info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Score:
    """``value``: NaN unless ``status`` is "ok". ``extra``: what else a function returned. ``error``: what happened.

    ``status``: "ok" (right or wrong, it was scored); "raised"; "crashed" (the process ended under it);
    "timed_out"; "wrong_type"; "wrong_count" (several numbers for one sample); "non_finite".
    """

    sample_id: str
    value: float
    status: Status
    extra: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def status_counts(scores: Iterable[Score]) -> dict[Status, int]:
    """How many scores have each status; all statuses are there, with 0 where there is none."""
    found = Counter(score.status for score in scores)
    return {status: found[status] for status in STATUSES}


class Scorer:
    """Scores samples in child processes, ``timeout_s`` seconds each at most.

    A sample's score depends on the sample and the code, not on the number of workers or on other samples
    (unless a function of the user's keeps state: each child has its own). ``digest``: sha256 of what scores,
    for fingerprints. Raises ``RewardError`` at once for: unknown data source, missing package, bad path or
    name, a file that cannot be imported, a signature that does not fit.

    >>> with Scorer(RewardSpec(sources=("numeric",)), num_workers=2, timeout_s=10.0) as scorer:
    ...     scorer.score([ScoreItem("a", "numeric", "2 + 3 = 5", "5", {})])[0].value
    1.0
    """

    def __init__(self, spec: RewardSpec, num_workers: int, timeout_s: float) -> None:
        if num_workers < 1:
            raise RewardError(f"reward.num_workers is {num_workers}; want at least 1")
        if not timeout_s > 0 or not math.isfinite(timeout_s):
            raise RewardError(f"the time limit per sample is {timeout_s} s; want a positive number")
        if spec.path is None:
            verifiers.require_known(spec.sources)
        self._lock = threading.Lock()
        self._pool = Pool(_message(spec), num_workers, timeout_s)
        named = json.dumps([spec.name, dict(spec.kwargs)] if spec.path else None, sort_keys=True)
        self.digest = hashlib.sha256(f"{self._pool.code} {named}".encode()).hexdigest()

    def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """One score per item, in the items' order. What goes wrong with one sample is in its ``Score``.

        Waits for the children; unblocked by their answers, ends or time limits: at most
        ``ceil(len(items) / num_workers) * timeout_s`` and the starts of replacements.
        Raises ``RewardError``: an id occurs twice, or no child can be started any more.
        """
        ids = [item.sample_id for item in items]
        if len(set(ids)) != len(ids):
            twice = next(i for i, count in Counter(ids).items() if count > 1)
            raise RewardError(f"sample id {twice!r} occurs twice among the samples to score")
        with self._lock:
            answers = self._pool.score(
                [
                    {
                        "id": item.sample_id,
                        "data_source": item.data_source,
                        "response": item.response,
                        "ground_truth": item.ground_truth,
                        "extra_info": dict(item.extra_info),
                    }
                    for item in items
                ]
            )
        return [_score(sample_id, answers[sample_id]) for sample_id in ids]

    def close(self) -> None:
        """End the children. May be called twice."""
        self._pool.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _message(spec: RewardSpec) -> dict[str, Any]:
    path = None
    if spec.path is not None:
        file = Path(spec.path).expanduser().absolute()
        if not file.is_file():
            raise RewardError(f"reward.custom_reward_function.path={spec.path}: there is no such file ({file})")
        path = str(file)
    try:
        kwargs = json.loads(json.dumps(dict(spec.kwargs)))
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward.custom_reward_function.reward_kwargs cannot be sent as JSON: {error}") from error
    return {
        "sources": sorted(set(spec.sources)),
        "path": path,
        "name": spec.name,
        "kwargs": kwargs,
        "sys_path": [str(Path(folder).absolute()) for folder in sys.path],
        "code": None,
    }


def _score(sample_id: str, answer: Mapping[str, Any]) -> Score:
    value = math.nan if answer["value"] is None else float(answer["value"])
    return Score(sample_id, value, answer["status"], dict(answer["extra"]), answer["error"])
