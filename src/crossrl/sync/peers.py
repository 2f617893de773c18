"""The receivers as the sender sees them, and bounded waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from crossrl.sync.endpoint import Hub
from crossrl.sync.messages import Message, SyncError
from crossrl.sync.processes import Watched


@dataclass(slots=True)
class Peer:
    """One receiver in one transaction. ``hello``: the message with which it came, whose id ``begin`` answers."""

    name: str
    hello: Message
    process: Watched
    told: bool = False  # that the transaction began
    ready: bool = False
    copied: int = -1  # the last bucket that it has copied out
    held: Mapping[str, Any] | None = None
    released: Mapping[str, Any] | None = None
    failed: str = ""

    def __str__(self) -> str:
        return f"{self.name} (process {self.process.pid})"


class Peers:
    """The receivers ``names`` at ``hub``. Used by one thread at a time."""

    def __init__(self, hub: Hub, names: Iterable[str]) -> None:
        self.hub, self.names = hub, tuple(names)
        self._present: dict[str, Message] = {}
        self._sync, self._in = "", dict[str, Peer]()

    def meet(self, sync: str, limit_s: float) -> list[Peer]:
        """All receivers, for the transaction ``sync``.

        Waits for: each receiver to be in ``WeightReceiver.receive``. Unblocked by: their "hello". Limit: ``limit_s``.
        """
        self._sync, self._in = "", {}
        found: dict[str, Peer] = {}
        deadline = time.monotonic() + limit_s
        died = ""
        try:
            while True:
                for name in set(self.names) & self._present.keys():
                    hello = self._present.pop(name)
                    if name in found:  # it was started again meanwhile
                        found.pop(name).process.close()
                    found[name] = Peer(name, hello, Watched(hello.body["process"]))
                for peer in [p for p in found.values() if p.process.gone or p.failed]:
                    died += f"; {peer} has died" if peer.process.gone else ""
                    found.pop(peer.name).process.close()
                missing = [n for n in self.names if n not in found]
                if not missing and not self._hear_of(found, time.monotonic()):
                    break  # and nobody has left meanwhile
                if missing and not self._hear_of(found, deadline):
                    raise SyncError(
                        f"waited {limit_s:g} s for {', '.join(missing)} to ask for weights at {self.hub.address}: "
                        f"nothing came. Does it run, with this address, and is it receiving?{died}"
                    )
        except BaseException:
            for peer in found.values():
                peer.process.close()
            raise
        self._sync, self._in = sync, found
        return [found[name] for name in self.names]

    def _hear_of(self, found: Mapping[str, Peer], deadline: float) -> bool:
        """Take in one message or death before a transaction; False at ``deadline``."""
        watched = {p.process.fd: p for p in found.values() if p.process.fd >= 0}
        got = self.hub.receive(deadline, watched)
        if isinstance(got, int):
            watched[got].process.gone = True
        elif got is not None:
            name, message = got
            self._note(name, message)
            if message.kind == "left" and name in found and found[name].hello.sync == message.sync:
                found[name].failed = "left"
        return got is not None

    def part(self) -> None:
        """The transaction is over. Who was not told of it is still waiting for one."""
        for peer in self._in.values():
            peer.process.close()
            if not peer.told and not peer.failed:
                self._present.setdefault(peer.name, peer.hello)
        self._sync, self._in = "", {}

    def tell(self, peers: Iterable[Peer], message: Callable[[Peer], Message]) -> None:
        """Raises ``SyncError`` naming a receiver that is not connected any more."""
        for peer in peers:
            if not self.hub.send(peer.name, message(peer)):
                peer.failed = "is not connected any more"
                raise SyncError(f"{peer} {peer.failed}")
            peer.told = True

    def wait(self, peers: Iterable[Peer], what: str, done: Callable[[Peer], bool], limit_s: float) -> None:
        """Waits for: ``done`` of every one of ``peers``, which is ``what``. Unblocked by: their messages, the first
        failure or death (``SyncError`` with its text). Limit: ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while late := [p for p in peers if not done(p)]:
            self.hear(deadline)
            for peer in late:
                if peer.failed:
                    raise SyncError(f"{peer} {peer.failed}")
            if time.monotonic() >= deadline and (late := [p for p in late if not done(p)]):
                raise SyncError(f"waited {limit_s:g} s for {', '.join(map(str, late))} to {what}: nothing came")

    def hear(self, deadline: float) -> None:
        """Take in one message or one death, of any peer of the transaction, until ``deadline``."""
        watched = {p.process.fd: p for p in self._in.values() if p.process.fd >= 0 and not p.failed}
        got = self.hub.receive(deadline, watched)
        if isinstance(got, int):
            watched[got].failed = "has died"
            return
        if got is None:
            return
        name, message = got
        self._note(name, message)
        kind, body, peer = message.kind, message.body, self._in.get(name)
        if peer is None:
            return
        if (kind == "left" and message.sync == peer.hello.sync) or kind == "hello":
            peer.failed = peer.failed or "stopped receiving in the middle of the transfer"
        if message.sync != self._sync:
            return  # of a transaction that is over
        if kind == "ready":
            peer.ready = True
        elif kind == "copied":
            peer.copied = int(body["bucket"])
        elif kind == "held":
            peer.held = body
        elif kind == "released":
            peer.released = body
        elif kind == "failed":
            peer.failed = f"failed at {body['phase']}: {body['error']}"

    def _note(self, name: str, message: Message) -> None:
        """Keep who is ready for a next transaction."""
        if message.kind == "hello":
            self._present[name] = message
        elif message.kind == "left" and name in self._present and self._present[name].sync == message.sync:
            del self._present[name]
