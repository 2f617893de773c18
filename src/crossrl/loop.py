"""The step. Start reading here: the lines of ``train_step`` are the stages, in the order of the docs.

A stage gets the fields that it declares and adds the fields that it declares (``stages/base.py``). Whatever
else is done about a stage - timing, recording, replaying - is done around it, not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from crossrl.algorithms.groups import groups_with_signal
from crossrl.batch import Batch
from crossrl.stages.base import At, Stage, apply


class NoSignal(RuntimeError):
    """Dynamic sampling found no group with different rewards: there is nothing to learn from."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Where prompts come from, and how many are wanted.

    ``draw(groups)``: the next prompts, each repeated n times; fewer, or none, at the end of the data.
    ``groups``: prompts per draw. ``want``: groups to train on; None takes the one draw as it is. Otherwise
    groups whose samples all have the same ``signal`` (float64 ``[N]``) are dropped, and up to ``max_draws`` draws
    are made (0: as long as there is data). DAPO, arXiv:2503.14476, section 3.2.
    """

    draw: Callable[[int], Batch | None]
    groups: int
    want: int | None = None
    max_draws: int = 0
    signal: Callable[[Batch], np.ndarray] = lambda batch: batch.array("reward")


@dataclass(slots=True)
class StepLog:
    """What one step did: seconds and facts per stage, metrics, lines for the user; ``batch``: as far as it has got."""

    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    infos: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    batch: Batch | None = None


def train_step(stages: Mapping[str, Stage], sampler: Sampler, step: int, log: StepLog) -> Batch | None:
    """One step; stages that are not in ``stages`` are not part of this run. None: the data is used up."""

    def run(name: str, batch: Batch, call: int = 0) -> Batch:
        if name not in stages:
            return batch
        start = time.perf_counter()
        batch = apply(stages[name], batch, At(step, call))
        log.seconds[name] = log.seconds.get(name, 0.0) + time.perf_counter() - start
        for key, value in batch.info.get("metrics", {}).items():
            log.metrics[key] = log.metrics.get(key, 0.0) + value if call else value
        log.infos[name], log.batch = batch.info, batch
        log.errors |= batch.info.get("errors", {})
        return batch

    batch = collect(run, sampler, log)
    if batch is None:
        return None
    batch = run("old_log_prob", batch)
    batch = run("ref_log_prob", batch)
    batch = run("advantage", batch)
    batch = run("update", batch)
    batch = run("checkpoint", batch)
    return run("sync", batch)


def collect(run: Callable[[str, Batch, int], Batch], sampler: Sampler, log: StepLog) -> Batch | None:
    """rollout and reward, once; or, with dynamic sampling, until ``sampler.want`` groups carry a signal."""
    kept: list[Batch] = []
    have, call, seen, unknown, ended = 0, 0, 0, 0, False
    while True:
        prompts = sampler.draw(sampler.groups)
        if prompts is None:
            ended = True
            break
        batch = run("reward", run("rollout", prompts, call), call)
        call += 1
        if sampler.want is None:
            return batch
        signal = sampler.signal(batch)
        seen, unknown = seen + len(batch), unknown + int(np.isnan(signal).sum())
        keep = groups_with_signal(signal, batch["group_id"])[: sampler.want - have]
        kept.append(batch.take([i for i, g in enumerate(batch["group_id"]) if g in set(keep)]))
        have += len(keep)
        if have >= sampler.want or call == sampler.max_draws:
            break
    if ended and not have and (not seen or unknown < seen):
        return None
    log.metrics["sampler/draws"], log.metrics["sampler/groups"] = float(call), float(have)
    if not have:
        raise NoSignal(
            f"{call} draws of {sampler.groups} prompts, and in every group all samples score the same "
            f"({unknown} of {seen} samples have no score, or not the number that algorithm.filter_groups.metric names)"
        )
    if have < (sampler.want or 0):
        log.notes.append(f"only {have} of {sampler.want} groups carry a signal after {call} draws: used as they are")
    return Batch.concat(kept)
