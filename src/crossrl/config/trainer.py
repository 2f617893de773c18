"""``trainer``: the run: length, names, places, checkpoints, validation."""

from __future__ import annotations

from dataclasses import dataclass, field

from crossrl.config.fields import allowed


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    total_epochs: int = 1
    """Passes over the training data."""
    total_training_steps: int | None = None
    """Training steps, whatever total_epochs says. null: as many as the epochs have."""
    stop_after_steps: int | None = None
    """Stop after this step, with a checkpoint, though more are planned; schedules keep their length, and started again
    without this the run goes on. null: do not. Not a key of verl's."""
    seed: int = 1
    """The one seed of the run; each consumer derives its own from it. Not a key of verl's."""
    device: str = field(default="auto", metadata=allowed("auto", "cpu", "cuda"))
    """Where the models are. auto: a GPU if there is one."""
    num_threads: int | None = None
    """Threads of PyTorch. null: chosen by model size and cores, and printed. Not a key of verl's."""
    nnodes: int = 1
    """Machines of the Ray cluster that the run takes."""
    n_gpus_per_node: int = 1
    """Processes that train, on each machine: one for each GPU, and as many as this on a CPU."""
    project_name: str = "crossrl"
    """Name of the project for loggers and folders."""
    experiment_name: str = "default"
    """Name of the run for loggers and folders."""
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    """Folder of the run: checkpoints, metrics.jsonl, resolved config."""
    logger: list[str] = field(
        default_factory=lambda: ["console", "file"],
        metadata=allowed("console", "file", "tensorboard", "wandb", "mlflow"),
    )
    """Where metrics go; file is metrics.jsonl. wandb and mlflow need the extra `loggers`."""
    log_val_generations: int = 0
    """Validation samples shown after each validation."""
    rollout_data_dir: str | None = None
    """Folder for training samples as readable JSON Lines, a file per step. null: none."""
    validation_data_dir: str | None = None
    """Folder for validation samples, a file per validation. null: none."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate once and stop."""
    test_freq: int = -1
    """Steps between validations; the last step is always validated. -1: none."""
    save_freq: int = -1
    """Steps between checkpoints; the last step is always saved. -1: none."""
    max_actor_ckpt_to_keep: int | None = None
    """Checkpoints kept; older ones are deleted once a new one is complete. null: all."""
    resume_mode: str = field(default="auto", metadata=allowed("auto", "disable", "resume_path"))
    """auto: go on from the last complete checkpoint of default_local_dir, if any; resume_path: from
    resume_from_path; disable: start anew, which needs a default_local_dir without checkpoints."""
    resume_from_path: str | None = None
    """Checkpoint folder for resume_mode=resume_path."""
    critic_warmup: int = 0
    """Must be 0: there is no critic in this version."""
    share_data: str | None = field(default=None, metadata=allowed("ckpt", "rollout"))
    """Exchange halves with a second, live run. ckpt: this run infers, publishes its rollouts and loads the other's
    checkpoints instead of training; rollout: it trains on the other's rollouts and publishes its checkpoints."""
    share_data_dir: str = "/tmp/verl/share_data_dir"
    """Folder of the exchange, the same for both runs and for no other; on two machines, a shared one."""
    share_data_timeout: float = 3600.0
    """Seconds to wait for one entry of the other run. A run that failed, died or ended is noticed before."""
    share_data_heartbeat: float = 60.0
    """Seconds without a sign of life after which the other run counts as dead. On one machine a killed process is
    noticed at once."""
    share_data_keep: int | None = None
    """Entries kept of those that both runs are done with (have a checkpoint after); older ones are removed. null: all
    are kept, about three times the model's size for each step."""
