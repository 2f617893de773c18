"""Content digests: strong, order-sensitive, typed, and the same whatever the number of threads.

SHA-256 throughout. On a CPU with SHA instructions (x86 ``sha_ni``, ARMv8) it is about twice as fast as BLAKE2b
(measured here with ``hashlib``: 1.42 against 0.73 GiB/s on one thread), and it is the digest for which every
language and shell has a tool. Where the CPU has no such instructions BLAKE2b would be faster; one digest
that all records share is worth more than that.

Large payloads are hashed in two levels, so that threads can share the work: the payload is cut into chunks of
``CHUNK`` bytes (the last one may be shorter), each chunk has its SHA-256, and the digest is the SHA-256 of a
one-line header followed by the chunks' raw digests, in order. The header holds type, counts and payload
sizes, so no two different columns have the same input. An empty payload has no chunks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from crossrl.tape.values import canonical

CHUNK = 8 << 20
Buffer = bytes | bytearray | memoryview | np.ndarray


def _view(data: Buffer) -> memoryview:
    return as_bytes(data) if isinstance(data, np.ndarray) else memoryview(data).cast("B")


def default_threads() -> int:
    """How many threads hash a large payload when nobody says otherwise."""
    return min(8, os.cpu_count() or 1)


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a one-dimensional array, little-endian, without a copy where it already is so."""
    array = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return array.reshape(-1).view(np.uint8).data


def tree(header: str, payloads: Sequence[Buffer], threads: int | None = None) -> str:
    """``sha256:<hex>`` over the line ``header`` and the chunk digests of each of ``payloads``.

    The caller's header must contain each payload's size in bytes.
    """
    views = [_view(p) for p in payloads]
    chunks = [view[at : at + CHUNK] for view in views for at in range(0, len(view), CHUNK)]
    root = hashlib.sha256(f"{header}\n".encode("ascii"))
    workers = min(len(chunks), threads if threads is not None else default_threads())
    if workers > 1 and sum(map(len, chunks)) > CHUNK:  # a thread costs more than a small chunk
        with ThreadPoolExecutor(workers) as pool:
            leaves = list(pool.map(_leaf, chunks))
    else:
        leaves = [_leaf(chunk) for chunk in chunks]
    for leaf in leaves:
        root.update(leaf)
    return f"sha256:{root.hexdigest()}"


def _leaf(chunk: memoryview) -> bytes:
    return hashlib.sha256(chunk).digest()


def plain_digest(data: Buffer) -> str:
    """``sha256:<hex>`` of the bytes themselves: what ``sha256sum`` prints."""
    return f"sha256:{hashlib.sha256(_view(data)).hexdigest()}"


def ragged_digest(dtype: str, lengths: np.ndarray, values: np.ndarray, threads: int | None = None) -> str:
    """Of a ragged column: ``lengths`` int64 ``[N]``, then ``values`` of ``dtype`` ``[sum(lengths)]``."""
    header = f"crossrl.column/1 ragged {dtype} {len(lengths)} {lengths.nbytes} {values.nbytes}"
    return tree(header, [lengths, values], threads)


def number_digest(dtype: str, values: np.ndarray, threads: int | None = None) -> str:
    """Of a column of one number per sample."""
    return tree(f"crossrl.column/1 number {dtype} {len(values)} {values.nbytes}", [values], threads)


def value_digest(samples: int, text: bytes, threads: int | None = None) -> str:
    """Of a column of strings or nested values; ``text``: its JSON as stored (``crossrl.tape.values``)."""
    return tree(f"crossrl.column/1 value json {samples} {len(text)}", [text], threads)


def json_digest(value: Any) -> str:
    """Of a JSON-like value (a config, a fingerprint): keys sorted, so their order does not matter."""
    text = canonical(value)
    return tree(f"crossrl.json/1 {len(text)}", [text])


def batch_digest(sample_id: Sequence[str], fields: Mapping[str, str], meanings: Mapping[str, Any]) -> str:
    """Of a batch, from the digests of its columns (``fields``: name to digest) and what its log-probs mean."""
    return json_digest({"sample_id": list(sample_id), "fields": dict(fields), "meanings": dict(meanings)})


def named_digest(tensors: Iterable[tuple[str, str, Sequence[int], Buffer]], threads: int | None = None) -> str:
    """Of named tensors (weights, optimizer state): name, dtype, shape and bytes of each; their order does not matter.

    Bytes are given as a buffer because NumPy has no bfloat16: view such a tensor as uint16.
    """
    each = {}
    for name, dtype, shape, data in tensors:
        view = _view(data)
        header = f"crossrl.tensor/1 {dtype} {'x'.join(map(str, shape)) or 'scalar'} {len(view)}"
        each[name] = tree(header, [view], threads)
    return json_digest(each)
