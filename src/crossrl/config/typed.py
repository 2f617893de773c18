"""From resolved values to the typed dataclasses, strictly: nothing is rounded, and no number is taken for a truth."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from crossrl.config.errors import ConfigError
from crossrl.config.keys import Leaf, leaves
from crossrl.config.root import RunConfig

_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
_TRUTHS = {"true": True, "false": False}


def build(values: Mapping[str, Any]) -> RunConfig:
    """``values``: one for each key of ours, by dotted path. Raises ``ConfigError`` that names all wrong ones."""
    converted, problems = {}, []
    for path, leaf in leaves().items():
        try:
            converted[path] = _convert(leaf, values[path])
        except (TypeError, ValueError):
            problems.append(f"{path}={values[path]!r}: want {type_text(leaf)}")
    if problems:
        raise ConfigError(problems)

    def make(cls: Any, prefix: str) -> Any:
        hints = typing.get_type_hints(cls)
        parts = {}
        for f in fields(cls):
            path = f"{prefix}{f.name}"
            parts[f.name] = make(hints[f.name], f"{path}.") if is_dataclass(hints[f.name]) else converted[path]
        return cls(**parts)

    config = make(RunConfig, "")
    assert isinstance(config, RunConfig)
    return config


def type_text(leaf: Leaf) -> str:
    """What a key takes, in words.

    >>> type_text(leaves()["trainer.num_threads"])
    'a whole number or null'
    """
    if leaf.is_list:
        text = "a list of numbers" if typing.get_args(leaf.kind) == (float,) else "a list of texts"
    else:
        text = _NAMES.get(leaf.kind, "a mapping")
    return f"{text} or null" if leaf.optional else text


def _convert(leaf: Leaf, value: Any) -> Any:
    if value is None and leaf.optional:
        return None
    if leaf.is_dict:
        if not isinstance(value, dict):
            raise TypeError
        return value
    if leaf.is_list:
        (kind,) = typing.get_args(leaf.kind)
        return [_scalar(kind, entry) for entry in value]
    return _scalar(leaf.kind, value)


def _scalar(kind: type, value: Any) -> Any:
    """Text is read as ``kind``, because ``${oc.env:NAME}`` gives text."""
    if isinstance(value, str):
        return _TRUTHS[value.lower()] if kind is bool and value.lower() in _TRUTHS else _from_text(kind, value)
    taken: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (int, float, bool)}
    if not isinstance(value, taken[kind]) or (isinstance(value, bool) and kind in (int, float)):
        raise TypeError
    return kind(value)


def _from_text(kind: type, text: str) -> Any:
    if kind is bool:
        raise ValueError
    return kind(text)
