"""The tape: wraps stages from outside and records, loads, awaits or compares what they put out.

    tape = Tape(RunLayout(folder), run_id, fingerprint)
    rollout = tape.wrap(rollout, "record")           # a Stage like any other
    ...
    tape.close()

A loop without a tape does not come here at all; a stage never knows that it is taped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch

from crossrl.batch import Batch
from crossrl.stages.base import At, Stage
from crossrl.tape import refuse
from crossrl.tape.api import Split
from crossrl.tape.capture import Reads, Snapshot, capture, digests_of, join, read_digests
from crossrl.tape.errors import Mismatch, ReplayRefused, TapeError
from crossrl.tape.header import Header
from crossrl.tape.layout import Layout, RunLayout, in_ray_session
from crossrl.tape.modes import STATEFUL, rule
from crossrl.tape.publish import Draft, clean_leftovers
from crossrl.tape.record import Record, read_record
from crossrl.tape.space import Retention, check_space
from crossrl.tape.taped import Comparison, Taped
from crossrl.tape.values import normal
from crossrl.tape.versions import versions
from crossrl.tape.wait import wait_for
from crossrl.tape.writer import Writer

logger = logging.getLogger("crossrl.tape")

# The prompt's side of a sample travels with its response, so that a replay never scores a response against
# another sample's answer (verl#5556, #3283).
PROMPT_FIELDS = ("group_id", "prompt_ids", "prompt", "data_source", "ground_truth", "extra_info")


@dataclass(frozen=True, slots=True)
class TapeOptions:
    """``accept``: keys of differences to load in spite of. ``steps``: what ``STEPPED`` modes apply to (None: all).

    ``keep``, ``max_bytes``: see ``Retention``; of the run's own tape. ``unstorable``: what to do with values that have
    no place in a record. ``buffer_bytes``: memory for records on their way to the disk. ``wait_s``: limit of a
    wait for a peer's record. ``tolerance``: field to absolute difference that ``verify`` lets pass.
    """

    accept: tuple[str, ...] = ()
    steps: frozenset[int] | None = None
    keep: int | None = None
    max_bytes: int | None = None
    unstorable: Literal["leave_out", "refuse"] = "leave_out"
    buffer_bytes: int = 512 << 20
    wait_s: float = 600.0
    tolerance: Mapping[str, float] = field(default_factory=dict)


class Tape:
    """The records of one run. One tape wraps all stages of a run; each wrap has its mode and may have its own layout.

    ``run_id``: written into records. ``fingerprint``: stage name and split to what the stage depends on there (nested,
    JSON-like). ``weight_version``: of the trainer's weights. ``wait``: how a mode ``follow`` waits; see ``wait_for``.
    ``device``: where the models compute.
    ``accepted``: the differences that were accepted so far. ``comparisons``: what mode verify found.
    """

    def __init__(
        self,
        layout: Layout,
        run_id: str,
        fingerprint: Callable[[str, Split], Mapping[str, Any]],
        options: TapeOptions | None = None,
        weight_version: Callable[[], int] | None = None,
        wait: Callable[[Path, float, str], None] = wait_for,
        device: str = "cpu",
    ) -> None:
        self.layout, self.run_id, self.fingerprint = layout, run_id, fingerprint
        self.options = options or TapeOptions()
        self.weight_version, self.wait = weight_version, wait
        self.accepted: list[Mismatch] = []
        self.comparisons: list[Comparison] = []
        self._layouts: list[Layout] = [layout]
        self._calls: dict[str, int] = {}
        self._labels: dict[Path, str] = {}
        self._versions = versions(device)
        self._retention = (
            Retention(layout, self.options.keep, self.options.max_bytes) if isinstance(layout, RunLayout) else None
        )
        self._leave_out = self.options.unstorable == "leave_out"
        self._writer = Writer(self.options.buffer_bytes, written=self._written)

    def start(self, need_bytes: int = 0) -> None:
        """Before the first step: remove what a killed writer left behind, and check that there is room.

        ``need_bytes``: expected size of all records of the run (``estimate_bytes``). Raises ``TapeFull``.
        """
        root = self.layout.root
        for folder in [root, *root.glob("step_*")]:
            for path in clean_leftovers(folder):
                logger.info("%s: removed %s, left by a writer that was killed", self.layout.label, path)
        if self.options.max_bytes is not None:
            need_bytes = min(need_bytes, self.options.max_bytes)
        check_space(root, need_bytes)

    def declare(self, versions: Mapping[str, str]) -> None:
        """With what the stages compute, where that is not this process: written into every record from here on."""
        self._versions = {**self._versions, **versions}

    def wrap(
        self,
        stage: Stage,
        mode: str,
        layout: Layout | None = None,
        carry: Iterable[str] | None = None,
        restore: Callable[[Record, At], None] | None = None,
        state: Callable[[], Mapping[str, torch.Tensor]] | None = None,
        ignore: Iterable[str] = (),
    ) -> Stage:
        """``stage`` in ``mode``: the same name, reads and writes (and it reads ``carry``).

        ``layout``: where its records lie, if not where the tape's do. ``carry``: fields stored with the output though
        the stage does not write them; by default the prompt's side for ``rollout``. ``restore``: brings the state that
        goes with a loaded record; a stage that changes state cannot be loaded without. ``state``: the tensors that are
        written with each record (they are on the disk when the stage returns). ``ignore``: patterns of keys that may
        differ between the record that is loaded and this call, such as ``optim.*``.
        """
        found = rule(mode)
        if mode == "live":
            return stage
        if found.found == "load" and stage.name in STATEFUL and restore is None:
            raise TapeError(
                f"stage {stage.name!r} changes state; mode {mode!r} would return its record and leave the weights as "
                f"they are. Use record or verify, or follow a peer that publishes checkpoints"
            )
        kept = tuple(carry if carry is not None else PROMPT_FIELDS if stage.name == "rollout" else ())
        layout = layout or self.layout
        if layout not in self._layouts:
            self._layouts.append(layout)
            logger.info("%s: %s", layout.label, layout.describe())
            if mode not in ("publish", "follow"):  # there somebody else writes too; each side removes its own
                clean_leftovers(layout.root)
        if in_ray_session(layout.root):
            logger.warning(
                "%s: %s lies in Ray's session folder, which is removed with the cluster; choose a folder that stays",
                layout.label, layout.root,
            )  # fmt: skip
        reads = tuple(dict.fromkeys([*stage.reads, *(f for f in kept if f not in stage.writes)]))
        return Taped(
            stage.name, reads, stage.writes, self, stage, mode, found, layout, kept, restore, state, tuple(ignore)
        )  # fmt: skip

    def preflight(self, stage: Stage, at: At | None = None) -> None:
        """Refuse now, before anything runs, when the first record that ``stage`` would load has other settings.

        ``at``: the first call; None for that of training. Raises ``ReplayRefused`` with the settings that differ.
        Inputs are compared later, when they are there.
        """
        if not isinstance(stage, Taped) or stage.rule.found != "load":
            return
        at = at or At(1)
        path = stage.layout.find(stage.name, at, 0)
        if path is not None:
            record = read_record(path)
            ignore, now = refuse.NOT_COMPARED.get(stage.name, ()), self.fingerprint(stage.name, at.split)
            self._accept(path, refuse.settings(record.header.fingerprints, now, ignore), stage.ignore)

    def check(self) -> None:
        """Raise ``TapeWriteError`` if a record could not be written. Each taped stage does it before it runs."""
        self._writer.check()

    def flush(self) -> None:
        """Return when all records are on the disk. Raises ``TapeWriteError``."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is left and stop. Raises ``TapeWriteError``."""
        unused = sorted(set(self.options.accept) - {m.key for m in self.accepted})
        if unused:
            logger.warning("tape: tape.accept names %s, but no record differed there", ", ".join(unused))
        self._writer.close()

    def state(self) -> dict[str, int]:
        """How many calls of each stage there were, for the checkpoint."""
        return dict(self._calls)

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on counting calls where ``state`` was taken."""
        self._calls = {str(k): int(v) for k, v in state.items()}

    def calls(self, label: str, stage: str) -> int:
        """How many calls of training there were of ``stage`` on layout ``label``."""
        keys = (k.split("/") for k in self._calls)
        return sum(self._calls["/".join(k)] for k in keys if (k[0], *k[2:]) == (label, stage, "train"))

    def forget_calls(self, label: str) -> None:
        """Count the calls on layout ``label`` from 0 again."""
        self._calls = {k: v for k, v in self._calls.items() if not k.startswith(f"{label}/")}

    def set_aside(self, after_step: int) -> Path | None:
        """Move the records of steps after ``after_step`` away, for a run that resumes there and runs them again.

        Returns the folder to which they were moved (``superseded-<n>`` in the tape's), or None if there were none.
        """
        if not isinstance(self.layout, RunLayout):
            return None
        self.flush()
        late = [s for s in self.layout.steps() if s > after_step]
        if not late:
            return None
        number = sum(1 for _ in self.layout.root.glob("superseded-*"))
        target = self.layout.root / f"superseded-{number}"
        target.mkdir()
        for step in late:
            self.layout.step_path(step).rename(target / self.layout.step_path(step).name)
        logger.info("tape: the records of steps %d to %d were moved to %s; they run again", late[0], late[-1], target)
        return target

    # What follows is for `Taped`.

    def count(self, taped: Taped, at: At) -> int:
        """The index of this call in the run. The mode is part of the key: a stage may be loaded from one tape and
        recorded on another."""
        key = f"{taped.layout.label}/{taped.mode}/{taped.name}/{at.split}"
        self._calls[key] = self._calls.get(key, 0) + 1
        return self._calls[key] - 1

    def load(self, taped: Taped, path: Path, given: Batch, at: At, loading: bool) -> Record:
        """Open a record and check that it belongs to this call."""
        try:
            record = read_record(path)
            now = self.fingerprint(taped.name, at.split)
            # Rollout skip and replay are for training differently on the same responses; an exchange is not.
            found = refuse.mismatches(record, taped.name, taped.writes, given, now, taped.mode in ("cache", "replay"))
            self._accept(path, found, taped.ignore)
        except TapeError as error:
            # Marked, so that a command which shows the error when it ends does not show it twice.
            logger.error("%s: could not load from %s: %s", taped.layout.label, path, error, extra={"raised": True})
            raise
        return record

    def look(self, taped: Taped, given: Batch) -> tuple[dict[str, Reads], Snapshot]:
        """Before a stage runs and can change its input: digests of what it reads, and a copy of what is carried."""
        carried = capture(given.only(taped.reads if taped.carry else ()), self._leave_out)
        others = given.only(n for n in taped.reads if n not in carried.columns)
        return {**digests_of(carried.columns), **read_digests(others, self._leave_out)}, carried

    def store(
        self, taped: Taped, path: Path, at: At, index: int, seen: tuple[Mapping[str, Reads], Snapshot], out: Batch
    ) -> None:
        """Hand a snapshot of ``out``, with what ``look`` returned, to the writer."""
        reads, carried = seen
        snapshot = join(capture(out, self._leave_out), carried)
        for each in snapshot.left_out:
            logger.warning(
                "%s: field %s of %d sample(s) (first %s) holds %s at %s, which cannot be stored; %s records the rest",
                taped.layout.label, each.field, each.count, each.sample_id, each.what, each.path, path,
            )  # fmt: skip
        header = Header(
            run_id=self.run_id, stage=taped.name, step=at.step, call=at.call, split=at.split, index=index,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            weight_version=self.weight_version() if self.weight_version else None,
            fingerprints=normal(self.fingerprint(taped.name, at.split)), versions=self._versions,
            accepted=tuple(self.accepted),
        )  # fmt: skip
        draft = Draft(header, snapshot, reads, taped.state() if taped.state else None)
        if self._retention is not None and taped.layout is self.layout:
            self._retention.admit(path, draft.nbytes)
        self._labels[path] = taped.layout.label
        self._writer.submit(path, draft)
        if draft.state is not None:  # live tensors, which the next update changes
            self._writer.flush()

    def _accept(self, path: Path, found: list[Mismatch], ignore: Sequence[str] = ()) -> None:
        found = [m for m in found if not (m.acceptable and any(fnmatchcase(m.key, p) for p in ignore))]
        refused = [m for m in found if not (m.acceptable and m.key in self.options.accept)]
        if refused:
            raise ReplayRefused(path, refused)
        for mismatch in found:
            if mismatch not in self.accepted:
                self.accepted.append(mismatch)
                logger.warning("tape: %s differs (%s), accepted: not a valid reproduction", path, mismatch.line())

    def _written(self, path: Path, size: int) -> None:
        label = self._labels.pop(path)
        logger.log(logging.DEBUG if label == "tape" else logging.INFO, "%s: stored in %s", label, path)
        if self._retention is not None and self.layout.root in path.parents:
            self._retention.written(path, size)
