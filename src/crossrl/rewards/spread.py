"""Scoring on the machines of a cluster: a scorer in a worker process on each, the samples dealt among them."""

from __future__ import annotations

from collections.abc import Sequence

from crossrl.cluster.worker import Launcher, close_all, collect
from crossrl.rewards.protocol import RewardError
from crossrl.rewards.scorer import RewardSpec, Score, ScoreItem, Scorer

FACTORY = "crossrl.rewards.spread:RewardHost"


class RewardHost:
    """What a worker process holds: a ``Scorer``, whose killable children are on its machine."""

    def __init__(self, spec: RewardSpec, num_workers: int, timeout_s: float) -> None:
        self.scorer = Scorer(spec, num_workers, timeout_s)

    def digest(self) -> str:
        return self.scorer.digest

    def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        return self.scorer.score(items)

    def close(self) -> None:
        self.scorer.close()


class SpreadScorer:
    """As ``Scorer``, over one ``RewardHost`` for each of ``names``. Sample ``i`` of a call goes to host ``i % count``:
    who is first has no effect.

    ``limit_s``: of one call of a host. Raises ``RewardError`` where the machines have different reward code, and
    ``WorkerError`` for a host that dies or is late.
    """

    def __init__(
        self,
        launcher: Launcher,
        names: Sequence[str],
        spec: RewardSpec,
        num_workers: int,
        timeout_s: float,
        limit_s: float,
    ) -> None:
        self.limit_s = limit_s
        self._workers = [launcher.start(name, FACTORY, spec, num_workers, timeout_s) for name in names]
        try:
            collect([w.born for w in self._workers], "start scoring", limit_s)
            digests = collect([w.start("digest") for w in self._workers], "say what scores", limit_s)
            if len(set(digests)) > 1:
                told = ", ".join(f"{w.name} ({w.process}): {d[:12]}" for w, d in zip(self._workers, digests))
                raise RewardError(f"the reward code is not the same on all machines: {told}. Copy one version to all")
        except BaseException:
            self.close()
            raise
        self.digest: str = digests[0]

    def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """See ``Scorer.score``. Waits for: all hosts. Limit: ``limit_s``."""
        count = len(self._workers)
        pending = [w.start("score", list(items[i::count])) for i, w in enumerate(self._workers)]
        found = collect(pending, "score", self.limit_s)
        return [found[i % count][i // count] for i in range(len(items))]

    def close(self) -> None:
        close_all(self._workers)
