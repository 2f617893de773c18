"""Fingerprints of source code: insensitive to comments, formatting and docstrings, sensitive to everything else.

A fingerprint is the hash of a function's normalised syntax tree, then three hexadecimal digits for its header and each
of its statements. The digits tell, without the old source, which statements changed.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from difflib import SequenceMatcher

Definition = ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)
# Not part of what code does: load or store (told by the place), comments that are types, and the u of u"".
_IGNORED = frozenset({"ctx", "type_comment", "kind"})
_DIGITS = 3


def fingerprint(node: Definition) -> str:
    """Of one function's definition: 32 hexadecimal digits, a colon, and 3 for the header and for each statement.

    >>> of = lambda text: fingerprint(ast.parse(text).body[0])
    >>> of("def f(x):  # why" + chr(10) + "    return (x)") == of("def f(x): return x")
    True
    >>> of("def f(x): return x")[32:]
    ':7c26bf'
    """
    entries = [text for text, _ in _entries(node)]
    whole = hashlib.sha256("\n".join(entries).encode()).hexdigest()[:32]
    return f"{whole}:{''.join(map(_short, entries))}"


def difference(expected: str, node: Definition, most: int = 3) -> list[str]:
    """What is other in ``node`` than in the source with fingerprint ``expected``: at most ``most`` lines of text."""
    digits = expected.partition(":")[2]
    old = [digits[i : i + _DIGITS] for i in range(0, len(digits), _DIGITS)]
    entries = list(_entries(node))
    lines = []
    for tag, i, j, k, m in SequenceMatcher(
        None, old, [_short(text) for text, _ in entries], autojunk=False
    ).get_opcodes():
        if tag == "equal":
            continue
        if k == m:
            where = (
                f"after line {entries[k - 1][1].lineno}, `{_first_line(entries[k - 1][1])}`" if k else "at the start"
            )
            lines.append(f"{j - i} statement{'s are' if j - i > 1 else ' is'} gone {where}")
            continue
        for index in range(k, m):
            kind = "new" if tag == "insert" else "changed"
            lines.append(f"line {entries[index][1].lineno} is {kind}: `{_first_line(entries[index][1])}`")
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]


def definitions(tree: ast.AST, qualname: str) -> list[Definition]:
    """All definitions of ``qualname`` (``f``, ``C.f``, ``C.D.f``) in a module's tree, branches of ``if``, ``try`` and
    ``with`` included."""
    name, _, rest = qualname.partition(".")
    found: list[Definition] = []
    for node in _level(tree):
        if getattr(node, "name", None) != name:
            continue
        if rest and isinstance(node, ast.ClassDef):
            found += definitions(node, rest)
        elif not rest and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node)
    return found


def first_line(node: Definition) -> int:
    """The line that a code object of ``node`` names as its first: that of the first decorator, if there is one."""
    return min(node.lineno, *(d.lineno for d in node.decorator_list)) if node.decorator_list else node.lineno


def source_of(node: Definition, text: str) -> str:
    """The lines of ``node``, decorators included, from its file's ``text``."""
    return "\n".join(text.splitlines()[first_line(node) - 1 : node.end_lineno])


def _level(tree: ast.AST) -> Iterator[ast.AST]:
    """Definitions of one scope."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, _DEFINITIONS):
            yield child
        elif isinstance(child, _BLOCKS):
            yield from _level(child)


def _entries(node: Definition) -> Iterator[tuple[str, ast.stmt]]:
    """The normalised text of the header and of each statement, in order, each with its node."""
    yield _dump(node), node
    yield from _block(node, 1)


def _block(node: ast.AST, depth: int) -> Iterator[tuple[str, ast.stmt]]:
    for field, value in ast.iter_fields(node):
        if not _is_block(value):
            continue
        for child in _without_docstring(node, value) if field == "body" else value:
            if isinstance(child, ast.stmt):
                yield f"{depth} {field} {_dump(child)}", child
                yield from _block(child, depth + 1)
                continue
            # `except E as e:` and `case P:` are no statements; they count with the first of their body.
            inside = list(_block(child, depth + 1))
            yield f"{depth} {field} {_dump(child)} {inside[0][0]}", inside[0][1]
            yield from inside[1:]


def _without_docstring(node: ast.AST, body: list[ast.stmt]) -> list[ast.stmt]:
    if not isinstance(node, _DEFINITIONS) or ast.get_docstring(node, clean=False) is None:
        return body
    return body[1:] or [ast.copy_location(ast.Pass(), body[0])]


def _is_block(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], _BLOCKS)


def _dump(value: object) -> str:
    """Like ``ast.dump`` but without blocks and empty fields, whose set differs between versions of Python."""
    if isinstance(value, ast.Constant):
        return f"{type(value.value).__name__}:{value.value!r}"
    if isinstance(value, ast.AST):
        fields = (
            f"{name}={_dump(field)}"
            for name, field in ast.iter_fields(value)
            if name not in _IGNORED and field is not None and field != [] and not _is_block(field)
        )
        return f"{type(value).__name__}({','.join(fields)})"
    if isinstance(value, list):
        return f"[{','.join(map(_dump, value))}]"
    return repr(value)


def _short(entry: str) -> str:
    return hashlib.sha256(entry.encode()).hexdigest()[:_DIGITS]


def _first_line(node: ast.stmt, most: int = 70) -> str:
    text = next(line for line in ast.unparse(node).splitlines() if not line.startswith("@"))
    return text if len(text) <= most else f"{text[: most - 1]}…"
