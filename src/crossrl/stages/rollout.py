"""rollout: sample responses to prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from crossrl.batch import Batch, Ragged
from crossrl.engines.base import Generation, Sampling
from crossrl.seeds import derive
from crossrl.stages.base import At


class Generator(Protocol):
    """The one thing that rollout needs of an engine; see ``RolloutEngine.generate``."""

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        seeds: Sequence[int],
        sampling: Sampling,
        progress: Callable[[int, int], None] | None = None,
    ) -> Generation: ...


class Decoder(Protocol):
    """The one thing that rollout needs of a tokenizer."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


class Rollout:
    """Samples one response per sample of the batch; members of a group lie next to each other.

    Each response has its own seed, derived from (run seed, split, sample id): it depends on its prompt and
    the weights, and on nothing else in the call. With ``greedy_baseline`` (ReMax) each prompt is also
    answered greedily, once per group, and that text is given to all its members.
    """

    name = "rollout"
    reads: tuple[str, ...] = ("group_id", "prompt_ids")
    writes: tuple[str, ...] = (
        "response_ids", "response_mask", "rollout_log_probs", "finish_reason", "rollout_weight_version", "response",
    )  # fmt: skip

    def __init__(
        self,
        engine: Generator,
        decoder: Decoder,
        sampling: Sampling,
        seed: int,
        greedy_baseline: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.engine, self.decoder, self.sampling, self.seed = engine, decoder, sampling, seed
        self.greedy_baseline, self.progress = greedy_baseline, progress
        if greedy_baseline:
            self.writes = (*Rollout.writes, "baseline_response")

    def __call__(self, batch: Batch, at: At) -> Batch:
        prompts = batch.ragged("prompt_ids").rows()
        seeds = [derive(self.seed, "rollout", at.split, s) for s in batch.sample_id]
        out = self.engine.generate(prompts, seeds, self.sampling, self.progress)
        columns: dict[str, Any] = {
            "response_ids": out.response_ids,
            "response_mask": Ragged.full_like(out.response_ids, 1, np.uint8),
            "rollout_log_probs": out.log_probs,
            "finish_reason": out.finish_reason,
            "rollout_weight_version": np.full(len(batch), out.weight_version, np.int64),
            "response": self._texts(out.response_ids),
        }
        if self.greedy_baseline:
            columns["baseline_response"] = self._baselines(batch, prompts)
        lengths = out.response_ids.lengths
        metrics = {"rollout/tokens": float(lengths.sum()), "rollout/empty_responses": float((lengths == 0).sum())}
        return Batch(batch.sample_id, columns, {"rollout_log_probs": out.meaning}, {"metrics": metrics})

    def _texts(self, ids: Ragged) -> list[str]:
        return [str(self.decoder.decode(row.tolist(), skip_special_tokens=True)) for row in ids.rows()]

    def _baselines(self, batch: Batch, prompts: list[np.ndarray]) -> list[str]:
        first: dict[str, int] = {}
        for i, group in enumerate(batch["group_id"]):
            first.setdefault(group, i)
        greedy = Sampling(temperature=0.0, max_tokens=self.sampling.max_tokens, ignore_eos=self.sampling.ignore_eos)
        out = self.engine.generate([prompts[i] for i in first.values()], [0] * len(first), greedy)
        texts = dict(zip(first, self._texts(out.response_ids), strict=True))
        return [texts[group] for group in batch["group_id"]]
