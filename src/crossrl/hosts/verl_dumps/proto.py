"""verl's padded ``DataProto``, in neutral form, as batches: rollout and reward of one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from crossrl.batch import Batch, Ragged
from crossrl.hosts.verl.padded import PER_TOKEN, rows
from crossrl.hosts.verl.prompts import FIELDS, samples
from crossrl.hosts.verl_dumps.dump import Dump
from crossrl.hosts.verl_dumps.errors import DumpError
from crossrl.hosts.verl_dumps.pickled import Neutral
from crossrl.hosts.verl_dumps.tokens import Tokens
from crossrl.tape.digest import json_digest

NEEDED = ("prompts", "responses", "attention_mask")
_PROMPT_SIDE = ("raw_prompt", "data_source", "reward_model", "extra_info", "index")
_RANDOM = ("uid", "request_id")


def proto_dump(found: Neutral, step: int, tokens: Tokens | None = None) -> Dump:
    """``tokens``: decode the responses. Samples stay in verl's order, that of generation. Raises ``DumpError``."""
    prompts, responses = _lengths(found)
    columns: dict[str, Any] = _prompt_side(found, prompts)
    ids = tuple(f"{g}/{r}" for g, r in zip(columns["group_id"], columns.pop("repeat"), strict=True))
    columns["prompt_ids"], columns["response_ids"] = prompts, responses
    for name, kind in PER_TOKEN.items():
        if name in found.tensors:
            columns[name] = _rows(found, name, responses.lengths, kind)
    if tokens is not None:
        columns["response"] = [tokens.decode(row.tolist()) for row in responses.rows()]
    names = [n for n in found.meta.get("reward_extra_keys", []) if n in found.columns]
    other = [n for n in found.columns if n not in (*_PROMPT_SIDE, *_RANDOM, *names)]
    if other:
        columns["verl"] = [{n: found.columns[n][i] for n in other} for i in range(len(ids))]
    reward: dict[str, Any] = {}
    if "rm_scores" in found.tensors:
        reward["score"] = _rows(found, "rm_scores", responses.lengths, np.float64).sums()
        reward["reward_extra"] = [{n: found.columns[n][i] for n in names} for i in range(len(ids))]
    missing = [n for n in ("response", "prompt", "ground_truth", "rollout_log_probs") if n not in columns]
    missing += ["advantages"] if reward else ["score", "advantages"]
    warnings = tuple(f"{found.path}: {key} was left out: {what}" for key, what in found.left_out.items())
    return Dump(
        found.path, found.digest, step, "dp", Batch(ids, columns), Batch(ids, reward),
        {n: found.columns[n] for n in _RANDOM if n in found.columns}, "as sampled", tokens.digest if tokens else None,
        tuple(missing), None, warnings, found.verl,
    )  # fmt: skip


def _lengths(found: Neutral) -> tuple[Ragged, Ragged]:
    """Prompts and responses without padding."""
    lacking = [name for name in NEEDED if name not in found.tensors]
    if lacking:
        raise DumpError(
            f"{found.path}: no {', '.join(lacking)}; there are: {', '.join(sorted(found.tensors)) or 'no tensors'}. A "
            f"rollout of verl has {', '.join(NEEDED)}"
        )
    prompts, responses, mask = (found.tensors[name] for name in NEEDED)
    for name, array in zip(NEEDED, (prompts, responses, mask), strict=True):
        if array.ndim != 2 or array.dtype.kind not in "iub":
            raise DumpError(f"{found.path}: {name} is {array.dtype} {array.shape}; want whole numbers [N, width]")
    width = prompts.shape[1]
    if mask.shape[1] != width + responses.shape[1]:
        raise DumpError(
            f"{found.path}: attention_mask has width {mask.shape[1]}; prompts and responses have {width} and "
            f"{responses.shape[1]}"
        )
    held = mask.astype(bool)
    left, right = held[:, :width], held[:, width:]
    # Prompts stand at the right end of their part, responses at the left: else the numbers below are others.
    bad = (np.diff(left.astype(np.int8), axis=1) < 0).any(1) | (np.diff(right.astype(np.int8), axis=1) > 0).any(1)
    if bad.any():
        raise DumpError(
            f"{found.path}: the attention mask of sample {int(np.flatnonzero(bad)[0])} has gaps, or its padding is on "
            f"the other side than verl's"
        )
    counts = torch.from_numpy(left.sum(1)), torch.from_numpy(right.sum(1))
    return (
        rows(torch.from_numpy(prompts), counts[0], np.int32, right_aligned=True),
        rows(torch.from_numpy(responses), counts[1], np.int32),
    )


def _rows(found: Neutral, name: str, lengths: np.ndarray, kind: Any) -> Ragged:
    values, width = found.tensors[name], found.tensors["responses"].shape[1]
    if values.ndim != 2 or values.shape[1] != width:
        raise DumpError(f"{found.path}: {name} has shape {values.shape}; responses have width {width}")
    return rows(torch.from_numpy(values), torch.from_numpy(lengths), kind)


def _prompt_side(found: Neutral, prompts: Ragged) -> dict[str, Any]:
    """``group_id``, ``repeat``, and what is known of the prompts, one entry per sample."""
    keys = [json_digest(row.tolist()) for row in prompts.rows()]
    uids: Sequence[Any] = found.columns.get("uid", keys)
    first: dict[Any, int] = {}
    for i, uid in enumerate(uids):
        if keys[first.setdefault(uid, i)] != keys[i]:
            raise DumpError(f"{found.path}: samples {first[uid]} and {i} have the uid {uid!r} and other prompts")
    seen: Counter[Any] = Counter()
    repeat: list[int] = []
    for uid in uids:
        repeat.append(seen[uid])
        seen[uid] += 1
    if "raw_prompt" in found.columns and "index" in found.columns:
        # As the host names them; the pass over the data is not in the dump and counts as the first.
        batch = samples([_row(found.columns, i) for i in first.values()], n=1, epoch=0)
        place = {uid: k for k, uid in enumerate(first)}
        columns = {name: [batch[name][place[uid]] for uid in uids] for name in FIELDS}
        absent = {"data_source": "data_source", "ground_truth": "reward_model", "extra_info": "extra_info"}
        return {n: c for n, c in columns.items() if absent.get(n, "index") in found.columns} | {"repeat": repeat}
    named: Counter[str] = Counter()
    groups: dict[Any, str] = {}
    for uid, i in first.items():
        digest = keys[i].partition(":")[2][:16]
        groups[uid] = f"{digest}{f'.{named[digest]}' if named[digest] else ''}/-/-"
        named[digest] += 1
    out: dict[str, list[Any]] = {"group_id": [groups[uid] for uid in uids], "repeat": repeat}
    sources = {"prompt": "raw_prompt", "data_source": "data_source", "extra_info": "extra_info"}
    out |= {name: list(found.columns[key]) for name, key in sources.items() if key in found.columns}
    if "reward_model" in found.columns:
        out["ground_truth"] = [(m or {}).get("ground_truth") for m in found.columns["reward_model"]]
    return out


def _row(columns: Mapping[str, list[Any]], i: int) -> dict[str, Any]:
    return {name: columns[name][i] for name in _PROMPT_SIDE if name in columns}
