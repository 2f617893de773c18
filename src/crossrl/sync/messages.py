"""What the two ends say to each other: one JSON header per message, checked where it arrives."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PROTOCOL = 1

# Every kind with the keys of its body. A message that lacks one, or has another, is refused.
KINDS: dict[str, frozenset[str]] = {
    # receiver to sender
    "hello": frozenset({"process"}),
    "left": frozenset(),
    "ready": frozenset(),
    "copied": frozenset({"bucket"}),
    "held": frozenset({"digest", "differ"}),
    "released": frozenset({"version", "prefix_cache"}),
    "failed": frozenset({"phase", "error"}),
    # sender to receiver
    "begin": frozenset({"process", "answers", "version", "manifest", "buffer", "digest", "limit_s"}),
    "bucket": frozenset({"bucket", "slot", "pieces"}),
    "finish": frozenset({"buckets", "digests"}),
    "commit": frozenset(),
    "abort": frozenset({"reason"}),
    # between a barrier and its ranks
    "phase": frozenset({"phase", "process", "waits"}),
    "open": frozenset({"phase"}),
    "late": frozenset({"reason"}),
}


class SyncError(RuntimeError):
    """Weights did not arrive; the message says where, why, and what state that leaves."""


class ProtocolError(SyncError):
    """A message is not one of this protocol, or of another version of it."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``sync``: the transaction (or the round of a barrier) that it belongs to, "" outside of one.

    >>> Message.decode(Message("copied", "5f", {"bucket": 3}).encode()).body
    {'bucket': 3}
    """

    kind: str
    sync: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        header = {"protocol": PROTOCOL, "kind": self.kind, "sync": self.sync, "body": dict(self.body)}
        return json.dumps(header, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Message:
        """Raises ``ProtocolError`` for anything that this version would not have written."""
        try:
            header = json.loads(raw)
            version, kind, sync, body = (header[key] for key in ("protocol", "kind", "sync", "body"))
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"not a message of the weight transfer ({error!r}): {raw[:80]!r}") from None
        if version != PROTOCOL:
            raise ProtocolError(
                f"the other side speaks version {version} of the weight transfer, this side {PROTOCOL}: "
                "install the same crossrl on both"
            )
        if kind not in KINDS or not isinstance(body, dict) or body.keys() != KINDS[kind]:
            raise ProtocolError(f"message {kind!r} with {body!r:.200}: version {PROTOCOL} has no such message")
        return cls(kind, str(sync), body)


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a log. ``did``: "sent", "got", or what this side did itself
    ("filling", "filled", "loaded", "closed").

    ``at``: ``time.monotonic_ns()``, comparable between the processes of one machine.
    """

    at: int
    who: str
    did: str
    kind: str = ""
    peer: str = ""
    bucket: int | None = None


class Log:
    """What one end sent, got and did in its latest transaction, in order."""

    def __init__(self, who: str) -> None:
        self.who, self.events = who, list[Event]()

    def add(self, did: str, message: Message | None = None, peer: str = "", bucket: int | None = None) -> None:
        if message is not None:
            bucket = message.body.get("bucket")
        self.events.append(Event(time.monotonic_ns(), self.who, did, message.kind if message else "", peer, bucket))


def describe(error: BaseException) -> str:
    """``error`` in one line, with the place in which it was raised where the type is not one of ours."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if type(error).__module__.startswith("crossrl."):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} (in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno})" if frames else text
