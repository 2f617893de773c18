"""What the commands that look at recorded runs share: finding the tape, texts that are safe to show, the pager."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, RenderableType
from rich.pager import SystemPager
from rich.text import Text

from crossrl.report.texts import TokenTexts, prompt_text, size_text, visible
from crossrl.tape import RunTape, TapeError, open_run
from crossrl.tape.api import Split
from crossrl.tape.values import plain

__all__ = [
    "Recorded",
    "TokenTexts",
    "as_json",
    "excerpt",
    "find_run",
    "prompt_text",
    "show",
    "size_text",
    "value_text",
    "visible",
]


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


def excerpt(text: str, limit: int = 200) -> Text:
    """One line of ``text``, cut by the table that it stands in."""
    return Text(visible(text[:limit]) + ("…" if len(text) > limit else ""), no_wrap=True, overflow="ellipsis")


def value_text(value: Any, limit: int = 300) -> str:
    """A recorded value on one line: strings as they are, the rest as Python writes it."""
    text = value if isinstance(value, str) else f"{value:.9g}" if isinstance(value, float) else repr(value)
    return visible(text[:limit]) + ("…" if len(text) > limit else "")


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
