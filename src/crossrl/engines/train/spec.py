"""All that a process needs to make its training engine, in a form that can be sent to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from crossrl.engines.train.fsdp import FsdpTrainEngine
from crossrl.engines.train.optimizer import AdamWSettings
from crossrl.models.loading import load_causal_lm


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """``model``: folder. ``dtype``: of the master weights. ``optimizer``: None for a model that is never trained.
    ``micro_batch_size`` to ``packed``: see ``FsdpTrainEngine``; they hold for each rank. ``autocast``: such as
    "bfloat16". ``device``: "cpu" or "cuda"; each rank takes the GPU of its own. ``threads``: of each rank, None leaves
    PyTorch's choice. ``reshard``: see ``ShardedTrainEngine``. ``limit_s``: of every wait for other ranks.

    Memory at the start: each rank loads the whole model, in ``dtype``, into CPU memory before it keeps its shard, so a
    machine needs that as many times as it has ranks (also while a checkpoint of one process is loaded)."""

    model: str
    dtype: str = "float32"
    optimizer: AdamWSettings | None = None
    micro_batch_size: int | None = None
    max_tokens_per_micro_batch: int | None = None
    gradient_checkpointing: bool = False
    autocast: str | None = None
    packed: bool | None = None
    device: str = "cpu"
    threads: int | None = None
    trust_remote_code: bool = False
    override_config: Mapping[str, Any] = field(default_factory=dict)
    reshard: bool = True
    limit_s: float = 1800.0

    def load(self, device: torch.device | str) -> PreTrainedModel:
        model = load_causal_lm(self.model, self.dtype, device, self.trust_remote_code, self.override_config)
        return model if self.optimizer is not None else model.requires_grad_(False)

    def options(self) -> dict[str, Any]:
        """For the engine's constructor."""
        return {
            "micro_batch_size": self.micro_batch_size,
            "max_tokens_per_micro_batch": self.max_tokens_per_micro_batch,
            "gradient_checkpointing": self.gradient_checkpointing,
            "autocast": None if self.autocast is None else getattr(torch, self.autocast),
            "packed": self.packed,
        }

    def plain_engine(self, model: PreTrainedModel | None = None) -> FsdpTrainEngine:
        """The engine of one process, over ``model`` where that is loaded already."""
        return FsdpTrainEngine(model or self.load(self.device), self.optimizer, **self.options())
