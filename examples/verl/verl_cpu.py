"""verl 0.9.1 on a CPU, without a change of its files: a platform, and the patches of ``verl_cpu_patches``.

For small experiments and for CI; loaded with ``VERL_USE_EXTERNAL_MODULES=verl_cpu`` and ``VERL_PLATFORM=cpu``. The
rollout named ``cpu_hf`` is in ``verl_cpu_rollout.py``; what verl's rollout with vLLM needs is in ``verl_cpu_vllm.py``.
Everything is in the processes that import verl; the patches are refused where verl, or vLLM, is another than the one
that they were written for.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from crossrl import patching


class CpuModule(types.ModuleType):
    """What verl asks of ``torch.cuda``, for a CPU: answers that are true, or nothing happens."""

    ANSWERS: ClassVar[dict[str, Callable[..., Any]]] = {
        "is_available": lambda *a, **k: True,
        "device_count": lambda *a, **k: 1,
        "get_device_name": lambda *a, **k: "cpu",
        "mem_get_info": lambda *a, **k: (8 << 30, 16 << 30),
        "get_rng_state": lambda *a, **k: torch.get_rng_state(),
        "set_rng_state": lambda state, *a, **k: torch.set_rng_state(state),
        "is_bf16_supported": lambda *a, **k: True,
    }
    NUMBERS = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "current_device")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self.ANSWERS:
            return self.ANSWERS[name]
        if name in self.NUMBERS:
            return lambda *a, **k: 0
        return getattr(torch.cpu, name, lambda *a, **k: None)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """Ray's resource is called GPU, as verl asks for it: start with ``+ray_kwargs.ray_init.num_gpus=1``."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuModule("verl_cpu_device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # verl writes tensor.to(current_device())

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, float]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


patching.install("verl_cpu_patches:PATCHES", "verl_cpu_vllm:PATCHES")
