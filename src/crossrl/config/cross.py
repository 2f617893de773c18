"""``cross``: this run as one side of a cross-examination (``crossrl cross --a A.yaml --b B.yaml``)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CrossConfig:
    plant: str | None = None
    """Faults to plant in this run, names of `crossrl faults list` joined by +; NAME@STEP acts from that step on.
    For testing the cross-examination, never for training."""
    python: str | None = None
    """Interpreter of this side in crossrl cross: a version of CrossRL and of everything below it. null: the same."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of this side in crossrl cross."""
    remote: str | None = None
    """This side runs elsewhere: crossrl cross prints its commands behind this prefix (such as `ssh gpu7`) and waits
    for their results in the shared output folder, which must have the same path there."""
