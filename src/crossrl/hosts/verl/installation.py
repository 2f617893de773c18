"""With what verl's workers compute: what two runs declare where their bits may differ without a fault."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from typing import Any

from crossrl.tape.versions import versions

# Besides those that every record names: what samples and trains, and what brings kernels of its own.
PACKAGES = (
    "verl", "ray", "vllm", "vllm-ascend", "sglang", "sgl-kernel", "tensorrt-llm", "flash-attn", "flash-attn-3",
    "flashinfer-python", "torch-npu", "triton", "triton-ascend", "transformer-engine", "megatron-core", "liger-kernel",
    "peft",
)  # fmt: skip


def installation(worker: Any, device: str) -> dict[str, str]:
    """Run in a worker (see ``weights``). ``device``: verl's name of the kind, such as ``cuda``."""
    return {**versions(device), **_accelerator(device), **_packages(PACKAGES)}


def of_all(found: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """What the workers said as one: where they differ, each value, in one order whatever theirs was.

    >>> of_all([{"device": "cuda (B)"}, {"device": "cuda (A)"}, {"device": "cuda (A)"}])
    {'device': 'cuda (A) and cuda (B)'}
    """
    each = list(found)
    names = dict.fromkeys(name for one in each for name in one)
    return {name: " and ".join(sorted({one.get(name, "not installed") for one in each})) for name in names}


def _packages(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _accelerator(device: str) -> dict[str, str]:
    """The name of one that is not CUDA's, from torch's module of that name (``torch.npu``), where it says it."""
    import torch

    if device in ("cpu", "cuda"):
        return {}
    name = getattr(getattr(torch, device, None), "get_device_name", None)
    return {"device": f"{device} ({name()})"} if name is not None else {}
