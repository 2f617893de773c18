"""What a process needs to know to make a rollout engine, and the object that it makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from crossrl.batch import Ragged
from crossrl.engines.base import EngineError, Generation, RolloutEngine, Sampling
from crossrl.engines.train.sending import this_machine
from crossrl.models.digest import tensor_digests

if TYPE_CHECKING:  # it needs the extra `sync`
    from crossrl.sync.receiver import Received


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """A rollout engine that is to be made in another process.

    ``model``: Hugging Face folder. ``dtype``: that it computes in; ``receives``: that weights come in, if another.
    ``packed``: see ``Policy`` (engine hf). ``options``: further arguments of the engine's own (``VllmOptions``).
    """

    name: Literal["hf", "vllm"]
    model: str
    dtype: str
    eos_token_ids: tuple[int, ...]
    device: str = "cpu"
    receives: str | None = None
    max_num_seqs: int = 256
    threads: int = 1
    packed: bool | None = None
    trust_remote_code: bool = False
    override_config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def environment(spec: EngineSpec, base: Mapping[str, str]) -> dict[str, str]:
    """Variables that the engine's process needs from its start, besides ``base``."""
    if spec.name == "vllm":
        from crossrl.engines.rollout.vllm_environment import vllm_environment

        return vllm_environment(spec.threads, base, spec.device)
    return {"OMP_NUM_THREADS": str(spec.threads)}


def make(spec: EngineSpec) -> RolloutEngine:
    """The engine, in this process. It holds the weights of ``spec.model`` until others are brought."""
    if spec.name == "vllm":
        from crossrl.engines.rollout.vllm import VllmEngine, VllmOptions

        return VllmEngine(
            VllmOptions(
                model=spec.model,
                dtype=spec.dtype,
                eos_token_ids=spec.eos_token_ids,
                max_num_seqs=spec.max_num_seqs,
                receives=spec.receives,
                trust_remote_code=spec.trust_remote_code,
                device=spec.device,
                **spec.options,
            )
        )
    from crossrl.engines.rollout.hf import HfRolloutEngine
    from crossrl.models.loading import as_dtype, load_causal_lm

    torch.set_num_threads(spec.threads)
    model = load_causal_lm(
        spec.model,
        dtype=spec.dtype,
        device=torch.device(spec.device),
        trust_remote_code=spec.trust_remote_code,
        override_config=spec.override_config,
    )
    return HfRolloutEngine(
        model.requires_grad_(False),
        spec.eos_token_ids,
        max_num_seqs=spec.max_num_seqs,
        receives=as_dtype(spec.receives) if spec.receives else None,
        packed=spec.packed,
    )


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What does not change about an engine. ``receivers``: names under which it takes part in a weight transfer.
    ``machine``: where it is."""

    name: str
    cast: str | None
    notice: str
    receivers: tuple[str, ...]
    machine: str


class EngineHost:
    """What a worker process holds: an engine, with methods whose arguments and results can be sent.

    ``worker``: the worker's name, under which it receives weights.
    """

    def __init__(self, worker: str, spec: EngineSpec, plant: str = "") -> None:
        self.worker, self.engine = worker, make(spec)
        if plant:
            from crossrl.cross.faults import plant_in_engine

            plant_in_engine(plant, self.engine)

    def facts(self) -> EngineFacts:
        engine = self.engine
        names = tuple(engine.receiver_names(self.worker))
        return EngineFacts(engine.name, engine.cast, getattr(engine, "notice", ""), names, this_machine())

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        seeds: Sequence[int],
        sampling: Sampling,
        progress: Callable[[int, int], None] | None = None,
    ) -> Generation:
        return self.engine.generate(prompts, seeds, sampling, progress)

    def score(self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], temperature: float) -> Ragged:
        return self.engine.score(prompts, responses, temperature)

    def receive(self, address: str, limit_s: float) -> list[Received]:
        return self.engine.receive(address, self.worker, limit_s)

    def ping(self) -> None:
        """Answered by whoever lives and is not busy."""

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def abort(self) -> None:
        self.engine.abort()

    def held_digests(self) -> dict[str, str]:
        """Of each tensor that the engine computes with (XXH3-128), by name."""
        return tensor_digests(self.engine.held())

    def held_tensor(self, name: str) -> torch.Tensor:
        """A copy of one of them, on the CPU. Raises ``EngineError`` where there is none of that name."""
        for found, tensor in self.engine.held():
            if found == name:
                return tensor.detach().cpu().clone()
        raise EngineError(f"{self.worker} holds no {name}")

    def close(self) -> None:
        close = getattr(self.engine, "close", None)
        if close is not None:
            close()
