"""From a configuration to the parts of a run: loads data and models, starts the scorers, connects the stages."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossrl import settings
from crossrl.cluster.worker import Launcher
from crossrl.config.root import RunConfig
from crossrl.data.dataset import PromptDataset, PromptOptions
from crossrl.data.loader import PromptLoader
from crossrl.data.tokenize import Template
from crossrl.engines.base import EngineError, RolloutEngine, TrainEngine
from crossrl.engines.rollout.hf import HfRolloutEngine
from crossrl.engines.rollout.replicas import Replicas
from crossrl.engines.train.fsdp import FsdpTrainEngine
from crossrl.models.loading import load_tokenizer
from crossrl.placement import Engines, open_engines
from crossrl.rewards.scorer import RewardSpec, Scorer
from crossrl.rewards.spread import SpreadScorer
from crossrl.stages.advantage import Advantage
from crossrl.stages.base import Stage
from crossrl.stages.log_probs import OldFromRollout, OldLogProb, RefLogProb
from crossrl.stages.reward import Reward, Scores
from crossrl.stages.rollout import Rollout
from crossrl.stages.sync import Sync
from crossrl.stages.update import Update

Progress = Callable[[str, int, int], None]  # stage, done, total
_IN_HERE = (
    "use actor_rollout_ref.rollout.name=hf, trainer.nnodes=1, trainer.n_gpus_per_node=1 and cluster.launcher=auto"
)


@dataclass(slots=True)
class Parts:
    """What a run is made of.

    ``stages``: by name, those of ``loop.train_step``; one that this run does not need is not there.
    ``val_rollout``, ``val_reward``: the same stages with validation's sampling, and without shaping.
    ``engines``: all of them, and how they end. ``notes``: lines for the user.
    """

    tokenizer: Any
    train_data: PromptDataset
    val_data: PromptDataset | None
    loader: PromptLoader
    total_steps: int
    trainer: TrainEngine
    engine: RolloutEngine | Replicas
    scorer: Scores
    advantage: Advantage
    update: Update
    sync: Stage
    reference: TrainEngine | None
    stages: dict[str, Stage]
    val_rollout: Stage
    val_reward: Stage
    engines: Engines
    notes: list[str]

    @property
    def local_trainer(self) -> FsdpTrainEngine:
        """The trainer, for who looks inside it. Raises ``EngineError`` where it is in another process."""
        if isinstance(self.trainer, FsdpTrainEngine):
            return self.trainer
        raise EngineError(f"this looks inside the trainer, which is in other processes: {_IN_HERE}")

    @property
    def local_engine(self) -> HfRolloutEngine:
        """The rollout engine, likewise."""
        if isinstance(self.engine, HfRolloutEngine):
            return self.engine
        raise EngineError(f"this looks inside the rollout engine, which is in another process: {_IN_HERE}")

    def close(self) -> None:
        """End all other processes, those that score included."""
        self.engines.close()


def assemble(cfg: RunConfig, progress: Progress, logs: Path | None = None) -> Parts:
    """Everything that a run needs, from files. Raises the errors of data, models, rewards and engines.

    ``logs``: folder for what worker processes write to their output.
    """
    tokenizer = tokenizer_of(cfg)
    train_data = load_data(cfg, tokenizer, "train")
    val_data = load_data(cfg, tokenizer, "val") if cfg.data.val_files else None
    engines = open_engines(cfg, tokenizer, logs)
    try:
        data = [d for d in (train_data, val_data) if d]
        check_positions(cfg, engines.trainer.facts.max_length, data)
        scorer = make_scorer(cfg, sorted({source for d in data for source in d.sources}), engines.launcher)
        engines.closing.append(scorer.close)
        return _parts(cfg, progress, tokenizer, train_data, val_data, engines, scorer)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to tell
            engines.close()
        raise


def _parts(
    cfg: RunConfig,
    progress: Progress,
    tokenizer: Any,
    train_data: PromptDataset,
    val_data: PromptDataset | None,
    engines: Engines,
    scorer: Scores,
) -> Parts:
    loader = make_loader(cfg, train_data)
    total = cfg.trainer.total_training_steps or loader.steps_per_epoch * cfg.trainer.total_epochs
    advantage = Advantage(settings.advantage_config(cfg), settings.kl_controller(cfg))
    stages = connect(cfg, tokenizer, engines, scorer, advantage, progress)
    columns = ["old_log_probs"] if "old_log_prob" in stages else []
    columns += ["ref_log_probs"] if cfg.actor_rollout_ref.actor.use_kl_loss else []
    columns += ["is_weights"] if advantage.config.correction else []
    update = Update(
        engines.trainer,
        settings.objective_config(cfg),
        settings.update_plan(cfg),
        settings.learning_rate(cfg, total),
        tuple(columns),
    )
    sync = Sync(engines.carrier)
    val_rollout = Rollout(
        engines.rollout,
        tokenizer,
        settings.validation_sampling(cfg),
        settings.seed_of(cfg.actor_rollout_ref.rollout.seed, cfg),
        progress=lambda done, of: progress("validation", done, of),
    )
    notes = [f"training data: {train_data.report}", *engines.notes[:1]]
    notes += [f"validation data: {val_data.report}"] if val_data else []
    notes += engines.notes[1:]
    return Parts(
        tokenizer=tokenizer, train_data=train_data, val_data=val_data, loader=loader, total_steps=total,
        trainer=engines.trainer, engine=engines.rollout, scorer=scorer, advantage=advantage, update=update, sync=sync,
        reference=engines.reference, stages={**stages, "update": update, "sync": sync}, val_rollout=val_rollout,
        val_reward=Reward(scorer), engines=engines, notes=notes,
    )  # fmt: skip


def connect(
    cfg: RunConfig,
    tokenizer: Any,
    engines: Engines,
    scorer: Scores,
    advantage: Advantage,
    progress: Progress,
) -> dict[str, Stage]:
    """The stages before the update, by name."""
    arr, remax = cfg.actor_rollout_ref, cfg.algorithm.adv_estimator == "remax"
    temperature = arr.rollout.temperature
    stages: dict[str, Stage] = {
        "rollout": Rollout(
            engines.rollout,
            tokenizer,
            settings.training_sampling(cfg),
            settings.seed_of(arr.rollout.seed, cfg),
            greedy_baseline=remax,
            progress=lambda done, of: progress("rollout", done, of),
        ),
        "reward": Reward(scorer, settings.shaping(cfg), baseline=remax, show_shaping=cfg.reward.overlong_buffer.log),
        "advantage": advantage,
    }
    if cfg.algorithm.rollout_correction.bypass_mode:
        stages["old_log_prob"] = OldFromRollout()
    elif settings.needs_old_log_probs(cfg):
        stages["old_log_prob"] = OldLogProb(engines.trainer, temperature)
    if engines.reference is not None:
        stages["ref_log_prob"] = RefLogProb(engines.reference, temperature)
    return stages


def tokenizer_of(cfg: RunConfig) -> Any:
    """The policy's, or that of ``model.tokenizer_path``. Code of its folder runs if model or data may run code."""
    model = cfg.actor_rollout_ref.model
    trusted = model.trust_remote_code or cfg.data.trust_remote_code
    return load_tokenizer(model.tokenizer_path or model.path or "", trusted)


