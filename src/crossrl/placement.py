"""The engines of a run, and the processes that they are in: this one, children of it, or a Ray cluster."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from crossrl import settings
from crossrl.cluster.local import LocalLauncher
from crossrl.cluster.worker import Launcher
from crossrl.config.root import RunConfig
from crossrl.engines.base import EngineError, RolloutEngine, TrainEngine
from crossrl.engines.rollout.hf import HfRolloutEngine
from crossrl.engines.rollout.replicas import ReplicaOptions, Replicas
from crossrl.engines.rollout.spec import EngineSpec
from crossrl.engines.threads import choose_threads
from crossrl.engines.train.fsdp import FsdpTrainEngine
from crossrl.engines.train.group import TrainGroup
from crossrl.engines.train.optimizer import AdamWSettings
from crossrl.engines.train.spec import TrainSpec
from crossrl.models.loading import as_dtype, load_causal_lm
from crossrl.sync.carriers import Carrier, InProcess, Transfer


@dataclass(slots=True)
class Engines:
    """``reference``: None where the run needs none. ``notes``: lines for the user. ``launcher``: who starts worker
    processes, where there are any."""

    trainer: TrainEngine
    reference: TrainEngine | None
    rollout: RolloutEngine | Replicas
    carrier: Carrier
    notes: list[str]
    closing: list[Callable[[], None]] = field(default_factory=list)
    launcher: Launcher | None = None

    def close(self) -> None:
        """End all processes that were started for them, whatever one of them raises."""
        first: BaseException | None = None
        while self.closing:
            try:
                self.closing.pop()()
            except Exception as error:
                first = first or error
        if first:
            raise first


def open_engines(cfg: RunConfig, tokenizer: Any, logs: Path | None = None) -> Engines:
    """Load models and start processes as ``cfg`` says. ``logs``: folder for what workers write to their output.

    Raises ``EngineError``, ``WorkerError``, ``ClusterError``, and the errors of loading a model.
    """
    return _in_this_process(cfg, tokenizer) if settings.launcher(cfg) == "none" else _apart(cfg, tokenizer, logs)


def _in_this_process(cfg: RunConfig, tokenizer: Any) -> Engines:
    model = load_model(cfg)
    threads, sentence = pick_threads(cfg, model)
    torch.set_num_threads(threads)
    trainer = train_engine(cfg, model)
    engine = rollout_engine(cfg, model, tokenizer)
    reference = reference_engine(cfg) if settings.needs_reference(cfg) else None
    notes = [sentence, *sorted({n for n in (trainer.notice, engine.notice) if n})]
    recorded = cfg.tape.mode != "off" and bool({"all", "sync"} & set(cfg.tape.stages))
    return Engines(trainer, reference, engine, InProcess(trainer, engine, trainer.facts.tied, recorded), notes)


def _apart(cfg: RunConfig, tokenizer: Any, logs: Path | None) -> Engines:
    """Training in workers if it has several processes or Ray is asked for; rollout engines in workers in any case."""
    _check_devices(cfg)
    launcher, end = _launcher(cfg, logs)
    closing: list[Callable[[], None]] = [end]
    try:
        replicas = Replicas(launcher, engine_spec(cfg, tokenizer), replica_options(cfg), os.environ)
        closing.append(replicas.close)
        reference: TrainEngine | None = None
        if settings.trains_apart(cfg):
            trainer: TrainEngine = train_group(cfg, launcher)
            closing.append(trainer.close)
            if settings.needs_reference(cfg):
                reference = train_group(cfg, launcher, frozen=True)
                closing.append(reference.close)
        else:
            model = load_model(cfg)
            torch.set_num_threads(threads_of(cfg))
            trainer = train_engine(cfg, model)
            closing.append(trainer.close)
            reference = reference_engine(cfg) if settings.needs_reference(cfg) else None
        replicas.wait()
    except BaseException:
        Engines(None, None, None, None, [], closing).close()  # type: ignore[arg-type]  # only what is to be closed
        raise
    carrier = Transfer(trainer, replicas, cfg.cluster.sync_timeout, cfg.cluster.transport)
    notes = [_where(cfg), *sorted({n for n in (trainer.notice, replicas.notice) if n})]
    return Engines(trainer, reference, replicas, carrier, notes, closing, launcher)


def _check_devices(cfg: RunConfig) -> None:
    """Raises ``EngineError`` for what cannot be placed."""
    rollout = cfg.actor_rollout_ref.rollout
    if settings.ray_address(cfg) and cfg.trainer.device == "auto" and not torch.cuda.is_available():
        raise EngineError(
            f"trainer.device=auto in the Ray cluster {settings.ray_address(cfg)}, started on a machine without a GPU: "
            "say what its machines are to compute on, trainer.device=cuda or trainer.device=cpu"
        )
    spread = rollout.tensor_model_parallel_size if rollout.name == "vllm" else 1
    if spread > 1 and settings.launcher(cfg) == "ray" and device_of(cfg).type == "cuda":
        raise EngineError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={spread} with GPUs under Ray is not available "
            "in this version: an engine sees one GPU there. Use tensor_model_parallel_size=1, or cluster.launcher=local"
        )


def _where(cfg: RunConfig) -> str:
    """Which processes there are, in words."""
    ranks, engines = settings.processes(cfg), settings.replicas(cfg)
    by = "actors of Ray" if settings.launcher(cfg) == "ray" else "child processes"
    training = f"training in {ranks} {by}" if settings.trains_apart(cfg) else "training in this process"
    return f"{training}, {engines} {cfg.actor_rollout_ref.rollout.name} engines in {by}, {threads_of(cfg)} threads each"


def _launcher(cfg: RunConfig, logs: Path | None) -> tuple[Launcher, Callable[[], None]]:
    """Who starts workers, and how that ends."""
    if settings.launcher(cfg) == "local":
        return LocalLauncher(logs), lambda: None
    from crossrl.cluster.ray import RayLauncher

    launcher = RayLauncher(**ray_settings(cfg), logs=logs)
    return launcher, launcher.close


def ray_settings(cfg: RunConfig) -> dict[str, Any]:
    """Of ``RayLauncher``: one slot for each train rank or replica, whichever are more."""
    return {
        "nodes": cfg.trainer.nnodes,
        "per_node": workers_of_a_kind(cfg),
        "slot": {"CPU": 1.0, "GPU": 1.0} if device_of(cfg).type == "cuda" else {"CPU": 1.0},
        "kinds": {
            "train": settings.processes(cfg),
            "reference": settings.processes(cfg),
            "rollout": settings.replicas(cfg),
            "reward": cfg.trainer.nnodes,
        },
        "address": settings.ray_address(cfg),
        "init": cfg.cluster.ray_init,
    }


def workers_of_a_kind(cfg: RunConfig) -> int:
    """On each machine: train ranks, or replicas, whichever are more."""
    return max(cfg.trainer.n_gpus_per_node, -(-settings.replicas(cfg) // cfg.trainer.nnodes))


def _gpu_share(cfg: RunConfig) -> float:
    """Of a GPU that a train rank, its reference and a replica have together."""
    return 0.3 if device_of(cfg).type == "cuda" else 0.0


def replica_options(cfg: RunConfig) -> ReplicaOptions:
    return ReplicaOptions(
        count=settings.replicas(cfg),
        gpus=_gpu_share(cfg),
        sleeps=_sleeps(cfg),
        start_s=cfg.cluster.start_timeout,
        call_s=cfg.cluster.call_timeout,
        plant=settings.planted_in_engine(cfg),
    )


def _sleeps(cfg: RunConfig) -> bool:
    """Whether engines give their memory back while the trainer works."""
    rollout = cfg.actor_rollout_ref.rollout
    return rollout.free_cache_engine and rollout.name == "vllm" and device_of(cfg).type == "cuda"


def engine_spec(cfg: RunConfig, tokenizer: Any) -> EngineSpec:
    """The rollout engine of ``cfg``, for another process."""
    arr, dtype, trained = cfg.actor_rollout_ref, settings.rollout_dtype(cfg), settings.train_dtype(cfg)
    rollout, options = arr.rollout, dict[str, Any]()
    if rollout.name == "vllm":
        given = dict(rollout.engine_kwargs.get("vllm") or {})
        options = {
            "max_model_len": rollout.max_model_len or cfg.data.max_prompt_length + cfg.data.max_response_length,
            "seed": settings.seed_of(rollout.seed, cfg),
            "tensor_parallel": rollout.tensor_model_parallel_size,
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "prefix_caching": rollout.enable_prefix_caching,
            "sleeps": _sleeps(cfg),
            "engine_kwargs": {"enforce_eager": True, **given} if rollout.enforce_eager else given,
        }
    return EngineSpec(
        name=rollout.name,  # type: ignore[arg-type]  # one of two, checked with the config
        model=_model_folder(cfg),
        dtype=dtype,
        eos_token_ids=tuple(eos_token_ids(_generation_config(_model_folder(cfg)), tokenizer)),
        device=device_of(cfg).type,
        receives=trained if dtype != trained else None,
        max_num_seqs=rollout.max_num_seqs,
        threads=threads_of(cfg),
        packed=packed_of(cfg),
        trust_remote_code=arr.model.trust_remote_code,
        override_config=arr.model.override_config,
        options=options,
    )


def _model_folder(cfg: RunConfig) -> str:
    """Absolute: workers have another working directory."""
    return str(Path(cfg.actor_rollout_ref.model.path or "").expanduser().absolute())


def threads_of(cfg: RunConfig) -> int:
    """PyTorch's, in each worker: training and generation take turns, workers of a kind share the cores of a machine."""
    cores = max(1, (os.cpu_count() or 1) // workers_of_a_kind(cfg))
    return cfg.trainer.num_threads or min(cores, choose_threads(_parameters(_model_folder(cfg)))[0])


@functools.cache
def _parameters(folder: str) -> int:
    """How many numbers the model in ``folder`` has, as far as its files say."""
    count = 0
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            count += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return count


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
    return HfRolloutEngine(
        load_model(cfg, dtype).requires_grad_(False) if own else model,
        eos_token_ids(model.generation_config, tokenizer),
        max_num_seqs=keys.max_num_seqs,
        receives=as_dtype(trained) if dtype != trained else None,
        packed=packed_of(cfg),
    )


def optimizer_of(cfg: RunConfig) -> AdamWSettings:
    optim = cfg.actor_rollout_ref.actor.optim
    return AdamWSettings(
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.clip_grad,
    )


def limits_of(cfg: RunConfig, frozen: bool = False) -> tuple[int | None, int | None]:
    """Sequences and tokens of a micro-batch, of training or of the ``frozen`` reference."""
    actor, ref = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.ref
    size = ref.log_prob_micro_batch_size_per_gpu if frozen else actor.ppo_micro_batch_size_per_gpu
    tokens = ref.log_prob_max_token_len_per_gpu if frozen else actor.ppo_max_token_len_per_gpu
    by_tokens = (ref.log_prob_use_dynamic_bsz if frozen else actor.use_dynamic_bsz) or size is None
    return (None, tokens) if by_tokens else (size, None)


def train_spec(cfg: RunConfig, frozen: bool = False) -> TrainSpec:
    """A train rank of ``cfg``, or a rank of the ``frozen`` reference, for another process."""
    model, autocast = cfg.actor_rollout_ref.model, autocast_of(cfg)
    sequences, tokens = limits_of(cfg, frozen)
    return TrainSpec(
        model=_model_folder(cfg),
        dtype=settings.train_dtype(cfg),
        optimizer=None if frozen else optimizer_of(cfg),
        micro_batch_size=sequences,
        max_tokens_per_micro_batch=tokens,
        gradient_checkpointing=model.enable_gradient_checkpointing and not frozen,
        autocast=None if autocast is None else str(autocast).removeprefix("torch."),
        packed=packed_of(cfg),
        device=device_of(cfg).type,
        threads=threads_of(cfg),
        trust_remote_code=model.trust_remote_code,
        override_config=model.override_config,
        reshard=cfg.actor_rollout_ref.actor.fsdp_config.reshard_after_forward,
        limit_s=cfg.cluster.call_timeout,
    )


def train_group(cfg: RunConfig, launcher: Launcher, frozen: bool = False) -> TrainGroup:
    """All train ranks, or those of the ``frozen`` reference, started."""
    host = "127.0.0.1"
    if settings.ray_address(cfg):
        from ray.util import get_node_ip_address

        host = get_node_ip_address()
    return TrainGroup.start(
        launcher,
        train_spec(cfg, frozen),
        settings.processes(cfg),
        host=host,
        name="reference" if frozen else "train",
        start_s=cfg.cluster.start_timeout,
        env={"OMP_NUM_THREADS": str(threads_of(cfg))},
        gpus=_gpu_share(cfg),
    )


def train_engine(cfg: RunConfig, model: PreTrainedModel) -> FsdpTrainEngine:
    return train_spec(cfg).plain_engine(model)


def reference_engine(cfg: RunConfig) -> FsdpTrainEngine:
    """The model as it was before training, frozen."""
    return train_spec(cfg, frozen=True).plain_engine()


def eos_token_ids(generation_config: Any, tokenizer: Any) -> list[int]:
    """The ids that end a response: those of the generation config and the tokenizer's own."""
    configured = getattr(generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return sorted(i for i in ids if i is not None)


def _generation_config(folder: str) -> GenerationConfig:
    """As loading the model would give it."""
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder, local_files_only=True))


def pick_threads(cfg: RunConfig, model: PreTrainedModel) -> tuple[int, str]:
    if cfg.trainer.num_threads is not None:
        return cfg.trainer.num_threads, f"threads: {cfg.trainer.num_threads} (trainer.num_threads)"
    return choose_threads(sum(p.numel() for p in model.parameters()))
