"""Faults of inference: the engine computes something else than its record says. Seam: ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from crossrl.batch import Ragged
from crossrl.cross.faults import conditions as when
from crossrl.cross.faults.base import Fault, FaultError, Site
from crossrl.cross.faults.weights import Versions, a_matrix, computing_with
from crossrl.engines.base import Generation, RolloutEngine, Sampling
from crossrl.models.head import Head
from crossrl.models.layout import Group

Prompts = Sequence[np.ndarray]
SCORED_AT_ONCE = 32


def stale_weights(site: Site) -> None:
    versions = Versions(site)

    def generate(inner: Callable[..., Generation], *args: Any, **kwargs: Any) -> Generation:
        with versions.before():
            return inner(*args, **kwargs)

    site.method(site.parts.engine, "generate", generate)


def stale_in_engine(engine: RolloutEngine, start: int) -> None:
    from crossrl.cross.faults import in_engine  # it needs the extra `sync`

    in_engine.stale_weights(engine, start)


def frozen_tensor(site: Site) -> None:
    engine = site.parts.local_engine
    name = a_matrix(engine.held())
    frozen: dict[str, torch.Tensor] = {}

    def generate(inner: Callable[..., Generation], *args: Any, **kwargs: Any) -> Generation:
        if not frozen:
            frozen[name] = dict(engine.held())[name].clone()
        with computing_with(engine, frozen):
            return inner(*args, **kwargs)

    site.method(engine, "generate", generate)


def rotary_base(site: Site) -> None:
    engine = site.parts.local_engine
    buffers = [b for n, b in engine.policy.model.named_buffers() if n.endswith("inv_freq")]
    if not buffers:
        raise FaultError("inference.rotary_base: the model has no rotary position embedding")

    def generate(inner: Callable[..., Generation], *args: Any, **kwargs: Any) -> Generation:
        kept = [b.clone() for b in buffers]
        for buffer in buffers:
            buffer.pow_(1.25)  # a base of 10 000 becomes one of 100 000
        try:
            return inner(*args, **kwargs)
        finally:
            for buffer, old in zip(buffers, kept, strict=True):
                buffer.copy_(old)

    site.method(engine, "generate", generate)


def _sampling(site: Site, change: Callable[[Sampling], Sampling]) -> None:
    """Generate with another sampling than asked for, and say nothing of it."""

    def generate(
        inner: Callable[..., Generation],
        prompts: Prompts,
        seeds: Sequence[int],
        sampling: Sampling,
        progress: Any = None,
    ) -> Generation:
        out = inner(prompts, seeds, change(sampling), progress)
        said = replace(out.meaning, temperature=sampling.temperature or 1.0, truncation=sampling.truncation)
        return replace(out, meaning=said)

    site.method(site.parts.engine, "generate", generate)


def temperature_twice(site: Site) -> None:
    _sampling(site, lambda s: replace(s, temperature=s.temperature**2))


def hidden_top_k(site: Site) -> None:
    _sampling(site, lambda s: replace(s, top_k=8))


def stop_token_missed(site: Site) -> None:
    _sampling(site, lambda s: replace(s, ignore_eos=True))


def limit_one_short(site: Site) -> None:
    _sampling(site, lambda s: replace(s, max_tokens=max(1, s.max_tokens - 1)))


def _log_probs(site: Site, change: Callable[[Prompts, Generation], np.ndarray]) -> None:
    """Other log-probs for what was sampled: ``change`` gives the flat float32 values."""

    def generate(inner: Callable[..., Generation], prompts: Prompts, *args: Any, **kwargs: Any) -> Generation:
        out = inner(prompts, *args, **kwargs)
        return replace(out, log_probs=Ragged(change(prompts, out), out.response_ids.lengths))

    site.method(site.parts.engine, "generate", generate)


def raw_log_probs(site: Site) -> None:
    policy = site.parts.local_engine.policy

    def raw(prompts: Prompts, out: Generation) -> np.ndarray:
        groups = [Group(p, [r]) for p, r in zip(prompts, out.response_ids.rows(), strict=True) if len(r)]
        parts = [groups[i : i + SCORED_AT_ONCE] for i in range(0, len(groups), SCORED_AT_ONCE)]
        with torch.no_grad():
            values = [policy.log_probs(part, 1.0, False)[0].float().cpu().numpy() for part in parts]
        return np.concatenate(values) if values else out.log_probs.values

    _log_probs(site, raw)


def log_probs_shifted(site: Site) -> None:
    def shifted(prompts: Prompts, out: Generation) -> np.ndarray:
        rows = [np.roll(row, 1) for row in out.log_probs.rows()]
        return np.concatenate(rows) if rows else out.log_probs.values

    _log_probs(site, shifted)


def _need_packed(site: Site, name: str) -> None:
    if not site.parts.local_engine.policy.packed:
        raise FaultError(f"{name}: this model is not sampled in packed form, which this fault is planted in")


def cache_kept(site: Site) -> None:
    _need_packed(site, "inference.cache_kept")
    versions = Versions(site)

    def prefill(inner: Callable[..., Any], *args: Any) -> Any:
        with versions.before():
            return inner(*args)

    site.method(site.parts.local_engine, "_prefill", prefill)


def _prompts(site: Site, change: Callable[[np.ndarray, Sampling, Prompts], np.ndarray]) -> None:
    """The engine sees other prompt tokens than the record holds."""

    def generate(
        inner: Callable[..., Generation],
        prompts: Prompts,
        seeds: Sequence[int],
        sampling: Sampling,
        progress: Any = None,
    ) -> Generation:
        return inner([change(p, sampling, prompts) for p in prompts], seeds, sampling, progress)

    site.method(site.parts.engine, "generate", generate)


def left_padding_seen(site: Site) -> None:
    pad = site.parts.tokenizer.pad_token_id
    pad = site.parts.tokenizer.eos_token_id if pad is None else pad
    positions = site.parts.local_engine.policy.max_length

    def padded(prompt: np.ndarray, sampling: Sampling, prompts: Prompts) -> np.ndarray:
        width = max(site.cfg.data.max_prompt_length, 1 + max(map(len, prompts)))
        room = width if positions is None else min(width, positions - sampling.max_tokens)
        return np.concatenate([np.full(max(0, room - len(prompt)), pad, np.int32), prompt])

    _prompts(site, padded)


def template_variant(site: Site) -> None:
    _prompts(site, lambda prompt, sampling, prompts: prompt[:-1] if len(prompt) > 1 else prompt)


def first_token_twice(site: Site) -> None:
    _prompts(site, lambda prompt, sampling, prompts: np.concatenate([prompt[:1], prompt]))


def same_seed(site: Site) -> None:
    def generate(
        inner: Callable[..., Generation],
        prompts: Prompts,
        seeds: Sequence[int],
        sampling: Sampling,
        progress: Any = None,
    ) -> Generation:
        return inner(prompts, [seeds[0]] * len(seeds) if seeds else seeds, sampling, progress)

    site.method(site.parts.engine, "generate", generate)


@dataclass(frozen=True, slots=True)
class RoundedHead(Head):
    """A head in bfloat16 on top of a float32 model."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return Head.logits(self, hidden).bfloat16().float()


