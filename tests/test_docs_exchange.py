"""The page about the exchange folder has every message of the exchange, and no other; its tables are the code's."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from crossrl.config.keys import leaves
from crossrl.sharing import MUST_AGREE, may_differ

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reference/exchange.md"
OWN = ("tape/exchange.py", "tape/identity.py", "tape/peers.py")  # every message of these is on the page
OTHERS = (
    "tape/errors.py",
    "tape/tape.py",
    "tape/taped.py",
    "tape/writer.py",
    "taping.py",
    "config/validate.py",
)  # some of these are
ROW = re.compile(r"^\| `([^`]+)` \| .* \| .*\|$", re.MULTILINE)
HOLE = re.compile(r"\{\}|%[.\d]*[a-z]")


def texts(source: str) -> Iterator[str]:
    """Every text in ``source`` but docstrings; ``{}`` stands for what is put in."""
    tree = ast.parse(source)
    whole = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    parts = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in ast.walk(n) if v is not n}
    for node in ast.walk(tree):
        if id(node) in whole:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def messages_of(source: str) -> list[str]:
    """Texts of more than one word."""
    return [text for text in texts(source) if " " in text.strip()]


def pieces(template: str) -> list[str]:
    """What is fixed in a template; spaces, lines and punctuation at the ends do not matter."""
    found = (" ".join(part.split()).strip(" :;,()=.") for part in HOLE.split(template))
    return [piece for piece in found if re.search("[a-z]", piece)]


def undocumented(sources: Iterable[str], page: str) -> list[str]:
    text = " ".join(page.split())
    return [m for source in sources for m in messages_of(source) if any(piece not in text for piece in pieces(m))]


def invented(messages: Iterable[str], sources: Iterable[str]) -> list[str]:
    """Quoted messages in which something is left when all that the sources say is taken out. Capitals vary."""
    known = sorted({piece for source in sources for text in texts(source) for piece in pieces(text)}, key=len)
    said = re.compile("|".join(rf"(?<!\w){re.escape(piece)}(?!\w)" for piece in reversed(known)))
    return [m for m in messages if re.search("[a-z]", said.sub("", m))]


def read(names: Iterable[str]) -> list[str]:
    return [(ROOT / "src/crossrl" / name).read_text(encoding="utf-8") for name in names]


def quoted() -> list[str]:
    """First cells of the tables of messages."""
    text = PAGE.read_text(encoding="utf-8").partition("## Messages")[2].partition("\n## ")[0]
    return ROW.findall(text)


def test_every_message_of_the_exchange_is_explained():
    sources = read(OWN)
    assert sum(len(messages_of(source)) for source in sources) > 40
    assert not undocumented(sources, PAGE.read_text(encoding="utf-8"))


def test_a_message_that_is_not_explained_is_found():
    source = 'def f(x):\n    """Not a message."""\n    raise ValueError(f"{x} has gone astray: {x!r}. Look again")\n'
    assert undocumented([source], "PATH has gone astray: REASON. Look elsewhere") == [
        "{} has gone astray: {}. Look again"
    ]
    assert not undocumented([source], "PATH has gone\nastray: REASON. Look again")


def test_every_quoted_message_is_one_of_the_program():
    messages = quoted()
    assert len(messages) > 35
    assert not invented(messages, read((*OWN, *OTHERS)))


def test_a_message_that_the_program_does_not_have_is_found():
    assert invented(["WHO died: its process is tired"], read(OWN)) == ["WHO died: its process is tired"]


@pytest.mark.parametrize("key", ["trainer.seed", "actor_rollout_ref.rollout.temperature", "data.train_batch_size"])
def test_keys_that_must_be_equal_are_listed(key):
    listed = PAGE.read_text(encoding="utf-8").partition("### Keys that must be equal")[2].partition("###")[0]
    assert f"`{key}`" in listed
    assert {k for k in leaves() if f"`{k}`" in listed} == {k for k in leaves() if not may_differ(k)}


def test_exceptions_from_what_may_differ_are_named():
    last = PAGE.read_text(encoding="utf-8").rpartition("Though a pattern above covers them")[2]
    assert all(f"`{pattern}`" in last for pattern in MUST_AGREE)
