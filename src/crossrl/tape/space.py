"""How much room a tape needs, whether it is there, and which records are kept."""

from __future__ import annotations

import logging
import secrets
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from crossrl.schema import FIELDS
from crossrl.tape.errors import TapeFull
from crossrl.tape.layout import RunLayout
from crossrl.tape.publish import TEMPORARY

logger = logging.getLogger("crossrl.tape")
_RECORD_BYTES = 8 << 10  # record.json without sample ids, and the file system's own
_SAMPLE_BYTES = 64  # a sample id, and the marks of what was read


def estimate_bytes(
    fields: Iterable[str], samples: int, prompt_tokens: float, response_tokens: float, text_per_token: float = 5.0
) -> int:
    """About how large a record with ``fields`` of the schema is.

    ``prompt_tokens``, ``response_tokens``: mean per sample. ``text_per_token``: bytes of text per token.
    Fields that the schema does not know count as one text per sample.

    >>> estimate_bytes(["response_ids"], samples=1000, prompt_tokens=0, response_tokens=100)
    480192
    """
    total = float(_RECORD_BYTES + samples * _SAMPLE_BYTES)
    for name in fields:
        field = FIELDS.get(name)
        tokens = prompt_tokens if name.startswith("prompt") else response_tokens
        if field is not None and field.kind == "ragged":
            total += samples * (tokens * np.dtype(field.dtype).itemsize + 8)
        elif field is not None and field.kind == "number":
            total += samples * np.dtype(field.dtype).itemsize
        elif name in ("prompt", "response"):
            total += samples * (tokens * text_per_token + 40)
        else:
            total += samples * 40
    return int(total)


def folder_bytes(folder: Path) -> int:
    """Bytes of all plain files under ``folder``."""
    return sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def check_space(folder: Path, need: int, reserve: int = 256 << 20) -> None:
    """Raise ``TapeFull`` unless the file system of ``folder`` has ``need`` bytes and a reserve free."""
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < need + reserve:
        raise TapeFull(
            f"recording into {folder} needs about {need / 1e9:.2f} GB (and {reserve / 1e9:.2f} GB in reserve), but "
            f"only {free / 1e9:.2f} GB are free there. Make room, choose another folder, or record less: tape.keep, "
            f"tape.steps, tape.stages"
        )


class Retention:
    """Bounds what a run's own tape occupies: the newest ``keep`` steps, at most ``max_bytes`` in all."""

    def __init__(self, layout: RunLayout, keep: int | None, max_bytes: int | None) -> None:
        if keep is not None and keep < 1:
            raise TapeFull(f"tape.keep={keep}: keep at least 1 step, or leave it empty to keep all")
        self._layout, self._keep, self._max = layout, keep, max_bytes
        self._used = folder_bytes(layout.root) if max_bytes is not None and layout.root.is_dir() else 0
        self._pending: dict[Path, int] = {}
        self._lock = (
            threading.Lock()
        )  # of the two counts: `admit` runs in the stages' thread, `written` in the writer's

    def admit(self, path: Path, nbytes: int) -> None:
        """Raise ``TapeFull`` when a record with ``nbytes`` of columns would not fit into ``max_bytes``."""
        need = nbytes + _RECORD_BYTES
        with self._lock:
            total = self._used + sum(self._pending.values()) + need
            self._pending[path] = need
        if self._max is not None and total > self._max:
            raise TapeFull(
                f"the record {path} (about {need} bytes) would take the tape in {self._layout.root} to {total} bytes, "
                f"more than tape.max_bytes={self._max}. Raise it, or record less: tape.keep, tape.steps, tape.stages"
            )

    def written(self, path: Path, size: int) -> None:
        """Count a finished record and remove steps that are no longer kept (called in the writer's thread)."""
        with self._lock:
            self._used += size
            self._pending.pop(path, None)
        if self._keep is None:
            return
        steps = self._layout.steps()
        for step in steps[: -self._keep]:
            old = self._layout.step_path(step)
            gone = old.with_name(f"{TEMPORARY}{old.name}-{secrets.token_hex(4)}")  # out of sight at once, then deleted
            freed = folder_bytes(old) if self._max is not None else 0
            old.rename(gone)
            shutil.rmtree(gone)
            with self._lock:
                self._used -= freed
            logger.debug("tape: removed step %d (tape.keep=%d)", step, self._keep)
