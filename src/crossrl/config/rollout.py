"""``actor_rollout_ref.rollout``: how responses are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import II

from crossrl.config.actor import DTYPES
from crossrl.config.fields import allowed

ENGINES = ("hf", "vllm", "sglang")


@dataclass(frozen=True, slots=True)
class ValSamplingConfig:
    """Sampling in validation."""

    temperature: float = 0.0
    """Softmax temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling; 1.0 is off."""
    top_k: int = -1
    """Sample among the k likeliest tokens; -1 is off."""
    n: int = 1
    """Responses per prompt; more than one gives pass@k."""
    do_sample: bool = False
    """False: greedy, whatever the temperature."""


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    name: str = field(default="hf", metadata=allowed(*ENGINES))
    """Engine. hf: embedded, any device. vllm: in a process of its own, with the vLLM that is installed. sglang is not
    available in this version."""
    dtype: str = field(default="auto", metadata=allowed(*DTYPES))
    """Data type that the engine computes in. auto: the trainer's own weights, without a copy. Another one than
    fsdp_config.model_dtype: the engine holds a copy, and each sync casts."""
    own_weights: bool = False
    """The embedded engine holds a copy of the weights, as an engine in another process does, also where it could use
    the trainer's: one model more in memory, and a sync copies. Not a key of verl's."""
    n: int = 8
    """Responses per prompt: the size of a group."""
    temperature: float = 1.0
    """Softmax temperature in training; above 0. Training applies the same one."""
    top_p: float = 1.0
    """Nucleus sampling; 1.0 is off, and with less the sampler's log-probs are not those of training."""
    top_k: int = -1
    """Sample among the k likeliest tokens; -1 is off."""
    do_sample: bool = True
    """Must stay True in training."""
    ignore_eos: bool = False
    """Go on to the maximum length whatever is sampled (for measurements)."""
    seed: int | None = None
    """Seed of sampling. null: trainer.seed."""
    prompt_length: int = II("data.max_prompt_length")
    """Tokens; must be data.max_prompt_length."""
    response_length: int = II("data.max_response_length")
    """Tokens; must be data.max_response_length."""
    max_num_seqs: int = 256
    """Sequences decoded at the same time; bounds the memory of the key-value cache."""
    replicas: int | None = None
    """Engines, each in its own process, that share the requests. null: as many as the processes of training leave room
    for (trainer.nnodes x trainer.n_gpus_per_node / tensor_model_parallel_size). Not a key of verl's."""
    tensor_model_parallel_size: int = 1
    """Processes over which one vLLM engine spreads the weights; has no meaning for hf."""
    gpu_memory_utilization: float = 0.5
    """Share of a GPU's memory that a vLLM engine may take for weights and cache."""
    free_cache_engine: bool = True
    """On a GPU that engine and trainer share: the engine gives its memory back while the trainer works."""
    enforce_eager: bool = False
    """vLLM without graph capture: starts faster, generates slower. On a CPU it always is eager."""
    enable_prefix_caching: bool = True
    """vLLM keeps keys and values of prompts between requests of the same weights."""
    max_model_len: int | None = None
    """Most tokens of a vLLM sequence. null: data.max_prompt_length + data.max_response_length."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine, below its name: engine_kwargs.vllm.block_size=32."""
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    skip_rollout: bool = False
    """Store each call of generation below skip_dump_dir and load it instead of generating when it is there."""
    skip_dump_dir: str = "/tmp/rollout_dump"
    """Folder of the stored calls of generation."""
