"""The whole configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from crossrl.config.actor import ActorConfig
from crossrl.config.algorithm import AlgorithmConfig
from crossrl.config.cluster import ClusterConfig
from crossrl.config.cross import CrossConfig
from crossrl.config.data import DataConfig
from crossrl.config.model import ModelConfig
from crossrl.config.ref import RefConfig
from crossrl.config.reward import RewardConfig
from crossrl.config.rollout import RolloutConfig
from crossrl.config.tape import TapeConfig
from crossrl.config.trainer import TrainerConfig


@dataclass(frozen=True, slots=True)
class ActorRolloutRefConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """All that a run depends on. Defaults may be interpolations: get a resolved one from ``load_config``.

    >>> from crossrl.config import load_config
    >>> cfg = load_config(["data.train_files=a.parquet", "actor_rollout_ref.model.path=m"]).config
    >>> cfg.actor_rollout_ref.actor.ppo_mini_batch_size == cfg.data.train_batch_size
    True
    """

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tape: TapeConfig = field(default_factory=TapeConfig)
    cross: CrossConfig = field(default_factory=CrossConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
