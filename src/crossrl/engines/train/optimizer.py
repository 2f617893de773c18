"""AdamW whose state exists from the start and travels by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from crossrl.engines.base import EngineError

MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK = 4096  # values that are summed in float32


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    """AdamW (Loshchilov and Hutter, 2019). ``max_grad_norm``: gradients are
    scaled down to this global 2-norm; None or infinity: no clipping."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0


class NamedAdamW:
    """``torch.optim.AdamW`` over named parameters; its moments are allocated at once, so that they can be loaded
    into a fresh engine (a template that is allocated at the first step loads nothing, and nobody notices)."""

    def __init__(self, named: Mapping[str, torch.nn.Parameter], settings: AdamWSettings) -> None:
        self.named, self.settings = dict(named), settings
        self._adamw = torch.optim.AdamW(
            list(self.named.values()),
            lr=0.0,  # each step brings its own
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.steps_done = 0
        for parameter in self.named.values():
            state = self._adamw.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def zero_grad(self) -> None:
        """Gradients are zero and stay allocated: a parameter that gets none still has decay and momentum applied,
        as all others, and no step pays for fresh memory."""
        for parameter in self.named.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def grad_norm(self) -> float:
        """The 2-norm of the gradients that this process holds: all of them, or its shards."""
        return norm_of([local(p.grad) for p in self.named.values() if p.grad is not None])

    def not_finite(self) -> list[str]:
        """Names of the parameters whose gradient holds NaN or infinity."""
        grads = ((n, local(p.grad)) for n, p in self.named.items() if p.grad is not None)
        return [n for n, grad in grads if not bool(torch.isfinite(grad).all())]

    def step(self, lr: float, grad_norm: float) -> None:
        """Clip (``grad_norm``: of all gradients, before) and step with this learning rate."""
        limit = self.settings.max_grad_norm
        if limit is not None and grad_norm > limit:
            grads = [local(p.grad) for p in self.named.values() if p.grad is not None]
            torch._foreach_mul_(grads, limit / (grad_norm + 1e-6))
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.steps_done += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        """``<parameter>.<moment>`` to the live tensor."""
        return {f"{n}.{m}": self._adamw.state[p][m] for n, p in self.named.items() for m in MOMENTS}

    def set_steps_done(self, steps_done: int) -> None:
        """After ``tensors()`` were copied into: the count of steps, for every parameter."""
        self.steps_done = steps_done
        for parameter in self.named.values():
            self._adamw.state[parameter]["step"].fill_(float(steps_done))


@torch.no_grad()
def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    """The 2-norm of all values, exact to about 1e-8, so that it does not depend on how they are split.

    PyTorch's own sums float32 on CPU in one go: for a matrix of 28 million values (an embedding) it is 5e-4 too small.
    """
    parts: list[torch.Tensor] = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        whole = flat.numel() // BLOCK * BLOCK
        parts.append(torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1, dtype=torch.float32))
        parts.append(torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)[None])
    return float(torch.cat(parts).cpu().double().square().sum().sqrt()) if parts else 0.0


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of it: a view of its shard, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_fit(targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor], what: str) -> None:
    """Raise ``EngineError`` unless ``sources`` has the names, shapes and dtypes of ``targets``."""
    missing, unknown = sorted(set(targets) - set(sources)), sorted(set(sources) - set(targets))
    if missing or unknown:
        raise EngineError(
            f"{what}: {len(missing)} tensors missing (first: {missing[:3]}), "
            f"{len(unknown)} unknown (first: {unknown[:3]})"
        )
    for name, target in targets.items():
        source = sources[name]
        if source.shape != target.shape or source.dtype != target.dtype:
            raise EngineError(
                f"{what}: {name} is {tuple(source.shape)} {source.dtype}, want {tuple(target.shape)} {target.dtype}"
            )


@torch.no_grad()
def copy_all(targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    """Copy ``sources`` into ``targets``, by name."""
    for name, target in targets.items():
        target.copy_(sources[name])
