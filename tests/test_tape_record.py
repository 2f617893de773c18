"""Records on disk: they come back as they were, and any other bytes are refused cleanly."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from crossrl.batch import Batch, Meaning, Ragged
from crossrl.tape import digest
from crossrl.tape.capture import capture, read_digests
from crossrl.tape.errors import CannotStore, CorruptRecord, RecordExists, RecordMissing
from crossrl.tape.header import Header
from crossrl.tape.record import Draft, Record, read_record, write_record

# How many mutations the fuzz tries; from 10000 on every byte is flipped instead of every third.
FUZZ = int(os.environ.get("CROSSRL_FUZZ", "600"))
FILES = ("record.json", "tensors.safetensors", "columns.json")


def make_batch() -> Batch:
    ids = tuple(f"d/0/{i}" for i in range(5))
    return Batch(
        ids,
        {
            "response_ids": Ragged.from_rows([[1, 2, 3], [], [4], [5, 6], [7]], np.int32),
            "rollout_log_probs": Ragged.from_rows([[-0.1, -2.5, -0.0], [], [-1e-30], [-3, -4], [-5]], np.float32),
            "response_mask": Ragged.from_rows([[1, 0, 1], [], [1], [1, 1], [1]], np.uint8),
            "reward": np.array([1.0, 0.5, np.nan, -0.0, 1e300]),
            "flags": np.array([True, False, True, True, False]),
            "response": ["vier", "", "größer 漢字 😀", 'quote " and \\', "line\nbreak"],
            "ground_truth": ["4", None, 7, 2.0, True],
            "extra_info": [{"a": {"b": [1, None]}}, {}, {"$x": 1}, {"n": np.bool_(True)}, {"f": float("inf")}],
        },
        {"rollout_log_probs": Meaning(0.6, "top_p=0.8", "hf", 3)},
        {"loss": np.float32(0.25), "grad_norm": float("nan"), "nested": {"k": (1, 2)}},
    )


def make_draft(batch: Batch | None = None) -> Draft:
    batch = batch or make_batch()
    given = Batch(batch.sample_id, {"prompt_ids": Ragged.from_rows([[9]] * len(batch), np.int32)})
    header = Header(
        run_id="run", stage="rollout", step=2, call=1, fingerprints={"rollout": {"temperature": 0.6, "$odd": 1}},
        versions={"crossrl": "0"}, weight_version=3, created="2026-01-01",
    )  # fmt: skip
    return Draft(header, capture(batch), read_digests(given))


def equal(a: Batch, b: Batch) -> bool:
    """Bit for bit; values by type as well."""
    if a.sample_id != b.sample_id or set(a.columns) != set(b.columns) or a.meanings != b.meanings:
        return False
    for name in a.columns:
        x, y = a[name], b[name]
        if isinstance(x, Ragged):
            if not (x.same_shape(y) and x.dtype == y.dtype and x.values.tobytes() == y.values.tobytes()):
                return False
        elif isinstance(x, np.ndarray):
            if x.dtype != y.dtype or x.tobytes() != y.tobytes():
                return False
        elif repr(x).replace("np.True_", "True") != repr(y):
            return False
    return True


@pytest.fixture
def record(tmp_path: Path) -> Path:
    write_record(tmp_path / "r", make_draft())
    return tmp_path / "r"


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def resign(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change ``record.json`` and give it the digest that goes with the change, as an adversary would."""
    body = json.loads(path.read_bytes())
    del body["digest"]
    change(body)
    write_signed(path, json.dumps(body).encode())


def write_signed(path: Path, text: bytes) -> None:
    rest = text[1:]
    path.write_bytes(b'{"digest":"' + digest.plain_digest(rest).encode() + b'",\n' + rest)


