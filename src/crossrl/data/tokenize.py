"""Prompts to token ids, and what happens to prompts that are too long.

With a chat template: the rendered conversation, generation prompt included; special tokens are the template's
business, so none are added. Without one (base models, character tokenizers): the message contents joined with
nothing between them, encoded as the tokenizer encodes plain text, its own default special tokens included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from crossrl.data.errors import DataError
from crossrl.data.rows import Row

Truncation = Literal["error", "left", "right", "middle"]
_CHUNK = 1024  # prompts per call of the tokenizer: it is several times faster on many than on one


@dataclass(frozen=True, slots=True)
class Template:
    """How a conversation becomes text. ``chat_template``: instead of the tokenizer's own (Jinja).

    ``kwargs``: handed to the template (``data.apply_chat_template_kwargs``), such as ``enable_thinking``.
    """

    chat_template: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def tokenize(rows: Sequence[Row], tokenizer: Any, template: Template | None = None) -> list[np.ndarray]:
    """The prompt of each row as int32 ids, not yet cut to any length. Raises ``DataError`` naming the row."""
    template = template or Template()
    templated = bool(template.chat_template or getattr(tokenizer, "chat_template", None))
    ids: list[np.ndarray] = []
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        texts = [_render(row, tokenizer, template) if templated else _join(row) for row in chunk]
        encoded = tokenizer(texts, add_special_tokens=not templated)["input_ids"]
        ids += [np.asarray(one, dtype=np.int32) for one in encoded]
    for row, one in zip(rows, ids, strict=True):
        if not len(one):
            raise DataError(f"{row.place}: the prompt has no tokens; a response cannot start from nothing")
    return ids


def truncate(ids: np.ndarray, limit: int, side: Truncation) -> np.ndarray:
    """At most ``limit`` of ``ids``. ``side`` says where tokens are lost; "middle" keeps both ends."""
    if len(ids) <= limit:
        return ids
    if side == "left":
        return ids[len(ids) - limit :]
    if side == "right":
        return ids[:limit]
    if side == "middle":
        head = limit // 2
        return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])
    raise DataError(f"truncation {side!r} does not cut; want left, right or middle")


def _render(row: Row, tokenizer: Any, template: Template) -> str:
    options = {"add_generation_prompt": True, **template.kwargs, "tokenize": False}
    if template.chat_template:
        options["chat_template"] = template.chat_template
    try:
        text = tokenizer.apply_chat_template(row.prompt, **options)
    except Exception as error:  # templates raise what they like: jinja2 errors, TypeError, KeyError
        raise DataError(f"{row.place}: the chat template refuses the prompt: {error}") from error
    return str(text)


def _join(row: Row) -> str:
    parts = []
    for message in row.prompt:
        if not isinstance(message["content"], str):
            raise DataError(
                f"{row.place}: a message's content is a {type(message['content']).__name__}; the tokenizer has no "
                f"chat template, so plain text is needed (or set actor_rollout_ref.model.custom_chat_template)"
            )
        parts.append(message["content"])
    return "".join(parts)
