"""HTML out of Python values, escaped by construction: whatever is not ``Html`` already becomes text.

Prompts, responses, ids and configuration values come from data files; nothing in them may become markup.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any, TypeAlias

from crossrl.report.texts import visible


class Html(str):
    """Markup that ``tag`` made. Never make one from data."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | Iterable[Child] | None"

_VOID = frozenset({"meta", "input", "br"})


def tag(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Html:
    """An element. Attributes: ``class_`` is class, ``data_cell`` is data-cell; True: no value; None, False: left out.

    >>> tag("b", "1 < 2", class_="x", hidden=True)
    '<b class="x" hidden>1 &lt; 2</b>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None and value is not False:
            key = key.rstrip("_").replace("_", "-")
            words.append(key if value is True else f'{key}="{html.escape(visible(str(value), lines=True))}"')
    opening = f"<{' '.join(words)}>"
    return Html(opening if name in _VOID else f"{opening}{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Html:
    """Markup as it is, text escaped, None nothing, iterables one after the other."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, (str, int, float)):
            parts.append(html.escape(visible(str(child), lines=True)))
        elif child is not None:
            parts.append(join(child))
    return Html("".join(parts))


def data_script(name: str, value: Any) -> Html:
    """``value`` as JSON for the page's script, in an element with this id; the browser does not run it.

    Inside a script element nothing is unescaped, and ``</script>`` or ``<!--`` in a string would end or hide it:
    so no character that HTML knows is left in the text. NaN is an error.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Html(f'<script type="application/json" id="{html.escape(name)}">{text}</script>')


def table(caption: str, head: Iterable[Child], rows: Iterable[Iterable[Child]], class_: str = "") -> Html:
    """A table whose first column heads the rows, in a box that scrolls sideways when the page is narrow."""
    body = [tag("tr", tag("th", first, scope="row"), [tag("td", c) for c in rest]) for first, *rest in map(list, rows)]
    inner = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", [tag("th", c, scope="col") for c in head])),
        tag("tbody", body),
        class_=class_ or None,
    )
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption)


def section(name: str, title: str, *children: Child) -> Html:
    """A part of the page that links can name."""
    return tag("section", tag("h2", title, id=f"{name}-title"), children, id=name, aria_labelledby=f"{name}-title")


def command(*lines: str) -> Html:
    """Shell commands, to be copied."""
    return tag("pre", tag("code", "\n".join(lines)), tabindex=0)


def number(value: Any) -> str:
    """A recorded value on one line, numbers with at most 6 digits.

    >>> number(0.123456789), number(3), number("x"), number(None)
    ('0.123457', '3', 'x', '–')
    """
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
