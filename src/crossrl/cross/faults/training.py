"""Faults of training: wrong numbers from right inputs. Seams: the advantage and update stages, the training engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from crossrl.algorithms.objective import make_objective
from crossrl.batch import Batch, Ragged
from crossrl.cross.faults import conditions as when
from crossrl.cross.faults.base import Fault, Site, replaced
from crossrl.cross.faults.weights import a_matrix
from crossrl.engines.base import LossInput, StepResult
from crossrl.seeds import derive
from crossrl.stages.base import At, Stage

DROPOUT = 0.1
STD_EPSILON = 1e-6


def mask_shifted(site: Site) -> None:
    def advantage(stage: Stage, batch: Batch, at: At) -> Batch:
        out = stage(batch, at)
        rows = [np.concatenate([np.zeros(1, np.uint8), row[:-1]])[: len(row)] for row in out.ragged("loss_mask").rows()]
        return replaced(out, loss_mask=Ragged.from_rows(rows, np.uint8))

    site.stage("advantage", advantage)


def advantage_sign(site: Site) -> None:
    def advantage(stage: Stage, batch: Batch, at: At) -> Batch:
        out = stage(batch, at)
        column = out.ragged("advantages")
        return replaced(out, advantages=Ragged(-column.values, column.lengths))

    site.stage("advantage", advantage)


def std_over_batch(site: Site) -> None:
    own = site.parts.advantage

    def advantage(stage: Stage, batch: Batch, at: At) -> Batch:
        right, own.config = own.config, replace(own.config, norm_by_std=False)
        try:
            out = stage(batch, at)
        finally:
            own.config = right
        column = out.ragged("advantages")
        deviation = float(np.nanstd(batch.array("reward"), ddof=1)) + STD_EPSILON
        return replaced(out, advantages=Ragged((column.values / deviation).astype(np.float32), column.lengths))

    site.stage("advantage", advantage)


def rewards_reordered(site: Site) -> None:
    def advantage(stage: Stage, batch: Batch, at: At) -> Batch:
        # As if the batch had been sorted by length in between and the rewards had not.
        order = np.argsort(-batch.ragged("response_mask").lengths, kind="stable")
        return stage(replaced(batch, reward=batch.array("reward")[order]), at)

    site.stage("advantage", advantage)


def old_from_new_weights(site: Site) -> None:
    def step(inner: Callable[..., StepResult], batch: Batch, *args: Any, **kwargs: Any) -> StepResult:
        without = batch.only(name for name in batch.columns if name != "old_log_probs")
        return inner(without, *args, **kwargs)  # then they are the current ones

    site.method(site.parts.trainer, "step", step)


def moment_zeroed(site: Site) -> None:
    trainer = site.parts.local_trainer

    def update(stage: Stage, batch: Batch, at: At) -> Batch:
        for name, tensor in trainer.state().optimizer.items():
            if name.endswith(".exp_avg"):
                tensor.zero_()
        return stage(batch, at)

    site.stage("update", update)


def lr_times_ten(site: Site) -> None:
    site.method(site.parts.update, "lr", lambda inner, step: 10 * inner(step))


def dropout_on(site: Site) -> None:
    trainer = site.parts.local_trainer
    draws = torch.Generator(device=trainer.policy.device)

    def drop(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        keep = torch.rand(output.shape, generator=draws, device=output.device) >= DROPOUT
        return output * keep.to(output.dtype) / (1 - DROPOUT)

    def step(inner: Callable[..., StepResult], *args: Any, **kwargs: Any) -> StepResult:
        draws.manual_seed(derive(site.cfg.trainer.seed, "dropout", site.clock.step) % 2**63)
        hook = trainer.model.get_input_embeddings().register_forward_hook(drop)
        try:
            return inner(*args, **kwargs)
        finally:
            hook.remove()

    site.method(trainer, "step", step)


def clipping_off(site: Site) -> None:
    # What the optimizer is told of the norm is for clipping only.
    site.method(site.parts.local_trainer._optimizer, "step", lambda inner, lr, grad_norm: inner(lr, 0.0))


def padded_length(site: Site) -> None:
    width = site.cfg.data.max_prompt_length + site.cfg.data.max_response_length

    def step(inner: Callable[..., StepResult], batch: Batch, *args: Any, **kwargs: Any) -> StepResult:
        mask = batch.ragged("loss_mask")
        weights = (mask.values > 0).astype(np.float32) / np.float32(len(batch) * width)
        return inner(replaced(batch, loss_weights=Ragged(weights, mask.lengths)), *args, **kwargs)

    site.method(site.parts.trainer, "step", step)


def kl_sign(site: Site) -> None:
    update = site.parts.update
    wrong = make_objective(replace(update.config, kl_coef=-(update.config.kl_coef or 0.0)))

    def objective(inner: Callable[[LossInput], Any], batch: LossInput) -> Any:
        return wrong(batch)

    site.method(update, "objective", objective)


def prompts_shifted(site: Site) -> None:
    def shifted(batch: Batch) -> Batch:
        groups = list(dict.fromkeys(batch["group_id"]))
        after = dict(zip(groups, [*groups[1:], *groups[:1]], strict=True))
        first = {group: batch["group_id"].index(group) for group in groups}
        index = np.array([first[after[group]] for group in batch["group_id"]], np.int64)
        return replaced(batch, prompt_ids=batch.ragged("prompt_ids").take(index))

    def call(inner: Callable[..., Any], batch: Batch, *args: Any, **kwargs: Any) -> Any:
        return inner(shifted(batch), *args, **kwargs)

    for name in ("log_probs", "step"):
        site.method(site.parts.trainer, name, call)


def temperature_ignored(site: Site) -> None:
    trainer = site.parts.local_trainer

    def log_probs(inner: Callable[..., Any], batch: Batch, temperature: float, entropy: bool) -> Any:
        return inner(batch, 1.0, entropy)

    def step(inner: Callable[..., StepResult], *args: Any, **kwargs: Any) -> StepResult:
        return inner(*args, **{**kwargs, "temperature": 1.0})

    site.method(trainer, "log_probs", log_probs)
    site.method(trainer, "step", step)


def reference_moves(site: Site) -> None:
    trainer, reference = site.parts.local_trainer, site.parts.reference
    site.method(reference, "log_probs", lambda inner, *args, **kwargs: trainer.log_probs(*args, **kwargs))


def tensor_not_trained(site: Site) -> None:
    trainer = site.parts.local_trainer
    weight = dict(trainer.named_weights())[a_matrix(trainer.named_weights())]

    def step(inner: Callable[..., None], *args: Any) -> None:
        kept = weight.clone()
        inner(*args)
        weight.copy_(kept)

    site.method(trainer._optimizer, "step", step)


def master_bf16(site: Site) -> None:
    trainer = site.parts.local_trainer

    def step(inner: Callable[..., None], *args: Any) -> None:
        inner(*args)
        for _, weight in trainer.named_weights():
            weight.copy_(weight.bfloat16())

    site.method(trainer._optimizer, "step", step)


TRAINING = (
    Fault(
        "training.mask_shifted", "training", "advantage",
        "the first token of each response is never learned; with tools or padding, foreign tokens are",
        mask_shifted,
    ),
    Fault(
        "training.advantage_sign", "training", "advantage",
        "the reward falls from the first step on, steadily",
        advantage_sign,
    ),
    Fault(
        "training.std_over_batch", "training", "advantage",
        "easy and hard groups count for more than they should; learning is slower or uneven",
        std_over_batch, when.GROUP_NORM, when.normalises_groups,
    ),
    Fault(
        "training.rewards_reordered", "training", "advantage",
        "the mean reward in the log is right, but nothing is learned: the rewards belong to other samples",
        rewards_reordered,
    ),
    Fault(
        "training.old_from_new_weights", "training", "update",
        "the clip fraction and the KL of the update are exactly 0 with several optimizer steps per batch; the policy "
        "moves too far",
        old_from_new_weights, when.SEVERAL_STEPS, when.has_several_steps,
    ),
    Fault(
        "training.moment_zeroed", "training", "update",
        "learning is noisier than it was before the optimizer was moved or resumed",
        moment_zeroed, earliest=2,
    ),
    Fault(
        "training.lr_times_ten", "training", "update",
        "the reward jumps, then collapses; the KL of each update is ten to a hundred times the usual",
        lr_times_ten,
    ),
    Fault(
        "training.dropout_on", "training", "update",
        "the trainer's log-probs of one and the same batch differ from call to call; the gap is noise of one size",
        dropout_on,
    ),
    Fault(
        "training.clipping_off", "training", "update",
        "now and then a step with a large gradient throws the policy off",
        clipping_off, when.CLIPPING, when.clips_often,
    ),
    Fault(
        "training.padded_length", "training", "update",
        "the gradient norm is smaller, the more the shorter the responses; learning depends on the length limit",
        padded_length,
    ),
    Fault(
        "training.kl_sign", "training", "update",
        "the divergence from the reference grows without bound, and faster with a larger coefficient",
        kl_sign, (*when.KL_LOSS, *when.SEVERAL_STEPS), when.has_kl_loss_and_several_steps,
    ),
    Fault(
        "training.prompts_shifted", "training", "old_log_prob",
        "the gap between sampler and trainer is huge even at learning rate 0",
        prompts_shifted, when.OLD_LOG_PROBS, when.has_old_log_probs,
    ),
    Fault(
        "training.temperature_ignored", "training", "old_log_prob",
        "the gap is large at temperatures below 1 and none at 1",
        temperature_ignored, (*when.TEMPERATURE, *when.OLD_LOG_PROBS), when.has_old_log_probs_and_temperature,
    ),
    Fault(
        "training.reference_moves", "training", "ref_log_prob",
        "the divergence from the reference stays near 0, whatever the policy does",
        reference_moves, when.KL_LOSS, when.has_kl_loss, earliest=2,
    ),
    Fault(
        "training.tensor_not_trained", "training", "update",
        "learning is slower; one tensor of the checkpoints never changes",
        tensor_not_trained,
    ),
    Fault(
        "training.master_bf16", "training", "update",
        "with a small learning rate hardly anything is learned: most updates are rounded away",
        master_bf16,
    ),
)  # fmt: skip
