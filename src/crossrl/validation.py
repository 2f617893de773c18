"""Validation: the held-out prompts, answered greedily or sampled, scored; accuracy and pass@k per data source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from crossrl.algorithms.groups import pass_at_k
from crossrl.batch import Batch
from crossrl.metrics import as_number
from crossrl.stages.base import At, Stage, apply


def validate(rollout: Stage, reward: Stage, batches: Sequence[Batch], step: int) -> tuple[dict[str, float], Batch]:
    """Answer and score every batch. Returns metrics (``validation_metrics``) and all samples, in order."""
    done = []
    for call, prompts in enumerate(batches):
        at = At(step, call, "val")
        done.append(apply(reward, apply(rollout, prompts, at), at))
    samples = Batch.concat(done)
    return validation_metrics(samples), samples


def outcome(sample: Mapping[str, Any], score: float) -> float:
    """What counts as correct: the verifier's ``acc`` where it returns one, else its score."""
    acc = as_number(sample.get("acc"))
    return score if acc is None else acc


def validation_metrics(samples: Batch) -> dict[str, float]:
    """Per data source: ``val-core/{source}/acc|reward/mean@n``, and ``pass@k`` if outcomes are 0 or 1.

    k is 1, 2, 4 .. n. A sample without a score counts as 0 here, and in ``val-aux/{source}/unscored``.
    Chen et al., arXiv:2107.03374.
    """
    by_source: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    has_acc: dict[str, bool] = {}
    unscored: dict[str, int] = defaultdict(int)
    scores = samples.array("score").tolist()
    rows = zip(samples["data_source"], samples["group_id"], scores, samples["reward_extra"], strict=True)
    for source, group, score, extra in rows:
        value = outcome(extra, score)
        unscored[source] += int(np.isnan(value))
        has_acc[source] = "acc" in extra or has_acc.get(source, False)
        by_source[source][group].append(0.0 if np.isnan(value) else value)
    out: dict[str, float] = {}
    for source, groups in by_source.items():
        name = f"val-core/{source}/{'acc' if has_acc[source] else 'reward'}"
        n = min(len(v) for v in groups.values())
        out[f"{name}/mean@{n}"] = float(np.mean([np.mean(v) for v in groups.values()]))
        if n > 1 and all(x in (0.0, 1.0) for v in groups.values() for x in v):
            for k in _powers_of_two(n):
                chances = [pass_at_k(len(v), int(sum(v)), k) for v in groups.values()]
                out[f"{name}/pass@{k}"] = float(np.mean(chances))
        out[f"val-aux/{source}/unscored"] = float(unscored[source])
    lengths = samples.ragged("response_ids").lengths
    out["val-aux/response_length/mean"] = float(lengths.mean())
    out["val-aux/response_length/clip_ratio"] = float(np.mean([r == "length" for r in samples["finish_reason"]]))
    return out


def _powers_of_two(n: int) -> list[int]:
    """1, 2, 4, ... up to n, and n itself."""
    return sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n})
