"""The reference of the record format is enough to read a record: a reader written from it alone agrees with ours.

Nothing of ``crossrl`` is used in ``Reader``; see docs/reference/record-format.md.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossrl.batch import Batch, Meaning, Ragged
from crossrl.tape.capture import capture, read_digests
from crossrl.tape.header import Header
from crossrl.tape.record import Draft, read_record, write_record

CHUNK = 8_388_608
CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float32": "F32",
    "float64": "F64",
}


class Reader:
    """A record, read as the reference says."""

    def __init__(self, folder: Path) -> None:
        text = (folder / "record.json").read_bytes()
        assert text[:18] == b'{"digest":"sha256:' and text[82:85] == b'",\n'
        assert text[18:82].decode() == hashlib.sha256(text[85:]).hexdigest()
        self.head = json.loads(text)
        assert self.head["schema_version"] == 1
        assert {p.name for p in folder.iterdir()} == {"record.json", *self.head["files"]}
        self.count = len(self.head["sample_id"])
        self.tensors = self.read_tensors(folder / "tensors.safetensors")
        self.text = (folder / "columns.json").read_bytes()
        self.columns = {name: self.column(name, entry) for name, entry in self.head["fields"].items()}
        for name, entry in self.head["reads"].items():
            marks = self.tensors[f"reads.{name}"]
            assert entry["marks"] == self.digest(f"number uint64 {self.count} {marks.nbytes}", marks)

    def read_tensors(self, path: Path) -> dict[str, np.ndarray]:
        data = path.read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        entry = self.head["files"]["tensors.safetensors"]
        assert entry == {"nbytes": len(data), "head": "sha256:" + hashlib.sha256(data[:start]).hexdigest()}
        dtypes = {code: np.dtype(name).newbyteorder("<") for name, code in CODES.items()}
        return {
            name: np.frombuffer(data[start:][slice(*t["data_offsets"])], dtypes[t["dtype"]])
            for name, t in json.loads(data[8:start]).items()
        }

    def digest(self, line: str, *payloads: Any) -> str:
        root = hashlib.sha256(f"crossrl.column/1 {line}\n".encode())
        for payload in payloads:
            raw = payload if isinstance(payload, bytes) else payload.tobytes()
            for at in range(0, len(raw), CHUNK):
                root.update(hashlib.sha256(raw[at : at + CHUNK]).digest())
        return "sha256:" + root.hexdigest()

    def column(self, name: str, entry: dict[str, Any]) -> Any:
        if entry["kind"] == "value":
            raw = self.text[entry["offset"] : entry["offset"] + entry["nbytes"]]
            assert entry["digest"] == self.digest(f"value json {self.count} {len(raw)}", raw)
            return untag(json.loads(raw))
        values = self.tensors[name]
        if entry["kind"] == "number":
            assert entry["digest"] == self.digest(f"number {entry['dtype']} {self.count} {values.nbytes}", values)
            return values
        lengths = self.tensors[f"{name}.lengths"]
        line = f"ragged {entry['dtype']} {self.count} {lengths.nbytes} {values.nbytes}"
        assert entry["digest"] == self.digest(line, lengths, values)
        return np.split(values, np.cumsum(lengths)[:-1])


def untag(value: Any) -> Any:
    if isinstance(value, list):
        return [untag(v) for v in value]
    if not isinstance(value, dict):
        return value
    if list(value) == ["$float"]:
        return float(value["$float"])
    if list(value) == ["$bytes"]:
        return base64.b64decode(value["$bytes"])
    return {k[1:] if k.startswith("$") else k: untag(v) for k, v in value.items()}


@pytest.fixture
def record(tmp_path: Path) -> Path:
    tokens = np.arange(CHUNK // 4 + 1000, dtype=np.int32)  # more than one chunk
    batch = Batch(
        ("a", "b", "c"),
        {
            "response_ids": Ragged(tokens, np.array([5, 0, tokens.size - 5])),
            "reward": np.array([1.0, np.nan, -0.0]),
            "flag": np.array([True, False, True]),
            "response": ["größer\n漢字", "", '"'],
            "extra_info": [{"$x": [1, 2.0, None, True]}, {"f": float("-inf"), "b": b"\0\xff"}, {}],
        },
        {"response_ids": Meaning()},
    )
    draft = Draft(Header("run", "rollout", 3), capture(batch), read_digests(batch.only(["response", "reward"])))
    write_record(tmp_path / "r", draft)
    return tmp_path / "r"


def test_a_reader_written_from_the_reference_agrees_with_ours(record: Path) -> None:
    ours, theirs = read_record(record, "eager").batch, Reader(record)
    assert theirs.head["sample_id"] == list(ours.sample_id)
    for mine, other in zip(ours.ragged("response_ids").rows(), theirs.columns["response_ids"], strict=True):
        assert np.array_equal(mine, other)
    assert theirs.columns["reward"].tobytes() == ours["reward"].tobytes()
    assert theirs.columns["flag"].tolist() == [True, False, True]
    assert theirs.columns["response"] == ours["response"] == ["größer\n漢字", "", '"']
    assert theirs.columns["extra_info"] == ours["extra_info"]
    mark = int.from_bytes(hashlib.sha256('"größer\\n漢字"'.encode()).digest()[:8], "little")
    assert theirs.tensors["reads.response"][0] == mark


def test_the_reader_of_this_test_notices_a_changed_byte(record: Path) -> None:
    """The control: the agreement above is not for want of checking."""
    for name in ("record.json", "tensors.safetensors", "columns.json"):
        original = (record / name).read_bytes()
        changed = bytearray(original)
        changed[-5] ^= 1
        (record / name).write_bytes(changed)
        with pytest.raises((AssertionError, ValueError)):
            Reader(record)
        (record / name).write_bytes(original)
    Reader(record)


def test_the_content_digest_is_as_the_reference_says(record: Path) -> None:
    head = Reader(record).head
    body = {
        "sample_id": head["sample_id"],
        "fields": {n: f["digest"] for n, f in head["fields"].items()},
        "meanings": head["meanings"],
    }
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    root = hashlib.sha256(f"crossrl.json/1 {len(text)}\n".encode() + hashlib.sha256(text).digest())
    assert read_record(record).header.content == "sha256:" + root.hexdigest()
