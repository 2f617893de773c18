"""What the commands that look at recorded runs share: finding the tape, texts that are safe to show, the pager."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console, RenderableType
from rich.pager import SystemPager
from rich.text import Text

from crossrl.tape import RunTape, TapeError, open_run
from crossrl.tape.api import Split
from crossrl.tape.values import plain

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded run. ``config``: its resolved configuration, empty when no config.yaml lies with it."""

    folder: Path
    tape: RunTape
    config: Mapping[str, Any]

    @property
    def tokenizer_folder(self) -> Path | None:
        model = self.config.get("actor_rollout_ref", {}).get("model", {})
        path = model.get("tokenizer_path") or model.get("path")
        return Path(path).expanduser() if path else None

    def token_texts(self, step: int, split: Split) -> TokenTexts:
        """For the samples of this step."""
        calls = [at.call for stage, at in self.tape.calls(step, split) if stage == "rollout"]
        made_with = self.tape.record(step, "rollout", calls[0], split).header.fingerprints if calls else {}
        digest = made_with.get("tokenizer", {}).get("digest")
        return TokenTexts(self.tokenizer_folder, digest)


def find_run(folder: Path) -> Recorded:
    """The run in ``folder``, which is the run's own or its tape's. Raises ``RecordMissing``, ``TapeError``."""
    folder = folder.expanduser()
    home = next((f for f in (folder, folder.absolute().parent) if (f / "config.yaml").is_file()), None)
    config = _read_config(home / "config.yaml") if home else {}
    elsewhere = config.get("tape", {}).get("dir") if home == folder else None
    return Recorded(folder, open_run(elsewhere or folder), config)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise TapeError(f"{path} cannot be read: {error}") from error
    sections = config.values() if isinstance(config, dict) else [config]
    if not all(isinstance(section, dict) for section in sections):
        raise TapeError(f"{path} is not the configuration of a run (a map of sections such as data and trainer)")
    return dict(config)


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


def excerpt(text: str, limit: int = 200) -> Text:
    """One line of ``text``, cut by the table that it stands in."""
    return Text(visible(text[:limit]) + ("…" if len(text) > limit else ""), no_wrap=True, overflow="ellipsis")


def value_text(value: Any, limit: int = 300) -> str:
    """A recorded value on one line: strings as they are, the rest as Python writes it."""
    text = value if isinstance(value, str) else f"{value:.9g}" if isinstance(value, float) else repr(value)
    return visible(text[:limit]) + ("…" if len(text) > limit else "")


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


def as_json(value: Any) -> Any:
    """``value`` for ``json.dumps``."""
    return plain(value, [])


def show(*parts: RenderableType) -> None:
    """Print; through the pager when it goes to a terminal and is longer than that."""
    console = Console(highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, Text))  # texts are left as they are, to be copied
    text = captured.get()
    lines = sum(1 + max(0, len(line) - 1) // console.width for line in text.splitlines())
    if sys.stdout.isatty() and lines >= console.height:
        os.environ.setdefault("LESS", "FRX")  # as git does: colours, and no paging of what fits
        SystemPager().show(text)
    else:
        sys.stdout.write(text if console.is_terminal else "".join(f"{line.rstrip()}\n" for line in text.splitlines()))
