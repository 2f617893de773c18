"""The data set as training sees it: rows, their prompts as token ids, a digest, and a report of what was kept."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from crossrl import seeds
from crossrl.batch import Ragged
from crossrl.data import reasoning
from crossrl.data.errors import DataError
from crossrl.data.rows import Row, read_rows
from crossrl.data.tokenize import Template, Truncation, tokenize, truncate


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What to make of the files; names follow the config keys under ``data``.

    ``max_prompt_length``: tokens. ``filter_overlong_prompts``: leave longer prompts out; else ``truncation``
    cuts them, or refuses the data ("error"). ``max_samples``: use so many rows, -1 for all: the first ones,
    or with ``sample_seed`` a subset drawn from that seed. ``split``: chooses the default seed of reasoning-gym
    specs, so that training and validation do not share items.
    """

    max_prompt_length: int
    filter_overlong_prompts: bool = False
    truncation: Truncation = "error"
    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    template: Template = field(default_factory=Template)
    max_samples: int = -1
    sample_seed: int | None = None
    split: Literal["train", "val"] = "train"


@dataclass(frozen=True, slots=True)
class DataReport:
    """Counts of rows, and lengths in tokens of the prompts that were kept, after cutting.

    >>> print(DataReport(read=100, unused=0, filtered=7, truncated=0, kept=93, shortest=5, longest=510, limit=512))
    100 rows read, 7 longer than 512 tokens left out, 93 kept, prompts of 5 to 510 tokens
    """

    read: int
    unused: int
    filtered: int
    truncated: int
    kept: int
    shortest: int
    longest: int
    limit: int

    def __str__(self) -> str:
        parts = [f"{self.read} rows read"]
        if self.unused:
            parts.append(f"{self.unused} not used (max_samples)")
        if self.filtered:
            parts.append(f"{self.filtered} longer than {self.limit} tokens left out")
        if self.truncated:
            parts.append(f"{self.truncated} cut to {self.limit} tokens")
        parts.append(f"{self.kept} kept, prompts of {self.shortest} to {self.longest} tokens")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class PromptDataset:
    """``rows[i]`` and ``prompt_ids.row(i)`` (int32) belong together.

    ``digest``: sha256 over rows and prompt ids in order; another order, template or tokenizer is another digest.
    """

    rows: tuple[Row, ...]
    prompt_ids: Ragged
    digest: str
    report: DataReport

    @classmethod
    def load(cls, files: str | Sequence[str], tokenizer: Any, options: PromptOptions) -> PromptDataset:
        """Read, tokenise, and filter or cut. Raises ``DataError``: see ``read_rows``; over-long prompts with
        ``truncation="error"``; nothing left.
        """
        _check(options)
        seed = reasoning.TRAIN_SEED if options.split == "train" else reasoning.VAL_SEED
        read = read_rows(files, options.prompt_key, options.reward_fn_key, seed)
        rows = _select(read, options)
        ids = tokenize(rows, tokenizer, options.template)
        limit = options.max_prompt_length
        over = [i for i, one in enumerate(ids) if len(one) > limit]
        if over and options.filter_overlong_prompts:
            kept = [i for i, one in enumerate(ids) if len(one) <= limit]
            if not kept:
                raise DataError(_nothing_left(len(read), len(rows), ids, limit))
        elif over and options.truncation == "error":
            raise DataError(_too_long(rows, ids, over, limit))
        else:
            kept = list(range(len(rows)))
        filtered = len(rows) - len(kept)
        rows = [rows[i] for i in kept]
        ids = [truncate(ids[i], limit, options.truncation) for i in kept]
        lengths = [len(one) for one in ids]
        report = DataReport(
            read=len(read),
            unused=len(read) - len(kept) - filtered,
            filtered=filtered,
            truncated=len(over) - filtered,
            kept=len(rows),
            shortest=min(lengths),
            longest=max(lengths),
            limit=limit,
        )
        return cls(tuple(rows), Ragged.from_rows(ids, np.int32), digest(rows, ids), report)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sources(self) -> dict[str, int]:
        """How many rows each data_source has."""
        return dict(sorted(Counter(row.data_source for row in self.rows).items()))


def digest(rows: Sequence[Row], prompt_ids: Sequence[np.ndarray]) -> str:
    """sha256, hexadecimal, over the rows (as canonical JSON, ``place`` left out) and prompt ids, in order."""
    whole = hashlib.sha256()
    for row, ids in zip(rows, prompt_ids, strict=True):
        text = json.dumps(
            [row.index, row.prompt, row.data_source, row.ground_truth, row.extra_info], sort_keys=True, allow_nan=False
        )
        data = text.encode() + b"\0" + ids.astype("<i4").tobytes()
        whole.update(len(data).to_bytes(8, "little") + data)
    return whole.hexdigest()


def _check(options: PromptOptions) -> None:
    if options.max_prompt_length < 1:
        raise DataError(f"data.max_prompt_length is {options.max_prompt_length}; want at least 1 token")
    if options.truncation not in ("error", "left", "right", "middle"):
        raise DataError(f"data.truncation is {options.truncation!r}; want error, left, right or middle")
    if options.max_samples == 0 or options.max_samples < -1:
        raise DataError(f"max_samples is {options.max_samples}; want -1 for all rows, or a positive number")


def _select(rows: list[Row], options: PromptOptions) -> list[Row]:
    count = options.max_samples
    if count < 0 or count >= len(rows):
        return rows
    if options.sample_seed is None:
        return rows[:count]
    order = permutation(len(rows), options.sample_seed, "data", "max_samples")
    return [rows[i] for i in sorted(order[:count].tolist())]


def permutation(count: int, seed: int, *purpose: str | int) -> np.ndarray:
    """int64 ``[count]``: a random order of 0 to count - 1 that depends on its arguments only.

    Sorted raw Philox bits, not ``Generator.permutation``: NumPy keeps the bits the same between its versions,
    but not what its methods make of them, and an order must outlive an upgrade.
    """
    bits = seeds.generator(seed, *purpose).bit_generator.random_raw(count)
    return np.argsort(bits, kind="stable")


def _too_long(rows: list[Row], ids: list[np.ndarray], over: list[int], limit: int) -> str:
    first = over[0]
    return (
        f"{rows[first].place}: the prompt has {len(ids[first])} tokens, data.max_prompt_length is {limit} "
        f"({len(over)} of {len(rows)} rows are too long, the longest has {max(len(one) for one in ids)}). Raise the "
        f"limit, or set data.filter_overlong_prompts=True, or data.truncation=left|right|middle"
    )


def _nothing_left(read: int, used: int, ids: list[np.ndarray], limit: int) -> str:
    return (
        f"no prompt is left: {read} rows read, {used} used, all {used} longer than data.max_prompt_length={limit} "
        f"tokens (the shortest has {min(len(one) for one in ids)}). Raise data.max_prompt_length"
    )
