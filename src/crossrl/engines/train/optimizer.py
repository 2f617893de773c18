"""AdamW whose state exists from the start and travels by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from crossrl.engines.base import EngineError

MOMENTS = ("exp_avg", "exp_avg_sq")


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

    def grad_norm(self) -> torch.Tensor:
        """The global 2-norm of the gradients, float32."""
        return torch.nn.utils.get_total_norm([p.grad for p in self.named.values() if p.grad is not None])

    def not_finite(self) -> list[str]:
        """Names of the parameters whose gradient holds NaN or infinity."""
        return [n for n, p in self.named.items() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]

    def step(self, lr: float, grad_norm: float) -> None:
        """Clip (``grad_norm``: what ``grad_norm()`` gave) and step with this learning rate."""
        limit = self.settings.max_grad_norm
        if limit is not None and grad_norm > limit:
            grads = [p.grad for p in self.named.values() if p.grad is not None]
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
