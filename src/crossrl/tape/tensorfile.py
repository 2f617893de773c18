"""One-dimensional arrays in a safetensors file: its layout, and a reader that trusts nothing.

The format (https://huggingface.co/docs/safetensors) is an 8-byte little-endian header length, a JSON header
(name to dtype, shape and offsets), then the data. It is written and read here directly, because a record is
hashed piece by piece and mapped, and because every byte must be accounted for: data without gaps or overlaps, a
header that has its own digest in ``record.json``. The ``safetensors`` package reads these files as well.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from crossrl.tape.values import BadJson, dumps, loads

DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64",
}  # fmt: skip
_BY_CODE = {code: name for name, code in DTYPES.items()}
MAX_HEADER = 1 << 20


class BadTensors(ValueError):
    """The header of a tensor file is not what was written."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one array lies. ``dtype``: NumPy's name. ``start``: byte in the file. ``size``: number of values."""

    name: str
    dtype: str
    size: int
    start: int

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize


def layout(arrays: Mapping[str, np.ndarray]) -> tuple[bytes, list[str]]:
    """The file's first bytes (length and header), and the order in which the arrays' data follow.

    Wide types come first, so that each array is aligned when the file is mapped.
    """
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    entries, at = {}, 0
    for name in order:
        end = at + arrays[name].nbytes
        entries[name] = {
            "dtype": DTYPES[arrays[name].dtype.name], "shape": [arrays[name].size], "data_offsets": [at, end],
        }  # fmt: skip
        at = end
    text = dumps(entries)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, order


def head_size(first: bytes, file_size: int) -> int:
    """How many bytes length and header take, from the file's first 8 bytes."""
    if len(first) < 8:
        raise BadTensors(f"the file ends at byte {len(first)}, inside the header's length")
    length = struct.unpack("<Q", first[:8])[0]
    if length > min(MAX_HEADER, file_size - 8):
        raise BadTensors(f"offset 0: a header of {length} bytes in a file of {file_size} bytes (limit {MAX_HEADER})")
    return 8 + length


def parse(head: bytes, file_size: int) -> dict[str, Slot]:
    """The arrays that the header names; they cover the rest of the file exactly."""
    try:
        entries = loads(head[8:])
    except BadJson as error:
        raise BadTensors(f"offset 8: header is {error}") from None
    if not isinstance(entries, dict):
        raise BadTensors("offset 8: the header is not a map")
    slots = [_slot(name, entry, len(head)) for name, entry in entries.items()]
    at = len(head)
    for slot in sorted(slots, key=lambda s: (s.start, s.nbytes)):
        if slot.start != at:
            raise BadTensors(f"tensor {slot.name!r} starts at byte {slot.start}, expected {at} (no gaps, no overlaps)")
        at += slot.nbytes
    if at != file_size:
        raise BadTensors(f"the tensors end at byte {at}, the file at byte {file_size}")
    return {slot.name: slot for slot in slots}


def _slot(name: str, entry: object, base: int) -> Slot:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise BadTensors(f"tensor {name!r:.80}: its header entry is malformed")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _BY_CODE:
        raise BadTensors(f"tensor {name!r:.80}: unknown dtype {code!r:.80}")
    if not _counts(shape, 1) or not _counts(offsets, 2):
        raise BadTensors(f"tensor {name!r:.80}: shape {shape!r:.80}, offsets {offsets!r:.80}")
    slot = Slot(name, _BY_CODE[code], shape[0], base + offsets[0])
    if slot.nbytes != offsets[1] - offsets[0]:
        raise BadTensors(
            f"tensor {name!r:.80}: {slot.size} values of {slot.dtype} do not fill {offsets[1] - offsets[0]} bytes"
        )
    if slot.start % np.dtype(slot.dtype).itemsize:
        raise BadTensors(f"tensor {name!r:.80}: byte {slot.start} is no aligned start for {slot.dtype}")
    return slot


def _counts(value: object, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(type(v) is int and 0 <= v < 1 << 62 for v in value)


def view(buffer: memoryview, slot: Slot) -> np.ndarray:
    """The array as a view of the mapped file."""
    dtype = np.dtype(slot.dtype).newbyteorder("<")
    return np.frombuffer(buffer, dtype, slot.size, slot.start) if slot.size else np.zeros(0, dtype)
