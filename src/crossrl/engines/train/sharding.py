"""How a model is cut into shards: by FSDP2, each rank with some rows of every weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from crossrl.models.layout import Group
from crossrl.models.policy import Policy


def shard(policy: Policy, mesh: DeviceMesh, reshard: bool) -> tuple[Any, list[FSDPModule]]:
    """Shard the model of ``policy`` in place. Returns the module whose call is ``Policy.log_probs``, and all modules
    whose weights come and go as one, this one included.

    ``reshard``: False keeps weights whole from the forward pass on until ``FSDPModule.reshard``.
    """
    root: Any = _Root(policy)
    # Half precision is summed in single: the sum over ranks is then as exact as that over micro-batches.
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in [*_layers(policy.model), root]:
        fully_shard(module, mesh=mesh, reshard_after_forward=None if reshard else False, mp_policy=precision)
    modules: list[Any] = [m for m in root.modules() if isinstance(m, FSDPModule)]
    for module in modules:
        module.set_gradient_divide_factor(1.0)  # a sum and not a mean
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor in it
        if hasattr(module, "set_reduce_scatter_unused_params"):  # in newer versions of PyTorch
            module.set_reduce_scatter_unused_params(True, recurse=False)
    return root, modules


def rows(count: int, rank: int, world: int) -> slice:
    """Which of ``count`` rows ``rank`` of ``world`` holds. FSDP2 gives the last ones fewer, or none.

    >>> [rows(5, rank, 4) for rank in range(4)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None), slice(5, 5, None)]
    """
    size = -(-count // world)
    return slice(min(count, rank * size), min(count, (rank + 1) * size))


class _Root(torch.nn.Module):
    """Embedding, norm and head, which are one group of weights: they are whole while this runs ``Policy.log_probs``."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model, self._policy = policy.model, policy

    def forward(
        self, groups: Sequence[Group], temperature: float, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        log_p, h, sequence = self._policy.log_probs(groups, temperature, entropy)
        return log_p.clone(), None if h is None else h.clone(), sequence  # FSDP wants no views: their hooks can be lost


def _layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The outermost repeated blocks; each is gathered when it is its turn."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found: list[torch.nn.Module] = []
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        if module in inside or not (isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in names):
            continue
        found.append(module)
        inside |= set(module.modules())
    return found
