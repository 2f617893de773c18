"""``tape``: which stages are recorded or replayed, and where."""

from __future__ import annotations

from dataclasses import dataclass, field

from crossrl.config.fields import allowed

TAPED_STAGES = ("rollout", "reward", "old_log_prob", "ref_log_prob", "advantage", "update", "checkpoint", "sync")


@dataclass(frozen=True, slots=True)
class TapeConfig:
    mode: str = field(default="off", metadata=allowed("off", "record", "replay", "verify"))
    """record: write each stage's output; replay: load it instead of running the stage; verify: run and compare."""
    dir: str | None = None
    """Folder of the records. null: `tape` in trainer.default_local_dir."""
    replay_from: str | None = None
    """Run whose records replay and verify read. null: dir."""
    stages: list[str] = field(default_factory=lambda: ["all"], metadata=allowed("all", *TAPED_STAGES))
    """Stages that mode applies to; the others run as without a tape."""
    steps: str | None = None
    """Steps that mode applies to, such as 1-10,20. null: all."""
    accept: list[str] = field(default_factory=list)
    """Differences between the recorded run and this one that are accepted, as keys named by a refusal. Such a
    replay is not a valid reproduction, and its own record says so."""
    keep: int | None = None
    """Steps kept on disk; older records are deleted. null: all."""
    state: bool = False
    """Store weights and optimizer with each update, so that every step can be examined by itself. Three times the
    model's size in float32 per step: use it with steps or keep."""
    unstorable: str = field(default="leave_out", metadata=allowed("leave_out", "refuse"))
    """What to do with a value that has no place in a record, such as an object in extra_info. leave_out: record the
    rest and say so; refuse: stop."""
    max_bytes: int | None = None
    """Stop with a message before the records take more bytes than this. null: no limit."""
