"""The two ports through which stages reach models. A backend's peculiarities end at its adapter.

Weights reach a rollout engine as a transaction: ``begin_update`` names what will come, ``load`` brings it,
``finish_update`` checks that everything came and only then moves ``weight_version``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from crossrl.batch import Batch, Meaning, Ragged


class EngineError(RuntimeError):
    """An engine cannot do what it was asked; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. ``temperature`` 0 is greedy. ``top_k`` -1 and ``top_p`` 1.0 are off.

    ``max_tokens`` bounds the response; ``ignore_eos`` goes on to ``max_tokens`` whatever is sampled.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    ignore_eos: bool = False

    @property
    def truncation(self) -> str:
        rules = []
        if self.temperature > 0 and self.top_k > 0:
            rules.append(f"top_k={self.top_k}")
        if self.temperature > 0 and self.top_p < 1.0:
            rules.append(f"top_p={self.top_p}")
        return ",".join(rules) or "none"


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine sampled for N requests, in the order of the requests.

    ``response_ids``: int32, end token included. ``log_probs``: float32, nat, of each sampled token, under
    the distribution that ``meaning`` names. ``finish_reason``: "stop" or "length".
    """

    response_ids: Ragged
    log_probs: Ragged
    finish_reason: list[str]
    meaning: Meaning
    weight_version: int


class RolloutEngine(Protocol):
    name: str
    weight_version: int

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        seeds: Sequence[int],
        sampling: Sampling,
        progress: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """Sample one response per entry of ``prompts`` (int32 token ids; equal neighbours share their prefill).

        ``seeds``: one per request; a response depends on its prompt, its seed and the weights, not on what
        else is in the call. ``progress(done, total)`` counts finished responses.
        """
        ...

    def begin_update(self, version: int, manifest: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """Announce the weights of ``version``: name to (shape, dtype such as "float32")."""
        ...

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Bring some of the announced tensors."""
        ...

    def check_update(self) -> None:
        """Raise ``EngineError`` unless all announced tensors came; the version does not move. Between processes: all
        engines check before one of them finishes."""
        ...

    def abort_update(self, reason: str) -> None:
        """Give an update up: the version stays, and generation is refused, with ``reason``, until one succeeds."""
        ...

    def clear_prefix_cache(self) -> str:
        """Forget keys and values that were computed with earlier weights; says what was done, for the record."""
        ...

    def held(self) -> Iterable[tuple[str, torch.Tensor]]:
        """What it computes with, live, under all names: a tied weight under each of its own."""
        ...

    def finish_update(self) -> str:
        """Check that all announced tensors came, move ``weight_version``, return the digest of what is held (under all
        names, a tied weight under each of its own)."""
        ...

    @property
    def cast(self) -> str | None:
        """How received weights are cast, such as "float32 to bfloat16"; None: they are held as they come."""
        ...

    def as_held(self, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``named`` after that cast."""
        ...

    def shares(self, named: Mapping[str, torch.Tensor]) -> bool:
        """Whether these very tensors are what it computes with, so that nothing can differ."""
        ...


@dataclass(frozen=True, slots=True)
class LossInput:
    """One micro-batch as the loss sees it; S whole sequences, T response tokens, all flat ``[T]`` tensors.

    ``log_probs`` carries the gradient; ``entropy`` is None unless the objective asks for it. ``columns``
    holds the other per-token fields (``old_log_probs``, ``advantages``, ``ref_log_probs``, ``is_weights``,
    ``loss_mask``), and ``loss_weights``: the loss is ``sum(loss_weights * per_token_loss)``, which makes it
    independent of how a mini-batch is split. ``sequence``: int64 ``[T]``, which of the S sequences.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    columns: Mapping[str, torch.Tensor]
    sequence: torch.Tensor
    num_sequences: int


# Returns the scalar loss of the micro-batch and what to add up for the metrics (floats, over all tokens).
Objective = Callable[[LossInput], "tuple[torch.Tensor, dict[str, float]]"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step. ``loss``: summed over micro-batches. ``grad_norm``: before clipping.

    ``sums``: the objective's metric sums. ``log_probs``: float32, aligned with ``response_ids`` of the
    mini-batch (NaN where a sample was skipped because it has no gradient). ``lr``: used in this step.
    """

    loss: float
    grad_norm: float
    lr: float
    sums: dict[str, float]
    log_probs: Ragged
    tokens: int = 0
    skipped_samples: int = 0


@dataclass(frozen=True, slots=True)
class EngineState:
    """All that a training engine must get back to go on as if it had never stopped.

    ``weights`` and ``optimizer``: name to tensor (live, not copies); ``scalars``: JSON-like
    (optimizer steps done, schedule).
    """

    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Any] = field(default_factory=dict)

    def named(self) -> dict[str, torch.Tensor]:
        """All tensors in one map, as ``weights/NAME`` and ``optimizer/NAME``: the form in which records hold them."""
        parts = {"weights": self.weights, "optimizer": self.optimizer}
        return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

    @classmethod
    def from_named(cls, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> EngineState:
        """The inverse of ``named``. Raises ``EngineError`` for a name of neither kind."""
        parts: dict[str, dict[str, torch.Tensor]] = {"weights": {}, "optimizer": {}}
        for key, tensor in tensors.items():
            part, _, name = key.partition("/")
            if part not in parts or not name:
                raise EngineError(f"a recorded state holds {key!r}: want weights/NAME or optimizer/NAME")
            parts[part][name] = tensor
        return cls(parts["weights"], parts["optimizer"], scalars)


class TrainEngine(Protocol):
    name: str
    weight_version: int

    def log_probs(self, batch: Batch, temperature: float, entropy: bool) -> tuple[Ragged, Ragged | None]:
        """Log-probs (nat, float32) of each response token after dividing logits by ``temperature``; entropy if asked.

        Reads ``prompt_ids`` and ``response_ids``. The result is aligned with ``response_ids``.
        """
        ...

    def step(
        self,
        batch: Batch,
        objective: Objective,
        *,
        lr: float,
        temperature: float,
        entropy: bool,
        skip: np.ndarray | None = None,
    ) -> StepResult:
        """One optimizer step on ``batch`` (the mini-batch): micro-batches, clip, guard, step with learning rate ``lr``.

        ``lr`` comes from the caller, a pure function of the training step, so that no schedule has state here.
        ``skip``: bool ``[N]``, samples whose gradient is known to be exactly zero; they are not computed.
        Raises ``EngineError`` before the optimizer steps when the loss or the gradient norm is not finite.
        """
        ...

    def state(self) -> EngineState: ...

    def load_state(self, state: EngineState) -> None:
        """Take back ``state``; a missing, unknown or mis-shaped tensor is an error that names it."""
        ...

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]: ...
