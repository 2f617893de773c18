"""verl's JSON Lines (``rollout_data_dir``, ``validation_data_dir``), read and checked line by line.

Every version from 0.7.1 to 0.9.1 writes ``input``, ``output``, ``gts``, ``score``, ``step`` and whatever its reward
function returned besides; the trainer with the transfer queue adds ``uid``, its key ``{uid}_{session}_{index}``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossrl.hosts.verl_dumps.errors import DumpError

REQUIRED = ("input", "output", "score", "step")
OURS = (*REQUIRED, "gts")
RANDOM = ("uid", "request_id")  # verl's own ids: others in every run


@dataclass(frozen=True, slots=True)
class Line:
    """``extra``: every key but verl's own."""

    number: int
    input: str
    output: str
    score: float
    has_gts: bool
    gts: Any
    random: Mapping[str, Any]
    extra: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Lines:
    """One file. ``digest``: of its bytes. ``cut``: what says that its writer did not come to the end, or None."""

    digest: str
    step: int
    lines: list[Line]
    cut: str | None
    warnings: tuple[str, ...]


def read_lines(path: Path, step: int | None) -> Lines | None:
    """The samples in ``path``; None for an empty file. ``step``: what the file's name says.

    Raises ``DumpError`` with file and line.
    """
    data = path.read_bytes()
    if not data.strip():
        return None
    # Not splitlines: texts hold U+2028 and others as they are, at which Python would split too.
    raw = data.split(b"\n")
    cut = None if raw[-1] == b"" else f"line {len(raw)} is the last one and does not end"
    maps: list[tuple[int, dict[str, Any]]] = []
    for number, text in enumerate(raw, 1):
        if not text.strip():
            continue
        try:
            maps.append((number, _parse(text)))
        except ValueError as error:
            if cut and number == len(raw) and maps:
                cut = f"line {number}, the last one, was cut off and is left out"
                continue
            raise DumpError(f"{path}, line {number}: {error}. Each line is one JSON map, as verl writes it") from None
    step = _step_of(path, step, maps)
    lines = [_line(f"{path}, line {number}", number, row) for number, row in maps]
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    return Lines(digest, step, lines, cut, _mixed_keys(path, lines))


def _parse(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__} and not a map")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(k for k, n in Counter(k for k, _ in pairs).items() if n > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return found


def _step_of(path: Path, step: int | None, maps: list[tuple[int, dict[str, Any]]]) -> int:
    """The one step of all lines, each of which has verl's keys."""
    first_number, first = maps[0]
    for number, row in maps:
        place = f"{path}, line {number}"
        lacking = [key for key in REQUIRED if key not in row]
        if lacking:
            raise DumpError(
                f"{place}: no {', '.join(lacking)}; there are: {', '.join(row) or 'no keys'}. A line of verl's dump "
                f"has {', '.join(OURS)}; is this another kind of file?"
            )
        if ("gts" in row) != ("gts" in first):
            raise DumpError(
                f"{place}: {'a' if 'gts' in row else 'no'} key gts, unlike line {first_number}: two files were mixed"
            )
        found = _step(place, row["step"])
        if step is None:
            step = found
        if found != step:
            said = "the name of the file" if path.stem.isdecimal() else f"line {first_number}"
            raise DumpError(
                f"{place}: step {found}, expected {step} (from {said}). A file holds one step, as verl writes it: "
                f"{{step}}.jsonl"
            )
    assert step is not None
    return step


def _mixed_keys(path: Path, lines: list[Line]) -> tuple[str, ...]:
    """A warning where reward functions did not return the same keys for all samples."""
    counts = Counter(frozenset(line.extra) for line in lines)
    if len(counts) == 1:
        return ()
    usual = counts.most_common(1)[0][0]
    odd = [line for line in lines if frozenset(line.extra) != usual]
    keys = sorted(frozenset(odd[0].extra) ^ usual)
    warning = (
        f"{path}: {len(odd)} of {len(lines)} lines have other extra keys than the rest (first: line "
        f"{odd[0].number}, {', '.join(keys)}); each sample has those of its own line"
    )
    return (warning,)


def _step(place: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DumpError(f"{place}: step is {value!r}; want a number from 0")
    return value


def _line(place: str, number: int, row: dict[str, Any]) -> Line:
    for key in ("input", "output"):
        if not isinstance(row[key], str):
            raise DumpError(f"{place}: {key} is a {type(row[key]).__name__}; want text")
    score = row["score"]
    if isinstance(score, bool) or not isinstance(score, (int, float, type(None))):
        raise DumpError(f"{place}: score is {score!r}; want a number, or null for none")
    try:
        value = math.nan if score is None else float(score)
    except OverflowError:
        raise DumpError(f"{place}: score is beyond what a float holds") from None
    return Line(
        number, row["input"], row["output"], value, "gts" in row,
        row.get("gts"), {k: row[k] for k in RANDOM if k in row},
        {k: v for k, v in row.items() if k not in OURS and k not in RANDOM},
    )  # fmt: skip
