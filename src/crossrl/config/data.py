"""``data``: which prompts, how many of them, how long."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from crossrl.config.fields import allowed


@dataclass(frozen=True, slots=True)
class DataConfig:
    train_files: list[str] = field(default_factory=list)
    """Training data: one file or a list. Parquet or JSON Lines with verl's columns, or a reasoning-gym data set
    as `reasoning_gym:NAME?setting=value&size=500&seed=1`. Required."""
    val_files: list[str] = field(default_factory=list)
    """Validation data, spelled like train_files. Empty: no validation."""
    train_max_samples: int = -1
    """Use at most this many training rows, drawn at random when data.shuffle is on, else the first. -1: all."""
    val_max_samples: int = -1
    """Use at most this many validation rows. -1: all."""
    prompt_key: str = "prompt"
    """Column that holds the prompt as chat messages."""
    reward_fn_key: str = "data_source"
    """Column that says which verifier scores a row."""
    max_prompt_length: int = 512
    """Tokens; longer prompts are treated as filter_overlong_prompts and truncation say."""
    max_response_length: int = 512
    """Tokens; generation stops there and the finish reason is "length"."""
    train_batch_size: int = 32
    """Prompts per training step; each gets actor_rollout_ref.rollout.n responses."""
    gen_batch_size: int | None = None
    """Prompts per call of generation when algorithm.filter_groups is on. null: train_batch_size."""
    val_batch_size: int | None = None
    """Prompts per call of generation in validation. null: all at once."""
    shuffle: bool = True
    """Draw a new order of the training rows in each epoch."""
    seed: int | None = None
    """Seed of the shuffle. null: trainer.seed."""
    filter_overlong_prompts: bool = False
    """Leave out prompts longer than max_prompt_length (their number is reported)."""
    truncation: str = field(default="error", metadata=allowed("error", "left", "right", "middle"))
    """What to do with a prompt that is too long and was not filtered: stop, or cut tokens off at that side."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """More arguments for the tokenizer's apply_chat_template, such as {enable_thinking: false}."""
    trust_remote_code: bool = False
    """Run Python code that the tokenizer's folder brings along; so does actor_rollout_ref.model.trust_remote_code."""
