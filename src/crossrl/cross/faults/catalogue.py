"""All faults by name, and how those that a run asks for are put in place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossrl import settings
from crossrl.cross.faults import data, harmless, inference, reward, sync, training
from crossrl.cross.faults.base import Around, Clock, Fault, FaultError, Harmless, Site

if TYPE_CHECKING:
    from crossrl.assemble import Parts
    from crossrl.config.root import RunConfig
    from crossrl.engines.base import RolloutEngine

FAULTS = {f.name: f for f in (*inference.INFERENCE, *training.TRAINING, *reward.REWARD, *data.DATA, *sync.SYNC)}
HARMLESS = {h.name: h for h in harmless.HARMLESS}


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault, and the training step from which on it acts."""

    fault: Fault
    start: int = 1


def parse(text: str) -> tuple[Planted, ...]:
    """``NAME`` or ``NAME@STEP``, separated by ``+`` (or commas, which a command line has to quote). Raises
    ``FaultError`` with the nearest names.

    >>> [(p.fault.name, p.start) for p in parse("reward.flipped,sync.transposed@3")]
    [('reward.flipped', 1), ('sync.transposed', 3)]
    """
    found = []
    for word in text.replace("+", ",").split(","):
        name, at, step = word.strip().partition("@")
        if name in HARMLESS:
            raise FaultError(
                f"cross.plant={name}: this is no fault but a difference in settings; give one of the two runs "
                f"{' '.join(HARMLESS[name].overrides)} instead"
            )
        if name not in FAULTS:
            raise FaultError(f"cross.plant={name}: there is no such fault; {_nearest(name)}")
        if at and not (step.isdecimal() and int(step) >= 1):
            raise FaultError(f"cross.plant={word.strip()}: want a training step from 1 after @, as in {name}@2")
        found.append(Planted(FAULTS[name], int(step) if at else 1))
    return tuple(found)


def chosen(text: str, cfg: RunConfig) -> tuple[Planted, ...]:
    """``parse``, for a run of ``cfg``. Raises ``FaultError`` also where a fault would have no effect in it."""
    found = parse(text)
    for each in found:
        if not each.fault.ready(cfg):
            raise FaultError(
                f"cross.plant={each.fault.name} would have no effect in this run; add {' '.join(each.fault.needs)}"
            )
    return found


def plant(text: str, parts: Parts, cfg: RunConfig) -> None:
    """Put the faults that ``text`` names into the run that ``parts`` are of: ``Trainer(..., plant=...)``.

    Raises ``FaultError``, of ``chosen`` or because the model has nothing that this fault could be planted in.
    """
    clock = Clock()
    apart = settings.launcher(cfg) != "none"
    for each in chosen(text, cfg):
        if not (apart and each.fault.in_engine):  # else it was planted where the engine is, see ``plant_in_engine``
            each.fault.plant(Site(parts, cfg, each.start, clock))
    parts.stages = {name: Around(stage, clock.around) for name, stage in parts.stages.items()}
    parts.val_rollout = Around(parts.val_rollout, clock.around)
    parts.val_reward = Around(parts.val_reward, clock.around)
    parts.sync = parts.stages["sync"]


def plant_in_engine(text: str, engine: RolloutEngine) -> None:
    """In the process of an engine: put those of ``text`` in place that belong there."""
    for each in parse(text):
        if each.fault.in_engine:
            each.fault.in_engine(engine, each.start)


def select(names: Sequence[str] = ()) -> tuple[list[Fault], list[Harmless]]:
    """The faults and harmless differences that ``names`` name: a name, or the word before its dot. None: all.

    Raises ``FaultError`` for a name that is neither.
    """
    known = {*FAULTS, *HARMLESS}
    words = known | {name.partition(".")[0] for name in known}
    for name in names:
        if name not in words:
            raise FaultError(f"{name}: there is no such fault; {_nearest(name)}")
    wanted = [name for name in (*FAULTS, *HARMLESS) if not names or {name, name.partition(".")[0]} & set(names)]
    return [FAULTS[n] for n in wanted if n in FAULTS], [HARMLESS[n] for n in wanted if n in HARMLESS]


def warning(planted: Iterable[Planted]) -> str:
    """What a run with planted faults says about itself."""
    names = ", ".join(f"{p.fault.name} (from step {p.start} on)" for p in planted)
    return f"A FAULT IS PLANTED IN THIS RUN: {names}. Its results are wrong on purpose; remove cross.plant to train"


def _nearest(name: str) -> str:
    same_part = [n for n in FAULTS if n.partition(".")[2] == name.partition(".")[2] or n.partition(".")[2] == name]
    near = list(dict.fromkeys([*same_part, *difflib.get_close_matches(name, FAULTS, 3, 0.5)]))[:3]
    inside = [n for n in FAULTS if name and name in n][:3]
    hint = ", ".join(near or inside)
    return f"nearest: {hint}; all of them: crossrl faults list" if hint else "see crossrl faults list"
