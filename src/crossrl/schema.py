"""Every field that flows between stages: its name, shape, dtype, unit and meaning, in one place.

Kinds: ``ragged`` (one value per token of a sample), ``number`` (one per sample), ``value`` (strings or
JSON-like, one per sample). N is the number of samples of a batch; a group is the n samples of one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from crossrl.batch import Batch, BatchError, Ragged

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Field:
    """One field. ``along``: the field whose lengths a ragged one shares. ``nan``: what NaN stands for, if allowed."""

    name: str
    kind: Literal["ragged", "number", "value"]
    dtype: str
    meaning: str
    along: str | None = None
    nan: str | None = None


_FIELDS = [
    Field("group_id", "value", "str", "the prompt a sample belongs to: the sample id without its repeat index"),
    Field("prompt_ids", "ragged", "int32", "token ids of the prompt, chat template applied"),
    Field("prompt", "value", "json", "the prompt as chat messages, as in the data file"),
    Field("data_source", "value", "str", "which verifier scores the sample"),
    Field("ground_truth", "value", "json", "the answer that the verifier compares with"),
    Field("extra_info", "value", "json", "whatever else the data row carries; handed to the verifier"),
    Field("response_ids", "ragged", "int32", "token ids as sampled, the end token included"),
    Field("response_mask", "ragged", "uint8", "1: sampled by the policy; 0: put there by the environment", "response_ids"),
    Field("rollout_log_probs", "ragged", "float32", "nat; the sampler's log-probability of each sampled token", "response_ids"),
    Field("finish_reason", "value", "str", "stop (end token sampled) or length (cut off)"),
    Field("rollout_weight_version", "number", "int64", "the version of the weights that the sample was drawn with"),
    Field("response", "value", "str", "the response as text, for verifiers and people; never encoded again"),
    Field("baseline_response", "value", "str", "ReMax: the greedy response to the same prompt, as text"),
    Field("baseline_reward", "number", "float64", "ReMax: the score of the greedy response to the same prompt", nan="no score"),
    Field("score", "number", "float64", "what the verifier returned", nan="no score"),
    Field("reward", "number", "float64", "the score, shaped (overlong penalty): what advantages are made of", nan="no score: excluded from training"),
    Field("reward_status", "value", "str", "ok, or why there is no score: raised, crashed, timed_out, wrong_type, wrong_count, non_finite"),
    Field("reward_extra", "value", "json", "what else a verifier returned (a dict), for metrics"),
    Field("old_log_probs", "ragged", "float32", "nat; the trainer's log-probs under the weights before the update", "response_ids"),
    Field("entropy", "ragged", "float32", "nat; entropy of the trainer's distribution at each response position", "response_ids"),
    Field("ref_log_probs", "ragged", "float32", "nat; log-probs under the reference weights", "response_ids"),
    Field("advantages", "ragged", "float32", "advantage of each response token", "response_ids"),
    Field("loss_mask", "ragged", "uint8", "1: the token counts in the loss; the one effective mask", "response_ids"),
    Field("is_weights", "ragged", "float32", "importance weight between sampler and trainer, truncated; 1 when off", "response_ids"),
    Field("log_probs", "ragged", "float32", "nat; the trainer's log-probs when the token's loss was first computed",
          "response_ids", nan="not computed: the sample has no gradient"),
]  # fmt: skip
FIELDS: dict[str, Field] = {f.name: f for f in _FIELDS}


def check(batch: Batch, names: tuple[str, ...] | None = None) -> None:
    """Raise ``BatchError`` unless each field of ``batch`` is as the schema says (kind, dtype, lengths, finite)."""
    for name in names if names is not None else tuple(batch.columns):
        field, column = FIELDS.get(name), batch[name]
        if field is None:
            raise BatchError(f"field {name!r} is not in the schema (crossrl/schema.py)")
        kind = {Ragged: "ragged", np.ndarray: "number", list: "value"}[type(column)]
        if kind != field.kind:
            raise BatchError(f"field {name!r}: want a {field.kind} column, found a {kind} one")
        if isinstance(column, list):
            continue
        if str(column.dtype) != field.dtype:
            raise BatchError(f"field {name!r}: want dtype {field.dtype}, found {column.dtype}")
        if isinstance(column, Ragged) and field.along and field.along in batch:
            other = batch.ragged(field.along)
            if not column.same_shape(other):
                bad = int(np.flatnonzero(column.lengths != other.lengths)[0])
                raise BatchError(
                    f"field {name!r}: sample {batch.sample_id[bad]} has {column.lengths[bad]} values, "
                    f"its {field.along} has {other.lengths[bad]}"
                )
        _check_finite(batch, field, column)


def _check_finite(batch: Batch, field: Field, column: Ragged | np.ndarray) -> None:
    values = column.values if isinstance(column, Ragged) else column
    if values.dtype.kind != "f":
        return
    bad = np.isinf(values) if field.nan else ~np.isfinite(values)
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        sample = int(column.sample_index[at]) if isinstance(column, Ragged) else at
        raise BatchError(
            f"field {field.name!r}: {values[at]} in sample {batch.sample_id[sample]} "
            f"({int(bad.sum())} of {values.size} values are not finite)"
        )
