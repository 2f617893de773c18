"""Where the record of a call lies: the naming schemes for a run's own tape and for rollout skip."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from crossrl.stages.base import At
from crossrl.tape.errors import TapeError

_STEP = re.compile(r"step_(\d{6,})")
_CALL = re.compile(r"(val\.)?([A-Za-z_][A-Za-z0-9_]*)\.(\d+)")


class Layout(Protocol):
    """``index`` counts the calls of a stage in the run, from 0, each split apart. ``label`` begins the log lines."""

    @property
    def root(self) -> Path: ...

    @property
    def label(self) -> str: ...

    def path(self, stage: str, at: At, index: int) -> Path:
        """The folder in which this call's record is, or is to be."""
        ...

    def find(self, stage: str, at: At, index: int) -> Path | None:
        """The folder of this call's record, if there is one. Raises ``TapeError`` for one that must not be used."""
        ...

    def describe(self) -> str:
        """One line for the log at the start of a run."""
        ...


@dataclass(frozen=True, slots=True)
class RunLayout:
    """A run's own tape: ``root/step_000001/rollout.0``, for validation ``root/step_000001/val.rollout.0``."""

    root: Path
    label: str = "tape"

    def path(self, stage: str, at: At, index: int) -> Path:
        split = "val." if at.split == "val" else ""
        return self.step_path(at.step) / f"{split}{stage}.{at.call}"

    def step_path(self, step: int) -> Path:
        return self.root / f"step_{step:06d}"

    def find(self, stage: str, at: At, index: int) -> Path | None:
        return _existing(self.path(stage, at, index))

    def describe(self) -> str:
        return f"folder in use: {self.root} ({len(self.steps())} recorded steps there)"

    def steps(self) -> list[int]:
        """The steps that have a folder, in order."""
        if not self.root.is_dir():
            return []
        return sorted(int(m[1]) for p in self.root.iterdir() if (m := _STEP.fullmatch(p.name)) and p.is_dir())

    def calls(self, step: int) -> list[tuple[str, At]]:
        """Stage and place of each record of ``step``, by name and call."""
        folder = self.step_path(step)
        names = [_CALL.fullmatch(p.name) for p in folder.iterdir()] if folder.is_dir() else []
        found = [(m[2], At(step, int(m[3]), "val" if m[1] else "train")) for m in names if m]
        return sorted(found, key=lambda c: (c[1].split, c[0], c[1].call))


@dataclass(frozen=True, slots=True)
class SkipLayout:
    """Rollout skip: ``root/{experiment_name}_{project_name}_GBS{gbs}_N{n}_{index}``, for validation ``root/val_...``.

    The older name without an index (``..._GBS{gbs}__N{n}``) is read for call 0 only: using it again would train on
    one batch for several steps, which is the fault that the index mends.
    """

    root: Path
    experiment_name: str
    project_name: str
    gbs: int
    n: int
    label: str = "rollout skip"

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root).expanduser())
        for key in ("experiment_name", "project_name"):
            name = getattr(self, key)
            if not name or "/" in name or "\0" in name or name.startswith("."):
                raise TapeError(
                    f"trainer.{key}={name!r} is part of a folder's name in rollout skip: give it a name without '/' "
                    f"that does not begin with '.'"
                )

    @property
    def _base(self) -> str:
        return f"{self.experiment_name}_{self.project_name}_GBS{self.gbs}"

    def path(self, stage: str, at: At, index: int) -> Path:
        split = "val_" if at.split == "val" else ""
        return self.root / f"{split}{self._base}_N{self.n}_{index}"

    @property
    def old_path(self) -> Path:
        """The un-indexed name."""
        return self.root / f"{self._base}__N{self.n}"

    def find(self, stage: str, at: At, index: int) -> Path | None:
        found = _existing(self.path(stage, at, index))
        if found or at.split == "val" or not self.old_path.is_dir():
            return found
        if self.path(stage, at, 0).exists():  # the first call has its own record, so the old folder is not in use
            return None
        if index > 0:
            raise TapeError(
                f"{self.old_path} (a name without an index) holds one call of generation and was used for call 0; "
                f"call {index} must not use the same responses again. Move that folder away to generate and store "
                f"each call on its own, or limit the run to one call"
            )
        foreign = sorted(p.name for p in self.old_path.iterdir() if p.suffix in (".dp", ".pt", ".pkl", ".pickle"))
        if foreign:
            raise TapeError(
                f"{self.old_path} holds {foreign[0]}, a pickle written by another trainer. Loading a pickle runs code "
                f"from the file, so it is not read. Move the folder away to generate and store anew"
            )
        return self.old_path

    def describe(self) -> str:
        pattern = f"{self._base}_N{self.n}_"
        names = [p.name for p in self.root.iterdir()] if self.root.is_dir() else []
        stored = sum(name.startswith(pattern) and name[len(pattern) :].isdecimal() for name in names)
        return f"folder in use: {self.root} ({pattern}<index>; {stored} stored calls there)"


def _existing(path: Path) -> Path | None:
    return path if path.is_symlink() or path.exists() else None


def in_ray_session(root: Path) -> bool:
    """Whether ``root`` lies in a session folder of Ray, which does not outlive the cluster."""
    parts = root.expanduser().absolute().resolve().parts
    return any(a == "ray" and b.startswith("session") for a, b in pairwise(parts))
