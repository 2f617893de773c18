"""Which files a dump consists of, and of which step each is. Nothing is parsed here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from crossrl.hosts.verl_dumps.errors import DumpError

Form = Literal["jsonl", "dp"]
_STEP_FILE = re.compile(r"(\d+)\.jsonl")
PICKLE = "gen_batch.dp"
_OTHER = "tq_batch.pt"  # skip of the trainer with the transfer queue: a list of its own, pickled by torch
LOOKED_FOR = (
    f"{{step}}.jsonl, as trainer.rollout_data_dir and trainer.validation_data_dir of verl hold them, or "
    f"{{step}}/{PICKLE}, as its rollout skip does"
)


@dataclass(frozen=True, slots=True)
class Source:
    """One file. ``step``: from its name or from beside it; None where only its content can tell."""

    path: Path
    form: Form
    step: int | None


def find_sources(place: Path, step: int | None = None) -> tuple[list[Source], list[str]]:
    """The files of the dump in ``place`` (a folder or one file), by step, and warnings of what was passed over.

    ``step``: of a single file that does not tell it. Raises ``DumpError``.
    """
    place = place.expanduser()
    if not place.exists():
        raise DumpError(f"{place}: there is no such file or folder")
    if place.is_file():
        return [_file(place, step)], []
    if step is not None:
        raise DumpError(f"--step says of which step one file is, but {place} is a folder; its files tell their steps")
    found, warnings = _folder(place)
    if not found:
        raise DumpError(f"{place} holds no dump of verl: looked for {LOOKED_FOR}" + "".join(f"; {w}" for w in warnings))
    by_step: dict[int | None, Source] = {}
    for each in found:
        if each.step in by_step:
            raise DumpError(
                f"{by_step[each.step].path} and {each.path} are both of step {each.step}: move one of them away"
            )
        by_step[each.step] = each
    return sorted(found, key=lambda s: s.step or 0), warnings


def _folder(place: Path) -> tuple[list[Source], list[str]]:
    lines = sorted(p for p in place.iterdir() if p.suffix == ".jsonl" and p.is_file())
    pickles = sorted(p for p in place.rglob(PICKLE) if p.is_file())
    if lines and pickles:
        raise DumpError(f"{place} holds both {lines[0].name} and {pickles[0].relative_to(place)}: import one at a time")
    warnings = _passed_over(
        (p for p in lines if not _STEP_FILE.fullmatch(p.name)), "are not named {step}.jsonl and were left out"
    ) + _passed_over(place.rglob(_OTHER), f"are left out: {_OTHER} of verl's skip.rollout_tq is not read")
    named = [Source(p, "jsonl", int(m[1])) for p in lines if (m := _STEP_FILE.fullmatch(p.name))]
    return named + [Source(p, "dp", _beside(p)) for p in pickles], warnings


def _passed_over(paths: Iterable[Path], what: str) -> list[str]:
    names = [p.name for p in paths]
    return [f"{len(names)} file(s) {what} (first: {names[0]})"] if names else []


def _file(path: Path, step: int | None) -> Source:
    form = _form(path)
    match = _STEP_FILE.fullmatch(path.name)
    named = int(match[1]) if match else _beside(path, needed=step is None) if form == "dp" else None
    if step is not None and named is not None and step != named:
        raise DumpError(f"--step {step}, but {path} is of step {named}")
    return Source(path, form, step if step is not None else named)


def _form(path: Path) -> Form:
    if path.suffix == ".jsonl":
        return "jsonl"
    with path.open("rb") as file:
        head = file.read(2)
    if path.name == PICKLE or head[:1] == b"\x80":  # protocol 2 and later begin with it
        return "dp"
    if head == b"PK":
        raise DumpError(f"{path} is an archive, such as torch.save writes ({_OTHER} is one); it is not read")
    if head[:1] == b"{":
        return "jsonl"
    raise DumpError(f"{path} is neither JSON Lines nor a pickle; a dump is {LOOKED_FOR}")


def _beside(path: Path, needed: bool = True) -> int | None:
    """verl writes ``meta.json`` beside a pickle; without one, its folder's name is the step."""
    meta = path.with_name("meta.json")
    if path.name == PICKLE and meta.is_file():
        try:
            found = json.loads(meta.read_text(encoding="utf-8"))["global_steps"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DumpError(f"{meta} does not say the step of {path.name} ({error!r}): want global_steps") from None
        if isinstance(found, int) and not isinstance(found, bool) and found >= 0:
            return found
        raise DumpError(f"{meta}: global_steps is {found!r}; want a number from 0")
    if path.name == PICKLE and path.parent.name.isdecimal():
        return int(path.parent.name)
    if needed:
        raise DumpError(
            f"{path} does not tell its step (verl up to 0.7.1 keeps one file for all): give it, as in --step 1"
        )
    return None
