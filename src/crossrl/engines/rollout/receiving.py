"""The receiver of one process that holds weights, kept from one transfer to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossrl.engines.base import EngineError

if TYPE_CHECKING:
    from crossrl.sync.receiver import Received, WeightReceiver
    from crossrl.sync.target import Target


class Receiving:
    """Takes part in weight transfers for ``target``; made when the first one is asked for, since it needs pyzmq."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._receiver: WeightReceiver | None = None
        self._at = ("", "")

    def receive(self, address: str, name: str, limit_s: float) -> Received:
        """One transfer as the receiver ``name`` of the sender at ``address``; see ``WeightReceiver.receive`` for what
        it waits for and raises. ``limit_s``: how long it waits for a transfer to begin."""
        if self._receiver is None or self._at != (address, name):
            self.close()
            self._receiver, self._at = self._connected(address, name), (address, name)
        return self._receiver.receive(limit_s)

    def _connected(self, address: str, name: str) -> WeightReceiver:
        try:
            from crossrl.sync.receiver import WeightReceiver
        except ImportError as error:
            raise EngineError(str(error)) from error
        return WeightReceiver(address, name, self._target)

    def close(self) -> None:
        if self._receiver is not None:
            receiver, self._receiver = self._receiver, None
            receiver.close()
