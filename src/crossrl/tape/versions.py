"""With what a record was made: packages, machine and device, as far as they decide how numbers are rounded."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import torch

DETERMINISTIC = "deterministic algorithms"


def versions(device: str = "cpu") -> dict[str, str]:
    """Names to versions. ``device``: of the models, such as ``cuda:0``; an accelerator's own name is given with it."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "processor": _processor()}
    # What torch makes of the processor, which ATEN_CPU_CAPABILITY and virtual machines can restrict.
    found["processor kernels"] = torch.backends.cpu.get_cpu_capability()
    found["device"] = device
    if device.startswith("cuda"):
        found |= _accelerator(device)
    for package in ("crossrl", "torch", "transformers", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _accelerator(device: str) -> dict[str, str]:
    return {
        "device": f"{device} ({torch.cuda.get_device_name(device)})",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "tf32": f"matmul {torch.backends.cuda.matmul.allow_tf32}, cudnn {torch.backends.cudnn.allow_tf32}",
        DETERMINISTIC: str(torch.are_deterministic_algorithms_enabled()),
    }


def _processor() -> str:
    """The model's name: kernels are chosen by what a processor can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
