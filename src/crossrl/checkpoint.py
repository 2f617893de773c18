"""Checkpoints: complete when visible, checked when loaded, and never fewer than there were.

A checkpoint is a folder ``global_step_{N}``::

    model/                  a normal Hugging Face folder (config, model.safetensors, tokenizer)
    optimizer.safetensors   every optimizer tensor by name
    state.json              everything else, JSON: step, loader position, schedules, run identity
    manifest.json           sha256 of each file above, digests of weights and optimizer, written last

Of a model that several ranks train, ``model`` is without weights, and weights and optimizer are in ``shards``, a file
of each rank; that is format 2. What is in these parts is the training engine's matter (``engines/train/saving.py``).

It is filled under a temporary name, flushed, and renamed. Older ones are removed only after that.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from crossrl.engines.train.saving import MODEL, SHARDS, is_sharded
from crossrl.files import dump_json, file_digests, publish_folder, publish_text, read_json, remove_leftovers

WHOLE, SHARDED = 1, 2  # formats
WEIGHTS = (f"{MODEL}/*.safetensors", f"{SHARDS}/*.safetensors")  # one of them is in every checkpoint
MARKER = "latest_checkpointed_iteration.txt"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or cannot be trusted; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint whose files are as they were written: ``state`` as it was saved; the tensors are the training
    engine's to load from ``path``."""

    path: Path
    step: int
    state: Mapping[str, Any]
    manifest: Mapping[str, Any]


class CheckpointStore:
    """The checkpoints under one folder. ``keep``: how many to keep; None keeps all."""

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        self.folder, self.keep = folder, keep

    def path(self, step: int) -> Path:
        return self.folder / f"global_step_{step}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in order. The folders are the truth, not the marker file."""
        if not self.folder.is_dir():
            return []
        found = (re.fullmatch(r"global_step_(\d+)", p.name) for p in self.folder.iterdir() if p.is_dir())
        return sorted(int(m[1]) for m in found if m and (self.folder / m[0] / "manifest.json").is_file())

    def latest(self) -> int | None:
        """The newest step, or None where there is nothing.

        Raises ``CheckpointError`` when folders look like checkpoints but none of them is complete, or when the
        marker names a checkpoint that is not there: going on from step 0 would overwrite somebody's run.
        """
        steps = self.steps()
        broken = [p for p in self.folder.glob("global_step_*") if not (p / "manifest.json").is_file()]
        if not steps and broken:
            raise CheckpointError(
                f"{broken[0]} has no manifest.json: not a complete CrossRL checkpoint, and there is no other in "
                f"{self.folder}. Move it away, or start afresh with trainer.resume_mode=disable in another folder"
            )
        marker = self.folder / MARKER
        if marker.is_file() and not steps:
            raise CheckpointError(f"{marker} names step {marker.read_text().strip()}, but no checkpoint is there")
        return steps[-1] if steps else None

    def save(
        self,
        step: int,
        write_engine: Callable[[Path], None],
        state: Mapping[str, Any],
        digests: Mapping[str, str],
        need_bytes: int,
    ) -> Path:
        """Write the checkpoint of ``step``, then drop the oldest ones beyond ``keep``.

        ``write_engine(folder)`` writes what the training engine will load. Saving a step that is there already is an
        error: it would be another run's. Raises ``CheckpointError`` when the disk is too full, before and after the
        try, and when ``write_engine`` has left no weights in the folder.
        """
        target = self.path(step)
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if free < need_bytes:
            raise CheckpointError(
                f"{target}: about {need_bytes / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free; nothing was removed. "
                "Free some space, or set trainer.max_actor_ckpt_to_keep lower before the next run"
            )

        try:
            with publish_folder(target) as tmp:
                write_engine(tmp)
                publish_text(tmp / "state.json", dump_json({"step": step, **state}))
                files = sorted(p for p in tmp.rglob("*") if p.is_file())
                names = [str(p.relative_to(tmp)) for p in files]
                if not any(PurePath(name).match(weights) for name in names for weights in WEIGHTS):
                    raise CheckpointError(
                        f"cannot write {target}: {' and '.join(WEIGHTS)} are both missing in what was written "
                        f"({', '.join(names)}). The processes that train must share the folder with this one: set "
                        f"trainer.default_local_dir to a folder that all of them see. Older checkpoints are untouched: "
                        f"{self.steps()}"
                    )
                content = dict(zip(names, file_digests(files), strict=True))
                form = SHARDED if is_sharded(tmp) else WHOLE
                manifest = {"format": form, "step": step, "files": content, **digests}
                publish_text(tmp / "manifest.json", dump_json(manifest))
            publish_text(self.folder / MARKER, str(step))
        except FileExistsError:
            raise CheckpointError(f"{target} is there already; use another trainer.default_local_dir") from None
        except OSError as error:
            raise CheckpointError(
                f"cannot write {target}: {error}. Older checkpoints are untouched: {self.steps()}"
            ) from error
        self._retire()
        return target

    def _retire(self) -> None:
        if self.keep is not None:
            for step in self.steps()[: -max(self.keep, 1)]:
                # The manifest goes first: a half-removed folder must not look complete after a kill.
                (self.path(step) / "manifest.json").unlink()
                shutil.rmtree(self.path(step))

    def clean(self) -> None:
        """Remove what a killed writer left behind (call it once, at start, as the folder's only writer)."""
        if self.folder.is_dir():
            remove_leftovers(self.folder)
            steps = self.steps()
            for path in self.folder.glob("global_step_*"):
                step = path.name.removeprefix("global_step_")
                if steps and not (path / "manifest.json").is_file() and step.isdigit() and int(step) < steps[-1]:
                    shutil.rmtree(path)  # half-removed by _retire

    def load(self, path: Path) -> Saved:
        """Read a checkpoint and check every file against the manifest. Raises ``CheckpointError``."""
        manifest_path = path / "manifest.json"
        if not manifest_path.is_file():
            raise CheckpointError(f"{manifest_path} is not there: {path} is not a complete CrossRL checkpoint")
        manifest = read_json(manifest_path)
        if manifest.get("format") not in (WHOLE, SHARDED):
            raise CheckpointError(
                f"{manifest_path}: format {manifest.get('format')!r} found, {WHOLE} or {SHARDED} expected"
            )
        files = {name: path / name for name in manifest["files"]}
        for file in files.values():
            if not file.is_file():
                raise CheckpointError(f"{file} is missing (named in {manifest_path}); use an older checkpoint")
        for (name, file), found in zip(files.items(), file_digests(files.values()), strict=True):
            if found != manifest["files"][name]:
                raise CheckpointError(
                    f"{file} was changed since it was saved: sha256 {manifest['files'][name][:16]}... expected, "
                    f"{found[:16]}... found. Use an older checkpoint (trainer.resume_mode=resume_path)"
                )
        state = read_json(path / "state.json")
        return Saved(path, state["step"], state, manifest)
