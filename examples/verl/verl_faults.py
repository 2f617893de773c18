"""Faults to plant in a verl run on a CPU, as patches: what a cross-examination has to find, and a control.

Each is off until its variable says so (``FAULTS``), and says nothing of itself in settings, versions or metrics.
Nothing heavy is imported: every child of the run imports this first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from crossrl import patching

Original = Callable[..., Any]
PREFIX = "verl-fault."
ROTARY_BASE = 1.2  # times; the model's own is 10000
RATE = 10.0


def rotary_base(original: Original) -> Original:
    """The sampler's positions turn at another rate than the trainer's, as after a misread configuration."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        turns = self.model.model.rotary_emb.inv_freq
        # base^(-i / half) of a base that is larger by the factor
        turns *= ROTARY_BASE ** -(turns.new_tensor(range(len(turns))) / len(turns))

    return __init__


def stale_weights(original: Original) -> Original:
    """The sampler gets what the training worker sent the time before, under the new version's name."""

    async def load(self: Any, named: Any, version: Any) -> Any:
        held, self.sent_before = getattr(self, "sent_before", named), named
        return await original(self, held, version)

    return load


def stale_vllm(original: Original) -> Original:
    """The same in vLLM's worker: it loads what it was sent the time before."""

    def _update_weights(self: Any, weights: Any, **kwargs: Any) -> Any:
        held, self.sent_before = getattr(self, "sent_before", weights), weights
        return original(self, held, **kwargs)

    return _update_weights


def learning_rate(original: Original) -> Original:
    """The optimizer steps with another learning rate than verl's schedule says and reports."""

    def optimizer_step(self: Any) -> Any:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * RATE
        found = original(self)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return found

    return optimizer_step


def slow_answers(original: Original) -> Original:
    """The control: another time and order of answers, and the same answers."""

    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0.05)
        return await original(self, *args, **kwargs)

    return generate


def _planted(name: str, target: str, fingerprint: str, wrapper: Any, distribution: str | None = None) -> patching.Patch:
    return patching.Patch(
        name=PREFIX + name,
        target=target,
        distribution=distribution,
        fingerprints={"0.9.1": fingerprint},
        wrapper=wrapper,
        why=str(wrapper.__doc__),
        on=False,
    )


PATCHES = (
    _planted(
        "rotary-base",
        "verl_cpu_rollout:Server.__init__",
        "618020b4abfa37a3fec4cac0420028b4:7e5da706bba6a4f3ac46c80a",
        rotary_base,
    ),
    _planted(
        "stale-weights",
        "verl_cpu_rollout:Server.load",
        "af8eb12fc014bd61e21c2abd2da41a15:52aa14b1d217b729efb7a64ba4a",
        stale_weights,
    ),
    _planted(
        "stale-weights-vllm",
        "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension._update_weights",
        "6a38bb617ebda44baa75ad8737140827:840913f99700df411bdc8836b065bb15ab942ac945dfccf8b77e6ae0e23cc8edd2a7a",
        stale_vllm,
        "verl",
    ),
    _planted(
        "learning-rate",
        "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.optimizer_step",
        "6540d33a9b334e1e40dd718f167d1d1e:a806ebea67571fe9b4d02047b19d5856cc7f7579ed8da3b4d0b21b9742e7b22466bd3",
        learning_rate,
        "verl",
    ),
    _planted(
        "slow-answers",
        "verl_cpu_rollout:Server.generate",
        "444956684d9464fd096eb8bae50c5bf1:dc18dd09790f9197c9f09becb1edefaa3",
        slow_answers,
    ),
)
FAULTS = {patch.name.removeprefix(PREFIX): patch.switch for patch in PATCHES}
"""Name to the environment variable that switches it on."""
