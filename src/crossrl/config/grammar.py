"""Hydra's override grammar on the command line: ``a.b=c``, ``+a=b``, ``++a=b``, ``~a``, lists, dicts, quotes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from crossrl.config.errors import ConfigError
from crossrl.config.keys import our_key

# In these a comma is part of the value; elsewhere Hydra takes it for a sweep.
TEXTS_WITH_COMMAS = (
    "tape.steps",
    "algorithm.rollout_correction.rollout_rs",
    "algorithm.rollout_correction.rollout_rs_threshold",
)


@dataclass(frozen=True, slots=True)
class Override:
    """``text``: as typed. ``value``: parsed; interpolations are still text. ``delete``: ``~key``."""

    text: str
    key: str
    value: Any
    delete: bool


def parse(texts: Sequence[str]) -> list[Override]:
    """Raises ``ConfigError`` that names every argument which cannot be read, or asks for a sweep."""
    parser, overrides, problems = OverridesParser.create(), [], []
    for text in texts:
        try:
            overrides.append(_parse_one(parser, text))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return overrides


def apply(overrides: Sequence[Override], tree: DictConfig) -> None:
    """Change ``tree`` in place, in order: the last one wins. A mapping is merged, a list replaced.

    ``+``, ``++`` and nothing all mean "set": whether a key may be set is for ``keys`` to say, and verl's own
    tree differs from version to version in which keys need the plus.
    """
    for o in overrides:
        if not o.delete:
            OmegaConf.update(tree, o.key, o.value, merge=True, force_add=True)
            continue
        parent, _, last = o.key.rpartition(".")
        node = OmegaConf.select(tree, parent, throw_on_missing=False) if parent else tree
        if isinstance(node, DictConfig) and last in node:
            del node[last]


def _parse_one(parser: OverridesParser, text: str) -> Override:
    key, equals, raw = text.partition("=")
    plain_key = key.lstrip("+~")
    if not plain_key or (not equals and not key.startswith("~")):
        raise ValueError(f"argument {text!r}: want key=value, such as trainer.total_training_steps=10")
    try:
        parsed = parser.parse_override(text)
    except HydraException as error:
        # A value such as reasoning_gym:chain_sum?size=5&seed=1 or ~/data needs no quotes: nothing in it groups.
        if not equals or any(c in raw for c in "[]{}\"'"):
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"argument {text!r}: {reason}; text with special characters needs quotes: {key}='\"...\"'"
            ) from None
        return Override(text, plain_key, raw, delete=False)
    if parsed.is_sweep_override() and plain_key in TEXTS_WITH_COMMAS:
        return Override(text, plain_key, raw, delete=False)
    if parsed.is_sweep_override():
        raise ValueError(f"argument {text!r} asks for a sweep, which is not supported: for a list write {key}=[{raw}]")
    value = parsed.value()
    leaf = our_key(plain_key)
    if leaf is not None and leaf.kind is str and isinstance(value, (int, float)) and not parsed.is_delete():
        value = raw  # experiment_name=1e5 is a name, not a number
    return Override(text, plain_key, value, parsed.is_delete())
