"""What there is to know of the model in a training engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from crossrl.engines.base import TrainFacts
from crossrl.models.loading import tied_names
from crossrl.models.policy import Policy


def facts_of(policy: Policy, state: Mapping[str, torch.Tensor]) -> TrainFacts:
    """``state``: all tensors by name, whole or sharded; shapes are those of the whole ones."""
    model = policy.model
    end = getattr(model.generation_config, "eos_token_id", None)
    return TrainFacts(
        device=str(policy.device),
        dtype=str(policy.dtype).removeprefix("torch."),
        vocab_size=policy.vocab_size,
        max_length=policy.max_length,
        num_parameters=sum(t.numel() for name, t in state.items() if name.startswith("weights/")),
        config=model.config.to_dict(),
        tied=tied_names(model),
        eos_token_ids=tuple(end) if isinstance(end, list) else () if end is None else (end,),
        state_bytes=sum(t.numel() * t.element_size() for t in state.values()),
        state_tensors=len(state),
        packed=policy.packed,
        notice=policy.notice,
    )
