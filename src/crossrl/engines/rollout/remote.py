"""A rollout engine in another process, as the driver sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from crossrl.batch import Ragged
from crossrl.cluster.worker import Pending, Worker, collect
from crossrl.engines.base import Sampling
from crossrl.engines.rollout.spec import EngineFacts

if TYPE_CHECKING:  # it needs the extra `sync`
    from crossrl.sync.receiver import Received

FACTORY = "crossrl.engines.rollout.spec:EngineHost"


class RemoteEngine:
    """The engine of ``worker``, an ``EngineHost``. ``limit_s``: of every call but a transfer's."""

    def __init__(self, worker: Worker, facts: EngineFacts, limit_s: float) -> None:
        self.worker, self.facts, self.limit_s = worker, facts, limit_s
        self.name, self.cast, self.notice = facts.name, facts.cast, facts.notice

    def start_generate(
        self,
        prompts: Sequence[np.ndarray],
        seeds: Sequence[int],
        sampling: Sampling,
        progress: Callable[[int, int], None] | None = None,
    ) -> Pending:
        return self.worker.start("generate", prompts, seeds, sampling, progress=progress)

    def score(self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], temperature: float) -> Ragged:
        """See ``RolloutEngine``."""
        found: Ragged = self._call(f"score {len(prompts)} responses", "score", prompts, responses, temperature)
        return found

    def start_receive(self, addresses: Mapping[str, str], limit_s: float) -> Pending:
        """Take part in the next weight transfer of the sender of this engine, at ``addresses`` (by receiver); the value
        is a list of ``Received``."""
        return self.worker.start("receive", addresses[self.facts.receivers[0]], limit_s)

    def held_digests(self) -> dict[str, str]:
        """See ``EngineHost``."""
        found: dict[str, str] = self._call("hash what it holds", "held_digests")
        return found

    def held_tensor(self, name: str) -> Any:
        """See ``EngineHost``."""
        return self._call(f"give {name}", "held_tensor", name)

    def _call(self, what: str, method: str, *args: Any) -> Any:
        return collect([self.worker.start(method, *args)], what, self.limit_s)[0]


def versions_of(received: Sequence[Sequence[Received]]) -> set[int]:
    """The weight versions that engines say they have after a transfer."""
    return {one.version for engine in received for one in engine}
