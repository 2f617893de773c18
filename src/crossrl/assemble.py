"""From a configuration to the parts of a run: loads data and models, starts the scorers, connects the stages."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from crossrl import settings
from crossrl.config.root import RunConfig
from crossrl.data.dataset import PromptDataset, PromptOptions
from crossrl.data.loader import PromptLoader
from crossrl.data.tokenize import Template
from crossrl.engines.base import EngineError
from crossrl.engines.rollout.hf import HfRolloutEngine
from crossrl.engines.threads import choose_threads
from crossrl.engines.train.fsdp import FsdpTrainEngine
from crossrl.engines.train.optimizer import AdamWSettings
from crossrl.models.loading import as_dtype, load_causal_lm, load_tokenizer, tied_names
from crossrl.rewards.scorer import RewardSpec, Scorer
from crossrl.stages.advantage import Advantage
from crossrl.stages.base import Stage
from crossrl.stages.log_probs import OldFromRollout, OldLogProb, RefLogProb
from crossrl.stages.reward import Reward
from crossrl.stages.rollout import Rollout
from crossrl.stages.sync import Sync
from crossrl.stages.update import Update

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(slots=True)
class Parts:
    """What a run is made of.

    ``stages``: by name, those of ``loop.train_step``; one that this run does not need is not there.
    ``val_rollout``, ``val_reward``: the same stages with validation's sampling, and without shaping.
    ``notes``: lines for the user.
    """

    tokenizer: Any
    train_data: PromptDataset
    val_data: PromptDataset | None
    loader: PromptLoader
    total_steps: int
    trainer: FsdpTrainEngine
    engine: HfRolloutEngine
    scorer: Scorer
    advantage: Advantage
    update: Update
    sync: Stage
    reference: FsdpTrainEngine | None
    stages: dict[str, Stage]
    val_rollout: Stage
    val_reward: Stage
    notes: list[str]


def assemble(cfg: RunConfig, progress: Progress) -> Parts:
    """Everything that a run needs, from files. Raises the errors of data, models, rewards and engines."""
    arr = cfg.actor_rollout_ref
    tokenizer = tokenizer_of(cfg)
    train_data = load_data(cfg, tokenizer, "train")
    val_data = load_data(cfg, tokenizer, "val") if cfg.data.val_files else None
    loader = make_loader(cfg, train_data)
    total = cfg.trainer.total_training_steps or loader.steps_per_epoch * cfg.trainer.total_epochs
    model = load_model(cfg)
    threads, sentence = pick_threads(cfg, model)
    torch.set_num_threads(threads)
    trainer = train_engine(cfg, model)
    engine = rollout_engine(cfg, model, tokenizer)
    sources = {*train_data.sources, *(val_data.sources if val_data else {})}
    scorer = make_scorer(cfg, sorted(sources))
    advantage = Advantage(settings.advantage_config(cfg), settings.kl_controller(cfg))
    reference = reference_engine(cfg) if settings.needs_reference(cfg) else None
    stages = connect(cfg, tokenizer, trainer, reference, engine, scorer, advantage, progress)
    columns = ["old_log_probs"] if "old_log_prob" in stages else []
    columns += ["ref_log_probs"] if arr.actor.use_kl_loss else []
    columns += ["is_weights"] if advantage.config.correction else []
    update = Update(
        trainer,
        settings.objective_config(cfg),
        settings.update_plan(cfg),
        settings.learning_rate(cfg, total),
        tuple(columns),
    )
    sync = Sync(trainer, engine, tied_names(model))
    val_rollout = Rollout(
        engine,
        tokenizer,
        settings.validation_sampling(cfg),
        settings.seed_of(arr.rollout.seed, cfg),
        progress=lambda done, of: progress("validation", done, of),
    )
    check_positions(cfg, trainer.policy.max_length, [d for d in (train_data, val_data) if d])
    notes = [f"training data: {train_data.report}", sentence]
    notes += [f"validation data: {val_data.report}"] if val_data else []
    notes += sorted({n for n in (trainer.notice, engine.notice) if n})
    return Parts(
        tokenizer=tokenizer, train_data=train_data, val_data=val_data, loader=loader, total_steps=total,
        trainer=trainer, engine=engine, scorer=scorer, advantage=advantage, update=update, sync=sync,
        reference=reference, stages={**stages, "update": update, "sync": sync}, val_rollout=val_rollout,
        val_reward=Reward(scorer), notes=notes,
    )  # fmt: skip


def connect(
    cfg: RunConfig,
    tokenizer: Any,
    trainer: FsdpTrainEngine,
    reference: FsdpTrainEngine | None,
    engine: HfRolloutEngine,
    scorer: Scorer,
    advantage: Advantage,
    progress: Progress,
) -> dict[str, Stage]:
    """The stages before the update, by name."""
    arr, remax = cfg.actor_rollout_ref, cfg.algorithm.adv_estimator == "remax"
    temperature = arr.rollout.temperature
    stages: dict[str, Stage] = {
        "rollout": Rollout(
            engine,
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
        stages["old_log_prob"] = OldLogProb(trainer, temperature)
    if reference is not None:
        stages["ref_log_prob"] = RefLogProb(reference, temperature)
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


def device_of(cfg: RunConfig) -> torch.device:
    if cfg.trainer.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(cfg.trainer.device)


def load_model(cfg: RunConfig, dtype: str | None = None) -> PreTrainedModel:
    """The policy as its folder has it, in ``dtype``; None: that of the master weights."""
    keys = cfg.actor_rollout_ref.model
    return load_causal_lm(
        keys.path or "",
        dtype=dtype or settings.train_dtype(cfg),
        device=device_of(cfg),
        trust_remote_code=keys.trust_remote_code,
        override_config=keys.override_config,
    )


def autocast_of(cfg: RunConfig) -> torch.dtype | None:
    """Forward and backward in bfloat16 on an accelerator unless float32 is asked for; never on a CPU."""
    dtype = cfg.actor_rollout_ref.actor.fsdp_config.dtype
    return torch.bfloat16 if device_of(cfg).type != "cpu" and dtype in ("auto", "bfloat16") else None


def packed_of(cfg: RunConfig) -> bool | None:
    """For ``Policy``: try the packed form, or do without."""
    return None if cfg.actor_rollout_ref.model.use_remove_padding else False


def rollout_engine(cfg: RunConfig, model: PreTrainedModel, tokenizer: Any) -> HfRolloutEngine:
    """It shares the trainer's ``model`` if it may: then a sync moves the version and copies nothing."""
    keys, dtype, trained = cfg.actor_rollout_ref.rollout, settings.rollout_dtype(cfg), settings.train_dtype(cfg)
    own = keys.own_weights or dtype != trained
    # Hashing all weights takes a while; it is for the record.
    recorded = cfg.tape.mode != "off" and bool({"all", Sync.name} & set(cfg.tape.stages))
    return HfRolloutEngine(
        load_model(cfg, dtype).requires_grad_(False) if own else model,
        eos_token_ids(model, tokenizer),
        max_num_seqs=keys.max_num_seqs,
        digest=recorded,
        receives=as_dtype(trained) if dtype != trained else None,
        packed=packed_of(cfg),
    )


