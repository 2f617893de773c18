"""A resolved config as text, as a flat table, and as a digest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from omegaconf import OmegaConf

from crossrl.config.root import RunConfig


def flatten(config: RunConfig) -> dict[str, Any]:
    """Dotted path to value, in the order of the dataclasses; mappings and lists are values.

    >>> from crossrl.config import load_config
    >>> loaded = load_config(["data.train_files=t.parquet", "actor_rollout_ref.model.path=m"])
    >>> flatten(loaded.config)["trainer.default_local_dir"]
    'checkpoints/crossrl/default'
    """
    flat: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        for f in fields(node):
            value = getattr(node, f.name)
            if is_dataclass(value):
                walk(value, f"{prefix}{f.name}.")
            else:
                flat[f"{prefix}{f.name}"] = value

    walk(config, "")
    return flat


def to_yaml(config: RunConfig) -> str:
    """The whole tree, ready for ``--config-name FILE``: loading it gives an equal config."""
    # OmegaConf's own writer: it quotes what its reader would take for a number, such as a run named 1e5.
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def digest(config: RunConfig) -> str:
    """sha256 (hex) of the flat table as canonical JSON (sorted keys, no spaces, shortest float that round-trips)."""
    text = json.dumps(flatten(config), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
