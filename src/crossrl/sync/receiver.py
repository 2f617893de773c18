"""The engine's end of a weight transfer: one per worker process of an engine."""

from __future__ import annotations

import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch

from crossrl.models.digest import combined
from crossrl.sync.buffer import Buffer, attach
from crossrl.sync.check import differing, survey
from crossrl.sync.endpoint import Spoke
from crossrl.sync.manifest import Manifest
from crossrl.sync.messages import Message, ProtocolError, SyncError, describe
from crossrl.sync.plan import Piece
from crossrl.sync.processes import Watched, this_process
from crossrl.sync.target import Loader, Target
from crossrl.sync.threads import copying_threads

MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class Received:
    """``digest``: of what the engine holds, equal to the sender's; "" if digests are off."""

    version: int
    digest: str
    buckets: int
    prefix_cache: str


class Aborted(SyncError):
    """The sender gave the transfer up, for a reason that is not this receiver's."""


class WeightReceiver:
    """Receives weights into ``target`` as the receiver ``name`` of the ``WeightSender`` at ``address``.

    ``on_release``: called when the weights are in force and before the sender hears of it; what it raises reaches the
    sender. ``threads``: that copy while weights are loaded. ``limit_s``: how long ``receive`` waits for a transfer to
    begin. Used by one thread at a time.
    """

    def __init__(
        self,
        address: str,
        name: str,
        target: Target,
        *,
        limit_s: float = 60.0,
        threads: int = 1,
        on_release: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.target, self.limit_s, self._on_release = name, target, limit_s, on_release
        self._threads = threads
        self._spoke = Spoke(address, name)
        self.log = self._spoke.log

    def receive(self, limit_s: float | None = None) -> Received:
        """Take part in one transfer.

        Waits for: a sender to begin; then for each of its next steps. Unblocked by: its messages, its death. Limits:
        ``limit_s``; then twice the sender's own limit, so that it is the sender that times out first and says why.
        Raises ``SyncError`` after a failure that the sender has been told: then nothing of the buffer is held any more,
        and the engine keeps its version and is unusable, with the reason, until a transfer succeeds.
        """
        self.log.events.clear()
        begin = self._await_begin(self.limit_s if limit_s is None else limit_s)
        sender = Watched(begin.body["process"])
        try:
            return _Transfer(self._spoke, sender, begin, self.target, self._on_release, self._threads).run()
        finally:
            sender.close()

    def _await_begin(self, limit_s: float) -> Message:
        while self._spoke.receive(time.monotonic()) is not None:
            pass  # of a transfer that this receiver has left
        hello = Message("hello", uuid.uuid4().hex[:16], {"process": this_process()})
        self._spoke.send(hello)
        deadline = time.monotonic() + limit_s
        try:
            while isinstance(message := self._spoke.receive(deadline), Message):
                if message.kind == "begin" and message.body["answers"] == hello.sync:
                    return message
        except BaseException:
            self._spoke.send(Message("left", hello.sync))
            raise
        self._spoke.send(Message("left", hello.sync))
        raise SyncError(f"{self.name} waited {limit_s:g} s for weights from {self._spoke.address}: no transfer began")

    def close(self) -> None:
        self._spoke.close()

    def __enter__(self) -> WeightReceiver:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Transfer:
    """One transaction, from ``begin`` on."""

    def __init__(
        self,
        spoke: Spoke,
        sender: Watched,
        begin: Message,
        target: Target,
        on_release: Callable[[], None],
        threads: int,
    ) -> None:
        self._spoke, self._sender, self._begin, self._target = spoke, sender, begin, target
        self._on_release, self._threads = on_release, threads
        self._limit_s = 2 * float(begin.body["limit_s"])
        self._phase, self._began = "begin", False
        self._buffer: Buffer | None = None
        self._buckets = 0

    def run(self) -> Received:
        try:
            manifest = self._open()
            with copying_threads(self._threads):
                finish = self._load()
            self._phase = "check"
            digest, differ = self._check(manifest, finish)
            self._say("held", digest=digest, differ=differ[:MOST_NAMED])
            self._expect("commit")
            self._phase = "release"
            cache = self._target.clear_prefix_cache()
            self._target.finish_update()
            self._on_release()
        except BaseException as error:
            reason = self._give_up(error)
            if not isinstance(error, Exception):
                raise
            who = f"{self._spoke.name}: weights of version {self._begin.body['version']} did not arrive"
            raise SyncError(f"{who}: {reason}") from error
        self._say("released", version=self._target.weight_version, prefix_cache=cache)
        return Received(self._target.weight_version, digest, self._buckets, cache)

    def _open(self) -> Manifest:
        """Attach first: a transfer that cannot even begin leaves the engine as it is."""
        body = self._begin.body
        manifest = Manifest.from_json(body["manifest"])
        manifest.check()
        self._buffer = attach(body["buffer"])
        self._began = True
        self._target.begin_update(int(body["version"]), manifest.tensors)
        self._say("ready")
        return manifest

    def _load(self) -> Message:
        """Copy out and load bucket after bucket; the message that ends them."""
        self._phase = "load"
        loader = Loader(self._target)
        while (message := self._expect("bucket", "finish")).kind == "bucket":
            number = int(message.body["bucket"])
            if number != self._buckets:
                raise ProtocolError(f"bucket {number} came, want {self._buckets}")
            self._take(loader, message)
            self._buckets += 1
            self._spoke.log.add("loaded", bucket=number)
            self._say("copied", bucket=number)
        if int(message.body["buckets"]) != self._buckets:
            raise ProtocolError(f"{self._buckets} buckets came, {message.body['buckets']} were sent")
        return message

    def _take(self, loader: Loader, message: Message) -> None:
        assert self._buffer is not None
        slot = self._buffer.slot(int(message.body["slot"]))
        loader.take([Piece.from_json(p) for p in message.body["pieces"]], slot)
        self._buffer.written()

    @torch.no_grad()
    def _check(self, manifest: Manifest, finish: Message) -> tuple[str, list[str]]:
        """The digest of what the engine holds, and what differs from what was sent. The buffer is closed before: what
        is checked lies elsewhere."""
        self._close_buffer()
        self._target.check_update()
        wanted = finish.body["digests"]
        if bool(wanted) != bool(self._begin.body["digest"]):
            raise ProtocolError("digests were announced and did not come, or came unannounced")
        held = survey(self._target.held(), manifest.tied, digests=bool(wanted))
        digest = combined({name: seen.digest for name, seen in held.items()}) if wanted and held else ""
        return digest, differing(manifest, held, wanted)

    def _give_up(self, error: BaseException) -> str:
        """Let go of everything, then tell the sender. Problems of the clean-up are added to ``error``, never instead
        of it. Returns the reason in words."""
        reason = describe(error)
        traceback.clear_frames(error.__traceback__)  # they hold views of the buffer
        try:
            self._close_buffer()
        except Exception as second:
            reason += f"; then, while cleaning up: {describe(second)}"
        try:
            if self._began:
                self._target.abort_update(reason)
        except Exception as second:
            reason += f"; then the engine failed to give the update up: {describe(second)}"
        if isinstance(error, Aborted):
            self._say("released", version=self._target.weight_version, prefix_cache="")
        else:
            self._say("failed", phase=self._phase, error=reason)
        return reason

    def _close_buffer(self) -> None:
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            buffer.close()
            self._spoke.log.add("closed")

    def _say(self, kind: str, **body: object) -> None:
        self._spoke.send(Message(kind, self._begin.sync, body))

    def _expect(self, *kinds: str) -> Message:
        """The sender's next message of this transfer, one of ``kinds``."""
        deadline = time.monotonic() + self._limit_s
        watch = [self._sender.fd] if self._sender.fd >= 0 else []
        while True:
            message = self._spoke.receive(deadline, watch)
            if isinstance(message, int) or self._sender.gone:
                raise SyncError(
                    f"the sender (process {self._sender.pid}) has died while {' or '.join(kinds)} was awaited"
                )
            if message is None:
                raise SyncError(f"waited {self._limit_s:g} s for the sender's {' or '.join(kinds)}: nothing came")
            if message.sync != self._begin.sync:
                continue  # of another transfer
            if message.kind == "abort":
                raise Aborted(f"the sender gave it up: {message.body['reason']}")
            if message.kind not in kinds:
                raise ProtocolError(f"{message.kind} came, want {' or '.join(kinds)}")
            return message