def train_engine(cfg: RunConfig, model: PreTrainedModel) -> FsdpTrainEngine:
    actor = cfg.actor_rollout_ref.actor
    by_tokens = actor.use_dynamic_bsz or actor.ppo_micro_batch_size_per_gpu is None
    optim = AdamWSettings(
        betas=(actor.optim.betas[0], actor.optim.betas[1]),
        eps=actor.optim.eps,
        weight_decay=actor.optim.weight_decay,
        max_grad_norm=actor.optim.clip_grad,
    )
    return FsdpTrainEngine(
        model,
        optim,
        micro_batch_size=None if by_tokens else actor.ppo_micro_batch_size_per_gpu,
        max_tokens_per_micro_batch=actor.ppo_max_token_len_per_gpu if by_tokens else None,
        gradient_checkpointing=cfg.actor_rollout_ref.model.enable_gradient_checkpointing,
        autocast=autocast_of(cfg),
        packed=packed_of(cfg),
    )


def reference_engine(cfg: RunConfig) -> FsdpTrainEngine:
    """The model as it was before training, frozen."""
    ref = cfg.actor_rollout_ref.ref
    by_tokens = ref.log_prob_use_dynamic_bsz or ref.log_prob_micro_batch_size_per_gpu is None
    return FsdpTrainEngine(
        load_model(cfg).requires_grad_(False),
        None,
        micro_batch_size=None if by_tokens else ref.log_prob_micro_batch_size_per_gpu,
        max_tokens_per_micro_batch=ref.log_prob_max_token_len_per_gpu if by_tokens else None,
        autocast=autocast_of(cfg),
        packed=packed_of(cfg),
    )


def eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """The ids that end a response: those of the generation config and the tokenizer's own."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return sorted(i for i in ids if i is not None)


def pick_threads(cfg: RunConfig, model: PreTrainedModel) -> tuple[int, str]:
    if cfg.trainer.num_threads is not None:
        return cfg.trainer.num_threads, f"threads: {cfg.trainer.num_threads} (trainer.num_threads)"
    return choose_threads(sum(p.numel() for p in model.parameters()))


def make_scorer(cfg: RunConfig, sources: list[str]) -> Scorer:
    """Checks before training that every data source of the data has a verifier."""
    custom = cfg.reward.custom_reward_function
    workers = cfg.reward.num_workers or max(1, min(8, os.cpu_count() or 1))
    return Scorer(RewardSpec(tuple(sources), custom.path, custom.name), workers, cfg.reward.timeout_s)
