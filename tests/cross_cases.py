"""Hand-made material for the tests of the verdict: curves of arms, and findings of examinations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from crossrl.cross.arms import ARMS, Arm
from crossrl.cross.curves import Curves, no_signal_since, non_finite
from crossrl.cross.findings import Examination, Finding, Gap, Setting

NAMES = {
    "reward": "critic/score/mean", "gap": "training/rollout_probs_diff_mean", "entropy": "actor/entropy",
    "gradient norm": "actor/grad_norm", "response length": "response_length/mean",
}  # fmt: skip
LEVEL = {"reward": 0.5, "gap": 0.003, "entropy": 1.0, "gradient norm": 1.0, "response length": 100.0}


def metrics(seed: int, steps: int = 60, **shifts: tuple[int, float]) -> dict[str, dict[int, float]]:
    """A run's metrics: level and scatter of 3 %; ``reward=(31, -0.3)`` shifts the reward since step 31."""
    rng, found = np.random.default_rng(seed), {}
    for metric, level in LEVEL.items():
        values = level * (1 + 0.03 * rng.standard_normal(steps))
        if metric.replace(" ", "_") in shifts:
            since, size = shifts[metric.replace(" ", "_")]
            values[since - 1 :] += size
        found[NAMES[metric]] = dict(enumerate(map(float, values), 1))
    return found


def arm(name: str, series: Mapping[str, Mapping[int, float]] | None, state: Any = "done", reason: str = "") -> Arm:
    if series is None:
        return Arm(name, (), None, "missing", "not there")
    curves = Curves(Path(name), series)
    return Arm(name, (Path(name),), curves, state, reason, non_finite(curves), no_signal_since(curves))


def arms(**given: Any) -> dict[str, Arm]:
    """By name; what is not given is missing, BB is healthy unless given."""
    given.setdefault("BB", metrics(0))
    return {n: g if isinstance(g := given.get(n), Arm) else arm(n, g) for n in ARMS}


def write_jsonl(path: Path, series: Mapping[str, Mapping[int, float]], torn: str = "") -> Path:
    """As the trainer writes ``metrics.jsonl``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    steps = sorted({step for values in series.values() for step in values})
    rows = [{"step": s, **{n: v[s] for n, v in series.items() if s in v}} for s in steps]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    return path


def gap(field: str = "rollout_log_probs", largest: float | None = 0.5, **more: Any) -> Gap:
    return Gap(field, more.pop("kind", "value"), 3, 8, "s0", 2, -1.0, -1.5, ("s0",), largest,
               more.pop("mean", largest), **more)  # fmt: skip


def finding(stage: str, step: int = 1, judged: Any = "differs", of: Any = "A", by: Any = "B", **more: Any) -> Finding:
    gaps = more.pop("gaps", (gap(),) if judged != "equal" else ())
    return Finding(of, by, stage, step, judged, more.pop("sentence", f"{stage} is {judged}"), gaps=tuple(gaps), **more)


def examination(*findings: Finding, of: Any = "A", by: Any = "B", **more: Any) -> Examination:
    """With what is not among ``findings`` equal at steps 1 to 3."""
    named = {(f.stage, f.step) for f in findings}
    stages = more.pop("stages", ("data", "rollout", "reward", "old_log_prob", "advantage", "update", "sync"))
    rest = [finding(s, t, "equal", of, by) for t in (1, 2, 3) for s in stages if (s, t) not in named]
    settings: tuple[Setting, ...] = more.pop("settings", ())
    numerics = more.pop("numerics", "exact")
    return Examination(of, by, (1, 2, 3), numerics, more.pop("because", ()), (*findings, *rest), settings)
