"""Checkpoints that two runs of verl exchange: verl's own save, complete when visible, and verl's own load.

``DIR/ckpt_3.verl/`` lies beside the record ``DIR/ckpt_3``, which has the digest of each of its files and of the weights
that were saved; the record comes later, so who sees it sees the checkpoint. verl's files are pickles: who can write to
the folder can run code in the run that loads them, as with any of verl's checkpoints.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crossrl.files import file_digests, publish_folder
from crossrl.hosts.verl.errors import HostError
from crossrl.hosts.verl.weights import forget_saved
from crossrl.tape.record import Record

SUFFIX = ".verl"
FACTS = "path/checkpoint"
"""Of the update's info. Like all paths it is left out where two runs are compared: pickles are never equal bytes."""


class Checkpoints:
    """``group``: verl's workers with the actor. ``ask``: runs a function in each of them."""

    def __init__(self, root: Path, group: Any, ask: Callable[..., list[Any]]) -> None:
        self.root, self.group, self.ask = root, group, ask

    def clean(self) -> None:
        """Remove what this side left when it was killed while it saved or removed."""
        for path in self.root.glob(f".ckpt_*{SUFFIX}.*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def remove(self, published: int) -> None:
        """Remove the files of entries whose records were removed, as both sides are done with them. ``published``: how
        many entries have had their record."""
        for path in self.root.glob(f"ckpt_*{SUFFIX}"):
            number = path.name.removeprefix("ckpt_").removesuffix(SUFFIX)
            if number.isdecimal() and int(number) < published and not (self.root / f"ckpt_{number}").exists():
                hidden = path.with_name(f".{path.name}.old.tmp")  # whole or not at all, and what is left is cleaned
                path.rename(hidden)
                shutil.rmtree(hidden, ignore_errors=True)

    def save(self, index: int, step: int) -> dict[str, Any]:
        """Publish the checkpoint of entry ``index``; returns what its record says about it."""
        target = self.root / f"ckpt_{index}{SUFFIX}"
        if target.exists():  # saved, but killed before the record came: nobody has seen it
            shutil.rmtree(target)
        with publish_folder(target) as folder:
            self.group.save_checkpoint(str(folder), None, step, max_ckpt_to_keep=None)
            self.ask(forget_saved, str(folder))
            files = sorted(p for p in folder.rglob("*") if p.is_file())
            if not files:
                raise HostError(
                    f"verl saved nothing into {folder}: the workers must see the same folder as the trainer"
                )
            names = [str(p.relative_to(folder)) for p in files]
            digests = dict(zip(names, file_digests(files), strict=True))
        return {"folder": target.name, "files": digests}

    def load(self, record: Record) -> None:
        """Bring the checkpoint of ``record`` into verl's workers. Raises ``HostError`` if it is not the one saved."""
        facts = record.header.info.get(FACTS)
        if not isinstance(facts, dict):
            raise HostError(f"{record.path} has no checkpoint of verl: it was published by another kind of run")
        folder = self.root / f"{record.path.name}{SUFFIX}"
        names = sorted(facts["files"])
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise HostError(f"{folder / missing[0]} is missing; {record.path} names it")
        for name, found in zip(names, file_digests([folder / name for name in names]), strict=True):
            if found != facts["files"][name]:
                raise HostError(
                    f"{folder / name} is not what was saved: sha256 {found[:16]}..., expected "
                    f"{facts['files'][name][:16]}... ({record.path})"
                )
        self.group.load_checkpoint(str(folder), None, del_local_after_load=False)
