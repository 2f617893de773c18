"""Strings and nested values as JSON and back, with their types.

What is stored, and how it comes back:

- ``None``, ``bool``, ``int``, ``float`` (shortest form that reads back to the same bits), ``str``, ``list``, and
  ``dict`` with string keys (their order kept): the same;
- a NaN or an infinity: ``{"$float": "nan" | "inf" | "-inf"}``; ``bytes``: ``{"$bytes": base64}``: the same;
- NumPy booleans, integers and floats: as Python's ``bool``, ``int`` and ``float``; a NumPy array, a tuple: as a list;
- a key that begins with ``$`` is written with one ``$`` more.

Anything else (a set, an object, a date, a key that is no string, more than 64 levels) cannot be stored: it is
named, with the sample and the path to it, and either refused or left out (see ``encode_column``).
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

MAX_DEPTH = 64
MAX_INT_BITS = 4096
MAX_LISTED = 50
_INDEX = re.compile(r"\[\d+\]")
_NOTHING = object()
_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Unstorable(ValueError):
    """``path``: where in the value, such as ``$.tests[2]``; ``what``: what is there."""

    def __init__(self, path: str, what: str) -> None:
        self.path, self.what = path, what
        super().__init__(f"{what} at {path}")


class BadJson(ValueError):
    """Text that is not the JSON that this module writes."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that was not stored. ``count``: in how many samples; ``sample_id``: the first of them."""

    field: str
    path: str
    what: str
    sample_id: str
    count: int = 1


def plain(value: Any, left_out: list[Unstorable] | None = None) -> Any:
    """``value`` as what ``json`` can write.

    With ``left_out``, map entries that cannot be stored are left out and listed there. Raises ``Unstorable`` for the
    first thing that cannot be stored (with ``left_out``: that is in no map).
    """
    return _plain(value, "$", 0, left_out)


def _plain(value: Any, path: str, depth: int, left_out: list[Unstorable] | None) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, np.integer)):
        number = int(value)
        if number.bit_length() > MAX_INT_BITS:
            raise Unstorable(path, f"an integer of {number.bit_length()} bits (limit {MAX_INT_BITS})")
        return number
    if isinstance(value, (float, np.floating)) and not isinstance(value, np.longdouble):
        number_ = float(value)
        return number_ if math.isfinite(number_) else {"$float": str(number_)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if depth >= MAX_DEPTH:
        raise Unstorable(path, f"a value nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{path}[{i}]", depth + 1, left_out) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        return _plain_map(value, path, depth, left_out)
    raise Unstorable(path, f"a value of type {kind.__module__}.{kind.__qualname__}")


def _plain_map(value: Mapping[Any, Any], path: str, depth: int, left_out: list[Unstorable] | None) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, entry in value.items():
        try:
            if not isinstance(key, str):
                raise Unstorable(path, f"a key of type {type(key).__name__}")
            name = str.__str__(key)
            stored = _plain(entry, f"{path}.{name}", depth + 1, left_out)
        except Unstorable as error:
            if left_out is None:
                raise
            left_out.append(error)
            continue
        out[f"${name}" if name.startswith("$") else name] = stored
    return out


def dumps(value: Any, sort_keys: bool = False, indent: int | None = None) -> bytes:
    """Already ``plain`` JSON as UTF-8; a lone surrogate becomes its ``\\udxxx`` escape, which JSON reads back."""
    encoder = _COMPACT
    if sort_keys or indent is not None:
        separators = (",", ": ") if indent is not None else (",", ":")
        encoder = json.JSONEncoder(
            ensure_ascii=False, allow_nan=False, sort_keys=sort_keys, indent=indent, separators=separators
        )
    return encoder.encode(value).encode("utf-8", "backslashreplace")


def normal(value: Any) -> Any:
    """A copy of a map as it would come back from a record; entries that cannot be stored are left out."""
    return loads(dumps(plain(value, [])))


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values have equal bytes. Raises ``Unstorable``."""
    return dumps(plain(value), sort_keys=True)


def loads(data: bytes) -> Any:
    """Read what ``dumps(plain(...))`` wrote.

    Raises ``BadJson`` for text that is not UTF-8 or not JSON, keys that occur twice, NaN literals, numbers out of
    range, unknown ``$`` tags and nesting that exhausts the stack.
    """
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite
        )
    except RecursionError:
        raise BadJson("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise BadJson(f"not UTF-8 at byte {error.start}") from None
    except BadJson:
        raise
    except ValueError as error:
        raise BadJson(f"not JSON: {str(error)[:200]}") from None


def _object(pairs: list[tuple[str, Any]]) -> Any:
    if len(pairs) == 1 and pairs[0][0] in ("$float", "$bytes"):
        tag, text = pairs[0]
        if tag == "$float" and isinstance(text, str) and text in _FLOATS:
            return _FLOATS[text]
        if tag == "$bytes" and isinstance(text, str):
            return base64.b64decode(text, validate=True)
        raise BadJson(f"tag {tag} with {text!r:.80}")
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key.startswith("$"):
            if not key.startswith("$$"):
                raise BadJson(f"unknown tag {key!r:.80}")
            key = key[1:]
        if key in out:
            raise BadJson(f"key {key!r:.80} occurs twice")
        out[key] = value
    return out


def _no_constant(name: str) -> Any:
    raise BadJson(f"the literal {name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadJson(f"number {text[:80]} is out of range")
    return value


def encode_column(
    name: str, column: Sequence[Any], sample_id: Sequence[str], leave_out: bool
) -> tuple[list[bytes], list[LeftOut]]:
    """The JSON of each sample's value, and what was left out.

    With ``leave_out``, the smallest map entry around something that cannot be stored is left out (a value in no map
    becomes null) and listed once per path and type, so that one odd sub-field does not stop a training run.
    Without it such a thing raises ``Unstorable``, whose path begins with the field's name and sample id.
    """
    texts: list[bytes] = []
    missing: dict[tuple[str, str], LeftOut] = {}
    last: Any = _NOTHING
    for sample, value in zip(sample_id, column, strict=True):
        if value is last:  # the members of a group share their prompt
            texts.append(texts[-1])
            continue
        dropped: list[Unstorable] = []
        try:
            stored = plain(value, dropped if leave_out else None)
        except Unstorable as error:
            if not leave_out:
                raise Unstorable(f"{name} of sample {sample}, {error.path}", error.what) from None
            stored, dropped = None, [*dropped, error]
        for each in dropped:
            _count(missing, LeftOut(name, _INDEX.sub("[*]", each.path), each.what, sample))
        texts.append(dumps(stored))
        last = _NOTHING if dropped else value
    return texts, list(missing.values())


def _count(missing: dict[tuple[str, str], LeftOut], new: LeftOut) -> None:
    """One entry per path and type; beyond ``MAX_LISTED`` of them the rest share one, so that a record stays small."""
    if (new.path, new.what) not in missing and len(missing) >= MAX_LISTED:
        new = LeftOut(new.field, "...", "more of the kind", new.sample_id)
    first = missing.get((new.path, new.what))
    missing[new.path, new.what] = replace(first, count=first.count + 1) if first else new


def join_column(texts: Sequence[bytes]) -> bytes:
    """The column's JSON as stored: one array, one sample per line."""
    return b"[" + b",\n".join(texts) + b"]"
