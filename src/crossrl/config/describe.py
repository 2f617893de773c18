"""Every key with its default and its meaning, for ``crossrl train --help`` and the reference."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

from crossrl.config.keys import Leaf, defaults, leaves
from crossrl.config.spellings import ALIASES


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Field name to the text under it in the source of a config dataclass, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for item, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(after, ast.Expr):
            value = after.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs[item.target.id] = " ".join(value.value.split())
    return docs


def describe(prefix: str = "") -> str:
    """All keys that start with ``prefix``, by group: key=default, allowed values, meaning, other names."""
    older: dict[str, list[str]] = {}
    for alias, target in ALIASES.items():
        older.setdefault(target, []).append(alias)
    by_group: dict[str, list[str]] = {}
    for path, leaf in leaves().items():
        if path.startswith(prefix):
            meaning = textwrap.wrap(_meaning(leaf, older.get(path, [])), 100, break_on_hyphens=False)
            entry = [f"  {path}={_show(defaults()[path])}", *(f"      {line}" for line in meaning)]
            by_group.setdefault(path.rpartition(".")[0], []).extend(entry)
    return "\n\n".join("\n".join([f"{group}:", *entries]) for group, entries in by_group.items())


def _meaning(leaf: Leaf, older: list[str]) -> str:
    text = field_docs(leaf.owner)[leaf.name]
    if leaf.allowed:
        text += f" One of: {', '.join(leaf.allowed)}."
    return f"{text} Also spelled {', '.join(older)}." if older else text


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(str(v) for v in value)}]"
    return str(value)
