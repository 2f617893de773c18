"""Which keys there are: ours, which have an effect; and verl's, which scripts may also set."""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import resources
from typing import Any

from omegaconf import OmegaConf

from crossrl.config.root import RunConfig


@dataclass(frozen=True, slots=True)
class Leaf:
    """A key that has an effect. ``kind``: its type without ``| None``; ``allowed``: its values, empty for any."""

    path: str
    kind: Any
    optional: bool
    allowed: tuple[str, ...]
    owner: type
    name: str

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.kind) is list

    @property
    def is_dict(self) -> bool:
        return typing.get_origin(self.kind) is dict


@functools.cache
def leaves() -> dict[str, Leaf]:
    """Our keys in the order of the dataclasses, by dotted path."""
    found: dict[str, Leaf] = {}

    def walk(cls: type, prefix: str) -> None:
        hints = typing.get_type_hints(cls)
        for f in fields(cls):
            kind, path = hints[f.name], f"{prefix}{f.name}"
            if is_dataclass(kind) and isinstance(kind, type):
                walk(kind, f"{path}.")
                continue
            options = [a for a in typing.get_args(kind) if a is not types.NoneType]
            optional = typing.get_origin(kind) is types.UnionType
            found[path] = Leaf(
                path, options[0] if optional else kind, optional, f.metadata.get("allowed", ()), cls, f.name
            )

    walk(RunConfig, "")
    return found


@functools.cache
def default_tree() -> Mapping[str, Any]:
    """Defaults as nested mappings; one that follows another key is that key's name in ``${}``. Not to be changed."""
    tree: Any = OmegaConf.to_container(OmegaConf.structured(RunConfig), resolve=False)
    return tree


def at(tree: Any, path: str) -> Any:
    """The value at a dotted path of nested mappings."""
    for part in path.split("."):
        tree = tree[part]
    return tree


def defaults() -> dict[str, Any]:
    """Dotted path to default."""
    return {path: at(default_tree(), path) for path in leaves()}


@functools.cache
def groups() -> frozenset[str]:
    """Paths that are groups of our keys, such as ``actor_rollout_ref.actor``."""
    return frozenset(prefix for path in leaves() for prefix in prefixes(path))


@functools.cache
def verl_keys() -> frozenset[str]:
    """Every key of verl 0.7.1 to 0.9.1; one that ends in ``.*`` stands for anything below it."""
    text = resources.files("crossrl.config").joinpath("verl_keys.txt").read_text(encoding="utf-8")
    return frozenset(text.split())


@functools.cache
def verl_groups() -> frozenset[str]:
    """Paths that are groups of verl's keys."""
    plain = (key.removesuffix(".*") for key in verl_keys())
    return frozenset(prefix for path in plain for prefix in prefixes(path))


def prefixes(path: str) -> list[str]:
    """The groups that a path lies in, outermost first.

    >>> prefixes("a.b.c")
    ['a', 'a.b']
    """
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def our_key(path: str) -> Leaf | None:
    """The key of ours that ``path`` is, or lies in if that key holds a mapping."""
    for candidate in (path, *prefixes(path)):
        leaf = leaves().get(candidate)
        if leaf is not None and (candidate == path or leaf.is_dict):
            return leaf
    return None


def is_verl_key(path: str) -> bool:
    """Whether verl knows ``path``, by name or because it lies in a free-form mapping."""
    known = verl_keys()
    if path.startswith("hydra/"):  # choice of one of Hydra's own config groups
        return True
    return path in known or any(f"{p}.*" in known for p in (path, *prefixes(path)))


def nearest(path: str, limit: int = 3) -> list[str]:
    """Valid keys that ``path`` may be a misspelling of, likeliest first.

    Our own keys come before verl's; a key with the same last word counts as near wherever it is.
    """
    ours, last = list(leaves()), path.rsplit(".", 1)[-1]
    same_word = difflib.get_close_matches(path, [p for p in ours if p.rsplit(".", 1)[-1] == last], limit, 0.0)
    theirs = [key for key in verl_keys() if not key.endswith(".*")]
    close = _close(path, ours, limit, 0.75) + _close(path, theirs, limit, 0.9)
    words = {p.rsplit(".", 1)[-1]: p for p in reversed(ours)}
    like_word = [words[w] for w in difflib.get_close_matches(last, words, limit, 0.75)]
    return list(dict.fromkeys(same_word + close + like_word))[:limit]


def nearest_prefixes(prefix: str, limit: int = 3) -> list[str]:
    """Beginnings of keys that ``prefix`` may stand for: where it is a word of a key, else what is spelled alike.

    >>> nearest_prefixes("optim"), nearest_prefixes("trainr", 1)
    (['actor_rollout_ref.actor.optim'], ['trainer'])
    """
    known = [*sorted(groups()), *leaves()]
    word = prefix.strip(".")
    as_word = [p for p in known if f".{p}".endswith(f".{word}")]
    return list(dict.fromkeys(as_word or _close(prefix, known, limit, 0.6) or nearest(prefix, limit)))[:limit]


def _close(path: str, candidates: Iterable[str], limit: int, cutoff: float) -> list[str]:
    return difflib.get_close_matches(path, sorted(candidates), limit, cutoff)
