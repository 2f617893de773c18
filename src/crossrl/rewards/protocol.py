"""What goes between a run and its scoring children: frames of JSON over two pipes, and the words used in them.

A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON. JSON and nothing else: a child runs
other people's code, and its answers must not be able to do more than be wrong.
"""

from __future__ import annotations

import json
from typing import Any, Literal

Status = Literal["ok", "raised", "crashed", "timed_out", "wrong_type", "wrong_count", "non_finite"]
STATUSES: tuple[Status, ...] = ("ok", "raised", "crashed", "timed_out", "wrong_type", "wrong_count", "non_finite")

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 << 20


class RewardError(RuntimeError):
    """Scoring cannot start or go on; the message says what to change. (A sample that fails is a ``Score``.)"""


class ProtocolError(RuntimeError):
    """The bytes of a child are not a frame."""


def pack(message: Any) -> bytes:
    """``message`` as one frame. Raises ``ProtocolError`` when it is larger than ``MAX_FRAME_BYTES``."""
    data = json.dumps(message).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes; the limit is {MAX_FRAME_BYTES}")
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def unpack(buffer: bytearray) -> list[Any]:
    """Take the complete frames off the front of ``buffer``. Raises ``ProtocolError``."""
    messages = []
    while len(buffer) >= HEADER_BYTES:
        length = int.from_bytes(buffer[:HEADER_BYTES], "big")
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {length} bytes is announced; the limit is {MAX_FRAME_BYTES}")
        if len(buffer) < HEADER_BYTES + length:
            break
        try:
            messages.append(json.loads(buffer[HEADER_BYTES : HEADER_BYTES + length]))
        except ValueError as error:
            raise ProtocolError(f"a frame is not JSON: {error}") from error
        del buffer[: HEADER_BYTES + length]
    return messages
