"""``cluster``: the processes of a run. Not keys of verl's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from crossrl.config.fields import allowed


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    launcher: str = field(default="auto", metadata=allowed("auto", "local", "ray"))
    """Who starts the processes of a run. auto: Ray where training or generation has more than one process; else
    children of this one where an engine needs a process (vllm); else there is one process. local, ray: these, also
    where one process would do (ray: training too)."""
    address: str | None = None
    """Ray cluster to run in: auto (the one this machine belongs to) or HOST:PORT. null: one is started on this machine,
    for this run, or, with trainer.nnodes above 1, auto."""
    ray_init: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ray.init, such as num_cpus=8."""
    start_timeout: float = 600.0
    """Seconds for a worker to start: import, load the model."""
    call_timeout: float = 3600.0
    """Seconds for one call of a worker: generate a share of a batch, one optimizer step. One that is later is ended."""
    transport: str = field(default="shared_memory", metadata=allowed("shared_memory", "cuda_ipc"))
    """What weights go through to an engine. cuda_ipc: the memory of a GPU that train rank 0 and all engines share; it
    was never run on a GPU."""
    sync_timeout: float = 120.0
    """Seconds for each step of a weight transfer."""
