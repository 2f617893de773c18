"""The prompts of one step as a batch of ours: which samples there will be, and what belongs to each of them.

verl's own ids are random, so records of two runs could not be joined by them. A sample's id here is
``{prompt}/{epoch}/{row}/{repeat}``: 8 digits of the digest of messages, data source and answer; passes over the data
before; ``extra_info.index`` of the data row; which of the n samples of the prompt. Where one step has the same prompt
twice, the second is ``{prompt}.1``.

>>> samples([{"uid": "x", "raw_prompt": [], "index": 7}], n=2, epoch=0).sample_id
('a2b0b0d9/0/7/0', 'a2b0b0d9/0/7/1')
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from crossrl.batch import Batch
from crossrl.tape.digest import json_digest
from crossrl.tape.values import normal

FIELDS = ("group_id", "prompt", "data_source", "ground_truth", "extra_info")


def samples(rows: Sequence[Mapping[str, Any]], n: int, epoch: int) -> Batch:
    """The batch that a step's rollout reads: ``n`` samples for each of ``rows`` (verl's columns by name, one prompt
    each), in their order."""
    groups = _groups(rows, epoch)
    columns: dict[str, list[Any]] = {name: [] for name in FIELDS}
    for row, group in zip(rows, groups, strict=True):
        values = (
            group, _messages(row), str(row.get("data_source", "")), _answer(row), _plain(row.get("extra_info")),
        )  # fmt: skip
        for name, value in zip(FIELDS, values, strict=True):
            columns[name] += [value] * n
    return Batch(tuple(f"{group}/{repeat}" for group in groups for repeat in range(n)), columns)


def _groups(rows: Iterable[Mapping[str, Any]], epoch: int) -> list[str]:
    seen: Counter[str] = Counter()
    groups = []
    for row in rows:
        digest = json_digest([_messages(row), str(row.get("data_source", "")), _answer(row)]).partition(":")[2][:8]
        place = f"{epoch}/{_plain(row.get('index', 0))}"
        count = seen[f"{digest}/{place}"]
        seen[f"{digest}/{place}"] += 1
        groups.append(f"{digest}{f'.{count}' if count else ''}/{place}")
    return groups


def _messages(row: Mapping[str, Any]) -> Any:
    return _plain(list(row["raw_prompt"]))


def _answer(row: Mapping[str, Any]) -> Any:
    return _plain((row.get("reward_model") or {}).get("ground_truth"))


def _plain(value: Any) -> Any:
    """As it would come back from a record; what cannot be stored (images, say) is left out of maps."""
    return normal({"value": value}).get("value")
