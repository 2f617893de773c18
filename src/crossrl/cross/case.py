"""One recorded step on the examiner's bench: the tape, the examiner's parts, and the state they are in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from crossrl.assemble import Parts
from crossrl.batch import Batch
from crossrl.cross.findings import Finding, Judgement, Side
from crossrl.cross.inputs import NotJudged, inputs_for
from crossrl.cross.measure import Measured
from crossrl.cross.noise import Kind, Numerics
from crossrl.cross.states import Known, States
from crossrl.stages.base import At, Stage, apply
from crossrl.tape.api import RunTape
from crossrl.tape.record import Record

GAPS = 12  # per finding


@dataclass(slots=True)
class Case:
    """``step`` of the tape of side ``of``, judged by the parts of side ``by``.

    ``known``: whether the trainer holds the run's state before the step. ``extra``: fields that the examiner's stages
    read and the run does not have, computed here. ``sync_fault``: why the weights in the recorded run's rollout engine
    were not those of its trainer when the step began, or "". ``unsynced``: the same of the examiner's engine.
    """

    run: RunTape
    parts: Parts
    of: Side
    by: Side
    numerics: Numerics
    states: States
    step: int
    known: Known = field(default_factory=lambda: Known("unknown"))
    extra: dict[str, Batch] = field(default_factory=dict)
    sync_fault: str = ""
    unsynced: str = ""

    def stage(self, name: str) -> Stage:
        """The examiner's. Raises ``NotJudged`` when its configuration has no such stage."""
        if name not in self.parts.stages:
            raise NotJudged(f"side {self.by} does not run this stage: its configuration has no use for it")
        return self.parts.stages[name]

    def again(self, record: Record) -> tuple[Batch, Batch]:
        """What the examiner's stage was given, and what it makes of it."""
        stage = self.stage(record.header.stage)
        given = inputs_for(self.run, stage.reads, record, stage.writes, self.extra)
        at = At(self.step, record.header.call)
        return given, apply(stage, given, at).only(stage.writes)

    def need_state(self) -> None:
        """Raises ``NotJudged`` unless the trainer holds the run's weights."""
        if self.known.kind == "unknown":
            raise NotJudged(self.known.why)

    def kind(self, stage: str) -> Kind:
        """The noise class of ``stage``: exact only on exactly the run's weights."""
        kind = self.numerics.of(stage)
        if kind == "exact" and self.known.kind == "walked" and stage in ("rollout", "old_log_prob", "update"):
            return "float32"
        return kind

    def finding(
        self,
        record: Record | None,
        stage: str,
        judged: Judgement,
        sentence: str,
        gaps: Sequence[Measured] = (),
        *,
        by: Side | None = None,
        own: bool = False,
        hint: str = "",
        harmless: bool = False,
    ) -> Finding:
        """``own``: the run's records contradict each other, so that no side is needed to see it."""
        call = record.header.call if record else 0
        return Finding(
            self.of, None if own else (by or self.by), stage, self.step, judged, sentence,
            call, tuple(m.gap for m in gaps[:GAPS]), hint, harmless,
        )  # fmt: skip
