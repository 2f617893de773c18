"""update: change the weights, one optimizer step per mini-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossrl.algorithms.aggregation import loss_weights
from crossrl.algorithms.objective import ObjectiveConfig, finish_metrics, has_gradient, make_objective
from crossrl.batch import Batch, Meaning
from crossrl.engines.base import StepResult, TrainEngine
from crossrl.seeds import generator
from crossrl.stages.base import At


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """How a batch becomes optimizer steps.

    ``mini_batch_groups``: groups per optimizer step. ``epochs``: passes over the batch. ``shuffle``: draw the
    groups of a mini-batch at random (derived from ``seed`` and the step) and not in the order of the batch.
    ``loss_agg_mode``, ``loss_scale_factor``: see ``algorithms/aggregation.py``.
    """

    mini_batch_groups: int
    epochs: int = 1
    shuffle: bool = False
    seed: int = 0
    temperature: float = 1.0
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None

    def mini_batches(self, batch: Batch, step: int) -> Iterator[tuple[int, np.ndarray]]:
        """(epoch, positions of the samples) of each optimizer step; groups stay whole."""
        groups: dict[str, list[int]] = {}
        for i, group in enumerate(batch["group_id"]):
            groups.setdefault(group, []).append(i)
        members = list(groups.values())
        for epoch in range(self.epochs):
            order = np.arange(len(members))
            if self.shuffle:
                order = generator(self.seed, "mini_batch", step, epoch).permutation(order)
            for start in range(0, len(order), self.mini_batch_groups):
                chosen = order[start : start + self.mini_batch_groups]
                yield epoch, np.array([i for g in chosen for i in members[g]], np.int64)


class Update:
    """Policy-gradient update from per-token advantages.

    ``columns``: the optional fields that this run's objective needs (old_log_probs, ref_log_probs, is_weights).
    Without ``old_log_probs`` the batch must be one optimizer step: then they are the current log-probs.
    ``lr``: training step to learning rate. ``digest``: when given, it is asked for digests of the state before and
    after, which go into the record.
    """

    name = "update"
    writes: tuple[str, ...] = ("log_probs",)

    def __init__(
        self,
        engine: TrainEngine,
        objective: ObjectiveConfig,
        plan: UpdatePlan,
        lr: Callable[[int], float],
        columns: tuple[str, ...] = (),
        digest: Callable[[str], dict[str, str]] | None = None,
    ) -> None:
        self.engine, self.plan, self.lr, self.digest = engine, plan, lr, digest
        self.config, self.objective = objective, make_objective(objective)
        self.per_token = ("advantages", "loss_mask", *columns)
        self.reads: tuple[str, ...] = ("group_id", "prompt_ids", "response_ids", *self.per_token)

    def __call__(self, batch: Batch, at: At) -> Batch:
        state: dict[str, Any] = {"before": self.digest("before")} if self.digest else {}
        meaning = Meaning(self.plan.temperature, "none", self.engine.name, self.engine.weight_version)
        results: list[StepResult] = []
        first_pass: list[Batch] = []
        for epoch, index in self.plan.mini_batches(batch, at.step):
            mini = batch.take(index)
            result = self._step(mini, at)
            results.append(result)
            if epoch == 0:
                first_pass.append(Batch(mini.sample_id, {"log_probs": result.log_probs}))
        self.engine.weight_version = at.step
        if self.digest:
            state["after"] = self.digest("after")
            state["engine"] = self.engine.scalars()
        seen = Batch.concat(first_pass)
        out = seen.take(seen.index_of(batch.sample_id))
        return Batch(
            out.sample_id, out.columns, {"log_probs": meaning}, {"metrics": self._metrics(results), "state": state}
        )

    def _step(self, mini: Batch, at: At) -> StepResult:
        mask = mini.ragged("loss_mask")
        weights = loss_weights(mask, self.plan.loss_agg_mode, self.plan.loss_scale_factor)
        skip = ~has_gradient(mini.ragged("advantages"), mask, self.config)
        return self.engine.step(
            mini.with_columns(loss_weights=weights),
            self.objective,
            lr=self.lr(at.step),
            temperature=self.plan.temperature,
            entropy=True,
            skip=skip if skip.any() else None,
        )

    def _metrics(self, results: list[StepResult]) -> dict[str, float]:
        sums: Counter[str] = Counter()
        for result in results:
            sums.update(result.sums)
        return {
            **finish_metrics(sums, len(results)),
            "actor/loss": float(np.mean([r.loss for r in results])),
            "actor/grad_norm": float(np.mean([r.grad_norm for r in results])),
            "actor/lr": results[-1].lr,
            "actor/optimizer_steps": float(len(results)),
            "actor/skipped_samples": float(sum(r.skipped_samples for r in results)),
        }
