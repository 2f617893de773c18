"""sync: bring the trained weights to the rollout engine."""

from __future__ import annotations

from typing import Any

from crossrl.batch import Batch
from crossrl.stages.base import At
from crossrl.sync.carriers import Carrier


class Sync:
    """One transaction: announce every tensor, bring every tensor, finish. The version moves in finish only.

    What a transaction cannot see (a tensor transposed, rounded or lost on the way, a head that is no longer tied) is
    seen in its record, by the digests of ``Brought``.
    """

    name = "sync"
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier

    def __call__(self, batch: Batch, at: At) -> Batch:
        brought = self.carrier.bring()
        info: dict[str, Any] = {"sync": brought.facts()}
        if brought.sent != brought.held:
            info["warnings"] = ["the rollout engine does not hold the weights that were sent to it"]
        return Batch(batch.sample_id, {}, {}, info)
