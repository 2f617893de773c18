"""The two ports through which stages reach models. A backend's peculiarities end at its adapter.

Weights reach a rollout engine as a transaction: ``begin_update`` names what will come, ``load`` brings it,
``finish_update`` checks that everything came and only then moves ``weight_version``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from crossrl.batch import Batch, Meaning, Ragged

if TYPE_CHECKING:
    from crossrl.sync.receiver import Received

if TYPE_CHECKING:  # it needs the extra `sync`
    from crossrl.sync.sender import Sent


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

    def score(self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], temperature: float) -> Ragged:
        """Log-probs (nat, float32) of the tokens of ``responses`` (int32 token ids), each after its prompt, under
        softmax(logits / temperature) without truncation; aligned with ``responses``. ``temperature`` > 0."""
        ...

    def abort(self) -> str:
        """End the call of ``generate`` or ``score`` that runs now: it raises an ``EngineError`` that says so, and the
        engine can be used again. Any thread may call this; it returns at once and says what it ended. With nothing
        running it does nothing."""
        ...

    def sleep(self) -> str:
        """Give back what memory it can until ``wake``; in words what was done. Asleep, it generates nothing and takes
        no weights: both are an ``EngineError``. Asleep already: nothing is done, which is said."""
        ...

    def wake(self) -> str:
        """Be ready again, with the weights it had; in words what was done. Awake already: nothing is done."""
        ...

    def receiver_names(self, base: str) -> list[str]:
        """The names under which ``receive`` will take part in a weight transfer: one for each process that holds
        weights. ``base``: a name for this engine that no other has."""
        ...

    def receive(self, address: str, base: str, limit_s: float) -> list[Received]:
        """Take part in one weight transfer of the ``WeightSender`` at ``address``, whose receivers include those of
        ``receiver_names(base)``: what each of them received, in that order.

        Waits for: the sender to begin, at most ``limit_s``; then its next steps, see ``WeightReceiver.receive``. Raises
        ``SyncError`` if the transfer failed: then the version has not moved, and if weights were touched, generation is
        refused until a transfer succeeds.
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

    def finish_update(self) -> None:
        """Check that all announced tensors came, and move ``weight_version``."""
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


@dataclass(frozen=True, slots=True)
class TrainFacts:
    """What a run needs to know of the model that a training engine holds, wherever that is.

    ``device``: such as "cuda:0". ``dtype``: of the weights, such as "float32". ``max_length``: positions that the model
    was made for, None if its config does not say. ``config``: the model's, as JSON-like values. ``tied``: further names
    of weights, each with the one under which it counts. ``eos_token_ids``: of the generation config. ``state_bytes``,
    ``state_tensors``: of weights and optimizer together. ``packed``: whether the packed forward pass is in use;
    ``notice``: why not, or "". ``ranks``: processes that hold it.
    """

    device: str
    dtype: str
    vocab_size: int
    max_length: int | None
    num_parameters: int
    config: Mapping[str, Any]
    tied: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    state_bytes: int
    state_tensors: int
    packed: bool = True
    notice: str = ""
    ranks: int = 1


class TrainEngine(Protocol):
    """``facts``: of its model; ``notice``: see there. ``changed``: whether the weights are others than when ``sent``
    was called: True is proven, False where no step was done, None where it is not known."""

    name: str
    weight_version: int

    @property
    def facts(self) -> TrainFacts: ...

    @property
    def notice(self) -> str: ...

    @property
    def changed(self) -> bool | None: ...

    def sent(self) -> None:
        """The weights as they are now have reached the rollout engines."""
        ...

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
        ``objective`` travels to the processes that compute, so it must be picklable where there are several.
        Raises ``EngineError`` before the optimizer steps when the loss or the gradient norm is not finite.
        """
        ...

    def state(self) -> EngineState:
        """All tensors, whole; where they are sharded, copies on the CPU that were gathered for this call."""
        ...

    def scalars(self) -> dict[str, Any]:
        """The scalars of ``state``, without its tensors."""
        ...

    def digests(self, *parts: str) -> dict[str, str]:
        """``weights_digest`` of the named ``parts`` of the state ("weights", "optimizer"; both by default)."""
        ...

    def load_state(self, state: EngineState) -> None:
        """Take back ``state``; a missing, unknown or mis-shaped tensor is an error that names it."""
        ...

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Each parameter once (a tied one under its first name), whole."""
        ...

    def save(self, folder: Path, tokenizer: Any = None) -> None:
        """Write weights, optimizer and what belongs to the model into the empty ``folder``, for ``load``; flushed to
        the disk. Raises ``OSError``."""
        ...

    def load(self, folder: Path, scalars: Mapping[str, Any], trust_remote_code: bool = False) -> None:
        """Take back what ``save`` wrote, by this or another number of processes. Raises ``EngineError``."""
        ...

    def save_hf(self, folder: Path, tokenizer: Any = None) -> None:
        """Write the model as a Hugging Face folder. Raises ``OSError``."""
        ...

    def open_sender(self, receivers: Mapping[str, str], cast: str | None = None, **options: Any) -> dict[str, str]:
        """Be the sending end of weight transfers to ``receivers`` (name to machine); returns for each the address to
        connect to. Raises ``EngineError`` for one on a machine where nothing trains.

        ``cast``: the dtype in which they hold the weights, where it is another one. ``options``: of ``WeightSender``,
        and ``transport``: "shared_memory" or "cuda_ipc".
        """
        ...

    def send(self, version: int) -> Sent:
        """One transfer of the weights as ``version``; see ``WeightSender.send``. Raises ``SyncError``."""
        ...

    def close_sender(self) -> None: ...

    def close(self) -> None:
        """Let go of everything, other processes included."""
        ...
