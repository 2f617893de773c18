"""A dump on disk: one sample through one side. A folder with ``dump.json`` and ``tensors.safetensors``.

``dump.json`` is a ``Dump`` and two digests: of its own content, and of the tensors' file, which holds what is kept of
each tensor under its digest (equal tensors once). A dump is complete when it is visible, and read only if both fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from crossrl.cross.findings import from_json, to_json
from crossrl.cross.probe.hooks import Call
from crossrl.cross.probe.weights import Weight
from crossrl.files import dump_json, file_digest, publish_folder, publish_text, read_json

SCHEMA = "crossrl.probe/1"
JSON, TENSORS = "dump.json", "tensors.safetensors"
LOG_PROBS = "log_probs"

Way = Literal["train", "rollout"]


class ProbeError(RuntimeError):
    """A dump cannot be made, read or compared; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Dump:
    """``run``, ``step``, ``sample_id``: whose tokens. ``side``: the configuration file. ``way``: which forward path;
    ``packed``: whether in its packed form. ``dtype``, ``autocast``: of weights and computation. ``recorded``: the
    log-probs on the tape, of the sampler (``rollout``) and the trainer (``train``), where they are there."""

    run: str
    step: int
    sample_id: str
    side: str
    way: Way
    packed: bool
    dtype: str
    autocast: str | None
    device: str
    temperature: float
    planted: str | None
    versions: dict[str, str]
    weights_from: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    parameters: tuple[Weight, ...]
    buffers: tuple[Weight, ...]
    calls: tuple[Call, ...]
    recorded: dict[str, list[float | None]]


@dataclass(frozen=True, slots=True)
class Opened:
    """A dump that was read. ``kept``: float32 ``[rows, columns]`` by digest. ``log_probs``: float32, nat, one per
    response token."""

    path: Path
    dump: Dump
    kept: Mapping[str, np.ndarray]
    log_probs: np.ndarray


def write_dump(path: Path, dump: Dump, kept: Mapping[str, np.ndarray], log_probs: np.ndarray) -> None:
    """Publish the dump at ``path``. Raises ``ProbeError`` where something is there, or it cannot be written."""
    try:
        with publish_folder(path) as folder:
            tensors = {LOG_PROBS: log_probs, **kept}
            save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / TENSORS)
            body = {"schema": SCHEMA, "tensors": file_digest(folder / TENSORS), "dump": to_json(dump)}
            publish_text(folder / JSON, dump_json({**body, "digest": _digest(body)}))
    except FileExistsError:
        raise ProbeError(f"{path} is there already: name another folder, or remove it") from None
    except (OSError, SafetensorError) as error:
        raise ProbeError(f"cannot write {path}: {error}") from error


def read_dump(path: Path) -> Opened:
    """Raises ``ProbeError`` for what is no dump, and for one that is not as it was written."""
    try:
        body = read_json(path / JSON)
        found = file_digest(path / TENSORS)
    except FileNotFoundError as error:
        raise ProbeError(f"{error.filename} is not there: want a folder made by `crossrl probe dump`") from None
    except (OSError, ValueError) as error:
        raise ProbeError(f"{path / JSON} cannot be read: {error}. Make the dump again") from None
    if not isinstance(body, dict) or body.get("schema") != SCHEMA:
        schema = body.get("schema") if isinstance(body, dict) else None
        raise ProbeError(
            f"{path / JSON}: schema {schema!r} found, {SCHEMA!r} expected. Make the dump with this version"
        )
    expected = {JSON: body.pop("digest", None), TENSORS: body.get("tensors")}
    for name, digest in ((JSON, _digest(body)), (TENSORS, found)):
        if digest != expected[name]:
            raise ProbeError(
                f"{path / name}: sha256 {digest[:16]}... found, {str(expected[name])[:16]}... expected: not as it was "
                "written. Copy it again, or make the dump again"
            )
    try:
        kept = load_file(path / TENSORS)
        return Opened(path, from_json(Dump, body["dump"]), kept, kept.pop(LOG_PROBS))
    except (KeyError, ValueError, SafetensorError) as error:
        raise ProbeError(f"{path}: {error}. Make the dump with this version") from None


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(dump_json(dict(body)).encode()).hexdigest()
