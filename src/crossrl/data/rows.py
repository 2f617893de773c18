"""Data rows in verl's schema: prompt, data_source, reward_model.ground_truth, extra_info.

    {"prompt": [{"role": "user", "content": "2 + 3 = ?"}], "data_source": "numeric",
     "reward_model": {"style": "rule", "ground_truth": "5"}, "extra_info": {"index": 0}}

A prompt may also be a plain string, which means one user message. Other columns are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crossrl.data import reasoning
from crossrl.data.errors import DataError
from crossrl.data.files import MEDIA_COLUMNS, plain, read_records


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt with what is needed to score a response to it. All values are JSON-like.

    ``prompt``: chat messages. ``index``: its number in the file set, from 0, all files in order.
    ``place``: file and row, for messages; no part of the row's identity.

    >>> row = Row(index=0, prompt=[{"role": "user", "content": "2 + 3 = ?"}], data_source="numeric", ground_truth="5")
    """

    index: int
    prompt: list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    place: str = ""


def read_rows(
    files: str | Sequence[str],
    prompt_key: str = "prompt",
    source_key: str = "data_source",
    reasoning_seed: int = 0,
) -> list[Row]:
    """The rows of all ``files``, in order: .parquet, .jsonl, .json, or ``reasoning_gym:NAME?key=value&...``.

    ``reasoning_seed``: for reasoning-gym specs that name no seed. Raises ``DataError``: missing or unreadable
    file, missing column, a row without prompt, source or answer, a value that JSON cannot hold, no rows at all.
    """
    files = [files] if isinstance(files, str) else list(files)
    rows: list[Row] = []
    for path in files:
        before = len(rows)
        for place, record in _records(path, prompt_key, source_key, reasoning_seed):
            rows.append(_row(len(rows), place, record, prompt_key, source_key))
        if len(rows) == before:
            raise DataError(f"data file {path!r} has no rows; remove it from the list or fill it")
    if not rows:
        raise DataError("no data files are named; set data.train_files (and data.val_files) to a file or a list")
    return rows


def _records(path: str, prompt_key: str, source_key: str, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    if not reasoning.is_spec(path):
        yield from read_records(path, required=(prompt_key, source_key, "reward_model"), optional=("extra_info",))
        return
    for place, record in reasoning.read_records(path, seed):
        # The configured column names are those of the files; generated rows follow them.
        yield place, {**record, prompt_key: record["prompt"], source_key: record["data_source"]}


def _row(index: int, place: str, record: Mapping[str, Any], prompt_key: str, source_key: str) -> Row:
    for column in MEDIA_COLUMNS:
        media = record.get(column)
        if media is not None and len(media):
            raise DataError(f"{place}: the row carries {column}; this version trains on text only")
    source = record[source_key]
    if not isinstance(source, str) or not source.strip():
        raise DataError(f"{place}: {source_key} is {source!r}; want the name of a verifier, such as 'numeric'")
    extra = record.get("extra_info")
    if not isinstance(extra, Mapping | None):
        raise DataError(f"{place}: extra_info is a {type(extra).__name__}; want a map, or leave it out")
    return Row(
        index=index,
        prompt=_messages(record[prompt_key], f"{place}: {prompt_key}"),
        data_source=source,
        ground_truth=_answer(record["reward_model"], place, source),
        extra_info=plain(extra or {}, f"{place}: extra_info"),
        place=place,
    )


def _messages(prompt: Any, place: str) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{place} is {prompt!r:.80}; want a list of chat messages, or a string")
    messages = []
    for i, message in enumerate(plain(prompt, place)):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"{place}[{i}] is {message!r:.80}; want a message with 'role' and 'content'")
        # In parquet all messages have the same keys, with null where one lacks it; templates ask "is defined".
        messages.append({k: v for k, v in message.items() if v is not None or k == "content"})
    return messages


def _answer(reward_model: Any, place: str, source: str) -> Any:
    if not isinstance(reward_model, Mapping):
        raise DataError(f"{place}: reward_model is {reward_model!r:.80}; want a map with 'ground_truth'")
    answer = plain(reward_model.get("ground_truth"), f"{place}: reward_model.ground_truth")
    empty = answer is None or answer in ([], {}) or (isinstance(answer, str) and not answer.strip())
    # Some reasoning-gym tasks have many right answers and name none: their scorer works from the entry.
    if empty and not reasoning.is_spec(source):
        raise DataError(
            f"{place}: empty answer (reward_model.ground_truth is {answer!r}); nothing could be scored. Fill it in, "
            f"or remove the row; a custom reward function that needs no answer can be given any placeholder"
        )
    return answer
