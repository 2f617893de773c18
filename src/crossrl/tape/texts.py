"""Digests of what lies between a text and its token ids, for fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 of all that a fast tokenizer does, or of the vocabulary of another one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()


def template_digest(template: str, arguments: Mapping[str, Any]) -> str:
    """sha256 of a chat template and what it is called with."""
    return hashlib.sha256(f"{template}\n{sorted(arguments.items())}".encode()).hexdigest()
