"""The keys that a user of verl sets for us: read from verl's own configuration, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from crossrl.config.tape import TapeConfig
from crossrl.hosts.verl.conflicts import conflicts
from crossrl.hosts.verl.errors import HostError
from crossrl.hosts.verl.versions import SUPPORTED, installed

SHARE = {
    "share_data": None, "share_data_dir": "/tmp/verl/share_data_dir", "share_data_timeout": 3600.0,
    "share_data_heartbeat": 60.0, "share_data_keep": None,
}  # fmt: skip
TRAINERS = ("verl.trainer.ppo.ray_trainer", "verl.trainer.ppo.v1.trainer_base")
SKIP_DIR = "/tmp/rollout_dump"
STAGES = ("all", "rollout", "reward", "old_log_prob", "ref_log_prob", "advantage", "update")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked of the host. ``skip_dir``: None without rollout skip. ``share``: None without an exchange.

    ``home``: verl's ``trainer.default_local_dir``, where the tape lies if ``tape.dir`` does not say, and which tells
    in an exchange that a restarted run is the same. ``keep``: how many entries of an exchange stay that both sides are
    done with (None: all). ``v1``: which of verl's trainers.
    """

    tape: TapeConfig
    skip_dir: Path | None
    share: Literal["ckpt", "rollout"] | None
    share_dir: Path
    timeout_s: float
    heartbeat_s: float
    keep: int | None
    home: Path
    v1: bool

    @property
    def tape_dir(self) -> Path:
        return Path(self.tape.dir).expanduser() if self.tape.dir else self.home / "tape"

    def covers(self, stage: str) -> bool:
        return bool({"all", stage} & set(self.tape.stages))


def take_settings(trainer: Any) -> None:
    """Read our keys from ``trainer.config``, and remove those that verl's own parts would refuse or act upon.

    Leaves ``trainer.crossrl_settings``: ``Settings``, or None when nothing is asked. Raises ``HostError``.
    """
    from omegaconf import open_dict

    config = trainer.config
    trainer.crossrl_settings = settings = read_settings(config, hasattr(trainer, "replay_buffer"))
    if settings is not None:
        _refuse_overridden(type(trainer))
    version = SUPPORTED[str(installed())]
    rollout = config.actor_rollout_ref.rollout
    with open_dict(rollout):
        for key in version.rollout_keys:
            rollout.pop(key, None)
        if version.own_skip and settings is not None and settings.skip_dir is not None:
            rollout.skip_rollout = False  # verl's own, which keeps one batch for all steps, steps aside for ours


def _refuse_overridden(kind: type) -> None:
    """A trainer derived from verl's, with a loop of its own, would take the keys and do nothing."""
    for name in ("fit", "_update_actor"):
        owner = next((c for c in kind.__mro__ if name in vars(c)), None)
        if owner is not None and owner.__module__ not in TRAINERS:
            raise HostError(
                f"{owner.__module__}.{owner.__qualname__} has a {name} of its own; the host works in that of verl's "
                f"trainers ({', '.join(TRAINERS)}). Leave out tape.*, trainer.share_data* and skip_rollout with it"
            )


