"""``record.json``: what a record says about itself, and the checks that it must pass before it is believed.

The file begins with the digest of all that follows, so a changed byte is found before anything is parsed:

    {"digest":"sha256:<64 hex digits>",
    "schema_version":1,
    ...}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from crossrl.batch import Meaning
from crossrl.tape import digest
from crossrl.tape.errors import Mismatch
from crossrl.tape.tensorfile import DTYPES
from crossrl.tape.values import BadJson, LeftOut, dumps, loads, plain

RECORD_VERSION = 1
MAX_BYTES = 64 << 20
TENSORS, COLUMNS, STATE, HEADER = "tensors.safetensors", "columns.json", "state.safetensors", "record.json"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_FILES = re.compile("|".join(re.escape(name) for name in (TENSORS, COLUMNS, STATE)))
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PREFIX = re.compile(rb'\{"digest":"(sha256:[0-9a-f]{64})",\n')


class BadHeader(ValueError):
    """``record.json`` is not what a writer of this version writes; the message says where."""


@dataclass(frozen=True, slots=True)
class FieldEntry:
    """A stored column. ``values``: how many numbers a ragged one holds in all. ``offset``, ``nbytes``: where a value
    column lies in ``columns.json``."""

    kind: Literal["ragged", "number", "value"]
    dtype: str
    digest: str
    values: int | None = None
    offset: int | None = None
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class ReadEntry:
    """A column that the stage was given. ``marks``: digest of the tensor ``reads.<name>``."""

    kind: Literal["ragged", "number", "value"]
    dtype: str
    digest: str
    marks: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A data file. ``head``: digest of what no field's digest covers (tensor file: its header; state: everything)."""

    nbytes: int
    head: str | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """Everything in ``record.json`` but its own digest.

    ``step``: 1-based training step (0: before training). ``call``: call of the stage within the step.
    ``index``: call of the stage within the run. ``accepted``: differences that were accepted in this run so far; a
    run with any is not a valid reproduction. ``weight_version``: of the trainer's weights when the stage had
    run; of an update, that is the version which it made.

    >>> Header(run_id="r", stage="reward", step=1).call
    0
    """

    run_id: str
    stage: str
    step: int
    call: int = 0
    split: str = "train"
    index: int = 0
    created: str = ""
    weight_version: int | None = None
    sample_id: tuple[str, ...] = ()
    fields: Mapping[str, FieldEntry] = field(default_factory=dict)
    reads: Mapping[str, ReadEntry] = field(default_factory=dict)
    meanings: Mapping[str, Meaning] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    accepted: tuple[Mismatch, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    schema_version: int = RECORD_VERSION

    @property
    def content(self) -> str:
        """Digest of the stage's output: ids, columns, meanings. Equal for two runs that computed the same."""
        each = {name: f.digest for name, f in self.fields.items()}
        return digest.batch_digest(self.sample_id, each, {n: asdict(m) for n, m in self.meanings.items()})


def to_bytes(header: Header) -> bytes:
    """``record.json``. Raises ``Unstorable`` when fingerprints or info hold what JSON cannot."""
    body = {"schema_version": header.schema_version}
    for each in fields(header):
        if each.name != "schema_version":
            body[each.name] = plain(_as_json(getattr(header, each.name)))
    text = dumps(body, indent=1)
    rest = text[text.index(b"\n") + 1 :]
    return f'{{"digest":"{digest.plain_digest(rest)}",\n'.encode() + rest


def _as_json(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    if isinstance(value, tuple):
        return [_as_json(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _as_json(v) for k, v in value.items()}
    return value


def from_bytes(data: bytes) -> Header:
    """Check and read ``record.json``. Raises ``BadHeader``."""
    prefix = _PREFIX.match(data)
    if prefix is None:
        raise BadHeader("offset 0: the file does not begin with its own digest")
    found, expected = digest.plain_digest(memoryview(data)[prefix.end() :]), prefix[1].decode()
    if found != expected:
        raise BadHeader(f"its bytes from offset {prefix.end()} have digest {found}, expected {expected}")
    try:
        body = loads(data)
    except BadJson as error:
        raise BadHeader(str(error)) from None
    version = body.get("schema_version") if isinstance(body, dict) else None
    if version != RECORD_VERSION:
        raise BadHeader(f"schema_version is {version!r:.80}; this version of crossrl reads {RECORD_VERSION}")
    _want(set(body) == {"digest"} | {f.name for f in fields(Header)}, "its set of keys", sorted(body))
    return _header(body)


def _header(body: dict[str, Any]) -> Header:
    for name in ("run_id", "created"):
        _want(isinstance(body[name], str), name, body[name])
    _want(isinstance(body["stage"], str) and bool(NAME.fullmatch(body["stage"])), "stage", body["stage"])
    for name in ("step", "call", "index"):
        _want(_count(body[name]), name, body[name])
    _want(body["split"] in ("train", "val"), "split", body["split"])
    _want(
        body["weight_version"] is None or type(body["weight_version"]) is int, "weight_version", body["weight_version"]
    )
    ids = body["sample_id"]
    _want(isinstance(ids, list) and all(isinstance(s, str) for s in ids), "sample_id", type(ids).__name__)
    _want(len(set(ids)) == len(ids), "sample_id", "an id that occurs twice")
    for name in ("info", "fingerprints", "versions"):
        _want(isinstance(body[name], dict), name, body[name])
    _want(all(isinstance(v, str) for v in body["versions"].values()), "versions", body["versions"])
    parsed: dict[str, Any] = {
        "sample_id": tuple(ids),
        "fields": _entries(body["fields"], "fields", FieldEntry, NAME),
        "reads": _entries(body["reads"], "reads", ReadEntry, NAME),
        "meanings": _entries(body["meanings"], "meanings", Meaning, NAME),
        "files": _entries(
            body["files"], "files", FileEntry, re.compile(f"{TENSORS}|{COLUMNS}|{STATE}".replace(".", r"\."))
        ),
        "accepted": _rows(body["accepted"], "accepted", Mismatch),
        "left_out": _rows(body["left_out"], "left_out", LeftOut),
    }
    for name, entry in parsed["fields"].items():
        _check_field(name, entry)
    for name, entry in parsed["reads"].items():
        _check_kind(f"reads.{name}", entry)
        _want(_is_digest(entry.marks), f"reads.{name}.marks", entry.marks)
    for name, entry in parsed["meanings"].items():
        kinds = (
            type(entry.temperature) in (int, float),
            isinstance(entry.truncation, str),
            isinstance(entry.engine, str),
        )
        _want(all(kinds) and type(entry.weight_version) is int, f"meanings.{name}", asdict(entry))
    for name, entry in parsed["files"].items():
        _want(_count(entry.nbytes) and (entry.head is None or _is_digest(entry.head)), f"files.{name}", asdict(entry))
        _want((entry.head is not None) == (name in (TENSORS, STATE)), f"files.{name}.head", entry.head)
    return Header(**{f.name: parsed.get(f.name, body[f.name]) for f in fields(Header)})


def _check_field(name: str, entry: FieldEntry) -> None:
    _check_kind(f"fields.{name}", entry)
    _want(
        _count(entry.values) if entry.kind == "ragged" else entry.values is None, f"fields.{name}.values", entry.values
    )
    for key, value in (("offset", entry.offset), ("nbytes", entry.nbytes)):
        _want(_count(value) if entry.kind == "value" else value is None, f"fields.{name}.{key}", value)


def _check_kind(where: str, entry: FieldEntry | ReadEntry) -> None:
    _want(entry.kind in ("ragged", "number", "value"), f"{where}.kind", entry.kind)
    known = ("json",) if entry.kind == "value" else tuple(DTYPES)
    _want(entry.dtype in known, f"{where}.dtype", entry.dtype)
    _want(_is_digest(entry.digest), f"{where}.digest", entry.digest)


def _entries(value: Any, where: str, kind: type, names: re.Pattern[str]) -> dict[str, Any]:
    _want(isinstance(value, dict) and all(names.fullmatch(n) for n in value), where, value)
    return {name: _entry(entry, f"{where}.{name}", kind) for name, entry in value.items()}


def _rows(value: Any, where: str, kind: type) -> tuple[Any, ...]:
    _want(isinstance(value, list), where, value)
    return tuple(_entry(entry, f"{where}[{i}]", kind) for i, entry in enumerate(value))


def _entry(value: Any, where: str, kind: type) -> Any:
    names = {f.name for f in fields(kind)}
    _want(isinstance(value, dict) and set(value) == names, where, value)
    return kind(**value)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and bool(_DIGEST.fullmatch(value))


def _want(good: bool, where: str, found: Any) -> None:
    if not good:
        raise BadHeader(f"{where} is not valid: {found!r:.200}")