@pytest.mark.parametrize("verify", ["eager", "lazy"])
def test_a_record_comes_back_bit_for_bit(record: Path, verify: Any) -> None:
    found = read_record(record, verify)
    assert equal(make_batch(), found.batch)
    assert found.batch.info["nested"] == {"k": [1, 2]} and np.isnan(found.batch.info["grad_norm"])
    assert found.header.fingerprints == {"rollout": {"temperature": 0.6, "$odd": 1}}
    assert (found.header.step, found.header.call, found.header.weight_version) == (2, 1, 3)
    assert found.nbytes == sum(p.stat().st_size for p in record.iterdir())


def test_the_comparison_of_batches_can_fail() -> None:
    batch = make_batch()
    for name in batch.columns:
        column = batch[name]
        if isinstance(column, Ragged):
            values = column.values.copy()
            values[0] += 1
            other: Any = Ragged(values, column.lengths)
        else:
            other = column[::-1].copy()
        assert not equal(batch, Batch(batch.sample_id, {**batch.columns, name: other}, batch.meanings)), name


def test_other_programs_can_read_the_files(record: Path) -> None:
    tensors = safetensors.numpy.load_file(record / "tensors.safetensors")
    assert tensors["response_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert tensors["response_ids.lengths"].tolist() == [3, 0, 1, 2, 1]
    columns = json.loads((record / "columns.json").read_text())
    assert columns["response"] == make_batch()["response"]
    assert json.loads((record / "record.json").read_text())["stage"] == "rollout"


def test_a_record_without_columns_or_samples(tmp_path: Path) -> None:
    write_record(tmp_path / "none", Draft(Header("r", "sync", 1), capture(Batch((), {}, {}, {"weights": "sha256:0"}))))
    assert read_record(tmp_path / "none").batch.info == {"weights": "sha256:0"}
    empty = Batch((), {"reward": np.zeros(0), "response_ids": Ragged.from_rows([], np.int32), "response": []})
    write_record(tmp_path / "empty", Draft(Header("r", "rollout", 1), capture(empty)))
    assert equal(empty, read_record(tmp_path / "empty", "eager").batch)


def test_what_is_loaded_may_be_changed_in_place_without_changing_the_record(record: Path) -> None:
    before = (record / "tensors.safetensors").read_bytes()
    batch = read_record(record).batch
    batch.ragged("response_ids").values[:] = 0
    batch.array("reward")[:] = 0
    assert (record / "tensors.safetensors").read_bytes() == before
    assert equal(make_batch(), read_record(record).batch)


def test_a_record_is_never_overwritten(record: Path) -> None:
    before = {p.name: p.read_bytes() for p in record.iterdir()}
    with pytest.raises(RecordExists, match="never overwritten"):
        write_record(record, make_draft())
    assert {p.name: p.read_bytes() for p in record.iterdir()} == before
    assert [p.name for p in record.parent.iterdir()] == ["r"]


def test_a_missing_record_is_told_from_a_corrupt_one(tmp_path: Path) -> None:
    with pytest.raises(RecordMissing):
        read_record(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorruptRecord, match=r"has no record\.json"):
        read_record(tmp_path / "empty")


def test_every_changed_byte_is_refused(record: Path) -> None:
    for name in FILES:
        original = (record / name).read_bytes()
        for at in range(0, len(original), 1 if FUZZ >= 10_000 else 3):
            flipped = bytearray(original)
            flipped[at] ^= 1 << (at % 8)
            (record / name).write_bytes(flipped)
            with pytest.raises(CorruptRecord, match=name.replace(".", r"\.")):
                read_record(record, "eager")
        (record / name).write_bytes(original)
    assert equal(make_batch(), read_record(record, "eager").batch)


def test_every_truncation_and_extension_is_refused(record: Path) -> None:
    for name in FILES:
        original = (record / name).read_bytes()
        for size in range(0, len(original), 1 if name != "record.json" else 7):
            (record / name).write_bytes(original[:size])
            with pytest.raises(CorruptRecord):
                read_record(record, "eager")
        (record / name).write_bytes(original + b"\0")
        with pytest.raises(CorruptRecord):
            read_record(record, "eager")
        (record / name).write_bytes(original)


def test_a_lazy_reader_checks_a_column_before_it_is_used(record: Path) -> None:
    path = record / "tensors.safetensors"
    slot = read_record(record)._slots["response_ids"]
    damage(path, lambda b: b[: slot.start] + b"\xff" + b[slot.start + 1 :])
    opened = read_record(record, "lazy")
    assert opened.only(["reward"])["reward"][0] == 1.0
    with pytest.raises(
        CorruptRecord, match=rf"'response_ids' at offset {slot.start}: digest sha256:\w+, expected sha256"
    ):
        opened.only(["response_ids"])
    with pytest.raises(CorruptRecord):
        read_record(record, "eager")


def test_without_its_digest_a_changed_byte_would_be_accepted(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted control: with the comparison of digests switched off, the tests above would fail."""
    start = read_record(record)._slots["response_ids"].start
    damage(record / "tensors.safetensors", lambda b: b[:start] + b"\xff" + b[start + 1 :])
    monkeypatch.setattr(Record, "_compare", lambda *args: None)
    assert read_record(record, "eager").batch.ragged("response_ids").values[0] == 255


@pytest.mark.parametrize("name", FILES)
def test_files_of_two_records_cannot_be_mixed(record: Path, tmp_path: Path, name: str) -> None:
    other = Batch(make_batch().sample_id, {**make_batch().columns, "reward": np.ones(5), "response": list("abcde")})
    write_record(tmp_path / "other", make_draft(other))
    (record / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(CorruptRecord):
        read_record(record, "eager")


def test_links_extra_files_and_pipes_are_refused(record: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(record)
    with pytest.raises(CorruptRecord, match="not a folder"):
        read_record(tmp_path / "link")
    (record / "extra.pkl").write_bytes(b"")
    with pytest.raises(CorruptRecord, match=r"extra\.pkl"):
        read_record(record)
    (record / "extra.pkl").unlink()
    for name in FILES:
        (record / name).rename(tmp_path / name)
        (record / name).symlink_to(tmp_path / name)
        with pytest.raises(CorruptRecord, match="links are not followed"):
            read_record(record)
        (record / name).unlink()
        os.mkfifo(record / name)
        with pytest.raises(CorruptRecord, match="not a plain file"):
            read_record(record)
        (record / name).unlink()
        with pytest.raises(CorruptRecord):
            read_record(record)
        (tmp_path / name).rename(record / name)
    assert equal(make_batch(), read_record(record, "eager").batch)


def _set(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("schema_version", value=2),
        _set("schema_version", value="1"),
        _set("unknown", value=1),
        lambda body: body.pop("stage"),
        _set("stage", value="../../etc"),
        _set("step", value=-1),
        _set("step", value=True),
        _set("split", value=["train"]),
        _set("sample_id", value=["a"] * 5),
        _set("sample_id", value=["a"]),
        _set("sample_id", value={"a": 1}),
        _set("fields", value=[]),
        _set("fields", "../x", value={}),
        _set("fields", "reward", value=None),
        _set("fields", "reward", "kind", value="pickle"),
        _set("fields", "reward", "dtype", value="object"),
        _set("fields", "reward", "dtype", value="float32"),
        _set("fields", "reward", "digest", value="sha256:zz"),
        _set("fields", "response_ids", "values", value=1 << 60),
        _set("fields", "response_ids", "values", value=6),
        _set("fields", "response", "offset", value=1 << 60),
        _set("fields", "response", "nbytes", value=1 << 60),
        _set("fields", "response", "nbytes", value=3),
        _set("fields", "response", "offset", value=-5),
        _set("files", "tensors.safetensors", "nbytes", value=1 << 60),
        _set("files", "tensors.safetensors", "head", value=None),
        _set("files", "columns.json", "head", value="sha256:" + "0" * 64),
        _set("files", "../../etc/passwd", value={"nbytes": 1, "head": None}),
        lambda body: body["files"].pop("columns.json"),
        _set("reads", "prompt_ids", "marks", value="sha256:" + "0" * 64),
        _set("reads", value={}),
        _set("meanings", "rollout_log_probs", "temperature", value="hot"),
        _set("versions", "crossrl", value=3),
        _set("left_out", value=[1]),
        _set("info", value=[]),
    ],
)
def test_a_signed_record_json_with_wrong_content_is_refused(
    record: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    resign(record / "record.json", change)
    with pytest.raises(CorruptRecord):
        read_record(record, "eager")


def test_resigning_an_unchanged_record_keeps_it_valid(record: Path) -> None:
    """The control of the test above: what refuses there is the content, not the signing."""
    resign(record / "record.json", lambda body: None)
    assert equal(make_batch(), read_record(record, "eager").batch)


@pytest.mark.parametrize(
    "text",
    [
        b'{"schema_version":1,"schema_version":1}',
        b'{"schema_version":NaN}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"schema_version":1e400}',
        b'{"schema_version":' + b"9" * 10_000 + b"}",
        b'{"\xff":1}',
        b'{"$bytes":"aa"}',
        b"{}",
        b"{",
    ],
)
def test_hostile_json_is_refused_without_harm(record: Path, text: bytes) -> None:
    write_signed(record / "record.json", text)
    tracemalloc.start()
    with pytest.raises(CorruptRecord):
        read_record(record)
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()


def _tensor_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of the tensor file, and sign it in ``record.json``."""
    data = (path / "tensors.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    entries = json.loads(data[8 : 8 + size])
    change(entries)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    (path / "tensors.safetensors").write_bytes(head + data[8 + size :])
    file = {"nbytes": len(head) + len(data) - 8 - size, "head": digest.plain_digest(head)}
    resign(path / "record.json", lambda body: body["files"].update({"tensors.safetensors": file}))


def _entry(name: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda entries: entries[name].update(values)


@pytest.mark.parametrize(
    "change",
    [
        _entry("reward", data_offsets=[0, 1 << 61]),
        _entry("reward", shape=[1 << 60]),
        _entry("reward", shape=[5, 1]),
        _entry("reward", shape=[-5]),
        _entry("reward", shape=[True]),
        _entry("reward", dtype="I64"),
        _entry("reward", dtype="BF16"),
        _entry("reward", dtype=None),
        _entry("reward", data_offsets=[8, 48]),
        _entry("reward", data_offsets=[40, 0]),
        _entry("response_ids", data_offsets=[0, 28]),
        lambda entries: entries.pop("reward"),
        lambda entries: entries.update(extra={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        lambda entries: entries.update({"a": 1}),
        lambda entries: entries["reward"].update(more=1),
    ],
)
def test_a_signed_tensor_header_with_wrong_content_is_refused(
    record: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    _tensor_header(record, change)
    with pytest.raises(CorruptRecord):
        read_record(record, "eager")


def test_lengths_beyond_all_sense_are_refused_even_when_signed(tmp_path: Path) -> None:
    """Four lengths of 2^62 add up to 0 in 64 bits, the number of values that there are."""
    lengths = np.full(4, 1 << 62, np.int64)
    assert int(lengths.sum()) == 0
    batch = Batch(tuple("abcd"), {"response_ids": Ragged.from_rows([[]] * 4, np.int32)})
    write_record(tmp_path / "r", Draft(Header("r", "rollout", 1), capture(batch)))
    found = read_record(tmp_path / "r")
    start = found._slots["response_ids.lengths"].start
    damage(tmp_path / "r" / "tensors.safetensors", lambda b: b[:start] + lengths.tobytes() + b[start + 32 :])
    signed = digest.ragged_digest("int32", lengths, np.zeros(0, np.int32))
    resign(tmp_path / "r" / "record.json", _set("fields", "response_ids", "digest", value=signed))
    with pytest.raises(CorruptRecord, match="length beyond its 0 values"):
        read_record(tmp_path / "r", "eager")


def _mutate(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(6)
        if kind == 0 and out:
            out[at % len(out)] = rng.randrange(256)
        elif kind == 1:
            del out[at : at + rng.randrange(1, 40)]
        elif kind == 2:
            out[at:at] = rng.randbytes(rng.randrange(1, 20))
        elif kind == 3:
            other = rng.randrange(len(out) + 1)
            out[at:at] = out[other : other + 30]
        elif kind == 4:
            out[at:at] = rng.choice([b"[", b"{", b'"', b"1e999", b"NaN", b"../", b"null", b"-1", b"9" * 30, b"$bytes"])
        else:
            out = out[:at]
    return bytes(out)


def test_a_fuzz_of_all_files_yields_only_clean_refusals(record: Path) -> None:
    """Half of the mutations are signed again, so that they reach the checks behind the digests.

    What is accepted after signing must still hold the recorded columns (their digests were not touched) unless the
    mutation changed what ``record.json`` says about the run.
    """
    rng = random.Random(0)
    original = {name: (record / name).read_bytes() for name in FILES}
    refused = 0
    for _ in range(FUZZ):
        name = rng.choice(FILES)
        mutated = _mutate(rng, original[name])
        signed = name == "record.json" and rng.random() < 0.7
        if signed:
            write_signed(record / name, b"{" + _mutate(rng, original[name][original[name].index(b"\n") + 1 :]))
        else:
            (record / name).write_bytes(mutated)
        try:
            batch = read_record(record, "eager").batch
        except CorruptRecord:
            refused += 1
        else:
            assert signed or mutated == original[name]
            for column in set(batch.columns) & set(make_batch().columns):
                assert repr(batch[column]) == repr(make_batch().only([column])[column]).replace("np.True_", "True"), (
                    column
                )
        (record / name).write_bytes(original[name])
    assert refused > FUZZ * 0.8
    assert sorted(p.name for p in record.parent.iterdir()) == ["r"]


def test_a_field_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    batch = Batch(("a", "b"), {"extra_info": [{"ok": 1}, {"bad": {1, 2}, "ok": 2}], "odd": np.array(["x", "y"])})
    with pytest.raises(CannotStore, match=r"extra_info of sample b, \$\.bad: a value of type builtins.set"):
        capture(batch, leave_out=False)
    snapshot = capture(batch)
    write_record(tmp_path / "r", Draft(Header("r", "rollout", 1), snapshot))
    found = read_record(tmp_path / "r", "eager")
    assert found.batch["extra_info"] == [{"ok": 1}, {"ok": 2}] and "odd" not in found.batch
    assert [(e.field, e.path) for e in found.header.left_out] == [("extra_info", "$.bad"), ("odd", "$")]


def test_capture_is_a_copy_of_arrays_and_of_nested_values(tmp_path: Path) -> None:
    assert not _reached(tmp_path / "copy", lambda batch: capture(batch))


def test_the_capture_test_fails_for_a_writer_that_keeps_references(tmp_path: Path) -> None:
    """The planted control: a capture without the copies."""

    def aliasing(batch: Batch) -> Any:
        from crossrl.tape.capture import Snapshot, capture_column

        columns = {n: capture_column(n, c, batch.sample_id, True, [], copy=False) for n, c in batch.columns.items()}
        return Snapshot(batch.sample_id, columns, {}, dict(batch.info))

    assert _reached(tmp_path / "alias", aliasing)


def _reached(path: Path, take: Callable[[Batch], Any]) -> bool:
    """Whether an in-place change after the capture reaches the record."""
    batch = make_batch()
    snapshot = take(batch)
    batch.ragged("response_ids").values[:] = 0
    batch.array("reward")[:] = 0
    batch["extra_info"][0]["a"]["b"].append("later")
    batch.info["nested"]["later"] = 1
    write_record(path, Draft(Header("r", "rollout", 1), snapshot))
    found = read_record(path).batch
    return not equal(make_batch(), Batch(found.sample_id, found.columns, make_batch().meanings)) or (
        "later" in found.info["nested"]
    )
