"""The embedded training engine: log-probs and optimizer steps over a transformers causal LM, on one process."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from transformers import PreTrainedModel

from crossrl.batch import Batch, Ragged
from crossrl.engines.base import EngineError, EngineState, LossInput, Objective, StepResult
from crossrl.engines.memory import keep_freed_memory
from crossrl.engines.train.micro_batches import MicroBatch, split
from crossrl.engines.train.optimizer import AdamWSettings, NamedAdamW, check_fit, copy_all
from crossrl.models.linear import accumulating
from crossrl.models.loading import distinct_parameters
from crossrl.models.policy import Policy

# On a CPU many tokens at once cost memory and bring little: SmolLM2-135M on a busy machine, 604 against 302 tokens,
# about 10 % less time for about 0.4 GB more. A tiny model is all overhead, so as many as may be.
ENOUGH_TOKENS, TINY = 512, 5_000_000

# The per-token fields that an objective may be given, where the batch has them.
LOSS_FIELDS = ("old_log_probs", "advantages", "ref_log_probs", "is_weights", "loss_mask", "loss_weights")


class FsdpTrainEngine:
    """``TrainEngine`` for ``model``. Deterministic: equal inputs give equal bits, for a fixed number of threads.

    ``optimizer``: None makes a frozen engine (a reference model) without optimizer memory.
    ``micro_batch_size``: at most so many samples at once; ``max_tokens_per_micro_batch``: at most so many computed
    tokens at once. They are limits: fewer are taken where more are of no use, and the result does not depend on it
    (within 1e-6).
    ``gradient_checkpointing``: recompute each layer in the backward pass. ``autocast``: mixed-precision dtype on
    accelerators, ignored on CPU. ``packed``: see ``Policy``; ``notice`` says when the fallback is in use.
    On CPU the process keeps the memory that a step frees (``keep_freed_memory``).
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

    def log_probs(self, batch: Batch, temperature: float, entropy: bool) -> tuple[Ragged, Ragged | None]:
        """See ``TrainEngine.log_probs``."""
        responses = batch.ragged("response_ids")
        values = np.full(len(responses.values), np.nan, dtype=np.float32)
        entropies = np.full(len(responses.values), np.nan, dtype=np.float32) if entropy else None
        with torch.no_grad(), self.policy.autocast(self._autocast):
            for micro in self._split(batch, None):
                log_p, h, _ = self.policy.log_probs(micro.groups, temperature, entropy)
                where = flat_index(responses, micro.samples)
                values[where] = log_p.cpu().numpy()
                if entropies is not None and h is not None:
                    entropies[where] = h.cpu().numpy()
        if not np.isfinite(values).all():
            bad = int(responses.sample_index[np.flatnonzero(~np.isfinite(values))[0]])
            raise EngineError(
                f"the log-probs of sample {batch.sample_id[bad]} are not finite; the weights may have diverged"
            )
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
        micros = self._split(batch, skip)
        loss, sums = 0.0, dict[str, float]()
        optimizer.zero_grad()
        try:
            for micro in micros:
                with accumulating():
                    part, log_p = self._backward(batch, micro, objective, temperature, entropy, sums)
                loss += part
                values[flat_index(responses, micro.samples)] = log_p
            norm = float(optimizer.grad_norm())
            if not math.isfinite(norm):
                bad = optimizer.not_finite()
                raise EngineError(
                    f"the gradient norm is {norm}; {len(bad)} parameters have gradients that are not finite "
                    f"(first: {bad[:3]}). The optimizer did not step and the weights are unchanged"
                )
            optimizer.step(lr, norm)
        finally:
            optimizer.zero_grad()
        self.weight_version += 1
        skipped = 0 if skip is None else int(np.count_nonzero(skip))
        tokens = sum(m.tokens for m in micros)
        return StepResult(loss, norm, lr, sums, Ragged(values, responses.lengths), tokens, skipped)

    def state(self) -> EngineState:
        """Live tensors; copy what must not change."""
        weights = {n: p.detach() for n, p in self._parameters.items()}
        if self._optimizer is None:
            return EngineState(weights, {}, {"steps_done": 0, "weight_version": self.weight_version})
        scalars = {"steps_done": self._optimizer.steps_done, "weight_version": self.weight_version}
        return EngineState(weights, self._optimizer.tensors(), scalars)

    def load_state(self, state: EngineState) -> None:
        """See ``TrainEngine.load_state``."""
        for key in ("steps_done", "weight_version"):
            if not isinstance(state.scalars.get(key), int):
                raise EngineError(f"engine state: {key} is {state.scalars.get(key)!r}, want an integer")
        weights = {n: p.detach() for n, p in self._parameters.items()}
        moments = self._optimizer.tensors() if self._optimizer is not None else {}
        check_fit(weights, state.weights, "weights")
        if self._optimizer is not None:  # a frozen engine may take the state of one that trains
            check_fit(moments, state.optimizer, "optimizer state")
            self._optimizer.set_steps_done(state.scalars["steps_done"])
        copy_all(weights, state.weights)
        copy_all(moments, state.optimizer)
        self.weight_version = state.scalars["weight_version"]

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Each parameter once (a tied one under its first name), live."""
        return ((n, p.detach()) for n, p in self._parameters.items())

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
            log_p, h, sequence = self.policy.log_probs(micro.groups, temperature, entropy)
        loss, parts = objective(LossInput(log_p, h, columns, sequence, len(micro.samples)))
        value = float(loss.detach())
        if not math.isfinite(value):
            ids = [batch.sample_id[int(i)] for i in micro.samples]
            raise EngineError(
                f"the loss is {value} in the micro-batch of samples {ids[:4]}{'...' if len(ids) > 4 else ''}; "
                "the optimizer did not step and the weights are unchanged"
            )
        loss.backward()
        for key, part in parts.items():
            sums[key] = sums.get(key, 0.0) + part
        return value, log_p.detach().cpu().numpy()

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.policy.device)


def flat_index(column: Ragged, samples: np.ndarray) -> np.ndarray:
    """int64: where the values of ``samples``, one after the other, are in ``column.values``."""
    lengths = column.lengths[samples]
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) + np.repeat(column.offsets[samples] - (ends - lengths), lengths)
