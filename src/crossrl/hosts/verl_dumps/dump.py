"""What every importer hands on, whatever it was read from: the samples of one step, and what is known of the file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crossrl.batch import Batch


@dataclass(frozen=True, slots=True)
class Dump:
    """One file of a dump: the samples that it holds of one step.

    ``rollout`` and ``reward``: what each stage wrote, as far as the file has it (``reward`` without columns: nothing).
    ``form``: ``jsonl`` or ``dp``. ``where``: what tells where each sample lies in the file, or is random (line, verl's
    uid); one entry per sample and key, not compared between two runs. ``tokens``: what the token ids are.
    ``missing``: what a record of ours has and this dump has not. ``cut``: why samples may be missing, or None.
    ``warnings``: what was harmless, each with its count. ``read_with``: verl's version that read the file, if any did.
    """

    path: Path
    digest: str
    step: int
    form: str
    rollout: Batch
    reward: Batch
    where: dict[str, list[Any]] = field(default_factory=dict)
    tokens: str = ""
    tokenizer: str | None = None
    missing: tuple[str, ...] = ()
    cut: str | None = None
    warnings: tuple[str, ...] = ()
    read_with: str | None = None
