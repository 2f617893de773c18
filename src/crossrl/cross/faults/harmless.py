"""Differences between two runs that change no result, or only by rounding: the tool must blame nobody for them."""

from __future__ import annotations

from crossrl.cross.faults.base import Harmless

_ACTOR, _MODEL, _ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))

HARMLESS = (
    Harmless("harmless.threads", "another number of threads: sums have another order", ("trainer.num_threads=2",)),
    Harmless(
        "harmless.micro_batch",
        "fewer sequences per forward and backward pass: gradients are added in another order",
        (f"{_ACTOR}.ppo_micro_batch_size_per_gpu=2",),
    ),
    Harmless(
        "harmless.attention",
        "another implementation of attention, in the model's own forward pass",
        (f"{_MODEL}.use_remove_padding=False", f"{_MODEL}.override_config={{attn_implementation:eager}}"),
    ),
    Harmless("harmless.bf16_inference", "sampling in bfloat16, training in float32", (f"{_ROLLOUT}.dtype=bfloat16",)),
    Harmless("harmless.batch_composition", "fewer sequences sampled at once", (f"{_ROLLOUT}.max_num_seqs=4",)),
    Harmless(
        "harmless.plain_engine",
        "another but equal engine: the model's own generate and padded forward pass",
        (f"{_MODEL}.use_remove_padding=False",),
    ),
    Harmless(
        "harmless.own_weights",
        "an engine with weights of its own, as in another process",
        (f"{_ROLLOUT}.own_weights=True",),
    ),
    Harmless(
        "harmless.gradient_checkpointing",
        "activations are computed again in the backward pass",
        (f"{_MODEL}.enable_gradient_checkpointing=True",),
    ),
    Harmless("harmless.reward_workers", "more processes that score responses", ("reward.num_workers=2",)),
    Harmless("harmless.logging", "other loggers", ("trainer.logger=[file,tensorboard]",)),
    Harmless("harmless.checkpoint_cadence", "a checkpoint after every step", ("trainer.save_freq=1",)),
)
