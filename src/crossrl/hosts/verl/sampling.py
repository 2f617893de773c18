"""What of verl's rollout settings decides what is sampled: all but those known not to, so that none is forgotten."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from crossrl.files import file_digest
from crossrl.tape.compare import flatten

# Patterns of dotted keys, of verl 0.7.1 to 0.9.1. Speed, memory and placement round otherwise, but mean the same; where
# two runs differ in them, ``crossrl cross`` says so from their config.yaml.
NOT_SAMPLED = (
    "*_target_", "name",
    # where and how fast
    "mode", "nnodes", "n_gpus_per_node", "*gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes",
    "free_cache_engine", "*parallel_size", "max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill",
    "enable_prefix_caching", "scheduling_policy", "full_determinism", "multi_stage_wake_up", "enable_sleep_mode",
    "sglang_engine_mode", "server", "server.*", "disaggregation.*", "router_config_path", "agent.num_workers",
    # how weights come to the engine
    "load_format", "layered_summon", "layer_name_map*", "checkpoint_engine.*", "checkpoint_manager_class",
    "update_weights_bucket_megabytes",
    # the trainer's part, validation, and what only watches
    "log_prob_*", "val_kwargs.*", "disable_log_stats", "trace.*", "profiler", "profiler.*", "prometheus.*",
    "moe_load_balance_metrics_interval", "skip_tokenizer_init",
    # another engine's, and verl's and our own skip
    "engine_kwargs.*", "skip.*", "skip_rollout", "skip_dump_dir",
)  # fmt: skip
_FILES = ("*path", "*_file")
_SWITCHED = ("mtp", "qat")  # whose settings nobody reads while they are off


def sampling(rollout: Any) -> dict[str, Any]:
    """Dotted key to value of ``actor_rollout_ref.rollout``. A file counts by its content, wherever it is; what is not
    set, is off or is empty is left out, as verl's versions differ in what they spell out."""
    from omegaconf import OmegaConf

    whole: Any = OmegaConf.to_container(rollout, resolve=True)
    found = {"engine": whole["name"]}
    used = {key: part for key, part in whole.items() if key not in _SWITCHED or (part or {}).get("enable")}
    for key, value in _set(used).items():
        if not any(fnmatchcase(key, pattern) for pattern in NOT_SAMPLED):
            found[key] = _content(key, value)
    # Settings of the engine that samples; those of the others are read by nobody.
    kwargs = (whole.get("engine_kwargs") or {}).get(whole["name"]) or {}
    found |= {f"engine_kwargs.{key}": _content(key, value) for key, value in _set(kwargs).items()}
    return found


def _set(part: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys of ``part`` without those that are not set, off or empty."""
    return {k: v for k, v in flatten(part).items() if v is not None and v is not False and v not in ([], "", {})}


def _content(key: str, value: Any) -> Any:
    if isinstance(value, str) and any(fnmatchcase(key, pattern) for pattern in _FILES):
        path = Path(value).expanduser()
        if path.is_file():
            return f"sha256:{file_digest(path)}"
    return value
