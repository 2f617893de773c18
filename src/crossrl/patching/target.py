"""From ``module:qualname`` to the object that lies there and the source that it was made from."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from crossrl.patching.fingerprint import Definition, definitions, first_line, source_of
from crossrl.patching.patch import PatchRefused

Kind = type[staticmethod] | type[classmethod] | type[property] | None
_SUPPORTED = (
    "supported are Python functions, methods, static and class methods and properties, also when decorated by "
    "decorators that keep __wrapped__ (functools.wraps)"
)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place that a target names, with what lies there now.

    ``owner``: the module or class. ``raw``: the attribute as the owner's namespace has it (perhaps a ``staticmethod``).
    ``function``: the function in it: what a wrapper gets.
    """

    owner: ModuleType | type
    name: str
    raw: Any
    kind: Kind
    function: FunctionType

    def put(self, function: Any) -> None:
        """Let ``function`` take the place of ``self.function``. Raises ``PatchRefused`` if the owner forbids it."""
        new = function
        if self.kind is property:
            new = property(function, self.raw.fset, self.raw.fdel, self.raw.__doc__)
        elif self.kind is not None:
            new = self.kind(function)
        self.put_raw(new)

    def put_raw(self, raw: Any) -> None:
        try:
            setattr(self.owner, self.name, raw)
        except (TypeError, AttributeError) as error:
            raise PatchRefused(f"{self.owner.__name__}.{self.name} cannot be replaced: {error}") from error


@dataclass(frozen=True, slots=True)
class Source:
    """The definition of a function, and its text."""

    node: Definition
    text: str


def find(module: ModuleType, qualname: str) -> Slot:
    """The slot that ``qualname`` names in ``module``. Raises ``PatchRefused`` if what it holds cannot be patched."""
    owner: Any = module
    *classes, name = qualname.split(".")
    target = f"{module.__name__}:{qualname}"
    for part in classes:
        inner = vars(owner).get(part)
        if not isinstance(inner, type):
            what = "is not there" if inner is None else f"is a {type(inner).__name__}, not a class"
            raise PatchRefused(f"{target}: {owner.__name__}.{part} {what}")
        owner = inner
    if name not in vars(owner):
        raise PatchRefused(f"{target}: {_missing(owner, name)}")
    raw = vars(owner)[name]
    kind: Kind = next((k for k in (staticmethod, classmethod, property) if type(raw) is k), None)
    function = raw.fget if kind is property else raw.__func__ if kind else raw
    if not isinstance(function, FunctionType):
        raise PatchRefused(f"{target} is a {type(function).__name__}: {_SUPPORTED}")
    return Slot(owner, name, raw, kind, function)


def source(module: ModuleType, slot: Slot, qualname: str) -> Source:
    """The source that ``slot.function`` was made from, below all decorators and patches.

    Raises ``PatchRefused`` where it cannot be known: no source file, another module's function, a file that changed
    since it was imported, a decorator that hides what it decorates.
    """
    target = f"{module.__name__}:{qualname}"
    innermost = inspect.unwrap(slot.function)
    if not isinstance(innermost, FunctionType):
        raise PatchRefused(f"{target} is around a {type(innermost).__name__}: {_SUPPORTED}")
    file = innermost.__code__.co_filename
    if not _same_file(file, getattr(module, "__file__", None)):
        raise PatchRefused(
            f"{target} is {innermost.__module__}.{innermost.__qualname__} of {file}, not of {module.__name__}: it was "
            f"imported from there, replaced by other code, or decorated without functools.wraps. Name the function "
            f"where it is defined, and patch it before others do"
        )
    linecache.checkcache(file)
    text = "".join(linecache.getlines(file, vars(module)))
    if not text:
        raise PatchRefused(f"{target}: the source {file} is not available, so it cannot be compared")
    try:
        there = definitions(parsed(text), qualname)
    except SyntaxError as error:
        raise PatchRefused(f"{target}: the source {file} was changed after it was imported: {error}") from error
    for node in there:
        if first_line(node) == innermost.__code__.co_firstlineno and node.name == innermost.__code__.co_name:
            return Source(node, source_of(node, text))
    lines = ", ".join(str(first_line(node)) for node in there)
    raise PatchRefused(
        f"{target} was made at line {innermost.__code__.co_firstlineno} of {file}, where there is no definition of it "
        f"({f'there is at line {lines}' if there else 'nor anywhere else'}): a decorator without functools.wraps made "
        f"it, or the file was changed after it was imported"
    )


@functools.lru_cache(maxsize=8)
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _same_file(a: str, b: str | None) -> bool:
    return b is not None and (a == b or Path(a).resolve() == Path(b).resolve())


def _missing(owner: Any, name: str) -> str:
    if isinstance(owner, ModuleType):
        lazily = (
            " (the module makes attributes on demand; that is not supported)" if "__getattr__" in vars(owner) else ""
        )
        return f"{owner.__name__} has no {name}{lazily}"
    for base in owner.__mro__[1:]:
        if name in vars(base):
            return (
                f"{owner.__name__} inherits {name}; name it where it is defined: {base.__module__}:{base.__qualname__}"
            )
    return f"class {owner.__name__} has no {name}"
