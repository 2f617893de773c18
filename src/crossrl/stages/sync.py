"""sync: bring the trained weights to the rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossrl.batch import Batch
from crossrl.engines.base import RolloutEngine, TrainEngine
from crossrl.engines.rollout.transaction import manifest_of
from crossrl.models.digest import weights_digest
from crossrl.stages.base import At


class Sync:
    """One transaction: announce every tensor, bring every tensor, finish. The version moves in finish only.

    What a transaction cannot see (a tensor transposed, rounded or lost on the way, a head that is no longer tied) is
    seen in its record: ``sent`` is the digest of the trainer's weights after the cast that the engine declares,
    ``held`` that of what the engine computes with; both over all names. They are equal, or the engine computes with
    something else. Both are "" where the engine makes no digest, which is where nothing is recorded. ``tied``: further
    names of the trainer's weights, each with the name under which it is sent.
    """

    name = "sync"
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __init__(self, trainer: TrainEngine, engine: RolloutEngine, tied: Mapping[str, str] | None = None) -> None:
        self.trainer, self.engine, self.tied = trainer, engine, dict(tied or {})

    def __call__(self, batch: Batch, at: At) -> Batch:
        weights = dict(self.trainer.named_weights())
        manifest = manifest_of(weights.items())
        self.engine.begin_update(self.trainer.weight_version, manifest)
        self.engine.load(weights.items())
        cleared = self.engine.clear_prefix_cache()  # what was computed with the old weights must not be used again
        held = self.engine.finish_update()
        weights |= {name: weights[first] for name, first in self.tied.items()}
        sent = held  # the same memory is not hashed twice
        if held and not self.engine.shares(weights):
            sent = weights_digest(self.engine.as_held(weights).items())
        facts = {
            "weight_version": self.engine.weight_version,
            "tensors": len(manifest),
            "sent": sent,
            "held": held,
            "cast": self.engine.cast,
            "prefix_cache": cleared,
        }
        info: dict[str, Any] = {"sync": facts}
        if sent != held:
            info["warnings"] = ["the rollout engine does not hold the weights that were sent to it"]
        return Batch(batch.sample_id, {}, {}, info)
