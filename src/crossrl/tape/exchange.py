"""Exchange of two live runs over a shared folder: entries ``rollout_{i}`` and ``ckpt_{i}``, and the two sides.

The entries are records like any other, made by tape mode ``publish`` and awaited by mode ``follow``; this module says
where they lie, whether they belong to this exchange, and whether it is any use to go on waiting.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from crossrl.files import dump_json
from crossrl.stages.base import At
from crossrl.tape.errors import ExchangeError, PeerLost, RecordMissing, TapeError, WaitTimeout
from crossrl.tape.identity import Identity, load_identities, save_identities
from crossrl.tape.peers import DOES, OTHER, Desk, Heart, Registration, Role, Watch, boot_id, gone, is_there
from crossrl.tape.record import read_record

logger = logging.getLogger("crossrl.tape")

ENTRY = {"rollout": "rollout", "update": "ckpt"}  # stage to the name of its entries
WRITER: dict[str, Role] = {"rollout": "ckpt", "update": "rollout"}  # stage to the role that publishes it
_ENTRY = re.compile(r"(rollout|ckpt)_(\d+)")


@dataclass(slots=True)
class Exchange:
    """This run's side of an exchange in ``root``.

    ``home``: the run's own folder. ``agreement``: what must be equal on both sides, by key; with
    ``weights()``, the digest of the weights at the beginning. ``timeout_s``: limit of a
    wait for an entry; ``heartbeat_s``: see ``Watch``. ``keep``: how many of the entries that both sides are done with
    stay (None: all). ``show``: is told what is awaited, for a display.
    """

    root: Path
    role: Role
    home: Path
    agreement: Mapping[str, Any]
    weights: Callable[[], str]
    timeout_s: float
    heartbeat_s: float
    keep: int | None = None
    show: Callable[[str], None] = lambda what: None
    label: str = "share data"
    mine: Registration = field(init=False)
    _peer: str | None = field(init=False, default=None)
    _agreed: str | None = field(init=False, default=None)
    _desk: Desk = field(init=False)
    _other: Desk = field(init=False)
    _watch: Watch = field(init=False)
    _heart: Heart = field(init=False)
    _lock: IO[str] = field(init=False)
    _open: bool = field(init=False, default=False)

    # -- the two ends of the run ------------------------------------------------------------------------------------

    def open(self, step: int) -> bool:
        """Register. ``step``: training steps that this run has behind it. True: some of these in this exchange, so that
        the calls in its checkpoint were counted here.

        Raises ``ExchangeError``: the role is taken, the folder holds another exchange, or it cannot be written to.
        """
        self.root = self.root.expanduser().absolute()
        self._desk, self._other = Desk(self.root, self.role), Desk(self.root, OTHER[self.role])
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            counted = self._register(step)
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            raise ExchangeError(f"{self.root} (trainer.share_data_dir) cannot be used: {error}") from None
        except OSError as error:
            raise ExchangeError(f"{self.root} (trainer.share_data_dir) cannot be written to: {error}") from None
        self._clean()
        self._watch = Watch(self._other, self.mine.boot, self.heartbeat_s)
        self._heart = Heart(self._desk, self.mine.session, self.heartbeat_s / 2)
        self._heart.once()
        self._heart.start()
        self._open = True
        self.check()
        return counted

    def close(self, failed: bool, reason: str) -> None:
        """Say how the run ended, so that the other side does not wait for it."""
        if not self._open:
            return
        self._open = False
        self._heart.stop()
        self.mine = replace(self.mine, state="failed" if failed else "finished", reason=reason[:2000])
        try:
            self._desk.write(self.mine)
        except (OSError, TapeError) as error:  # the run ends for a reason of its own, which must be seen
            logger.warning("%s: the other side could not be told how this run ended: %s", self.label, error)
        finally:
            self._lock.close()

    def _register(self, step: int) -> bool:
        there, known = self._desk.read(), load_identities(self.home)
        me = next((i for i in known if there and (i.run_id, i.role) == (there.run_id, self.role)), None)
        if there is not None and me is None:
            raise ExchangeError(self._taken(there))
        again = me is not None
        me = me or Identity(uuid.uuid4().hex, str(self.root), self.role, step)
        self._refuse_strangers(me.run_id)
        self._peer = there.peer if there else None
        began = there is None or step == me.first_step  # else the weights have changed since, as they should
        weights = self.weights() if began else there.agreement.get("weights") if there else None
        agreement = {**self.agreement, "weights": weights, "first_step": me.first_step}
        self.mine = Registration(
            self.role, me.run_id, uuid.uuid4().hex, socket.gethostname(), boot_id(), os.getpid(),
            str(self.home.absolute()), datetime.now(UTC).isoformat(timespec="seconds"),
            json.loads(dump_json(agreement)), self._peer,
        )  # fmt: skip
        (self.root / "peers").mkdir(exist_ok=True)
        self._lock = self._desk.lock()
        if again:
            self._desk.write(self.mine)
        else:
            # First here: a run that is killed in between must know itself again.
            save_identities(self.home, [*known, me])
            try:
                self._desk.claim(self.mine)
            except FileExistsError:
                taken = self._desk.read()
                raise ExchangeError(self._taken(taken) if taken else gone(self._desk.path, None)) from None
        # Calls are counted from 0 in every exchange; the counts of a checkpoint from before it are of another one.
        return again and step > me.first_step

    def _taken(self, there: Registration) -> str:
        how = {"running": "has not said that it ended", "finished": "has ended", "failed": "has failed"}[there.state]
        return (
            f"{self.root} (trainer.share_data_dir) already has a run with trainer.share_data={self.role}: "
            f"{there.who()}, started {there.started}, which {how}. The two sides have one role each, and every "
            f"exchange has its own folder: set trainer.share_data={OTHER[self.role]} if this is the other side, choose "
            "another folder for a new exchange, or remove this one if it is done with"
        )

    def _refuse_strangers(self, run_id: str) -> None:
        """Entries that neither side of this exchange has written are left from another one."""
        writers: dict[str, Path] = {}
        for path in sorted(self.root.iterdir()):
            if _ENTRY.fullmatch(path.name):
                with suppress(RecordMissing):  # removed at this moment: both sides are done with it
                    writers.setdefault(read_record(path).header.run_id, path)
        other = self._other.read()  # after the entries: a side registers before it publishes
        for found in set(writers) - {run_id, other.run_id if other else ""}:
            raise ExchangeError(
                f"{writers[found]} was written by run {found}, which is no side of this exchange: it is left from an "
                "older one. Choose another trainer.share_data_dir, or remove this folder"
            )

    def _clean(self) -> None:
        """Remove what this side left when it was killed while it wrote or removed an entry."""
        own = [ENTRY[stage] for stage, role in WRITER.items() if role == self.role]
        for pattern in (f".{what}-{kind}_*" for kind in own for what in ("tmp", "old")):
            for path in self.root.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)

    # -- while it runs ----------------------------------------------------------------------------------------------

    def check(self) -> Registration | None:
        """Raise if this exchange cannot go on; returns the other side, if it is there.

        Raises ``PeerLost`` (it failed or died), ``ExchangeError`` (it differs where it must not, the folder is gone).
        """
        if not is_there(self._desk.path):
            raise ExchangeError(gone(self._desk.path, None))
        if self._heart.failure is not None:
            raise ExchangeError(self._heart.failure)
        other = self._other.read()
        if other is None:
            if self._peer is not None:
                raise ExchangeError(gone(self._other.path, None))
            return None
        # Once for each session: it may have been started again with other settings. One that has ended may yet be
        # started with what it lacked; what it has published is looked at in `find`.
        misfit = self._watch.old_news(other) and disagreement(self.mine.agreement, other.agreement)
        if other.session != self._agreed and not misfit:
            self._bind(other)
        trouble = self._watch.trouble(other)
        if trouble:
            raise PeerLost(trouble)
        return other

    def _bind(self, other: Registration) -> None:
        """See that ``other`` is the other side of this exchange, and fits."""
        if self._peer not in (None, other.run_id):
            raise ExchangeError(f"{gone(self._other.path, other)}; this run's other side was run {self._peer}")
        if other.peer not in (None, self.mine.run_id):
            raise ExchangeError(
                f"{self.root}: {other.who()} already exchanges data with another run ({other.peer}): two exchanges "
                "must not use one folder (trainer.share_data_dir)"
            )
        different = disagreement(self.mine.agreement, other.agreement)
        if different:
            lines = "\n".join(f"  {key}: here {a!r:.200}, there {b!r:.200}" for key, a, b in different)
            raise ExchangeError(
                f"this run and {other.who()} differ in what both sides of an exchange must have in common:\n{lines}\n"
                "Make them equal; docs/reference/exchange.md lists what may differ"
            )
        if self._peer is None:
            self._peer = other.run_id
            self.mine = replace(self.mine, peer=other.run_id)
            self._desk.write(self.mine)
        self._agreed = other.session
        logger.info("%s: the other side is %s, run %s", self.label, other.who(), other.run_id)

    def wait(self, path: Path, timeout_s: float, why: str) -> None:
        """Return when ``path`` is there. For ``Tape``.

        Waits for: the other side to publish ``path``. Unblocked by: its rename into place. Time limit: ``timeout_s``;
        ends at once, with ``PeerLost``, when the other side failed, died or ended without it.
        """
        start = said = shown = time.monotonic()
        pause = 0.005
        self._heart.tell(waiting=path.name)
        while not is_there(path):
            other, now = self.check(), time.monotonic()
            # Looked at again where it may have come in between: an end and a later entry both follow its appearance.
            if other is not None and other.state == "finished" and not is_there(path):
                raise PeerLost(f"{other.who()} ended without {path.name} ({why}): {other.reason}")
            if (later := self._later(path)) and not is_there(path):
                raise ExchangeError(
                    f"{path} was removed, since both sides were done with it; {later.name} is there. This run needs it "
                    "because it began at an earlier checkpoint than it once had: start it at its last one "
                    "(trainer.resume_mode=auto), or both sides in a new folder"
                )
            if now - start > timeout_s:
                raise WaitTimeout(
                    f"{path} did not appear within {timeout_s:g} s ({why}; trainer.share_data_timeout): "
                    f"{self._whom(other)}"
                )
            if now - shown >= 1:
                self.show(f"waiting for {path.name} for {now - start:.0f} s: {self._whom(other)}")
                shown = now
            if now - said >= 30:
                logger.info(
                    "%s: waiting for %s for %.0f s (%s; limit %g s): %s",
                    self.label, path, now - start, why, timeout_s, self._whom(other),
                )  # fmt: skip
                said = now
            time.sleep(min(pause, max(0.0, start + timeout_s - now)))
            pause = min(pause * 1.3, 0.5)
        self._heart.tell(waiting="")

    def _later(self, path: Path) -> Path | None:
        kind, _, index = path.name.rpartition("_")
        found = [p for p in self.root.glob(f"{kind}_*") if p.name[len(kind) + 1 :].isdecimal()]
        return max((p for p in found if int(p.name[len(kind) + 1 :]) > int(index)), default=None)

    def _whom(self, other: Registration | None) -> str:
        role = OTHER[self.role]
        if other is None:
            return f"the run that {DOES[role]} (trainer.share_data={role}) has not been started in this folder"
        if self._watch.old_news(other):
            how = f" ({other.state}: {other.reason})" if other.reason else ""
            return f"{other.who()} has not been started again{how}"
        beat = self._other.beat()
        return f"{other.who()} is at work" + (f" and waits for {beat.waiting}" if beat and beat.waiting else "")

    def done_with(self, calls: Mapping[str, int]) -> None:
        """This side has a checkpoint after so many calls of each stage and needs no earlier entry again.

        Removes what this side has published and both are done with, but for the last ``keep``.
        """
        self._heart.tell(done=calls)
        other = self._other.beat()
        if self.keep is None or other is None:
            return
        for stage, role in WRITER.items():
            if role == self.role:
                last = min(calls.get(stage, 0), other.done.get(stage, 0)) - self.keep
                kind = f"{ENTRY[stage]}_"
                names = (p.name[len(kind) :] for p in self.root.glob(f"{kind}*"))
                for index in sorted(i for i in map(int, filter(str.isdecimal, names)) if i < last):
                    self._remove(self.root / f"{kind}{index}")

    def _remove(self, path: Path) -> None:
        hidden = path.with_name(f".old-{path.name}-{self.mine.session[:8]}")  # whole or not at all, also for a reader
        with suppress(OSError):
            path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
        logger.debug("%s: %s removed: both sides are done with it", self.label, path)

    # -- a Layout of the tape ---------------------------------------------------------------------------------------

    def path(self, stage: str, at: At, index: int) -> Path:
        return self.root / f"{ENTRY[stage]}_{index}"

    def find(self, stage: str, at: At, index: int) -> Path | None:
        """The entry, if it is there and was written by the side of this exchange that has to. Raises ``TapeError``."""
        path = self.path(stage, at, index)
        other = self.check() if self._open else None
        if not is_there(path):
            return None
        own = WRITER[stage] == self.role
        if not own and other is not None and self._peer is None:
            self._bind(other)
        found, want = read_record(path).header.run_id, self.mine.run_id if own else self._peer
        if found != want:
            raise ExchangeError(
                f"{path} was written by run {found}, expected {want}: it does not belong to this exchange. Choose "
                "another trainer.share_data_dir"
            )
        return path

    def describe(self) -> str:
        names = [m for p in self.root.iterdir() if (m := _ENTRY.fullmatch(p.name))] if self.root.is_dir() else []
        does = "infers and loads the other's checkpoints" if self.role == "ckpt" else "trains on the other's rollouts"
        counts = ", ".join(f"{sum(m[1] == kind for m in names)} {kind}" for kind in ("rollout", "ckpt"))
        return f"this run {does}; folder {self.root} ({counts} entries there)"


def disagreement(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, value here, value there) where two agreements differ; a key that one side lacks differs."""
    absent = "(absent)"
    pairs = ((key, mine.get(key, absent), theirs.get(key, absent)) for key in sorted({*mine, *theirs}))
    return [(key, a, b) for key, a, b in pairs if a != b]
