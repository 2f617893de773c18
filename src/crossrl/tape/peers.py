"""The two sides of an exchange: who they are, whether they live, how they ended.

    DIR/peers/ckpt.json      ``Registration`` of the side that infers (``trainer.share_data=ckpt``)
    DIR/peers/rollout.json   of the side that trains
    DIR/peers/*.beat         a count that its process raises every second, what it waits for, what it needs no more
    DIR/peers/*.lock         held by its process; tells a dead one at once, where both run on one machine

No clock of one side is compared with a clock of the other: a side watches whether the other's count moves.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from crossrl.files import dump_json, publish_text, read_json
from crossrl.tape.errors import ExchangeError, TapeError

T = TypeVar("T")
Role = Literal["ckpt", "rollout"]
OTHER: dict[Role, Role] = {"ckpt": "rollout", "rollout": "ckpt"}
DOES: dict[str, str] = {"ckpt": "infers", "rollout": "trains"}
BEAT_S = 1.0
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Registration:
    """One side, as the other sees it. ``run_id`` stays when the run is started again, ``session`` does not.

    ``peer``: the run id of the other side, once it has been seen; the two belong together from then on.
    ``agreement``: what both sides must have in common. ``state``: running, finished (``reason``: how far), or failed.
    """

    role: Role
    run_id: str
    session: str
    host: str
    boot: str
    pid: int
    folder: str
    started: str
    agreement: Mapping[str, Any]
    peer: str | None = None
    state: Literal["running", "finished", "failed"] = "running"
    reason: str = ""
    format: int = FORMAT

    def who(self) -> str:
        return f"the run that {DOES[self.role]} ({self.folder} on {self.host}, process {self.pid})"


@dataclass(frozen=True, slots=True)
class Beat:
    """``done``: stage to the number of calls whose entries this side needs no more."""

    session: str
    count: int
    waiting: str = ""
    done: Mapping[str, int] = field(default_factory=dict)


class Desk:
    """One side's files in ``root/peers``: read by everybody, written by the side itself."""

    def __init__(self, root: Path, role: Role) -> None:
        self.root, self.role = root, role
        self.path, self.beat_path, self.lock_path = (
            root / "peers" / f"{role}.{kind}" for kind in ("json", "beat", "lock")
        )

    def read(self) -> Registration | None:
        """None if nobody has registered. Raises ``ExchangeError`` for a file that is none of ours."""
        try:
            found = patiently(lambda: Registration(**read_json(self.path)))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ExchangeError(f"{self.path} cannot be read: {error.strerror}. Is the folder still mounted?") from None
        except (ValueError, TypeError) as error:
            raise ExchangeError(
                f"{self.path} cannot be read as a registration: {error}. Was it written by another version? "
                "Use a new folder (trainer.share_data_dir)"
            ) from None
        if found.format != FORMAT:
            raise ExchangeError(f"{self.path}: format {found.format!r} found, {FORMAT} expected: use equal versions")
        return found

    def beat(self) -> Beat | None:
        """The last sign of life; None if there is none, or none that can be read."""
        try:
            return Beat(**read_json(self.beat_path))
        except (OSError, ValueError, TypeError):
            return None

    def claim(self, mine: Registration) -> None:
        """Register by a link to a name that must be free: one of two runs can. Raises ``FileExistsError``."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f".{self.role}.{mine.session}.tmp")
        publish_text(draft, dump_json(asdict(mine)))
        try:
            os.link(draft, self.path)
        except FileExistsError:
            there = self.read()  # NFS may answer so to its own request, sent twice
            if there is None or there.session != mine.session:
                raise
        finally:
            draft.unlink(missing_ok=True)

    def write(self, mine: Registration) -> None:
        """Replace the registration. Raises ``ExchangeError`` when it is no longer this run's, or gone."""
        there = self.read()
        if there is None or there.run_id != mine.run_id:
            raise ExchangeError(gone(self.path, there))
        try:
            publish_text(self.path, dump_json(asdict(mine)))
        except OSError as error:
            raise ExchangeError(
                f"{self.path} cannot be written: {error.strerror}. Make room, then start again"
            ) from None

    def lock(self) -> IO[str]:
        """Hold the lock for as long as the file is open. Raises ``ExchangeError``: somebody else holds it for 5 s."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC  # in a folder that others may write to
        file = os.fdopen(os.open(self.lock_path, flags, 0o666), "r+")
        end = time.monotonic() + 5.0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:  # the other side looks for a moment, or another process is this run
                if time.monotonic() > end:
                    file.close()
                    raise ExchangeError(
                        f"{self.lock_path} is held by another process: a run is already sharing data in this folder "
                        f"as trainer.share_data={self.role}"
                    ) from None
                time.sleep(0.02)
            except OSError:  # a file system without locks: the count of the beat must do
                return file

    def locked(self) -> bool | None:
        """Whether a living process of this machine holds the lock; None where that cannot be told."""
        try:
            with self.lock_path.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
        return False


class Heart(threading.Thread):
    """Writes a ``Beat`` every second until ``stop``. ``failure``: why it could not for ``limit_s`` seconds; it has
    stopped then, as the other side is about to take this one for dead."""

    def __init__(self, desk: Desk, session: str, limit_s: float) -> None:
        super().__init__(name="crossrl-heartbeat", daemon=True)
        self.desk, self.limit_s = desk, limit_s
        self._good = time.monotonic()
        self.failure: str | None = None
        self._beat = Beat(session, 0)
        self._over, self._guard = threading.Event(), threading.Lock()

    def tell(self, waiting: str | None = None, done: Mapping[str, int] | None = None) -> None:
        with self._guard:
            if waiting is not None:
                self._beat = replace(self._beat, waiting=waiting)
            if done is not None:
                self._beat = replace(self._beat, done=dict(done))
        self.once()

    def once(self) -> None:
        with self._guard:
            self._beat = replace(self._beat, count=self._beat.count + 1)
            draft = self.desk.beat_path.with_suffix(".beat.tmp")
            try:
                draft.write_text(dump_json(asdict(self._beat)), encoding="utf-8")
                draft.replace(self.desk.beat_path)
                self._good = time.monotonic()
            except OSError as error:
                if time.monotonic() - self._good > self.limit_s:
                    self.failure = f"{self.desk.beat_path} cannot be written: {error.strerror}"

    def run(self) -> None:
        while not self._over.wait(BEAT_S) and self.failure is None:
            self.once()

    def stop(self) -> None:
        self._over.set()
        if self.is_alive():
            self.join(timeout=10.0)


class Watch:
    """What one side knows about the other's life. ``limit_s``: seconds without a beat after which it counts as dead."""

    def __init__(self, desk: Desk, boot: str, limit_s: float) -> None:
        self.desk, self.boot, self.limit_s = desk, boot, limit_s
        # What was there at the start may be left from before both sides were started again: an end or a death of
        # this session is old news until the session has been seen alive.
        there = desk.read()
        self._session = there.session if there else None
        self._old = (there.session, there.state) if there else None
        self._seen: Beat | None = desk.beat()
        self._at = time.monotonic()

    def trouble(self, found: Registration) -> str | None:
        """Why the other side will publish nothing more; None as long as it may."""
        if found.session != self._session:
            self._session, self._at = found.session, time.monotonic()
        if self.old_news(found):
            return None
        self._old = None
        if found.state == "failed":
            return f"{found.who()} failed: {found.reason}"
        dead = self._dead(found)
        if dead:
            with suppress(TapeError):  # it may have said how it ended in between
                found = self.desk.read() or found
            if found.state == "failed":
                return f"{found.who()} failed: {found.reason}"
            return None if found.state == "finished" else f"{found.who()} died: {dead}"
        return None

    def old_news(self, found: Registration) -> bool:
        """Whether the session is one from before this side was started, with no sign of life since."""
        if (found.session, found.state) != self._old:
            return False
        # A session that has ended stays ended: if the lock is held, its successor is about to register.
        return found.state != "running" or not ((self._here(found) and self.desk.locked()) or self._moved())

    def _here(self, found: Registration) -> bool:
        return found.boot != "" and found.boot == self.boot

    def _moved(self) -> bool:
        beat = self.desk.beat()
        if beat is not None and beat != self._seen:
            self._seen, self._at = beat, time.monotonic()
            return True
        return False

    def _dead(self, found: Registration) -> str | None:
        if self._here(found) and self.desk.locked() is False:
            return "its process is gone"
        if not self._moved() and time.monotonic() - self._at > self.limit_s:
            return f"no sign of life for {self.limit_s:g} s (trainer.share_data_heartbeat)"
        return None


def patiently(read: Callable[[], T], tries: int = 5, pause_s: float = 0.2) -> T:
    """What ``read`` returns. A network folder may fail for a moment (ESTALE): then again, for about a second."""
    for left in reversed(range(tries)):
        try:
            return read()
        except FileNotFoundError:
            raise
        except OSError:
            if not left:
                raise
            time.sleep(pause_s)
    raise AssertionError("unreachable")


def is_there(path: Path) -> bool:
    """Whether ``path`` exists. Raises ``ExchangeError`` when that cannot be told."""
    try:
        patiently(path.lstat)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ExchangeError(f"{path} cannot be looked at: {error.strerror}. Is the folder still mounted?") from None
    return True


def boot_id() -> str:
    """The running kernel: the same for all containers of a machine, and another on every machine and boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def gone(path: Path, found: Registration | None) -> str:
    """For an error: this run's registration is not what it was."""
    if found is None:
        return (
            f"{path} has vanished: the folder of the exchange was removed or moved while a run was using it. Bring it "
            "back and start both sides again: they go on from their last checkpoints; or begin anew in another folder"
        )
    return f"{path} now belongs to {found.who()}, run {found.run_id}: two exchanges must not use one folder"
