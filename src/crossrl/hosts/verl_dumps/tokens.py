"""A tokenizer folder, used to encode a dump's texts or to decode its token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from crossrl.hosts.verl_dumps.errors import DumpError

REENCODED = (
    "re-encoded text, not the ids that were sampled: decoding and encoding do not lead back, and the dump's texts "
    "have no special tokens"
)


class Tokens:
    """Only ``tokenizer.json`` is read: no code of a model folder runs. ``digest``: of the tokenizer."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        file = folder.expanduser() / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
            raise DumpError(f"--tokenizer {folder}: {file} cannot be loaded ({error})") from None
        self.digest = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()
        self._tokenizer.no_truncation()  # a setting that some folders carry; it would shorten responses
        self._tokenizer.no_padding()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
