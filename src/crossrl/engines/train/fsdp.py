"""The embedded training engine: log-probs and optimizer steps over a transformers causal LM, on one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from crossrl.batch import Batch, Ragged
from crossrl.engines.base import EngineError, EngineState, LossInput, Objective, StepResult, TrainFacts
from crossrl.engines.memory import keep_freed_memory
from crossrl.engines.train import saving
from crossrl.engines.train.changes import Changes
from crossrl.engines.train.facts import facts_of
from crossrl.engines.train.micro_batches import MicroBatch, flat_index, split
from crossrl.engines.train.optimizer import AdamWSettings, NamedAdamW, check_fit, copy_all, local
from crossrl.engines.train.sending import Layout, Sending, check_machines, this_machine
from crossrl.engines.train.trouble import check_scalars, gradient_trouble, log_prob_trouble
from crossrl.models.digest import weights_digest
from crossrl.models.linear import accumulating
from crossrl.models.loading import distinct_parameters
from crossrl.models.policy import Policy

if TYPE_CHECKING:
    from crossrl.sync.sender import Sent

# On a CPU many tokens at once cost memory and bring little: SmolLM2-135M on a busy machine, 604 against 302 tokens,
# about 10 % less time for about 0.4 GB more. A tiny model is all overhead, so as many as may be.
ENOUGH_TOKENS, TINY = 512, 5_000_000

# The per-token fields that an objective may be given, where the batch has them.
LOSS_FIELDS = ("old_log_probs", "advantages", "ref_log_probs", "is_weights", "loss_mask", "loss_weights")
PARTS = ("weights", "optimizer")


class FsdpTrainEngine:
    """``TrainEngine`` for ``model``. Deterministic: equal inputs give equal bits, for a fixed number of threads.

    ``optimizer``: None makes a frozen engine (a reference model) without optimizer memory.
    ``micro_batch_size``: at most so many samples at once; ``max_tokens_per_micro_batch``: at most so many computed
    tokens at once. They are limits: fewer are taken where more are of no use, and the result does not depend on it
    (within 1e-6).
    ``gradient_checkpointing``: recompute each layer in the backward pass. ``autocast``: mixed-precision dtype on
    accelerators, ignored on CPU. ``packed``: see ``Policy``; ``notice`` says when the fallback is in use.
    On CPU the process keeps the memory that a step frees (``keep_freed_memory``).

    ``ShardedTrainEngine`` is this engine on several ranks; what differs there are the methods below "seams".
    """

    name = "fsdp"

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: AdamWSettings | None = None,
        *,
        micro_batch_size: int | None = None,
        max_tokens_per_micro_batch: int | None = None,
        gradient_checkpointing: bool = False,
        autocast: torch.dtype | None = None,
        packed: bool | None = None,
        weight_version: int = 0,
    ) -> None:
        self.policy = Policy(model, packed)
        self.notice = self.policy.notice
        self.model = model
        self.weight_version = weight_version
        self._place()
        self._parameters = dict(distinct_parameters(model))
        self._checkpointing = gradient_checkpointing
        self._autocast = autocast
        self._max_sequences, self._max_tokens = micro_batch_size, max_tokens_per_micro_batch
        if self.policy.device.type == "cpu":
            keep_freed_memory()
        large = sum(p.numel() for p in self._parameters.values()) > TINY
        self._enough_tokens = ENOUGH_TOKENS if large and self.policy.device.type == "cpu" else None
        if micro_batch_size is None and max_tokens_per_micro_batch is None:
            self._max_tokens = 8192
        trained = {n: p for n, p in self._parameters.items() if p.requires_grad}
        self._optimizer = None if optimizer is None else NamedAdamW(trained, optimizer)
        self._changes, self._sending = Changes(), Sending()
        self.facts: TrainFacts = facts_of(self.policy, self._held().named())

    def log_probs(self, batch: Batch, temperature: float, entropy: bool) -> tuple[Ragged, Ragged | None]:
        """See ``TrainEngine.log_probs``."""
        responses = batch.ragged("response_ids")
        values = np.full(len(responses.values), np.nan, dtype=np.float32)
        entropies = np.full(len(responses.values), np.nan, dtype=np.float32) if entropy else None
        with torch.no_grad(), self.policy.autocast(self._autocast):
            for micro in self._rounds(batch, None):
                log_p, h, _ = self._forward(micro, temperature, entropy)
                where = flat_index(responses, micro.samples)
                values[where] = log_p.cpu().numpy()
                if entropies is not None and h is not None:
                    entropies[where] = h.cpu().numpy()
        self._check_log_probs(batch, values)
        lengths = responses.lengths
        return Ragged(values, lengths), None if entropies is None else Ragged(entropies, lengths)

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
        """See ``TrainEngine.step``. With everything skipped the optimizer still steps, on zero gradients."""
        optimizer = self._trained()
        if self._checkpointing:
            # At every step: whoever shares the model (the rollout engine) may have put it into eval mode, in which
            # transformers does not checkpoint, silently.
            self.policy.checkpoint_gradients()
        responses = batch.ragged("response_ids")
        values = np.full(len(responses.values), np.nan, dtype=np.float32)
        micros = self._rounds(batch, skip)
        loss, sums = 0.0, dict[str, float]()
        optimizer.zero_grad()
        try:
            for micro in micros:
                with self._accumulating():
                    part, log_p = self._backward(batch, micro, objective, temperature, entropy, sums)
                loss += part
                values[flat_index(responses, micro.samples)] = log_p
            norm = self._norm(optimizer)
            optimizer.step(lr, norm)
        finally:
            optimizer.zero_grad()
        self._changes.touched()
        self.weight_version += 1
        skipped = 0 if skip is None else int(np.count_nonzero(skip))
        tokens = sum(m.tokens for m in micros)
        return StepResult(loss, norm, lr, sums, Ragged(values, responses.lengths), tokens, skipped)

    def state(self) -> EngineState:
        """Live tensors; copy what must not change."""
        return self._held()

    def scalars(self) -> dict[str, Any]:
        done = 0 if self._optimizer is None else self._optimizer.steps_done
        return {"steps_done": done, "weight_version": self.weight_version}

    def digests(self, *parts: str) -> dict[str, str]:
        """See ``TrainEngine.digests``."""
        return {part: weights_digest(self.tensors(part).items()) for part in parts or PARTS}

    def load_state(self, state: EngineState) -> None:
        """See ``TrainEngine.load_state``."""
        check_scalars(state.scalars)
        weights, moments = self.tensors("weights"), self.tensors("optimizer")
        check_fit(weights, state.weights, "weights")
        if self._optimizer is not None:  # a frozen engine may take the state of one that trains
            check_fit(moments, state.optimizer, "optimizer state")
        copy_all(weights, state.weights)
        copy_all(moments, state.optimizer)
        self.loaded(state.scalars)

    @torch.no_grad()
    def load_shards(self, part: str, shards: Mapping[str, torch.Tensor]) -> None:
        """Copy some of the tensors of ``part``, as this process holds them; ``loaded`` ends it."""
        mine = {name: local(tensor) for name, tensor in self.tensors(part).items() if name in shards}
        check_fit(mine, shards, f"shards of the {part}")
        copy_all(mine, shards)

    def loaded(self, scalars: Mapping[str, Any]) -> None:
        """The tensors were replaced by those of a state with these ``scalars``."""
        if self._optimizer is not None:
            self._optimizer.set_steps_done(scalars["steps_done"])
        self.weight_version = scalars["weight_version"]
        self._changes.touched()

    def tensors(self, part: str) -> dict[str, torch.Tensor]:
        """The live tensors of "weights" or "optimizer", as this process holds them."""
        if part == "weights":
            return {n: p.detach() for n, p in self._parameters.items()}
        return {} if self._optimizer is None else self._optimizer.tensors()

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Each parameter once (a tied one under its first name), live."""
        return iter(self.tensors("weights").items())

    @property
    def changed(self) -> bool | None:
        return self._changes.since_sent(self.tensors("weights").values())

    def sent(self) -> None:
        self._changes.sent(self.tensors("weights").values())

    def save(self, folder: Path, tokenizer: Any = None) -> None:
        """See ``TrainEngine.save``: ``model/``, a Hugging Face folder, and ``optimizer.safetensors``."""
        saving.write_whole(folder, self.model, self.tensors("optimizer"), tokenizer)

    def load(self, folder: Path, scalars: Mapping[str, Any], trust_remote_code: bool = False) -> None:
        """See ``TrainEngine.load``."""
        check_scalars(scalars)
        if saving.is_sharded(folder):
            saving.read_shards(folder, self._held().named(), self._group())
            self.loaded(scalars)
        else:
            weights, moments = saving.read_whole(folder, self.policy.dtype, trust_remote_code)
            self.load_state(EngineState(weights, moments, scalars))

    def save_hf(self, folder: Path, tokenizer: Any = None) -> None:
        """See ``TrainEngine.save_hf``."""
        saving.write_model(folder, self.model, tokenizer)

    def open_sender(self, receivers: Mapping[str, str], cast: str | None = None, **options: Any) -> dict[str, str]:
        """See ``TrainEngine.open_sender``."""
        check_machines(receivers, [this_machine()])
        return dict.fromkeys(receivers, self._sending.open(list(receivers), cast, options))

    def send(self, version: int) -> Sent:
        """See ``TrainEngine.send``."""
        found = self._sending.send(version, self.layout(), self.facts.tied, self.named_weights(), self.changed)
        self.sent()
        return found

    def layout(self, part: str = "weights") -> Layout:
        """Shapes (of whole tensors) and dtypes by name."""
        return {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in self.tensors(part).items()}

    def close_sender(self) -> None:
        self._sending.close()

    def close(self) -> None:
        self.close_sender()

    def _held(self) -> EngineState:
        return EngineState(self.tensors("weights"), self.tensors("optimizer"), self.scalars())

    def _trained(self) -> NamedAdamW:
        if self._optimizer is None:
            raise EngineError("this engine was made without an optimizer (a reference model); it cannot step")
        return self._optimizer

    def _split(self, batch: Batch, skip: np.ndarray | None) -> list[MicroBatch]:
        prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
        keep = responses.lengths > 0  # an empty response has no log-probs and no gradient
        empty = np.flatnonzero(keep & (prompts.lengths == 0))
        if empty.size:
            raise EngineError(f"sample {batch.sample_id[int(empty[0])]} has a prompt of no tokens")
        if skip is not None:
            if skip.shape != keep.shape:
                raise EngineError(f"skip has shape {skip.shape}, want one entry for each of the {len(batch)} samples")
            keep &= ~skip
        return split(prompts, responses, keep, self._max_sequences, self._max_tokens, self._enough_tokens)

    def _backward(
        self,
        batch: Batch,
        micro: MicroBatch,
        objective: Objective,
        temperature: float,
        entropy: bool,
        sums: dict[str, float],
    ) -> tuple[float, np.ndarray]:
        """Add the micro-batch's gradient and metric sums; returns its loss and log-probs."""
        where = flat_index(batch.ragged("response_ids"), micro.samples)
        columns = {n: self._tensor(batch.ragged(n).values[where]) for n in LOSS_FIELDS if n in batch}
        with self.policy.autocast(self._autocast):
            log_p, h, sequence = self._forward(micro, temperature, entropy)
        loss, parts = self._loss(objective, LossInput(log_p, h, columns, sequence, len(micro.samples)))
        value = float(loss.detach())
        if not math.isfinite(value):
            ids = [batch.sample_id[int(i)] for i in micro.samples]
            self._trouble(
                f"the loss is {value} in the micro-batch of samples {ids[:4]}{'...' if len(ids) > 4 else ''}; "
                "the optimizer did not step and the weights are unchanged"
            )
        loss.backward()
        for key, part in parts.items():
            sums[key] = sums.get(key, 0.0) + part
        return value, log_p.detach().cpu().numpy()

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.policy.device)

    # Seams: what several ranks do together.

    def _place(self) -> None:
        """Bring the model to where it will be trained, before anything is made of its parameters."""

    def _rounds(self, batch: Batch, skip: np.ndarray | None) -> list[MicroBatch]:
        """The micro-batches to compute."""
        return self._split(batch, skip)

    def _accumulating(self) -> AbstractContextManager[None]:
        return accumulating()

    def _forward(
        self, micro: MicroBatch, temperature: float, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        return self.policy.log_probs(micro.groups, temperature, entropy)

    def _loss(self, objective: Objective, given: LossInput) -> tuple[torch.Tensor, dict[str, float]]:
        return objective(given)

    def _trouble(self, problem: str) -> None:
        """The step cannot be done, for a reason that is found in the middle of it."""
        raise EngineError(problem)

    def _norm(self, optimizer: NamedAdamW) -> float:
        """The norm of the whole gradient. Raises ``EngineError`` if it is not finite."""
        norm = optimizer.grad_norm()
        if not math.isfinite(norm):
            raise EngineError(gradient_trouble(norm, optimizer.not_finite()))
        return norm

    def _check_log_probs(self, batch: Batch, values: np.ndarray) -> None:
        if problem := log_prob_trouble(batch, values):
            raise EngineError(problem)

    def _group(self) -> Any:
        """The process group for reading and writing shards."""
        return None
