"""Lines of text as batches: sample ids that are the same in every import, and columns by the names of our schema."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crossrl.batch import Batch, Ragged
from crossrl.hosts.verl_dumps.dump import Dump
from crossrl.hosts.verl_dumps.lines import Line, read_lines
from crossrl.hosts.verl_dumps.tokens import REENCODED, Tokens
from crossrl.tape.digest import json_digest
from crossrl.tape.values import normal

_NOT_THERE = ("token ids as sampled", "log-probs", "data_source", "finish_reason", "advantages")


def text_dump(path: Path, step: int | None, tokens: Tokens | None = None) -> Dump | None:
    """The samples of one of verl's JSON Lines files; None for an empty one. ``tokens``: encode the texts.

    Samples are in the order of their ids, since verl's order is another in every run (it sorts by random ids, or deals
    the batch out by lengths). Raises ``DumpError``.
    """
    found = read_lines(path, step)
    if found is None:
        return None
    named = sorted(_named(found.lines), key=lambda n: (n[0], n[1]))
    lines = [line for _, _, line in named]
    ids = tuple(f"{group}/{repeat}" for group, repeat, _ in named)
    columns: dict[str, Any] = {
        "group_id": [group for group, _, _ in named],
        "prompt": [line.input for line in lines],
        "response": [line.output for line in lines],
    }
    missing = list(_NOT_THERE)
    if lines[0].has_gts:
        columns["ground_truth"] = [_plain(line.gts) for line in lines]
    else:
        missing.append("ground_truth")
    if tokens is not None:
        columns["prompt_ids"] = Ragged.from_rows([tokens.encode(line.input) for line in lines], np.int32)
        columns["response_ids"] = Ragged.from_rows([tokens.encode(line.output) for line in lines], np.int32)
    reward = {
        "score": np.array([line.score for line in lines], np.float64),
        "reward_extra": [_plain(dict(line.extra)) for line in lines],
    }
    where = {"line": [line.number for line in lines]}
    for key in ("uid", "request_id"):
        if any(key in line.random for line in lines):
            where[key] = [_plain(line.random.get(key)) for line in lines]
    return Dump(
        path, found.digest, found.step, "jsonl", Batch(ids, columns), Batch(ids, reward), where,
        REENCODED if tokens else "not in this dump", tokens.digest if tokens else None, tuple(missing), found.cut,
        found.warnings,
    )  # fmt: skip


def _named(lines: Sequence[Line]) -> list[tuple[str, int, Line]]:
    """Group, repeat and line of each. A group is ``{prompt}/-/-``: neither data row nor pass over the data is in the
    dump; ``prompt``: 16 digits of the digest of prompt and answer. Samples of the same prompt count from 0, in the
    order of verl's own ids of sessions where there are any, else in that of the file.
    """
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        digest = json_digest([line.input, _plain(line.gts)]).partition(":")[2][:16]
        groups[f"{digest}/-/-"].append(line)
    return [
        (name, repeat, line)
        for name, members in groups.items()
        for repeat, line in enumerate(sorted(members, key=_session))
    ]


def _session(line: Line) -> tuple[int, int]:
    """The trainer with the transfer queue has ``{uid}_{session}_{index}``; sorting is stable, so others stay."""
    parts = str(line.random.get("uid", "")).rsplit("_", 2)
    if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
        return int(parts[1]), int(parts[2])
    return 0, 0


def _plain(value: Any) -> Any:
    return normal({"value": value}).get("value")