def load_data(cfg: RunConfig, tokenizer: Any, split: str) -> PromptDataset:
    train = split == "train"
    options = PromptOptions(
        max_prompt_length=cfg.data.max_prompt_length,
        filter_overlong_prompts=cfg.data.filter_overlong_prompts,
        truncation=cfg.data.truncation,  # type: ignore[arg-type]  # one of four, checked with the config
        prompt_key=cfg.data.prompt_key,
        reward_fn_key=cfg.data.reward_fn_key,
        template=Template(cfg.actor_rollout_ref.model.custom_chat_template, cfg.data.apply_chat_template_kwargs),
        max_samples=cfg.data.train_max_samples if train else cfg.data.val_max_samples,
        sample_seed=settings.seed_of(cfg.data.seed, cfg) if train and cfg.data.shuffle else None,
        split="train" if train else "val",
    )
    return PromptDataset.load(cfg.data.train_files if train else cfg.data.val_files, tokenizer, options)


def check_positions(cfg: RunConfig, positions: int | None, data: list[PromptDataset]) -> None:
    """Refuse now what would fail when the longest prompt is drawn, perhaps hours into the run."""
    longest, limit = max(d.report.longest for d in data), cfg.data.max_response_length
    if positions is not None and longest + limit > positions:
        raise EngineError(
            f"the longest prompt has {longest} tokens, data.max_response_length is {limit}, and the model was made for "
            f"{positions} positions ({longest} + {limit} = {longest + limit}). Set data.max_response_length to at most "
            f"{positions - longest}, or leave long prompts out: data.max_prompt_length={positions - limit} with "
            "data.filter_overlong_prompts=True"
        )


def make_loader(cfg: RunConfig, data: PromptDataset) -> PromptLoader:
    """An explicit number of steps goes over the data as often as it takes; else the epochs are the limit."""
    return PromptLoader(
        data,
        cfg.data.train_batch_size,
        cfg.actor_rollout_ref.rollout.n,
        settings.seed_of(cfg.data.seed, cfg),
        shuffle=cfg.data.shuffle,
        total_epochs=None if cfg.trainer.total_training_steps else cfg.trainer.total_epochs,
    )


def make_scorer(cfg: RunConfig, sources: list[str], launcher: Launcher | None = None) -> Scores:
    """Checks before training that every data source of the data has a verifier. Under Ray each machine scores a share;
    ``launcher``: who starts that."""
    custom = cfg.reward.custom_reward_function
    workers = cfg.reward.num_workers or max(1, min(8, os.cpu_count() or 1))
    path = str(Path(custom.path).expanduser().absolute()) if custom.path else None
    spec = RewardSpec(tuple(sources), path, custom.name)
    if launcher is None or settings.launcher(cfg) != "ray":
        return Scorer(spec, workers, cfg.reward.timeout_s)
    names = [f"reward-{node}" for node in range(cfg.trainer.nnodes)]
    return SpreadScorer(launcher, names, spec, workers, cfg.reward.timeout_s, cfg.cluster.call_timeout)