def read_settings(config: Any, v1: bool) -> Settings | None:
    """Raises ``HostError`` for a value that is not possible, naming its key."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    share = {key: trainer.get(key, default) for key, default in SHARE.items()}
    unknown = [k for k in trainer if k.startswith("share_data") and k not in SHARE]
    if unknown:
        raise HostError(f"trainer.{unknown[0]} is unknown; the keys of an exchange are: {', '.join(SHARE)}")
    tape, skip = _tape(config.get("tape") or {}), bool(rollout.get("skip_rollout", False))
    if share["share_data"] is None and tape.mode == "off" and not skip:
        return None
    settings = Settings(
        tape,
        Path(rollout.get("skip_dump_dir") or SKIP_DIR) if skip else None,
        share["share_data"],
        Path(share["share_data_dir"]),
        float(share["share_data_timeout"]),
        float(share["share_data_heartbeat"]),
        None if share["share_data_keep"] is None else int(share["share_data_keep"]),
        Path(trainer.default_local_dir),
        v1,
    )
    _check(settings, config)
    return settings


def _tape(given: Mapping[str, Any]) -> TapeConfig:
    names = [f.name for f in fields(TapeConfig)]
    for key in given:
        if key not in names:
            near = get_close_matches(key, names, 1)
            raise HostError(f"tape.{key} is unknown{f'; did you mean tape.{near[0]}?' if near else ''}")
    values: dict[str, Any] = {key: list(v) if key in ("stages", "accept") else v for key, v in given.items()}
    if values.get("steps") is not None:
        values["steps"] = str(values["steps"])
    tape = TapeConfig(**values)
    if tape.mode not in ("off", "record", "replay"):
        raise HostError(
            f"tape.mode={tape.mode}: in verl there are off, record, and replay (of generation). To verify the stages "
            f"of a recorded run, compare it with a second recorded run: crossrl diff"
        )
    for stage in tape.stages:
        if stage not in STAGES:
            raise HostError(f"tape.stages holds {stage!r}; of verl's step are recorded: {', '.join(STAGES)}")
    if tape.state:
        raise HostError("tape.state=True: verl's state is in its own checkpoints; set trainer.save_freq instead")
    return tape


def _check(settings: Settings, config: Any) -> None:
    """What cannot work is refused here, with every reason at once."""
    problems = []
    role, rollout, algorithm = settings.share, config.actor_rollout_ref.rollout, config.algorithm
    if role not in (None, "ckpt", "rollout"):
        problems.append(f"trainer.share_data={role}: want ckpt (this run infers) or rollout (this run trains)")
    if role and settings.skip_dir:
        problems.append(f"trainer.share_data={role} with skip_rollout=True: both say where responses come from")
    if settings.tape.mode == "replay" and (role or settings.skip_dir):
        problems.append("tape.mode=replay with trainer.share_data or skip_rollout: both say where responses come from")
    if settings.v1 and config.trainer.v1.trainer_mode != "sync":
        problems.append(f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}: want sync, whose steps are apart")
    if settings.v1 and (config.trainer.v1.sampler.get("custom_sampler") or {}).get("path"):
        problems.append("trainer.v1.sampler.custom_sampler: a sampler of your own decides what a step is made of")
    groups = algorithm.get("filter_groups") or {}
    if groups.get("enable") or (settings.v1 and config.trainer.v1.sampler.get("sync_refill_failed_groups")):
        problems.append(
            "algorithm.filter_groups.enable, sync_refill_failed_groups: what a step is made of depends on it"
        )
    if str(algorithm.adv_estimator).rpartition(".")[2].lower() == "remax":
        problems.append("algorithm.adv_estimator=remax: its greedy answers are not recorded")
    problems += conflicts(settings, config)
    if role:
        problems += _exchange_problems(config)
    if int(rollout.get("n", 1)) < 1:
        problems.append(f"actor_rollout_ref.rollout.n={rollout.n}: want at least 1")
    if problems:
        raise HostError("this run cannot be recorded, replayed or exchanged:\n  " + "\n  ".join(problems))


def _exchange_problems(config: Any) -> list[str]:
    problems, actor = [], config.actor_rollout_ref.actor
    if config.trainer.critic_warmup:
        problems.append(f"trainer.share_data with trainer.critic_warmup={config.trainer.critic_warmup}: want 0")
    if str(config.algorithm.adv_estimator).rpartition(".")[2].lower() == "gae":
        problems.append("trainer.share_data with a critic (algorithm.adv_estimator=gae): critics are not exchanged")
    saved = set(actor.checkpoint.get("save_contents") or ())
    if not {"model", "optimizer", "extra"} <= saved:
        problems.append(f"actor.checkpoint.save_contents={sorted(saved)}: an exchange needs model, optimizer and extra")
    if actor.checkpoint.get("async_save"):
        problems.append("actor.checkpoint.async_save=True: an exchanged checkpoint must be complete when it is saved")
    keep = config.trainer.get("share_data_keep")
    if keep is not None and int(keep) < 0:
        problems.append(f"trainer.share_data_keep={keep}: want 0 or more entries, or null to keep all")
    if keep is not None and config.trainer.save_freq <= 0:
        problems.append(
            f"trainer.share_data_keep={keep} needs trainer.save_freq: an entry is removed once both runs have a "
            "checkpoint after it"
        )
    if config.trainer.get("val_only"):
        problems.append("trainer.share_data with trainer.val_only=True: there is nothing to share")
    return problems
