"""The versions of verl that the host knows, and what differs between them. Their sources: ``fingerprints.py``."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Version:
    """``v1``: whether it has the trainer with the transfer queue. ``own_skip``: whether ``rollout.skip_rollout`` is a
    key of its own, to be taken from it. ``old_workers``: whether ``trainer.use_legacy_worker_impl`` can choose workers
    of an older kind. ``rollout_keys``: ours that its ``RolloutConfig`` would refuse."""

    v1: bool
    own_skip: bool
    old_workers: bool = False

    @property
    def rollout_keys(self) -> tuple[str, ...]:
        return () if self.own_skip else ("skip_rollout", "skip_dump_dir")


SUPPORTED: Mapping[str, Version] = {
    "0.9.1": Version(v1=True, own_skip=False),
    "0.8.0": Version(v1=False, own_skip=False),
    "0.7.1": Version(v1=False, own_skip=True, old_workers=True),
}


def installed() -> str | None:
    """The version of verl that is installed, without importing it."""
    try:
        return importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        return None
