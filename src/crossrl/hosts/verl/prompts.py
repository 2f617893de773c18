"""The prompts of one step as a batch of ours: which samples there will be, and what belongs to each of them.

verl's own ids are random, so records of two runs could not be joined by them. A sample's id here is
``{prompt}/{epoch}/{row}/{repeat}``: 8 digits of the digest of messages, data source and answer; passes over the data
before; ``extra_info.index`` of the data row; which of the n samples of the prompt. Where one step has the same prompt
twice, the second is ``{prompt}.1``. What has no place in a record (an image, a ``Decimal``) is told apart all the same;
whether it is left out of the record or refused is said by ``tape.unstorable``.

>>> samples([{"uid": "x", "raw_prompt": [], "index": 7}], n=2, epoch=0).sample_id
('fb0bad0c/0/7/0', 'fb0bad0c/0/7/1')
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from crossrl.batch import Batch
from crossrl.tape.digest import json_digest
from crossrl.tape.values import Unstorable, dumps, loads, plain

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
FIELDS = ("group_id", "prompt", "data_source", "ground_truth", "extra_info")


def samples(rows: Sequence[Mapping[str, Any]], n: int, epoch: int) -> Batch:
    """The batch that a step's rollout reads: ``n`` samples for each of ``rows`` (verl's columns by name, one prompt
    each), in their order."""
    groups = _groups(rows, epoch)
    columns: dict[str, list[Any]] = {name: [] for name in FIELDS}
    for row, group in zip(rows, groups, strict=True):
        values = (
            group, _messages(row), str(row.get("data_source", "")), _answer(row), row.get("extra_info"),
        )  # fmt: skip
        for name, value in zip(FIELDS, values, strict=True):
            columns[name] += [value] * n
    return Batch(tuple(f"{group}/{repeat}" for group in groups for repeat in range(n)), columns)


def _groups(rows: Iterable[Mapping[str, Any]], epoch: int) -> list[str]:
    seen: Counter[str] = Counter()
    groups = []
    for row in rows:
        what = [_messages(row), str(row.get("data_source", "")), _answer(row)]
        digest = json_digest(identity(what)).partition(":")[2][:8]
        place = f"{epoch}/{identity(row.get('index', 0))}"
        count = seen[f"{digest}/{place}"]
        seen[f"{digest}/{place}"] += 1
        groups.append(f"{digest}{f'.{count}' if count else ''}/{place}")
    return groups


def _messages(row: Mapping[str, Any]) -> Any:
    return list(row["raw_prompt"])


def _answer(row: Mapping[str, Any]) -> Any:
    return (row.get("reward_model") or {}).get("ground_truth")


def identity(value: Any) -> Any:
    """``value`` for a digest: what a record can hold as it is there, anything else by its type and content.

    >>> from decimal import Decimal
    >>> identity({"n": 1, "d": Decimal("0.10")})
    {'n': 1, 'd': "decimal.Decimal: Decimal('0.10')"}
    """
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _content(key): identity(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        return identity(value.tolist())
    if isinstance(value, (list, tuple)):
        return [identity(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return [_kind(value), sorted(json_digest(identity(entry)) for entry in value)]
    try:
        return loads(dumps(plain(value)))
    except Unstorable:
        return _content(value)


def _content(value: Any) -> str:
    """The same in every process: images and tensors by their bytes, others by their text without addresses."""
    if hasattr(value, "numpy") and hasattr(value, "detach"):  # a tensor, whose text is abridged
        value = value.detach().cpu()
        return f"{_kind(value)} {value.dtype} {tuple(value.shape)}: {hashlib.sha256(_bytes_of(value)).hexdigest()}"
    if hasattr(value, "tobytes"):
        size = getattr(value, "size", "")
        return f"{_kind(value)} {size}: {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, int):  # Python refuses to write very large ones in decimal
        return f"{_kind(value)}: {value:#x}"
    return f"{_kind(value)}: {_ADDRESS.sub('', repr(value))}"


def _bytes_of(tensor: Any) -> bytes:
    import torch

    found: bytes = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return found


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