def head_bf16(site: Site) -> None:
    _need_packed(site, "inference.head_bf16")

    def head(inner: Callable[[], Head]) -> Head:
        right = inner()
        return RoundedHead(right.weight.bfloat16().to(right.weight.dtype), right.bias, right.scale, right.softcap)

    site.method(site.parts.local_engine.policy, "head", head)


INFERENCE = (
    Fault(
        "inference.stale_weights", "inference", "rollout",
        "the gap between sampler and trainer is about one update from the second step on; training is off-policy by "
        "one more step than it says, and learns more slowly or collapses",
        stale_weights, earliest=2, in_engine=stale_in_engine,
    ),
    Fault(
        "inference.frozen_tensor", "inference", "rollout",
        "the gap grows with every step; sampled text gets worse than validation of a checkpoint says",
        frozen_tensor, lag=1,
    ),
    Fault(
        "inference.rotary_base", "inference", "rollout",
        "the gap is large from the first step on and grows with the position of the token",
        rotary_base,
    ),
    Fault(
        "inference.temperature_twice", "inference", "rollout",
        "responses are less varied than the temperature says; entropy falls early; no gap at temperature 1",
        temperature_twice, when.TEMPERATURE, when.has_temperature,
    ),
    Fault(
        "inference.hidden_top_k", "inference", "rollout",
        "the sampler's log-probs are all a little too high; rare tokens never occur; entropy falls",
        hidden_top_k,
    ),
    Fault(
        "inference.raw_log_probs", "inference", "rollout",
        "importance ratios are far from 1 on the first token at a temperature below 1, and fine at 1",
        raw_log_probs, when.TEMPERATURE, when.has_temperature,
    ),
    Fault(
        "inference.log_probs_shifted", "inference", "rollout",
        "gaps are huge and have no pattern, though the texts are good and rewards rise",
        log_probs_shifted,
    ),
    Fault(
        "inference.cache_kept", "inference", "rollout",
        "the gap grows with the number of updates since the engine was started, and a restart resets it",
        cache_kept, when.PACKED, when.is_packed, earliest=2,
    ),
    Fault(
        "inference.left_padding_seen", "inference", "rollout",
        "the gap depends on the length of the prompt: short ones, which are padded most, are worst",
        left_padding_seen,
    ),
    Fault(
        "inference.template_variant", "inference", "rollout",
        "responses begin with the end of the prompt or with a role name; the gap is largest on the first token",
        template_variant,
    ),
    Fault(
        "inference.first_token_twice", "inference", "rollout",
        "a small gap on all tokens from the first step on, after an upgrade of the tokenizer or the engine",
        first_token_twice,
    ),
    Fault(
        "inference.head_bf16", "inference", "rollout",
        "a small gap on all tokens, larger where the model is undecided; no trend over the steps",
        head_bf16, when.PACKED, when.is_packed,
    ),
    Fault(
        "inference.stop_token_missed", "inference", "rollout",
        "every response is as long as the limit and ends in gibberish; none has finish reason stop",
        stop_token_missed,
    ),
    Fault(
        "inference.limit_one_short", "inference", "rollout",
        "answers that need the whole length are cut off; none is longer than the limit less one",
        limit_one_short,
    ),
    Fault(
        "inference.same_seed", "inference", "rollout",
        "the responses of a group are all the same; advantages are 0; nothing is learned",
        same_seed,
    ),
)  # fmt: skip
