"""Run in verl's workers by ``ActorHandle.__ray_call__``: nothing there is patched, they are only asked.

``worker``: the Ray actor's own object, in which verl keeps the worker of each role.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from crossrl.hosts.verl.errors import HostError


def actor_digest(worker: Any) -> str:
    """Digest of the actor's weights, the same for every way in which they are sharded; all ranks must be asked at once.

    One tensor at a time is put together; its name is that of verl's own state dict.
    """
    import torch

    from crossrl.models.digest import combined, weights_digest

    each = {}
    for name, value in _named(worker):
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            each[name] = weights_digest([(name, whole.detach())], threads=2)
    if not each:
        raise HostError("verl's actor has no weights: nothing can be compared")
    return combined(each)


def forget_saved(worker: Any, path: str) -> None:
    """An exchanged checkpoint is not one of those of which verl keeps the last few (``max_actor_ckpt_to_keep``)."""
    manager = getattr(_actor(worker), "checkpoint_manager", None)
    paths = getattr(manager, "previous_saved_paths", None)
    if paths is not None and path in paths:
        paths.remove(path)


def _actor(worker: Any) -> Any:
    """The engine of the actor (0.8 on), or the worker itself where it holds the module (0.7's older workers)."""
    inner = getattr(worker, "worker_dict", None) or getattr(worker, "fused_worker_dict", None) or {"": worker}
    for candidate in inner.values():
        engine = getattr(getattr(candidate, "actor", None), "engine", None)
        if engine is not None:
            return engine
        if hasattr(candidate, "actor_module_fsdp"):
            return candidate
    raise HostError(f"no actor among the roles of this worker: {', '.join(map(str, inner)) or 'none'}")


def _named(worker: Any) -> Iterator[tuple[str, Any]]:
    """Name and tensor (perhaps a DTensor); of an engine that cannot give a state dict, what it gives the rollout."""
    actor = _actor(worker)
    module = getattr(actor, "actor_module_fsdp", None) or getattr(actor, "module", None)
    if module is not None and hasattr(module, "state_dict") and not _flat(module):
        yield from module.state_dict().items()
    elif hasattr(actor, "get_per_tensor_param"):
        yield from actor.get_per_tensor_param()[0]
    else:
        raise HostError(f"{type(actor).__name__}: no way to read its weights is known to the host")


def _flat(module: Any) -> bool:
    """FSDP1 keeps parameters flattened: their state dict is made in another way."""
    return type(module).__name__ == "FullyShardedDataParallel"
