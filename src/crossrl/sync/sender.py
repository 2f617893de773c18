"""The trainer's end of a weight transfer."""

from __future__ import annotations

import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from crossrl.models.digest import combined
from crossrl.sync.buffer import Buffer
from crossrl.sync.digests import Digests
from crossrl.sync.endpoint import Hub
from crossrl.sync.manifest import Manifest, listed
from crossrl.sync.messages import Message, SyncError, describe
from crossrl.sync.peers import Peer, Peers
from crossrl.sync.plan import pack
from crossrl.sync.processes import this_process
from crossrl.sync.shared_memory import SharedBuffer
from crossrl.sync.threads import copying_threads

BUCKET_BYTES = 8 << 20  # small enough that a receiver finds most of it in the processor's cache
SLOTS = 2  # one is filled while the receivers load the other
PAGE = 4096


@dataclass(frozen=True, slots=True)
class Sent:
    """A transfer that succeeded. ``digest``: of what every receiver holds, "" if digests are off. ``prefix_caches``:
    what each receiver's engine did to forget what it had computed with earlier weights."""

    version: int
    digest: str
    tensors: int
    bytes: int
    buckets: int
    seconds: float
    prefix_caches: Mapping[str, str]


class WeightSender:
    """Sends weights to all of ``receivers`` (their names), each a ``WeightReceiver`` at ``address``.

    ``address``: where to listen; by default a socket in a new private folder. ``bucket_bytes``: twice that is the extra
    memory of a transfer. ``limit_s``: of every wait for the receivers' next step. ``digest``: False sends without proof
    of arrival. ``threads``: that copy (each receiver copies with one at the same time). ``make_buffer``:
    ``SharedBuffer.create``, or ``CudaBuffer.create`` where all share one GPU.

    Used by one thread at a time. After a failed ``send`` the next one starts afresh.
    """

    def __init__(
        self,
        receivers: Sequence[str],
        address: str = "",
        *,
        bucket_bytes: int = BUCKET_BYTES,
        limit_s: float = 60.0,
        digest: bool = True,
        threads: int = 1,
        make_buffer: Callable[[int, int], Buffer] = SharedBuffer.create,
    ) -> None:
        if not receivers or len(set(receivers)) < len(receivers) or limit_s <= 0 or bucket_bytes < 1:
            raise SyncError(
                f"receivers {list(receivers)}, limit_s {limit_s}, bucket_bytes {bucket_bytes}: "
                "want distinct names, at least one, and positive numbers"
            )
        self._folder = "" if address else tempfile.mkdtemp(prefix="crossrl-sync-")
        self._hub = Hub(address or f"ipc://{self._folder}/weights", "sender")
        self._peers = Peers(self._hub, receivers)
        self.address, self.log = self._hub.address, self._hub.log
        self.limit_s, self.digest, self._threads, self._make_buffer = limit_s, digest, threads, make_buffer
        self.bucket_bytes = -(-bucket_bytes // PAGE) * PAGE
        self._last = ""  # digest of what was sent last

    def send(
        self,
        version: int,
        manifest: Manifest,
        named: Iterable[tuple[str, torch.Tensor]],
        changed: bool | None = None,
    ) -> Sent:
        """Bring ``named`` to every receiver as weights of ``version``; returns when all hold them and have let go of
        the buffer.

        ``named``: as announced in ``manifest``; each tensor must stay as it is until this returns. ``changed``: whether
        an update with a non-zero gradient lies between these weights and those sent before (None: not known); then
        equal digests are an error. Raises ``SyncError``, which says who failed, at what, and what state that leaves.
        """
        manifest.check()
        if changed and not self.digest:
            raise SyncError("changed=True is checked by digests, which are off (digest=False)")
        self.log.events.clear()
        sync = uuid.uuid4().hex[:16]
        started = time.perf_counter()
        buffer = self._make_buffer(self.bucket_bytes, SLOTS)
        try:
            peers = self._peers.meet(sync, self.limit_s)
        except BaseException:
            buffer.close()
            raise
        transfer = _Transfer(self, self._peers, peers, sync, version, manifest, buffer)
        try:
            with copying_threads(self._threads):
                digest, caches = transfer.run(named, self._last if changed else "")
        finally:
            self._peers.part()
        self._last = transfer.sent_digest
        return Sent(
            version, digest, len(manifest.tensors), transfer.bytes, transfer.buckets,
            time.perf_counter() - started, caches,
        )  # fmt: skip

    def close(self) -> None:
        self._hub.close()
        if self._folder and Path(self._folder).exists():
            Path(self._folder).rmdir()

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Transfer:
    """One transaction."""

    def __init__(
        self,
        sender: WeightSender,
        peers: Peers,
        members: list[Peer],
        sync: str,
        version: int,
        manifest: Manifest,
        buffer: Buffer,
    ) -> None:
        self._sender, self._peers, self._members, self._sync = sender, peers, members, sync
        self._version, self._manifest = version, manifest
        self._buffer: Buffer | None = buffer
        self.bytes, self.buckets, self.sent_digest = 0, 0, ""

    def run(self, named: Iterable[tuple[str, torch.Tensor]], unchanged: str) -> tuple[str, dict[str, str]]:
        """``unchanged``: the digest that these weights must not have."""
        try:
            self._begin()
            wanted = self._bring(named, unchanged)
            digest = self._finish(wanted)
            self._tell("commit")
            self._wait("let go of the buffer and move its version", lambda p: p.released is not None)
            self._moved()
            self._close()
            return digest, {p.name: str((p.released or {})["prefix_cache"]) for p in self._members}
        except BaseException as error:
            reason = describe(error)
            traceback.clear_frames(error.__traceback__)  # they hold views of the buffer
            after = self._abort(reason)
            try:
                self._close()
            except SyncError as second:
                after += f"; then, while cleaning up: {second}"
            if not isinstance(error, Exception):
                raise
            raise SyncError(f"weights of version {self._version} did not arrive: {reason}. {after}") from error

    def _begin(self) -> None:
        buffer = self._buffer
        assert buffer is not None
        manifest = self._manifest.to_json()
        self._peers.tell(
            self._members,
            lambda peer: Message("begin", self._sync, {
                "process": this_process(), "answers": peer.hello.sync, "version": self._version,
                "manifest": manifest, "buffer": buffer.describe(), "digest": self._sender.digest,
                "limit_s": self._sender.limit_s,
            }),
        )  # fmt: skip
        self._wait("attach to the buffer", lambda p: p.ready)
        buffer.attached()

    def _bring(self, named: Iterable[tuple[str, torch.Tensor]], unchanged: str) -> dict[str, str]:
        """Send all buckets; the digests of what is to be held, by name."""
        assert self._buffer is not None
        with closing(Digests(self._manifest, 2 * self._buffer.size)) as digests:
            for number, pieces in pack(
                digests.of(named) if self._sender.digest else named, self._buffer.size, self._slot
            ):
                self._buffer.written()
                self.buckets = number + 1
                self._sender.log.add("filled", bucket=number)
                self.bytes += sum(p.count * getattr(torch, p.dtype).itemsize for p in pieces)
                self._tell("bucket", bucket=number, slot=number % SLOTS, pieces=[p.to_json() for p in pieces])
            sent, wanted = digests.result()
        self.sent_digest = combined(sent) if sent else ""
        if unchanged and self.sent_digest == unchanged:
            raise SyncError(
                "the old weights were sent: their digest is that of the transfer before, though an update with a "
                f"non-zero gradient lies between (digest {unchanged[:12]}...)"
            )
        return wanted

    def _slot(self, number: int) -> torch.Tensor:
        """The memory for bucket ``number``, free: the bucket that lay there before has been copied out by all."""
        assert self._buffer is not None
        self._all_copied(number - SLOTS)
        self._sender.log.add("filling", bucket=number)
        return self._buffer.slot(number)

    def _all_copied(self, number: int) -> None:
        """The barrier behind which a bucket counts as acknowledged."""
        if number >= 0:
            self._wait(f"copy bucket {number} out", lambda p: p.copied >= number)

    def _finish(self, wanted: dict[str, str]) -> str:
        """All receivers hold everything, each by its own digest; that digest."""
        self._all_copied(self.buckets - 1)
        self._tell("finish", buckets=self.buckets, digests=wanted)
        self._wait("check what its engine holds", lambda p: p.held is not None)
        digest = combined(wanted) if wanted else ""
        for peer in self._members:
            held = peer.held or {}
            if held["differ"] or held["digest"] != digest:
                raise SyncError(f"{peer} does not hold what was sent: {listed(held['differ']) or 'digests differ'}")
        return digest

    def _moved(self) -> None:
        for peer in self._members:
            if (found := (peer.released or {})["version"]) != self._version:
                raise SyncError(f"{peer} says that it has version {found} after an update to {self._version}")

    def _tell(self, kind: str, **body: object) -> None:
        self._peers.tell(self._members, lambda peer: Message(kind, self._sync, body))

    def _wait(self, what: str, done: Callable[[Peer], bool]) -> None:
        self._peers.wait(self._members, what, done, self._sender.limit_s)

    def _abort(self, reason: str) -> str:
        """Have every receiver that still lives let go. Waits for: their last messages. Limit: ``limit_s``. Returns in
        what state they are now."""
        deadline = time.monotonic() + self._sender.limit_s
        abort = Message("abort", self._sync, {"reason": reason})
        told = [p for p in self._members if p.told]
        for peer in (p for p in told if not p.failed and p.released is None):
            if not self._peers.hub.send(peer.name, abort):
                peer.failed = "is not connected any more"
        moved = [str(p) for p in self._members if (p.released or {}).get("version") == self._version]
        while any(not p.failed and p.released is None for p in told) and time.monotonic() < deadline:
            with suppress(SyncError):  # the first error is what is told
                self._peers.hear(deadline)
        silent = [str(p) for p in told if not p.failed and p.released is None]
        after = ["The engines keep their version and generate nothing until a transfer succeeds"]
        if moved:
            after = [f"{', '.join(moved)} had moved to the new version already; the others keep theirs"]
        if silent:
            after.append(
                f"{', '.join(silent)} did not answer within {self._sender.limit_s:g} s and may still be loading"
            )
        return "; ".join(after)

    def _close(self) -> None:
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            buffer.close()
            self._sender.log.add("closed")
