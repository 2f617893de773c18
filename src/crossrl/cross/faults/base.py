"""What a planted fault is, and the seams at which one gets into a run.

A fault changes the run it is planted in and nothing else: methods of this run's objects are replaced on the objects,
stages are wrapped. The configuration, the fingerprints and everything else that a run says about itself stay as they
are, as with a real fault.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossrl.batch import Batch
from crossrl.cross.findings import Part
from crossrl.stages.base import At, Stage

if TYPE_CHECKING:
    from crossrl.assemble import Parts
    from crossrl.config.root import RunConfig
    from crossrl.engines.base import RolloutEngine


class FaultError(ValueError):
    """The fault cannot be planted in this run; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the catalogue.

    ``part``: where the cross-examination must find it. ``stage``: the first stage whose record it changes ("data":
    what the loader hands to ``rollout``). ``symptom``: what a user sees. ``plant``: puts it in place. ``needs``:
    overrides with which it acts, for both sides of an experiment; ``ready``: whether a configuration will do.
    ``in_engine``: puts it, from a training step on, into an engine that is in another process (called there).
    ``earliest``, ``lag``: see ``first_step``. ``harmless``: training sees nothing of it, and the tool must say so.
    """

    name: str
    part: Part
    stage: str
    symptom: str
    plant: Callable[[Site], None]
    needs: tuple[str, ...] = ()
    ready: Callable[[RunConfig], bool] = lambda cfg: True
    earliest: int = 1
    lag: int = 0
    harmless: bool = False
    in_engine: Callable[[RolloutEngine, int], None] | None = None

    def first_step(self, start: int = 1) -> int:
        """The training step whose records it changes first when it is planted with ``@start``.

        >>> Fault("inference.x", "inference", "rollout", "", lambda site: None, earliest=2).first_step()
        2
        """
        return max(start + self.lag, self.earliest)


@dataclass(frozen=True, slots=True)
class Harmless:
    """A difference that must give "no fault": ``overrides`` of one side, and what they change."""

    name: str
    what: str
    overrides: tuple[str, ...]


@dataclass(slots=True)
class Clock:
    """The training step that is under way; between two steps, the next one."""

    step: int = 0

    def around(self, stage: Stage, batch: Batch, at: At) -> Batch:
        """Call ``stage`` and know the time while it runs."""
        before, self.step = self.step, at.step
        try:
            return stage(batch, at)
        finally:
            # The sync is the last stage of a step; validation comes between two steps.
            self.step = at.step + 1 if stage.name == "sync" else before


@dataclass(frozen=True, slots=True)
class Site:
    """Where a fault is planted: the ``parts`` of one run, and when: from training step ``start`` on."""

    parts: Parts
    cfg: RunConfig
    start: int
    clock: Clock

    @property
    def active(self) -> bool:
        return self.clock.step >= self.start

    def method(self, target: object, name: str, change: Callable[..., Any]) -> None:
        """While active, ``target.name(...)`` is ``change(inner, ...)``, on this object only."""
        inner = getattr(target, name)

        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            return change(inner, *args, **kwargs) if self.active else inner(*args, **kwargs)

        setattr(target, name, call)

    def stage(self, name: str, change: Callable[[Stage, Batch, At], Batch]) -> None:
        """While active, stage ``name`` is ``change(stage, batch, at)``."""

        def call(stage: Stage, batch: Batch, at: At) -> Batch:
            return change(stage, batch, at) if self.active else stage(batch, at)

        self.parts.stages[name] = Around(self.parts.stages[name], call)


class Around:
    """``stage``, called through ``change(stage, batch, at)``."""

    def __init__(self, stage: Stage, change: Callable[[Stage, Batch, At], Batch]) -> None:
        self.inner, self.change = stage, change
        self.name, self.reads, self.writes = stage.name, stage.reads, stage.writes

    def __call__(self, batch: Batch, at: At) -> Batch:
        return self.change(self.inner, batch, at)


def replaced(batch: Batch, **columns: Any) -> Batch:
    """``batch`` with other values in these columns."""
    return Batch(batch.sample_id, {**batch.columns, **columns}, batch.meanings, batch.info)
