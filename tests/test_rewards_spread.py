"""Scoring by several machines: the same scores, in the same order, and never by different code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from crossrl.cluster.local import LocalLauncher
from crossrl.cluster.worker import WorkerError
from crossrl.rewards.protocol import RewardError
from crossrl.rewards.scorer import RewardSpec, ScoreItem, Scorer
from crossrl.rewards.spread import SpreadScorer

SPEC = RewardSpec(sources=("numeric",))
ITEMS = [ScoreItem(f"s{i}", "numeric", f"it is {i}", str(i if i % 3 else i + 1), {}) for i in range(7)]


@pytest.fixture
def spread(tmp_path: Path) -> Iterator[SpreadScorer]:
    scorer = SpreadScorer(LocalLauncher(tmp_path), ["reward-0", "reward-1"], SPEC, 1, 10.0, 60.0)
    yield scorer
    scorer.close()


def test_the_scores_are_those_of_one_scorer_in_the_order_of_the_samples(spread: SpreadScorer) -> None:
    with Scorer(SPEC, 1, 10.0) as alone:
        expected = alone.score(ITEMS)
        assert spread.digest == alone.digest
    found = spread.score(ITEMS)
    assert found == expected and {s.value for s in found} == {0.0, 1.0}
    assert spread.score(ITEMS[:1]) == expected[:1] and spread.score([]) == []


def test_a_host_that_dies_is_named(spread: SpreadScorer) -> None:
    spread._workers[1].kill()
    with pytest.raises(WorkerError, match="reward-1"):
        spread.score(ITEMS)


def test_different_reward_code_on_two_machines_is_refused(tmp_path: Path) -> None:
    class OtherFolder(LocalLauncher):
        """As if ``path`` were another file on the second machine."""

        def start(self, name: str, factory: str, *args: object, **how: object) -> object:  # type: ignore[override]
            spec = RewardSpec((), str(tmp_path / f"{name}.py"))
            return super().start(name, factory, spec, *args[1:], **how)  # type: ignore[arg-type]

    for name, value in (("reward-0", 1), ("reward-1", 2)):
        text = f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return {value}\n"
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(RewardError, match=r"not the same on all machines: reward-0 .*, reward-1 "):
        SpreadScorer(OtherFolder(tmp_path), ["reward-0", "reward-1"], SPEC, 1, 10.0, 60.0)  # type: ignore[arg-type]
