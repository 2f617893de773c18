"""Scores for responses that came from a record: by verl's own reward workers, which score while they generate.

So a run that trains on another's responses, or on stored ones, is trained on its own reward, as the reward function may
have changed since. Agent loops other than verl's single-turn one may score by themselves; what they gave is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from crossrl.batch import Batch, Ragged
from crossrl.hosts.verl.padded import padded

log = logging.getLogger("crossrl.tape")
LOOP = "single_turn_agent"
_FROM_LOOP = ("turn_scores", "tool_rewards", "global_steps", "min_global_steps", "max_global_steps")


def scored(trainer: Any, batch: Batch, prompts: Sequence[Mapping[str, Any]]) -> Batch:
    """``batch`` with this run's scores in its column ``verl``. ``prompts``: verl's row of each sample's prompt."""
    extras: list[dict[str, Any]] = batch["verl"]
    if not extras or "score" not in extras[0]:  # a reward model in turn with the trainer: verl scores later
        return batch
    agent = (trainer.config.actor_rollout_ref.rollout.get("agent") or {}).get("default_agent_loop", LOOP)
    if agent != LOOP or any(str(row.get("agent_name", LOOP)) != LOOP for row in prompts):
        log.info("tape: agent loops other than %s may score by themselves: their recorded scores are used", LOOP)
        return batch
    found = [_with_score(e, *new) for e, new in zip(extras, _scores(trainer, batch, prompts), strict=True)]
    return Batch(batch.sample_id, {**batch.columns, "verl": found}, batch.meanings, batch.info)


def _scores(
    trainer: Any, batch: Batch, prompts: Sequence[Mapping[str, Any]]
) -> list[tuple[float, dict[str, Any]]]:  # fmt: skip
    """Score, and what else the reward function returned, of each sample."""
    from verl.protocol import DataProto, pad_dataproto_to_divisor

    other = {name: _objects([row.get(name) for row in prompts]) for name in prompts[0]}
    other["__num_turns__"] = np.array([_of_loop(e).get("num_turns", e.get("__num_turns__", 2)) for e in batch["verl"]])
    other["tool_extra_fields"] = _objects(
        [{name: _of_loop(e)[name] for name in _FROM_LOOP if name in _of_loop(e)} for e in batch["verl"]]
    )
    data = DataProto.from_dict(tensors=_tensors(batch), non_tensors=other)
    manager = trainer.reward_loop_manager
    whole, _ = pad_dataproto_to_divisor(data, len(manager.reward_loop_workers))
    result = manager.compute_rm_score(whole)
    names = result.meta_info.get("reward_extra_keys", [])
    scores = result.batch["rm_scores"].sum(1).tolist()
    return [(scores[i], {name: _item(result.non_tensor_batch[name][i]) for name in names}) for i in range(len(batch))]


def _tensors(batch: Batch) -> dict[str, torch.Tensor]:
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    widths = [max(1, int(column.lengths.max())) for column in (prompts, responses)]
    masks = [
        padded(Ragged.full_like(column, 1, np.int64), width, 0, torch.long, right_aligned=i == 0)
        for i, (column, width) in enumerate(zip((prompts, responses), widths, strict=True))
    ]
    return {
        "prompts": padded(prompts, widths[0], 0, torch.long, right_aligned=True),
        "responses": padded(responses, widths[1], 0, torch.long),
        "attention_mask": torch.cat(masks, 1),
    }


def _of_loop(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where an agent loop's own fields are: beside the others (synchronous trainer), or in a map of their own."""
    inner = extra.get("extra_fields")
    return {**extra, **inner} if isinstance(inner, Mapping) else extra


def _with_score(extra: dict[str, Any], score: float, more: dict[str, Any]) -> dict[str, Any]:
    new = {**extra, "score": score}
    if isinstance(extra.get("extra_fields"), Mapping):
        new["extra_fields"] = {**extra["extra_fields"], "reward_extra_info": more}
    else:
        new |= {**more, **({"reward_extra_info": more} if "reward_extra_info" in extra else {})}
    return new


def _objects(values: Sequence[Any]) -> np.ndarray:
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def _item(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
