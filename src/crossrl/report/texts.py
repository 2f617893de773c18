"""Recorded tokens, prompts and sizes as texts for people, safe to show in a terminal or on a page."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TokenTexts:
    """Token ids to texts, with the tokenizer that the run's configuration names.

    ``note``: why there are no texts, or None. Only ``tokenizer.json`` is read: no code of a model folder runs.
    ``digest``: of the tokenizer that the run was recorded with; another one is not used.
    """

    def __init__(self, folder: Path | None, digest: str | None = None) -> None:
        self.note: str | None = None
        self._tokenizer: Tokenizer | None = None
        if folder is None:
            self.note = "no config.yaml lies with the tape, so no tokenizer is known: ids only"
            return
        file = folder / "tokenizer.json"
        try:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
            self.note = f"{file} cannot be loaded ({error}): ids only"
            return
        found = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()
        if digest is not None and found != digest:
            self._tokenizer = None
            self.note = f"{file} is not the tokenizer that the run was recorded with (another digest): ids only"

    def __call__(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token], skip_special_tokens=False)


def visible(text: str, lines: bool = False) -> str:
    """``text`` without anything that could steer a terminal: what is not printable becomes an escape.

    ``lines``: keep line breaks and tabs.
    """
    keep = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def prompt_text(prompt: Any) -> str:
    """Chat messages as text; the role is named where there are several."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(isinstance(m, dict) for m in prompt):
        return "" if prompt is None else repr(prompt)
    contents = [m["content"] if isinstance(m.get("content"), str) else repr(m.get("content")) for m in prompt]
    if len(prompt) == 1:
        return str(contents[0])
    return "\n".join(f"{m.get('role')}: {content}" for m, content in zip(prompt, contents, strict=True))


def size_text(nbytes: int) -> str:
    """Two or three digits and a unit.

    >>> size_text(1_400_000), size_text(43_500), size_text(12)
    ('1.4 MB', '44 kB', '12 B')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.{1 if nbytes < 10 * size else 0}f} {unit}"
    return f"{nbytes} B"
