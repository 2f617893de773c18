"""Frames between a run and its scoring children."""

import pytest

from crossrl.rewards.protocol import MAX_FRAME_BYTES, ProtocolError, pack, unpack


def test_frames_come_back_however_the_bytes_arrive():
    messages = [{"id": "a", "text": "\u65e5 \U0001f600 \x00"}, {}, [1, None], "x" * 1000]
    data, buffer, got = b"".join(map(pack, messages)), bytearray(), []
    for i in range(0, len(data), 7):
        buffer += data[i : i + 7]
        got += unpack(buffer)
    assert got == messages
    assert not buffer


@pytest.mark.parametrize(
    "junk", [b"\xff" * 8, b"\x00\x00\x00\x03{a}", b"\x00\x00\x00\x02\xff\xff", b"\x00\x00\x00\x00"]
)
def test_bytes_that_are_no_frame_are_refused(junk):
    with pytest.raises(ProtocolError):
        unpack(bytearray(junk))


def test_a_message_that_is_too_large_is_refused_by_its_sender():
    with pytest.raises(ProtocolError, match="the limit is"):
        pack("x" * MAX_FRAME_BYTES)
