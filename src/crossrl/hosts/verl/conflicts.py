"""Settings of verl's own under which the host could not do what it is asked; each is named by its key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crossrl.hosts.verl.versions import SUPPORTED, installed

if TYPE_CHECKING:
    from crossrl.hosts.verl.settings import Settings

# verl's own ways to take responses from a file, besides the one whose key is ours (``rollout.skip_rollout``).
OWN_SKIPS = (
    "skip.rollout.enable", "skip.rollout_tq.enable", "skip.async_rollout.enable",
    "actor_rollout_ref.rollout.skip.enable",
)  # fmt: skip
ADAPTERS = ("lora_rank", "lora_adapter_path", "lora.rank", "lora.adapter_path")


def conflicts(settings: Settings, config: Any) -> list[str]:
    """One text for each. ``config``: verl's whole."""
    problems = [
        f"{key}=True: with it verl's own skip also says where responses come from; leave it out, or leave out ours"
        for key in OWN_SKIPS
        if _at(config, key)
    ]
    if settings.tape.mode != "off" and config.trainer.get("val_only"):
        problems.append(
            f"tape.mode={settings.tape.mode} with trainer.val_only=True: no step is trained, and validation is not "
            f"recorded"
        )
    if settings.tape.mode != "off" or settings.share:  # these look at the weights that train
        problems += _weights_unseen(config)
    return problems


def _weights_unseen(config: Any) -> list[str]:
    arr, problems = config.actor_rollout_ref, []
    model, strategy = arr.get("model") or {}, arr.actor.get("strategy")
    given = [(key, value) for key in ADAPTERS if (value := _at(model, key))]
    if given and strategy != "fsdp2":
        key, value = given[0]
        problems.append(
            f"actor_rollout_ref.model.{key}={value} with actor.strategy={strategy}: the adapter is not among the "
            f"weights that the host can read there, so an update would look as if it changed nothing; want "
            f"actor_rollout_ref.actor.strategy=fsdp2"
        )
    found = SUPPORTED.get(str(installed()))
    legacy = config.trainer.get("use_legacy_worker_impl", "auto")
    if found is not None and found.old_workers and legacy != "disable":
        problems.append(
            f"trainer.use_legacy_worker_impl={legacy}: want disable; the host does not know weights and checkpoints of "
            "verl's older workers"
        )
    return problems


def _at(part: Any, key: str) -> Any:
    for name in key.split("."):
        part = (part or {}).get(name)
    return part
