"""Run in verl's workers by ``ActorHandle.__ray_call__``: nothing there is patched, they are only asked.

``worker``: the Ray actor's own object, in which verl keeps the worker of each role.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from crossrl.hosts.verl.errors import HostError

# Where an engine keeps what manages its checkpoints; the second is how verl's Megatron engine spells it.
_MANAGERS = ("checkpoint_manager", "checkpoint_mananager")


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
    """An exchanged checkpoint is not one of those of which verl keeps the last few (``max_actor_ckpt_to_keep``).

    Raises ``HostError`` where verl's list of them is not found: verl would delete a checkpoint of the user's for ours.
    """
    actor = _actor(worker)
    managers = [getattr(actor, name) for name in _MANAGERS if hasattr(actor, name)]
    lists = [m.previous_saved_paths for m in managers if hasattr(m, "previous_saved_paths")]
    if not lists:
        raise HostError(
            f"{type(actor).__name__}: verl's list of saved checkpoints (previous_saved_paths) is not where it was "
            f"({' or '.join(_MANAGERS)}): verl would count the exchanged ones and delete one of this run for each. Use "
            f"actor.strategy=fsdp2, or record both runs (tape.mode=record) instead of exchanging"
        )
    for paths in lists:
        if path in paths:
            paths.remove(path)


def _actor(worker: Any) -> Any:
    """The engine of the actor."""
    inner = getattr(worker, "worker_dict", None) or getattr(worker, "fused_worker_dict", None) or {"": worker}
    for candidate in inner.values():
        engine = getattr(getattr(candidate, "actor", None), "engine", None)
        if engine is not None:
            return engine
    raise HostError(f"no actor among the roles of this worker: {', '.join(map(str, inner)) or 'none'}")


def _named(worker: Any) -> Iterator[tuple[str, Any]]:
    """Name and tensor (perhaps a DTensor); of an engine that cannot give a state dict, what it gives the rollout."""
    actor = _actor(worker)
    module = getattr(actor, "module", None)
    if module is not None and hasattr(module, "state_dict") and not _flat(module):
        yield from module.state_dict().items()
    elif hasattr(actor, "get_per_tensor_param"):
        _refuse_adapter(actor, module)
        yield from actor.get_per_tensor_param()[0]
    else:
        raise HostError(f"{type(actor).__name__}: no way to read its weights is known to the host")


def _refuse_adapter(actor: Any, module: Any) -> None:
    """What such an engine gives the rollout is without the adapter, the only thing that is trained."""
    inner = getattr(module, "_fsdp_wrapped_module", module)
    if hasattr(inner, "peft_config") or getattr(actor, "peft_cls", None) is not None:
        raise HostError(
            f"{type(actor).__name__} trains a LoRA adapter, which the weights that the host can read there do not "
            f"contain. Use actor_rollout_ref.actor.strategy=fsdp2, whose weights are read as they are"
        )


def _flat(module: Any) -> bool:
    """FSDP1 keeps parameters flattened: their state dict is made in another way."""
    return type(module).__name__ == "FullyShardedDataParallel"
