"""sync: bring the trained weights to the rollout engine."""

from __future__ import annotations

from crossrl.batch import Batch
from crossrl.engines.base import RolloutEngine, TrainEngine
from crossrl.engines.rollout.transaction import manifest_of
from crossrl.stages.base import At


class Sync:
    """One transaction: announce every tensor, bring every tensor, finish. The version moves in finish only."""

    name = "sync"
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __init__(self, trainer: TrainEngine, engine: RolloutEngine) -> None:
        self.trainer, self.engine = trainer, engine

    def __call__(self, batch: Batch, at: At) -> Batch:
        weights = dict(self.trainer.named_weights())
        manifest = manifest_of(weights.items())
        self.engine.begin_update(self.trainer.weight_version, manifest)
        self.engine.load(weights.items())
        digest = self.engine.finish_update()
        facts = {"weight_version": self.engine.weight_version, "digest": digest, "tensors": len(manifest)}
        return Batch(batch.sample_id, {}, {}, {"sync": facts})
