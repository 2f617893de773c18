"""Sockets that can always send the next message: a hub that binds, and spokes that connect to it.

Request/reply sockets of ZeroMQ must alternate, so that an exception between the two leaves them unusable. ROUTER and
DEALER have no such state. Each end has its own context, so that closing it ends its threads and descriptors.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

try:
    import zmq
except ImportError as error:
    raise ImportError("weight transfer between processes needs pyzmq: pip install 'crossrl[sync]'") from error

from crossrl.sync.messages import Log, Message, SyncError

LINGER_MS = 1000  # how long closing waits for a last message to leave


class _Socket:
    def __init__(self, kind: int, who: str) -> None:
        self.log = Log(who)
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)

    def close(self) -> None:
        """Waits for: messages that have not left. Unblocked by: the other end taking them. Limit: 1 s."""
        self._context.destroy(linger=LINGER_MS)

    def _frames(self, deadline: float, watch: Collection[int]) -> list[bytes] | int | None:
        """The next message; or the descriptor of ``watch`` that is readable; or None at ``deadline``.

        Messages come first: what a process said before it died is heard.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for fd in watch:
            poller.register(fd, zmq.POLLIN)
        left = max(0.0, deadline - time.monotonic())
        ready = dict(poller.poll(int(left * 1000) + (1 if left else 0)))
        if self._socket not in ready and ready:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            fd = next(iter(ready))
            ready = dict(poller.poll(200))  # its last message may still be on the way
            if not ready:
                return int(fd)
        return self._socket.recv_multipart() if ready else None


class Hub(_Socket):
    """The end that binds ``address`` (``ipc://PATH``; ``tcp://HOST:*`` picks a port: see ``self.address``)."""

    def __init__(self, address: str, who: str) -> None:
        super().__init__(zmq.ROUTER, who)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to nobody is an error, not lost
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that was started again takes its name over
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            super().close()
            raise SyncError(f"cannot listen at {address}: {error}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, peer: str, message: Message) -> bool:
        """Whether ``peer`` is connected; never blocks."""
        self.log.add("sent", message, peer)  # before it is, so that no log has it arrive earlier
        try:
            self._socket.send_multipart([peer.encode(), message.encode()], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.log.events.pop()
            return False
        return True

    def receive(self, deadline: float, watch: Collection[int] = ()) -> tuple[str, Message] | int | None:
        """(peer, message), a descriptor of ``watch``, or None. Raises ``ProtocolError``, which names the peer."""
        frames = self._frames(deadline, watch)
        if not isinstance(frames, list):
            return frames
        peer = frames[0].decode(errors="replace")
        try:
            message = Message.decode(frames[-1])
        except SyncError as error:
            raise type(error)(f"from {peer}: {error}") from None
        self.log.add("got", message, peer)
        return peer, message

    def close(self) -> None:
        super().close()
        if self.address.startswith("ipc://"):
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)


class Spoke(_Socket):
    """The end that connects to a hub under a name of its own."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(zmq.DEALER, name)
        self.name, self.address = name, address
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)  # what is said before there is a hub waits for it, however much it is
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise SyncError(f"{name} cannot connect to {address}: {error}") from None

    def send(self, message: Message) -> None:
        """Never blocks."""
        self.log.add("sent", message)
        try:
            self._socket.send(message.encode(), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise SyncError(f"{self.name} cannot send to {self.address}: {error}") from None

    def receive(self, deadline: float, watch: Collection[int] = ()) -> Message | int | None:
        """The next message, a descriptor of ``watch``, or None at ``deadline``."""
        frames = self._frames(deadline, watch)
        if not isinstance(frames, list):
            return frames
        message = Message.decode(frames[-1])
        self.log.add("got", message)
        return message
