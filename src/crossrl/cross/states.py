"""The weights and the optimizer that a recorded run had before each step, brought into the examiner's trainer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from crossrl.engines.base import EngineError, EngineState, TrainEngine
from crossrl.models.digest import weights_digest
from crossrl.stages.base import At
from crossrl.tape.api import RunTape
from crossrl.tape.record import Record


@dataclass(frozen=True, slots=True)
class Known:
    """``recorded``: exactly the run's state, as its digests say. ``walked``: what the examiner's own updates made of
    it, which is the run's but for rounding. ``unknown``: neither; ``why``, for a sentence."""

    kind: Literal["recorded", "walked", "unknown"]
    why: str = ""


class States:
    """``before(step)`` leaves the trainer in the run's state after ``step - 1``."""

    def __init__(self, run: RunTape, trainer: TrainEngine) -> None:
        self.run, self.trainer = run, trainer
        self._read: tuple[int, EngineState] | None = None  # the last one, which two readers in a row want
        self.initial = self.now()
        self.initial_digest = weights_digest(self.initial.weights.items())
        self.first_recorded = self._told()
        self.first = self._begin()
        self._holds: tuple[int, Known] = (0, self.first)

    def now(self) -> EngineState:
        """What the trainer holds: copies, on the CPU."""
        state = self.trainer.state()
        weights, optimizer = (
            {n: t.detach().cpu().clone() for n, t in part.items()} for part in (state.weights, state.optimizer)
        )
        return EngineState(weights, optimizer, dict(state.scalars))

    def after(self, step: int) -> EngineState | None:
        """The run's state after ``step``, from its tape; None when it is not there."""
        if step == 0:
            return self.initial if self.first.kind != "unknown" else None
        if self._read is not None and self._read[0] == step:
            return self._read[1]
        record = self.update(step)
        if record is None or not record.has_state:
            return None
        scalars = record.header.info.get("state", {}).get("engine", {})
        self._read = step, EngineState.from_named(record.state(), {"weight_version": step, **scalars})
        return self._read[1]

    def before(self, step: int) -> Known:
        """Load the state; when it is not on the tape, keep what the trainer's own updates made, if it came that far."""
        state = self.after(step - 1)
        if state is not None:
            known = self.load(state)
            known = self.first if step == 1 and known.kind == "recorded" else known
        elif self._holds[0] == step - 1:
            known = self._holds[1]
        elif step == 1:
            known = self.first
        else:
            why = f"the weights after step {step - 1} are not on the tape: record with tape.state=True"
            known = Known("unknown", why)
        self._holds = (step - 1, known)
        return known

    def load(self, state: EngineState) -> Known:
        """Into the trainer, cast to its data types where those are others."""
        mine = self.trainer.state()
        try:
            self.trainer.load_state(
                EngineState(_like(state.weights, mine.weights), _like(state.optimizer, mine.optimizer), state.scalars)
            )
        except EngineError as error:
            return Known("unknown", f"the run's state does not fit this side's model: {error}")
        return Known("recorded")

    def walked(self, step: int, judged_differs: bool) -> None:
        """The examiner's update of ``step`` has run; what the trainer holds now is its own work."""
        record = self.update(step)
        told = record.header.info.get("state", {}).get("after", {}) if record else {}
        state = self.trainer.state()
        if told and all(
            weights_digest(part.items()) == told.get(name)
            for name, part in (("weights", state.weights), ("optimizer", state.optimizer))
        ):
            known = Known("recorded")
        elif judged_differs or self._holds[0] != step - 1 or self._holds[1].kind == "unknown":
            known = Known(
                "unknown", f"this side's update of step {step} made other weights than the run's, which are not on the "
                "tape: record with tape.state=True"
            )  # fmt: skip
        else:
            known = Known("walked", f"on this side's own weights after step {step}: the run's are not on the tape")
        self._holds = (step, known)

    @functools.cached_property
    def same_types(self) -> bool:
        """Whether both sides hold their weights in the same data types; taken to be so where the tape has none."""
        after = next((found for s in self.run.steps() if s and (found := self.after(s))), None)
        mine = self.initial.weights
        return after is None or all(t.dtype == mine[n].dtype for n, t in after.weights.items() if n in mine)

    def update(self, step: int) -> Record | None:
        return self.run.record(step, "update") if ("update", At(step)) in self.run.calls(step) else None

    @property
    def known(self) -> Known:
        """Of what the trainer holds."""
        return self._holds[1]

    def _told(self) -> str | None:
        """The digest of the weights that the run began with."""
        record = self.update(1)
        told = record.header.info.get("state", {}).get("before", {}).get("weights") if record else None
        if told is None and ("rollout", At(1)) in self.run.calls(1):
            told = self.run.record(1, "rollout").header.fingerprints.get("weights")
        return told

    def _begin(self) -> Known:
        """Whether this side's model is what the run began with."""
        told = self.first_recorded
        if told == self.initial_digest:
            return Known("recorded")
        if told is None:
            return Known("walked", "whether the run began with this side's weights is not on the tape")
        if not self.same_types:
            return Known("walked", "the sides hold weights in different data types, so the first ones are not compared")
        return Known("unknown", "the run began with other weights than this side's model has")


def _like(tensors: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: t.to(mine[n].dtype) if n in mine else t for n, t in tensors.items()}
