"""verl's trainer with the transfer queue (``trainer.use_v1``, mode sync): its trajectories as batches, and back.

verl hands a step's prompts out when the step begins and samples their trajectories afterwards, in the order in which
they were finished. With the host both happen when it samples, and the trajectories come in the order of their prompts,
so that two runs which computed the same train on the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from crossrl.batch import Batch, BatchError, Ragged
from crossrl.hosts.verl.adapter import Adapter
from crossrl.hosts.verl.errors import HostError
from crossrl.hosts.verl.padded import PER_TOKEN, described, equal, nested_rows, not_given_back
from crossrl.hosts.verl.prompts import samples
from crossrl.hosts.verl.rewards import scored

if TYPE_CHECKING:
    from crossrl.hosts.verl.session import Session

PARTITION = "train"
# What a trajectory holds besides what came with its prompt: tensors that we rebuild, and what we store as it is.
TENSORS = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "loss_mask", "input_ids",
           "position_ids")  # fmt: skip
FOR_LOOP_ONLY = ("agent_name", "__rollout_n__", "__do_sample__", "priority")  # its worker takes them out of the prompt


class V1(Adapter):
    """``waiting``: prompts that were handed out for this step; ``keys``: the queue's keys of the step to our ids."""

    def __init__(self, trainer: Any, session: Session) -> None:
        self.trainer, self.session = trainer, session
        self.waiting: Any = None
        self.keys: dict[str, str] = {}

    def attach(self, *args: Any) -> tuple[Any, ...]:
        self.loops, *rest = args
        self.buffer = self.trainer.replay_buffer
        self.trainer.replay_buffer = Samples(self)
        return (Submits(self), *rest)

    def detach(self) -> None:
        self.trainer.replay_buffer = self.buffer

    def sample(self, global_steps: int, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """verl's ``ReplayBuffer.sample`` of a training step: generated now, or from a record."""
        prompts, self.waiting = self.waiting, None
        if prompts is None or len(prompts) != batch_size:
            raise HostError(
                f"step {global_steps} samples {batch_size} prompts, but {0 if prompts is None else len(prompts)} were "
                f"handed out for it: data.train_batch_size and gen_batch_size must be equal"
            )
        each = [_row(prompts, i) for i in range(len(prompts))]
        n = self.trainer.config.actor_rollout_ref.rollout.n
        given = samples(each, n, self.session.epoch)
        keys = [f"{row['uid']}_{repeat}_0" for row in each for repeat in range(n)]
        self.keys = dict(zip(keys, given.sample_id, strict=True))
        return self.session.rollout(
            given,
            lambda: self._asked(given, prompts, keys, global_steps, batch_size),
            lambda batch: self._put(
                scored(self.trainer, batch, [each[i // n] for i in range(len(batch))]), each, n, keys, global_steps
            ),
        )

    def _asked(self, given: Batch, prompts: Any, keys: list[str], step: int, size: int) -> tuple[Any, Batch]:
        import transfer_queue as tq

        self.loops.generate_sequences(prompts)
        found, metrics = self.buffer.sample(global_steps=step, partition_id=PARTITION, batch_size=size)
        if set(found.keys) != set(keys):
            missing, more = sorted(set(keys) - set(found.keys)), sorted(set(found.keys) - set(keys))
            raise HostError(
                f"step {step}: {len(missing)} trajectories failed (first: {missing[:1]}), and {len(more)} are more "
                f"than one of a sample (first: {more[:1]}); the tape needs exactly one for each sample. See the log "
                f"of verl's agent loop"
            )
        tags = dict(zip(found.keys, found.tags, strict=True))
        found.keys, found.tags = list(keys), [tags[key] for key in keys]
        data = tq.kv_batch_get(keys=keys, partition_id=PARTITION)
        batch = self._batch(given, data, [_row(prompts, i) for i in range(size)])
        fields = self._fields(batch, [_row(prompts, i) for i in range(size)], len(keys) // size)
        odd = [name for name in TENSORS if not _equal(data, fields, name)] + not_given_back(batch["verl"])
        self.session.refuse_unlike(odd)
        info = {**batch.info, "unlike": odd}
        return (found, metrics), Batch(batch.sample_id, batch.columns, batch.meanings, info)

    def _batch(self, given: Batch, data: Any, prompts: list[dict[str, Any]]) -> Batch:
        columns: dict[str, Any] = {
            "prompt_ids": nested_rows(data["prompts"], np.int32),
            "response_ids": nested_rows(data["responses"], np.int32),
            **{name: nested_rows(data[name], kind) for name, kind in PER_TOKEN.items() if name in data},
        }
        own = [k for k in data.keys() if k not in TENSORS and k not in prompts[0]]  # noqa: SIM118  (a TensorDict)
        extras = [{name: _untimed(name, _at(data[name], i)) for name in own} for i in range(len(given))]
        if "rm_scores" in data:
            scores = [float(row.sum()) for row in data["rm_scores"].unbind()]
            extras = [{**e, "score": s} for e, s in zip(extras, scores, strict=True)]
        versions = self.session.versions_of([(e.get("extra_fields") or {}).get("max_global_steps") for e in extras])
        info = {"verl": {"position_ids": "position_ids" in data}}
        return described(given.sample_id, columns, *self.session.reading(), versions, extras, info)

    def _fields(self, batch: Batch, prompts: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
        """What verl's own workers would have put into the queue, one map for each trajectory."""
        fields = []
        for i, extra in enumerate(batch["verl"]):
            prompt, response = (
                torch.tensor(batch.ragged(name).row(i), dtype=torch.int64) for name in ("prompt_ids", "response_ids")
            )
            mask = torch.tensor(batch.ragged("response_mask").row(i), dtype=torch.int64)
            ids = torch.cat([prompt, response])
            field = {k: v for k, v in prompts[i // n].items() if k not in FOR_LOOP_ONLY}
            field |= {k: v for k, v in extra.items() if k != "score"}
            field |= {"prompts": prompt, "responses": response, "response_mask": mask, "loss_mask": mask}
            field |= {"input_ids": ids, "position_ids": torch.arange(len(ids), dtype=torch.int64)}
            if "rollout_log_probs" in batch:
                field["rollout_log_probs"] = torch.from_numpy(batch.ragged("rollout_log_probs").row(i).copy())
            if "score" in extra:
                field["rm_scores"] = torch.zeros_like(mask, dtype=torch.float32)
                field["rm_scores"][-1] = extra["score"]
            fields.append(field)
        return fields

    def _put(
        self, batch: Batch, prompts: list[dict[str, Any]], n: int, keys: list[str], step: int
    ) -> tuple[Any, dict[str, Any]]:
        """Trajectories of a record into the queue, as if they had just been generated."""
        import transfer_queue as tq
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        fields = self._fields(batch, prompts, n)
        tags = [_tag(field, step) for field in fields]
        tq.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id=PARTITION)
        tq.kv_clear(partition_id=PARTITION, keys=[row["uid"] for row in prompts])
        return tq.KVBatchMeta(partition_id=PARTITION, keys=list(keys), tags=tags), {}

    def visible(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        import transfer_queue as tq

        meta = args[0] if args else kwargs["batch"]
        keys = [key for key, tag in zip(meta.keys, meta.tags, strict=True) if not tag.get("is_padding", False)]
        data = tq.kv_batch_get(keys=keys, partition_id=meta.partition_id)
        if any(key not in self.keys for key in keys):
            raise BatchError("the update has samples that this step's rollout did not have")

        def column(name: str, kind: Any = np.float32) -> Ragged | None:
            return nested_rows(data[name], kind) if name in data else None

        scores = [float(row.sum()) for row in data["rm_scores"].unbind()]
        rewards = column("token_level_rewards")
        extra = [(_at(data["extra_fields"], i) or {}).get("reward_extra_info", {}) for i in range(len(keys))]
        ids = nested_rows(data["responses"], np.int32)
        return self.session.computed(
            [self.keys[key] for key in keys], column, scores, rewards.sums() if rewards else scores, extra,
            [self.session.decode(r.tolist()) for r in ids.rows()], ids,
        )  # fmt: skip

    def metrics(self, result: Any, kwargs: dict[str, Any]) -> dict[str, float]:
        return {k: float(v) for k, v in kwargs["metrics"].items() if k.startswith(("actor/", "perf/mfu/actor"))}

    def stand_in(self, args: tuple[Any, ...], kwargs: dict[str, Any], metrics: dict[str, float]) -> Any:
        kwargs["metrics"].update(metrics)
        return args[0] if args else kwargs["batch"]


class Submits:
    """In the place of verl's agent loop manager: keeps a step's prompts until it samples."""

    def __init__(self, adapter: V1) -> None:
        self._adapter = adapter

    def generate_sequences(self, prompts: Any) -> None:
        if "validate" in prompts and bool(prompts["validate"]):
            self._adapter.loops.generate_sequences(prompts)
        else:
            self._adapter.waiting = prompts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter.loops, name)


class Samples:
    """In the place of verl's replay buffer; what is not training goes through."""

    def __init__(self, adapter: V1) -> None:
        self._adapter = adapter

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        if partition_id != PARTITION:
            found: tuple[Any, dict[str, Any]] = self._adapter.buffer.sample(
                global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
            )
            return found
        return self._adapter.sample(global_steps, batch_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter.buffer, name)


def _row(prompts: Any, i: int) -> dict[str, Any]:
    return {key: _at(prompts.get(key), i) for key in prompts.keys()}  # noqa: SIM118  (a TensorDict)


def _at(value: Any, i: int) -> Any:
    """One sample's value of a column of a TensorDict: a tensor, a stack of values, or one value for all."""
    if isinstance(value, torch.Tensor):
        return value[i]
    if type(value).__name__ == "NonTensorData":
        return value.data
    item = value[i]
    return getattr(item, "data", item) if type(item).__name__ == "NonTensorData" else item


def _untimed(name: str, value: Any) -> Any:
    """The agent loop's ``metrics`` without its seconds, which no two runs share; verl's trainer does not read them."""
    if name != "metrics" or not isinstance(value, Mapping):
        return value
    return {key: 0.0 if isinstance(each, (float, np.floating)) else each for key, each in value.items()}


def _equal(data: Any, fields: list[dict[str, Any]], name: str) -> bool:
    if (name in data) != (name in fields[0]):
        return False
    rows = data[name].unbind() if name in data else []
    return all(equal(row, field[name]) for row, field in zip(rows, fields, strict=True)) if rows else True


def _tag(field: dict[str, Any], step: int) -> dict[str, Any]:
    lengths = len(field["prompts"]), len(field["responses"])
    extra = field.get("extra_fields") or {}
    return {
        "status": "success", "prompt_len": lengths[0], "response_len": lengths[1], "seq_len": sum(lengths),
        "global_steps": step, "min_global_steps": extra.get("min_global_steps"),
        "max_global_steps": extra.get("max_global_steps"),
    }  # fmt: skip
