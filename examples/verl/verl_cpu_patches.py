"""The patches that verl 0.9.1 needs on a CPU. Nothing heavy is imported: every child imports this first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossrl import patching

Original = Callable[..., Any]


def fsdp_on_cpu(original: Original) -> Original:
    def register(cls: Any, model_type: str, backend: Any, device: Any = "cuda", vendor: Any = None) -> Any:
        backends = backend if isinstance(backend, list) else [backend]
        devices = device if isinstance(device, list) else [device]
        more = ["cpu"] if "cuda" in devices and any(b.startswith("fsdp") for b in backends) else []
        return original(cls, model_type, backend, [*devices, *more], vendor)

    return register


def gloo_alone(original: Original) -> Original:
    def initialize(timeout_second: float | None = None, backend: str | None = None) -> Any:
        return original(timeout_second, backend or "cpu:gloo")

    return initialize


def with_our_replica(original: Original) -> Original:
    def get(cls: Any, name: str) -> Any:
        if name != "cpu_hf":
            return original(cls, name)
        from verl_cpu_rollout import Replica

        return Replica

    return get


def with_our_rollout(original: Original) -> Original:
    def get_rollout_class(rollout_name: str, mode: str = "async") -> Any:
        if rollout_name != "cpu_hf":
            return original(rollout_name, mode)
        from verl_cpu_rollout import Adapter

        return Adapter

    return get_rollout_class


def with_a_seed(original: Original) -> Original:
    """verl gives a request a random id and nothing that says which of a prompt's samples it is to be; here it is the
    session (default trainer) or the place in the batch (synchronous one), so that a run samples what its rerun does."""

    async def run(self: Any, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        which = kwargs.get("session_id", kwargs.get("priority", 0))
        return await original(self, {**sampling_params, "seed": int(which)}, **kwargs)

    return run


PATCHES = (
    patching.Patch(
        name="verl-cpu.engines",
        target="verl.workers.engine.base:EngineRegistry.register",
        distribution="verl",
        fingerprints={
            "0.9.1": "a6ed5e9c62034570c9316b26d4e293d0:f42282995116a8870085690d4c941776dfa2a16a903767282b2124"
        },
        wrapper=fsdp_on_cpu,
        why="FSDP engines are registered for cuda and npu only",
        required=False,
    ),
    patching.Patch(
        name="verl-cpu.process-group",
        target="verl.utils.distributed:initialize_global_process_group_ray",
        distribution="verl",
        fingerprints={"0.9.1": "967da9bbc4b749db7c574b70c9535926:cab3056f56c34a0c97fb1c81"},
        wrapper=gloo_alone,
        why="'cpu:gloo,cpu:gloo' is no valid backend",
        required=False,
    ),
    patching.Patch(
        name="verl-cpu.replica",
        target="verl.workers.rollout.replica:RolloutReplicaRegistry.get",
        distribution="verl",
        fingerprints={"0.9.1": "26c4e024040c19ba8ffe2f4e6c090e7d:2bda4c98b6c8"},
        wrapper=with_our_replica,
        why="the rollout cpu_hf",
        required=False,
    ),
    patching.Patch(
        name="verl-cpu.rollout",
        target="verl.workers.rollout.base:get_rollout_class",
        distribution="verl",
        fingerprints={"0.9.1": "865378752d366fabd0171d0a086b3a89:0880f1752bd810ed35"},
        wrapper=with_our_rollout,
        why="the rollout cpu_hf",
        required=False,
    ),
    patching.Patch(
        name="verl-cpu.seeds",
        target="verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop.run",
        distribution="verl",
        fingerprints={
            "0.9.1": (
                "32c5d3dd2499787100e31dac84728de5:214208711bfbadf4abc349188243eddea5f0e4694535172"
                "2dd085386e79640970d9ee6be"
            )
        },
        wrapper=with_a_seed,
        why="what is sampled depends on the order in which requests arrive",
        required=False,
    ),
)
