"""Two recorded runs, walked in stage order to the first difference: what they are before how much they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from crossrl.stages.base import At
from crossrl.tape import refuse
from crossrl.tape.api import SAMPLER_COLUMN, RunTape, Split, open_run, stage_rank, trainer_column
from crossrl.tape.compare import Difference, compare
from crossrl.tape.errors import Mismatch
from crossrl.tape.gap import input_differences, meaning_verdict
from crossrl.tape.imported import notes
from crossrl.tape.record import Record
from crossrl.tape.values import plain

Verdict = Literal[
    "equal", "equal as far as both go", "settings differ", "records missing", "samples differ", "inputs differ",
    "weights differ", "meaning differs", "tokens differ", "values differ", "nothing to compare",
]  # fmt: skip
_WEIGHTS = "the stage ran with other weights in A than in B"
_TOKENS = ("prompt_ids", "response_ids", "response_mask")


@dataclass(frozen=True, slots=True)
class Diff:
    """``verdict``: the kind of the first difference. ``first``: where it is. ``settings``: by stage, fingerprints that
    differ (a reason for what follows, listed whatever the verdict). ``compared``: pairs of records.

    ``equal as far as both go``: one run is shorter. ``records missing``: what both have is equal, but within the steps
    that both cover, one run lacks records; ``warnings`` says which."""

    a: Path
    b: Path
    verdict: Verdict
    first: Difference | None
    reason: str
    settings: dict[str, tuple[Mismatch, ...]]
    warnings: tuple[str, ...]
    compared: int

    @property
    def exit_code(self) -> int:
        """0 equal, 1 differs, 2 nothing could be compared."""
        return {"equal": 0, "equal as far as both go": 0, "nothing to compare": 2}.get(self.verdict, 1)

    def text(self) -> str:
        """A short report for people."""
        lines = [f"A: {self.a}", f"B: {self.b}", f"{self.compared} pairs of records compared: {self.verdict}"]
        if self.first is not None:
            lines += [f"First difference: {self.first.line()}", *([self.reason] if self.reason else [])]
        elif self.reason:
            lines[-1] += f": {self.reason}"
        for stage, found in self.settings.items():
            lines.append(f"Settings that {stage} depends on and that differ:")
            lines += [f"  {m.key}: A {m.recorded!r:.100}, B {m.found!r:.100}" for m in found]
        return "\n".join([*lines, *(f"Warning: {w}" for w in self.warnings)])

    def to_json(self) -> dict[str, Any]:
        """The same for programs; ``first`` has the fields of ``Difference``."""
        body = asdict(self) | {"a": str(self.a), "b": str(self.b), "exit_code": self.exit_code}
        return plain(body, [])


def diff_runs(a: Path | str, b: Path | str, tolerance: Mapping[str, float] | None = None) -> Diff:
    """Compare the tapes in folders ``a`` and ``b`` up to the first difference.

    At each pair of records, in stage order: samples, what was read, weight versions, what log-probs mean, token ids;
    only then values. ``tolerance``: field to absolute difference that passes, where a stage writes the field and where
    a later one reads it. Raises ``RecordMissing`` for a folder without a tape and ``CorruptRecord``.
    """
    walk = _Walk(open_run(a), open_run(b), tolerance or {})
    return walk.run(Path(a), Path(b))


class _Walk:
    def __init__(self, a: RunTape, b: RunTape, tolerance: Mapping[str, float]) -> None:
        self.a, self.b, self.tolerance = a, b, tolerance
        self.settings: dict[str, tuple[Mismatch, ...]] = {}
        self.warnings: list[str] = []
        self.missing: dict[tuple[str, str], list[int]] = {}  # what, and in which run only: steps
        self.compared = 0

    def run(self, a: Path, b: Path) -> Diff:
        mine, theirs = self.a.steps(), self.b.steps()
        low, high = max(mine[0], theirs[0]), min(mine[-1], theirs[-1])
        if mine != theirs:
            self.warnings.append(f"A has the steps {_range(mine)}, B {_range(theirs)}; the common ones are compared")
        found = self._steps([s for s in sorted({*mine, *theirs}) if low <= s <= high])
        verdict, first, reason = found or ("equal", None, "")
        if found is None and not self.compared:
            verdict, reason = "nothing to compare", "the runs have no recorded stage of the same step in common"
        elif found is None and self.missing:
            verdict, reason = "records missing", f"within steps {low} to {high}, which both cover; the others are equal"
        elif found is None and self.settings:
            verdict = "settings differ"
        elif found is None and (mine[0], mine[-1]) != (theirs[0], theirs[-1]):
            verdict, reason = "equal as far as both go", f"steps {low} to {high}"
        self.warnings += [
            f"{what} of {_some(s)} is recorded in {side} only" for (what, side), s in self.missing.items()
        ]
        return Diff(a, b, verdict, first, reason, self.settings, tuple(dict.fromkeys(self.warnings)), self.compared)

    def _steps(self, steps: Sequence[int]) -> tuple[Verdict, Difference | None, str] | None:
        splits: tuple[Split, ...] = ("train", "val")
        mine, theirs = set(self.a.steps()), set(self.b.steps())
        for step in steps:
            if step not in mine or step not in theirs:
                self.missing.setdefault(("everything", _side(step in mine)), []).append(step)
                continue
            for split in splits:
                found = self._step(step, split)
                if found is not None:
                    return found
        return None

    def _step(self, step: int, split: Split) -> tuple[Verdict, Difference | None, str] | None:
        mine, theirs = self.a.calls(step, split), self.b.calls(step, split)
        mixed = [("A", input_differences(self.a, step, split)), ("B", input_differences(self.b, step, split))]
        for stage, at in sorted({*mine, *theirs}, key=lambda c: (stage_rank(c[0]), c[1].call)):
            if (stage, at) not in mine or (stage, at) not in theirs:
                what = f"{'val.' if split == 'val' else ''}{stage}.{at.call}"
                self.missing.setdefault((what, _side((stage, at) in mine)), []).append(step)
                continue
            for side, differences in mixed:
                for each in differences:
                    if (each.stage, each.at) == (stage, at):
                        return "inputs differ", each, _mixed(side, each)
            pair = self.a.record(step, stage, at.call, split), self.b.record(step, stage, at.call, split)
            for side, record in zip("AB", pair, strict=True):
                record.check()  # equal digests in two record.json say nothing about data that has changed since
                self.warnings += [
                    f"run {side} is not a valid reproduction; it accepted: {m.line()}" for m in record.header.accepted
                ]
                self.warnings += [f"run {side}: {note}" for note in notes(record.header)]
            self.compared += 1
            self._note_settings(stage, *pair)
            found = self._pair(stage, at, *pair)
            if found is not None:
                return found
        self._note_meanings(step, split)
        return None

    def _note_settings(self, stage: str, a: Record, b: Record) -> None:
        known = self.settings.get(stage, ())
        found = refuse.settings(a.header.fingerprints, b.header.fingerprints, ("weights",))
        if new := tuple(m for m in found if m.key not in {k.key for k in known}):
            self.settings[stage] = known + new

    def _note_meanings(self, step: int, split: Split) -> None:
        for side, run in (("A", self.a), ("B", self.b)):
            meanings = {n: m for _, r in run.records(step, split) for n, m in r.header.meanings.items()}
            trainer = trainer_column(meanings, meanings)
            if SAMPLER_COLUMN in meanings and trainer is not None:
                verdict, reason = meaning_verdict(meanings[SAMPLER_COLUMN], meanings[trainer])
                if reason:
                    self.warnings.append(f"run {side}: {verdict}: {reason}")

    def _pair(self, stage: str, at: At, a: Record, b: Record) -> tuple[Verdict, Difference | None, str] | None:
        if a.header.content == b.header.content and _same_inputs(a, b) and a.header.info == b.header.info:
            if difference := _weights(stage, at, a, b):
                return "weights differ", difference, _WEIGHTS
            return None
        if refuse.samples(a.sample_id, b.sample_id):
            first = next(d for d in compare(a.only([]), b.only([]), stage, at) if d.kind in ("ids", "order"))
            return "samples differ", first, "the runs do not work on the same samples in the same order at this call"
        if difference := self._inputs(stage, at, a, b):
            reason = f"{stage} was given something else in A than in B"
            if difference.field in self.tolerance:
                reason += f"; {difference.field} is not recorded in both, so its tolerance cannot be applied"
            return "inputs differ", difference, reason
        if difference := _weights(stage, at, a, b):
            return "weights differ", difference, _WEIGHTS
        found = compare(a.batch, b.batch, stage, at, self.tolerance)
        for difference in found:
            if difference.kind == "meaning":
                return "meaning differs", difference, _meaning_reason(difference)
        if not found:
            return None
        first = next((d for d in found if d.field in _TOKENS), found[0])
        return ("tokens differ" if first.field in _TOKENS else "values differ"), first, ""

    def _inputs(self, stage: str, at: At, a: Record, b: Record) -> Difference | None:
        for name in sorted(set(a.header.reads) | set(b.header.reads)):
            mine, theirs = a.header.reads.get(name), b.header.reads.get(name)
            if mine is None or theirs is None:
                found = _read(mine is not None), _read(theirs is not None)
                return Difference(stage, at, name, "inputs", None, None, *found)
            if mine.digest != theirs.digest and not self._let_pass(name, stage, at, a):
                ids = [a.sample_id[int(i)] for i in np.flatnonzero(a.marks(name) != b.marks(name))]
                more = f"another value, in samples {', '.join(ids[:8])}"
                first = ids[0] if ids else None
                return Difference(stage, at, name, "inputs", first, None, mine.digest, more, len(ids), len(a.sample_id))
        return None

    def _let_pass(self, name: str, stage: str, at: At, record: Record) -> bool:
        """Whether field ``name`` has a tolerance that was applied where it was written, before ``stage`` in both runs.

        A digest does not say by how much two inputs differ, so nothing else lets them pass.
        """
        return name in self.tolerance and all(
            run.written(at.step, name, record.sample_id, at.split, before=stage) is not None for run in (self.a, self.b)
        )


def _same_inputs(a: Record, b: Record) -> bool:
    return {n: r.digest for n, r in a.header.reads.items()} == {n: r.digest for n, r in b.header.reads.items()}


def _weights(stage: str, at: At, a: Record, b: Record) -> Difference | None:
    """By version, and by digest where the fingerprint has one (key ``weights``)."""
    versions = a.header.weight_version, b.header.weight_version
    if versions[0] != versions[1]:
        return Difference(stage, at, "weight_version", "fields", None, None, *versions)
    digests = a.header.fingerprints.get("weights"), b.header.fingerprints.get("weights")
    if digests[0] != digests[1]:
        return Difference(stage, at, "weights", "fields", None, None, *digests)
    return None


def _read(yes: bool) -> str:
    return "read" if yes else "not read"


def _some(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def _side(in_a: bool) -> str:
    return "A" if in_a else "B"


def _mixed(side: str, difference: Difference) -> str:
    return (
        f"inputs differ within run {side}: {difference.stage} was given another {difference.field} for these samples "
        f"than the stage before it wrote. Samples were mixed up between two stages; neither computed wrongly"
    )


def _meaning_reason(difference: Difference) -> str:
    return (
        f"{difference.field} means something else in A than in B, so its numbers are not compared: this is neither a "
        f"numerical fault nor policy lag"
    )


def _range(steps: list[int]) -> str:
    return f"{steps[0]} to {steps[-1]} ({len(steps)})" if steps else "none"
