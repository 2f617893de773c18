"""verl's padded tensors (prompts to the left, responses to the right) and ragged columns, one into the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from crossrl.batch import Batch, Meaning, Ragged
from crossrl.tape.values import Unstorable, plain

PER_TOKEN = {"rollout_log_probs": np.float32, "response_mask": np.uint8}
REWARD_EXTRA = "reward_extra_info"


def rows(values: torch.Tensor, lengths: torch.Tensor, dtype: Any, right_aligned: bool = False) -> Ragged:
    """The first (``right_aligned``: last) ``lengths[i]`` values of each row of ``values`` ``[N, width]``."""
    array, width = _array(values), values.shape[1]
    parts = [
        row[width - n :] if right_aligned else row[:n] for row, n in zip(array, lengths.tolist(), strict=True)
    ]  # fmt: skip
    return Ragged.from_rows(parts, dtype)


def nested_rows(values: Any, dtype: Any) -> Ragged:
    """Of a jagged tensor ``[N, *]``, or of a plain one whose rows are of equal length."""
    return Ragged.from_rows([_array(row) for row in values.unbind()], dtype)


def _array(values: torch.Tensor) -> np.ndarray:
    """NumPy has no bfloat16, in which verl may hand on log-probs; float32 holds the same numbers."""
    found: np.ndarray = (values.float() if values.is_floating_point() else values).detach().cpu().numpy()
    return found


def padded(column: Ragged, width: int, fill: float, dtype: torch.dtype, right_aligned: bool = False) -> torch.Tensor:
    """``[N, width]``; the inverse of ``rows``."""
    out = torch.full((len(column), width), fill, dtype=dtype)
    for i, row in enumerate(column.rows()):
        part = slice(width - len(row), width) if right_aligned else slice(0, len(row))
        out[i, part] = torch.from_numpy(row.copy()).to(dtype)
    return out


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """In every bit and in the dtype, which ``torch.equal`` does not compare but stumbles over."""
    return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())


def not_given_back(extras: Sequence[Mapping[str, Any]], only_logged: Sequence[str] = ()) -> list[str]:
    """Names of ``extras`` that a record does not give back as they were: they hold a tensor or an array (which comes
    back as a list, or not at all), or something that has no place in a record (an image).

    ``only_logged``: names that nobody trains on, besides ``reward_extra_info``.
    """
    skip = {*only_logged, REWARD_EXTRA}
    return sorted({name for each in extras for name, value in each.items() if name not in skip and not _kept(value)})


def _kept(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and (k == REWARD_EXTRA or _kept(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_kept, value))
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return False
    try:
        plain(value)
    except Unstorable:
        return False
    return True


def described(
    ids: Sequence[str],
    columns: dict[str, Any],
    decode: Callable[[list[int]], str],
    ends: frozenset[int],
    limit: int,
    meaning: Meaning,
    versions: Sequence[int],
    extras: list[dict[str, Any]],
    info: dict[str, Any],
) -> Batch:
    """The rollout's output: ``columns`` (token ids, mask, log-probs) and what can be said of each sample.

    ``ends``: end tokens; ``limit``: longest response. verl does not hand on why a response ended: one that has the
    longest length and no end token was cut off.
    """
    responses: Ragged = columns["response_ids"]
    cut = [len(r) >= limit and not (len(r) and int(r[-1]) in ends) for r in responses.rows()]
    whole = {
        **columns,
        "finish_reason": ["length" if c else "stop" for c in cut],
        "rollout_weight_version": np.array(versions, np.int64),
        "response": [decode(r.tolist()) for r in responses.rows()],
        "verl": [_in_order(each) for each in extras],
    }
    meanings = {"rollout_log_probs": meaning} if "rollout_log_probs" in columns else {}
    return Batch(tuple(ids), whole, meanings, info)


def _in_order(value: Any) -> Any:
    """With sorted keys: verl puts them together from sets, so two equal runs have them in another order."""
    return {key: _in_order(value[key]) for key in sorted(value)} if isinstance(value, dict) else value
