"""Saving all that a run needs to go on, and bringing it back as if the run had never stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import crossrl
from crossrl.assemble import Parts
from crossrl.batch import Batch
from crossrl.checkpoint import CheckpointError, CheckpointStore, Saved
from crossrl.config.resolved import flatten
from crossrl.config.root import RunConfig


class ResumeError(RuntimeError):
    """The run cannot go on from what is there; the message says why and what to do."""


class RunState:
    """The state of one run, in its checkpoints: weights, optimizer, loader, controllers; by name, with digests."""

    def __init__(self, cfg: RunConfig, parts: Parts, store: CheckpointStore) -> None:
        self.cfg, self.parts, self.store = cfg, parts, store

    def digests(self) -> dict[str, str]:
        return self.parts.trainer.digests()

    def save(self, step: int, batch: Batch | None, facts: Mapping[str, Any]) -> dict[str, str]:
        """Write ``global_step_{step}``; returns its path and digests. ``facts``: what else belongs to the run's state.

        ``batch``: the step's, whose sample ids a resumed run needs to complete that step's records.
        """
        trainer = self.parts.trainer
        digests = self.digests()
        path = self.store.save(
            step,
            lambda folder: trainer.save(folder, self.parts.tokenizer),
            {
                "engine": trainer.scalars(),
                "loader": self.parts.loader.state(),
                "advantage": dict(self.parts.advantage.state()),
                "sample_id": list(batch.sample_id) if batch is not None else [],
                "config": flatten(self.cfg),
                "crossrl": crossrl.__version__,
                **facts,
            },
            digests,
            need_bytes=int(trainer.facts.state_bytes * 1.05) + 10_000_000,
        )
        return {"path": str(path), **digests}

    def find(self) -> Saved | None:
        """The checkpoint that ``trainer.resume_mode`` asks for; None to start anew. Raises ``ResumeError``."""
        trainer, folder = self.cfg.trainer, self.store.folder
        latest = self.store.latest()
        if trainer.resume_mode == "resume_path":
            if not trainer.resume_from_path:
                raise ResumeError("trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N")
            saved = self.store.load(Path(trainer.resume_from_path).expanduser())
            if latest is not None and latest > saved.step:
                raise ResumeError(
                    f"{folder} holds a later checkpoint (step {latest}) than {saved.path}, which this run would have "
                    "to overwrite. Choose another trainer.default_local_dir, or move it away"
                )
            return saved
        if latest is None:
            return None
        if trainer.resume_mode == "disable":
            raise ResumeError(
                f"{folder} holds checkpoints up to step {latest}, and trainer.resume_mode=disable would start over "
                "them. Choose another trainer.default_local_dir, or move them away"
            )
        return self.store.load(self.store.path(latest))

    def restore(self, saved: Saved) -> None:
        """Bring everything back, and check that what is now held is what was saved."""
        trusted = self.cfg.actor_rollout_ref.model.trust_remote_code
        self.parts.trainer.load(saved.path, saved.state["engine"], trusted)
        self.parts.loader.load_state(saved.state["loader"])
        self.parts.advantage.load_state(saved.state["advantage"])
        for name, found in self.digests().items():
            if found != saved.manifest[name]:
                raise CheckpointError(
                    f"{saved.path}: the digest of the {name} after loading is {found[:16]}..., saved was "
                    f"{saved.manifest[name][:16]}...: this is not the state that was saved"
                )

    def changes(self, saved: Saved) -> list[str]:
        """A line for each key of the configuration that differs from the run that made the checkpoint."""
        before, now = saved.state["config"], flatten(self.cfg)
        keys = sorted(k for k in {*before, *now} if before.get(k) != now.get(k))
        return [f"changed since the checkpoint: {k}: {before.get(k)} -> {now.get(k)}" for k in keys]
