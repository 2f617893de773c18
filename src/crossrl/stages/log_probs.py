"""old_log_prob and ref_log_prob: score the sampled tokens with the trainer's and with the reference weights."""

from __future__ import annotations

from collections.abc import Mapping

from crossrl.batch import Batch, Meaning
from crossrl.engines.base import TrainEngine
from crossrl.stages.base import At

READS = ("group_id", "prompt_ids", "response_ids")


class OldLogProb:
    """The trainer's log-probs before the update: what importance ratios are taken against."""

    name = "old_log_prob"
    reads: tuple[str, ...] = READS
    writes: tuple[str, ...] = ("old_log_probs", "entropy")

    def __init__(self, engine: TrainEngine, temperature: float) -> None:
        self.engine, self.temperature = engine, temperature

    def __call__(self, batch: Batch, at: At) -> Batch:
        log_probs, entropy = self.engine.log_probs(batch, self.temperature, entropy=True)
        return Batch(
            batch.sample_id,
            {"old_log_probs": log_probs, "entropy": entropy},
            _meaning("old_log_probs", self.engine, self.temperature),
        )


class RefLogProb:
    """Log-probs under the reference weights, which never change: for the KL term."""

    name = "ref_log_prob"
    reads: tuple[str, ...] = READS
    writes: tuple[str, ...] = ("ref_log_probs",)

    def __init__(self, engine: TrainEngine, temperature: float) -> None:
        self.engine, self.temperature = engine, temperature

    def __call__(self, batch: Batch, at: At) -> Batch:
        log_probs, _ = self.engine.log_probs(batch, self.temperature, entropy=False)
        return Batch(
            batch.sample_id, {"ref_log_probs": log_probs}, _meaning("ref_log_probs", self.engine, self.temperature)
        )


class OldFromRollout:
    """The sampler's log-probs stand for the old ones (verl's bypass mode): ratios are taken against the sampler."""

    name = "old_log_prob"
    reads: tuple[str, ...] = ("rollout_log_probs",)
    writes: tuple[str, ...] = ("old_log_probs",)

    def __call__(self, batch: Batch, at: At) -> Batch:
        meanings = {"old_log_probs": batch.meanings["rollout_log_probs"]}
        return Batch(batch.sample_id, {"old_log_probs": batch.ragged("rollout_log_probs")}, meanings)


def _meaning(column: str, engine: TrainEngine, temperature: float) -> Mapping[str, Meaning]:
    return {column: Meaning(temperature, "none", engine.name, engine.weight_version)}
