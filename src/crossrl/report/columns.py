"""Which metrics the console shows of a step, and how. Names are verl's where it has one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shown:
    """One column: ``title``, the metrics it may come from (the first that is there), how a value looks."""

    title: str
    names: tuple[str, ...]
    look: Callable[[float], str]

    def text(self, metrics: Mapping[str, float]) -> str | None:
        """None: none of the metrics is there."""
        value = next((metrics[name] for name in self.names if name in metrics), None)
        if value is None:
            return None
        return self.look(value) if math.isfinite(value) else str(value)


def _small(value: float) -> str:
    """One to three significant digits in at most six characters (seven with a sign), whatever the size."""
    if value == 0:
        return "0"
    if 1e-2 <= abs(value) < 1e4:
        return f"{value:.3g}" if abs(value) < 1e3 else f"{value:.0f}"
    mantissa, exponent = f"{value:.{0 if abs(value) < 1e-9 else 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _count(value: float) -> str:
    if value < 1e4:
        return f"{value:.0f}"
    return f"{value / 1e3:.1f}k" if value < 1e5 else f"{value / 1e3:.0f}k"


def _length(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


COLUMNS = (
    Shown("reward", ("critic/score/mean", "critic/rewards/mean"), "{:.3f}".format),
    Shown("KL ref", ("actor/kl_loss", "actor/reward_kl_penalty"), _small),
    Shown("KL old", ("actor/ppo_kl",), _small),
    Shown("clip", ("actor/pg_clipfrac",), "{:.1%}".format),
    Shown("entropy", ("actor/entropy",), "{:.3f}".format),
    Shown("gap", ("training/rollout_probs_diff_mean",), _small),
    Shown("grad", ("actor/grad_norm",), _small),
    Shown("length", ("response_length/mean",), _length),
    Shown("tok/s", ("perf/throughput",), _count),
)

_STAGES = {
    "gen": "rollout", "reward": "reward", "old_log_prob": "old log-probs", "ref": "ref log-probs", "adv": "advantage",
    "update_actor": "update", "save_checkpoint": "checkpoint", "update_weights": "sync", "testing": "validation",
}  # fmt: skip


def stage_times(metrics: Mapping[str, float]) -> str:
    """Where a step's time went, longest first: ``rollout 0.08 s, update 0.06 s``; under 1 % is left out."""
    times = {n.removeprefix("timing_s/"): s for n, s in metrics.items() if n.startswith("timing_s/")}
    total = times.pop("step", None) or sum(times.values())
    shown = sorted((item for item in times.items() if item[1] >= 0.01 * total), key=lambda item: -item[1])
    return ", ".join(f"{_STAGES.get(name, name)} {seconds(s)}" for name, s in shown)


def seconds(value: float) -> str:
    """A duration for people: ``0.08 s``, ``12 s``, ``3:07``, ``2:03:07``."""
    if value < 99.5:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def held_out(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a validation that matter (verl's ``val-core/``), or all of it when none is marked so."""
    core = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
    return core or dict(metrics)
