"""verl's synchronous trainer (``RayPPOTrainer``): its ``DataProto`` into batches of ours, and back."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from crossrl.batch import Batch, BatchError, Ragged
from crossrl.hosts.verl.adapter import Adapter
from crossrl.hosts.verl.padded import PER_TOKEN, described, equal, not_given_back, padded, rows
from crossrl.hosts.verl.prompts import samples
from crossrl.hosts.verl.rewards import scored

if TYPE_CHECKING:
    from crossrl.hosts.verl.session import Session


class V0(Adapter):
    """``uids``: of the step at hand, verl's id and the response of a sample to our ids: verl reorders its batch and
    gives no sample an id of its own. Equal responses to one prompt are interchangeable."""

    def __init__(self, trainer: Any, session: Session) -> None:
        self.trainer, self.session = trainer, session
        self.ids: dict[tuple[str, bytes], list[str]] = {}

    def attach(self, *args: Any) -> tuple[Any, ...]:
        self.inner = self.trainer.async_rollout_manager
        self.trainer.async_rollout_manager = Generates(self)
        return args

    def detach(self) -> None:
        self.trainer.async_rollout_manager = self.inner

    def generate(self, prompts: Any) -> Any:
        """verl's ``generate_sequences`` of a training step, from the engine or from a record."""
        n, columns = self.trainer.config.actor_rollout_ref.rollout.n, prompts.non_tensor_batch
        each = [{name: values[i] for name, values in columns.items()} for i in range(0, len(prompts), n)]
        given = samples(each, n, self.session.epoch)
        output = self.session.rollout(
            given,
            lambda: self._asked(given, prompts),
            lambda batch: self._rebuilt(self._scored(batch, each, n), prompts),
        )
        self.ids = _queues(columns["uid"], output.batch["responses"], given.sample_id)
        return output

    def _asked(self, given: Batch, prompts: Any) -> tuple[Any, Batch]:
        output = self.inner.generate_sequences(prompts)
        batch = self._batch(given, output, prompts)
        rebuilt = self._rebuilt(batch, prompts).batch
        odd = [
            key
            for key in sorted({*output.batch.keys(), *rebuilt.keys()})
            if key not in output.batch or key not in rebuilt or not equal(output.batch[key], rebuilt[key])
        ]
        odd += not_given_back(batch["verl"], output.meta_info.get("reward_extra_keys") or ())
        self.session.refuse_unlike(odd)
        return output, Batch(batch.sample_id, batch.columns, batch.meanings, {**batch.info, "unlike": odd})

    def _batch(self, given: Batch, output: Any, prompts: Any) -> Batch:
        tensors, extra = output.batch, output.non_tensor_batch
        width = tensors["prompts"].shape[1]
        prompt_len = tensors["attention_mask"][:, :width].sum(1)
        length = tensors["attention_mask"][:, width:].sum(1)
        columns: dict[str, Any] = {
            "prompt_ids": rows(tensors["prompts"], prompt_len, np.int32, right_aligned=True),
            "response_ids": rows(tensors["responses"], length, np.int32),
            **{name: rows(tensors[name], length, kind) for name, kind in PER_TOKEN.items() if name in tensors},
        }
        scores = tensors["rm_scores"].sum(1).tolist() if "rm_scores" in tensors else None
        own = {key: values for key, values in extra.items() if key not in prompts.non_tensor_batch}
        extras = [{key: values[i] for key, values in own.items()} for i in range(len(output))]
        if scores is not None:
            extras = [{**e, "score": s} for e, s in zip(extras, scores, strict=True)]
        info = {
            "dtypes": {key: str(values.dtype) for key, values in own.items()},
            "shared": sorted(set(extra) - set(own)),
            "meta": {key: value for key, value in output.meta_info.items() if key not in ("timing", "metrics")},
        }
        versions = self.session.versions_of([e.get("max_global_steps") for e in extras])
        return described(given.sample_id, columns, *self.session.reading(), versions, extras, {"verl": info})

    def _scored(self, batch: Batch, prompts: list[dict[str, Any]], n: int) -> Batch:
        """With this run's scores; what a reward function returns besides may have other names than when recorded."""
        found = scored(self.trainer, batch, [prompts[i // n] for i in range(len(batch))])
        if found is batch:
            return batch
        info, extras = batch.info["verl"], found["verl"]
        names = list(extras[0].get("reward_extra_info", {}))
        dtypes = {key: kind for key, kind in info["dtypes"].items() if key not in info["meta"]["reward_extra_keys"]}
        dtypes |= {name: str(np.array([e[name] for e in extras]).dtype) for name in names}
        meta = {**info["meta"], "reward_extra_keys": names}
        return Batch(
            found.sample_id, found.columns, found.meanings,
            {**found.info, "verl": {**info, "dtypes": dtypes, "meta": meta}},
        )  # fmt: skip

    def _rebuilt(self, batch: Batch, prompts: Any) -> Any:
        """A ``DataProto`` as verl's own workers would have put together from these responses."""
        from verl.protocol import DataProto

        info, extras = batch.info["verl"], batch["verl"]
        tensors = self._tensors(batch)
        if extras and "score" in extras[0]:
            last = torch.as_tensor(batch.ragged("response_ids").lengths) - 1
            tensors["rm_scores"] = torch.zeros_like(tensors["response_mask"], dtype=torch.float32)
            tensors["rm_scores"][torch.arange(len(batch)), last] = torch.tensor([e["score"] for e in extras])
        other = {key: _array([e.get(key) for e in extras], kind) for key, kind in info["dtypes"].items()}
        other |= {key: prompts.non_tensor_batch[key] for key in info["shared"] if key in prompts.non_tensor_batch}
        return DataProto.from_dict(
            tensors=tensors, non_tensors=other, meta_info={**info["meta"], "timing": {}}
        )  # fmt: skip

    def _tensors(self, batch: Batch) -> dict[str, torch.Tensor]:
        rollout, pad = self.trainer.config.actor_rollout_ref.rollout, self.trainer.tokenizer.pad_token_id or 0
        wide, long = rollout.prompt_length, rollout.response_length
        prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
        ones = [Ragged.full_like(column, 1, np.int64) for column in (prompts, responses)]
        mask = torch.cat([padded(ones[0], wide, 0, torch.long, True), padded(ones[1], long, 0, torch.long)], 1)
        out = {
            "prompts": padded(prompts, wide, pad, torch.long, True),
            "responses": padded(responses, long, pad, torch.long),
            "response_mask": padded(batch.ragged("response_mask"), long, 0, torch.long),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        }
        out["input_ids"] = torch.cat([out["prompts"], out["responses"]], 1)
        if "rollout_log_probs" in batch:
            out["rollout_log_probs"] = padded(batch.ragged("rollout_log_probs"), long, 0.0, torch.float32)
        return out

    def visible(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        data = args[0] if args else kwargs["batch"]
        tensors, extra = data.batch, data.non_tensor_batch
        left = {key: list(ids) for key, ids in self.ids.items()}
        ids = [_next(left, (uid, _key(row))) for uid, row in zip(extra["uid"], tensors["responses"], strict=True)]
        length = tensors["attention_mask"][:, -tensors["responses"].shape[1] :].sum(1)

        def column(name: str, kind: Any = np.float32) -> Ragged | None:
            return rows(tensors[name], length, kind) if name in tensors else None

        names = data.meta_info.get("reward_extra_keys", [])
        return self.session.computed(
            ids, column,
            tensors["token_level_scores"].sum(1), tensors["token_level_rewards"].sum(1),
            [{name: extra[name][i] for name in names if name in extra} for i in range(len(ids))],
            [self.session.decode(r.tolist()) for r in rows(tensors["responses"], length, np.int32).rows()],
            rows(tensors["responses"], length, np.int32),
        )  # fmt: skip

    def metrics(self, result: Any, kwargs: dict[str, Any]) -> dict[str, float]:
        from verl.utils.metric import reduce_metrics

        return {k: float(v) for k, v in reduce_metrics(dict(result.meta_info["metrics"])).items()}

    def stand_in(self, args: tuple[Any, ...], kwargs: dict[str, Any], metrics: dict[str, float]) -> Any:
        from verl.protocol import DataProto

        return DataProto.from_single_dict(data={}, meta_info={"metrics": {k: [v] for k, v in metrics.items()}})


class Generates:
    """In the place of verl's agent loop manager; what is not training goes through."""

    def __init__(self, adapter: V0) -> None:
        self._adapter = adapter

    def generate_sequences(self, prompts: Any) -> Any:
        if prompts.meta_info.get("validate", False):
            return self._adapter.inner.generate_sequences(prompts)
        return self._adapter.generate(prompts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter.inner, name)


def _queues(uids: Any, responses: torch.Tensor, ids: tuple[str, ...]) -> dict[tuple[str, bytes], list[str]]:
    found: dict[tuple[str, bytes], list[str]] = defaultdict(list)
    for uid, row, sample in zip(uids, responses, ids, strict=True):
        found[uid, _key(row)].append(sample)
    return dict(found)


def _next(left: dict[tuple[str, bytes], list[str]], key: tuple[str, bytes]) -> str:
    if not left.get(key):
        raise BatchError("the update has samples that this step's rollout did not have")
    return left[key].pop(0)


def _key(row: torch.Tensor) -> bytes:
    return row.cpu().numpy().tobytes()


def _array(values: list[Any], kind: str) -> np.ndarray:
    if kind != "object":
        return np.array(values, dtype=kind)
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out
