"""How the engine on vLLM is set up: the options, what they become, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crossrl.engines.base import EngineError
from crossrl.models.loading import DTYPES

EXTENSION = "crossrl.engines.rollout.vllm_worker.VllmWorkerExtension"
LOWEST_TEMPERATURE = 0.01  # vLLM raises lower ones to it, with a line in the log

# What this adapter cannot keep its promises with, and why. Keys of ``VllmOptions.engine_kwargs``.
REFUSED = {
    "speculative_config": "a draft model is not updated, and its log-probs are not the sampler's",
    "quantization": "what is held would not be what was sent",
    "enable_lora": "adapters are not part of a weight transfer here",
    "enable_return_routed_experts": "it is not recorded",
    "kv_transfer_config": "keys and values of another engine are computed with other weights",
    "kv_cache_dtype": "log-probs would be those of rounded keys and values",
    "weight_transfer_config": "weights come by crossrl.sync, which proves what arrived",
    "pipeline_parallel_size": "weights are received by whole models and tensor-parallel ranks only",
    "data_parallel_size": "use several engines: crossrl places and feeds them itself",
    "logits_processors": "the distribution that log-probs are of would not be the one that Meaning states",
    "load_format": "weights are read from the model folder",
    "hf_overrides": "the model would not be the trainer's",
    "tokenizer": "token ids go in and come out; vLLM gets no tokenizer",
    "cpu_offload_gb": "it moves weights behind the back of a transfer",
    "enable_eplb": "it moves experts behind the back of a transfer",
}


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """``model``: a local Hugging Face folder. ``dtype``: to compute in. ``eos_token_ids``: sampling one ends a response
    (and it is part of it). ``receives``: the dtype in which weights come, where it is not ``dtype``: they are cast.

    ``max_num_seqs``: responses in the making at once. ``max_model_len``: longest prompt and response together; None: as
    many as the model has positions. ``seed``: of vLLM itself (each request has its own). ``tensor_parallel``: worker
    processes that share one model. ``gpu_memory_utilization``: share of the GPU that vLLM takes (not on a CPU, where
    VLLM_CPU_KVCACHE_SPACE says how many GiB keys and values take). ``prefix_caching``: equal beginnings of prompts are
    computed once. ``sleeps``: ``sleep`` frees memory (GPU). ``device``: "cpu" or "cuda", as vLLM must be
    installed for; None: "cuda" if PyTorch has one. ``engine_kwargs``: handed to vLLM as they are, but for those that
    this adapter sets itself or refuses (``REFUSED``), which are an error.
    """

    model: str
    eos_token_ids: tuple[int, ...]
    dtype: str = "float32"
    receives: str | None = None
    max_num_seqs: int = 256
    max_model_len: int | None = None
    seed: int = 0
    tensor_parallel: int = 1
    gpu_memory_utilization: float = 0.5
    prefix_caching: bool = True
    sleeps: bool = False
    trust_remote_code: bool = False
    device: str | None = None
    weight_version: int = 0
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ``EngineError`` that lists what is wrong."""
        wrong = []
        for key, value in (("dtype", self.dtype), ("receives", self.receives or self.dtype)):
            if value not in DTYPES:
                wrong.append(f"{key} is {value!r}, want one of {', '.join(DTYPES)}")
        if self.device not in (None, "cpu", "cuda"):
            wrong.append(f"device is {self.device!r}, want cpu or cuda")
        for key in ("max_num_seqs", "tensor_parallel"):
            if getattr(self, key) < 1:
                wrong.append(f"{key} is {getattr(self, key)}, want at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            wrong.append(f"max_model_len is {self.max_model_len}, want at least 2")
        if not 0 < self.gpu_memory_utilization <= 1:
            wrong.append(f"gpu_memory_utilization is {self.gpu_memory_utilization}, want more than 0 and at most 1")
        if not (Path(self.model) / "config.json").is_file():
            wrong.append(f"model is {self.model!r}, want a local folder with a config.json")
        wrong += [f"{key}: {why}" for key, why in REFUSED.items() if key in self.engine_kwargs]
        own = _own(self, cpu=True)
        wrong += [f"{key}: is set by this adapter, to {own[key]!r}" for key in self.engine_kwargs if key in own]
        if wrong:
            raise EngineError("the engine 'vllm' cannot be set up so: " + "; ".join(wrong))


def engine_arguments(options: VllmOptions, cpu: bool) -> dict[str, Any]:
    """Of vLLM's ``EngineArgs``."""
    return {**_defaults(cpu), **options.engine_kwargs, **_own(options, cpu)}


def _defaults(cpu: bool) -> dict[str, Any]:
    """What ``engine_kwargs`` may change."""
    # Compiling takes two minutes on a CPU and gains little there. Blocks of vLLM's 128 give short prompts no reuse.
    return {"enforce_eager": True, "block_size": 32} if cpu else {}


def _own(options: VllmOptions, cpu: bool) -> dict[str, Any]:
    own: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "seed": options.seed,
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": options.max_model_len,
        "tensor_parallel_size": options.tensor_parallel,
        "enable_prefix_caching": options.prefix_caching,
        "trust_remote_code": options.trust_remote_code,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # else end tokens and sampling defaults of the model folder are added
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "enable_sleep_mode": options.sleeps and not cpu,
        # With a prompt in chunks, a request's generator is set back, which generators on a CPU cannot (vLLM ends).
        "enable_chunked_prefill": not cpu,
    }
    if options.tensor_parallel > 1:
        own["distributed_executor_backend"] = "mp"  # within a Ray actor vLLM would start Ray actors of its own
    if cpu:
        own["max_num_batched_tokens"] = max(8192, options.max_model_len or positions(options.model))
    else:
        own["gpu_memory_utilization"] = options.gpu_memory_utilization
    return own


def positions(model: str) -> int:
    """How many the model in this folder was made for; 0 if its config does not say."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config()
    except (OSError, ValueError):
        return 0
    return int(getattr(config, "max_position_embeddings", 0) or 0)


def lowest_temperature(temperature: float) -> None:
    """Raises ``EngineError`` for one that vLLM would change."""
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise EngineError(
            f"temperature is {temperature}: vLLM raises those below {LOWEST_TEMPERATURE}. Want 0 (greedy) or more"
        )


def check_names(model: str, found: Sequence[tuple[str, tuple[int, ...], str]]) -> None:
    """Raises ``EngineError`` if vLLM's weights, as named here, are not those of the model folder: then a transfer could
    not tell which is which. A tied head, which files leave out, may be more. Also if the folder has no safetensors."""
    from safetensors import safe_open

    if found and not found[0][0]:
        raise EngineError(found[0][2])
    stored: set[str] = set()
    for file in Path(model).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            stored |= set(opened.keys())
    if not stored:
        raise EngineError(
            f"{model} has no weights in *.safetensors files, so that their names cannot be compared with those that "
            "vLLM has. Save the model with save_pretrained, which writes that form"
        )
    names = {name for name, _, _ in found}
    strange, more = sorted(stored - names), sorted(n for n in names - stored if not n.endswith("lm_head.weight"))
    if strange or more:
        raise EngineError(
            f"vLLM holds the weights of {model} in a form that this adapter does not know: not found "
            f"{strange[:4] or 'none'}, unknown {more[:4] or 'none'}. Use the engine hf for this model"
        )
