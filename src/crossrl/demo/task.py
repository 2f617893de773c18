"""The task of the demo: sort six digits. ``524163>`` is to be answered with ``123456``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from crossrl.seeds import generator

DIGITS = 6
SOURCE = "sort_digits"


def problems(seed: int, *counts: int) -> list[list[str]]:
    """As many lists of digit strings as ``counts``; no string is in two of them, or twice in one."""
    drawn = generator(seed, "demo", "problems").choice(10**DIGITS, size=sum(counts), replace=False)
    strings = [f"{number:0{DIGITS}d}" for number in drawn]
    parts = []
    for count in counts:
        parts.append(strings[:count])
        strings = strings[count:]
    return parts


def answer(digits: str) -> str:
    return "".join(sorted(digits))


def write_parquet(path: Path, digits: Sequence[str], split: str) -> None:
    """One row per problem in verl's schema."""
    rows = [
        {
            "data_source": SOURCE,
            "prompt": [{"role": "user", "content": f"{text}>"}],
            "reward_model": {"style": "rule", "ground_truth": answer(text)},
            "extra_info": {"split": split, "index": index},
        }
        for index, text in enumerate(digits)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
