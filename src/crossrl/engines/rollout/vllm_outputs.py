"""From vLLM's outputs to tokens and log-probs, or to an error that names the request: nothing is made up or cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossrl.engines.base import EngineError


@dataclass(frozen=True, slots=True)
class Sampled:
    """``tokens``: int32 ``[T]``. ``log_probs``: float32 ``[T]``. ``reason``: "stop" or "length"."""

    tokens: np.ndarray
    log_probs: np.ndarray
    reason: str


def sampled(i: int, output: Any, max_tokens: int, stops: Collection[int]) -> Sampled:
    """What request ``i`` sampled. Raises ``EngineError`` if it did not end with one of ``stops`` or at ``max_tokens``,
    or has not exactly one finite log-prob per token."""
    one = output.outputs[0]
    tokens, reason = np.asarray(one.token_ids, dtype=np.int32), str(one.finish_reason)
    ended = len(tokens) > 0 and int(tokens[-1]) in stops
    if reason not in ("stop", "length") or (reason == "stop") != ended or (reason == "length") > (
        len(tokens) == max_tokens
    ):  # fmt: skip
        raise EngineError(
            f"vLLM ended request {i} for {reason!r} (stop_reason {one.stop_reason!r}) after {len(tokens)} of "
            f"{max_tokens} tokens: want an end token or the limit"
        )
    kept = one.logprobs
    if kept is None or list(kept.token_ids) != tokens.tolist():
        found = "no log-probs" if kept is None else f"log-probs of {len(kept.token_ids)} tokens"
        raise EngineError(f"vLLM returned {found} for the {len(tokens)} tokens of request {i}: want one for each")
    return Sampled(tokens, _finite(i, kept.logprobs), reason)


def scored(i: int, output: Any, response: Sequence[int]) -> np.ndarray:
    """float32 ``[T]``: the log-probs of the tokens of ``response``, of which all but the last were put in as prompt."""
    before = list(output.prompt_logprobs or [])
    rows = [*(before[len(before) - len(response) + 1 :] if len(response) > 1 else []), output.outputs[0].logprobs[0]]
    if len(rows) != len(response) or any(
        row is None or token not in row for row, token in zip(rows, response, strict=True)
    ):
        raise EngineError(f"vLLM scored {len(rows)} tokens of request {i}, which are not its {len(response)}")
    return _finite(i, [row[token].logprob for row, token in zip(rows, response, strict=True)])


def _finite(i: int, values: Sequence[float]) -> np.ndarray:
    found = np.asarray(values, dtype=np.float32)
    if not np.isfinite(found).all():
        where = int(np.flatnonzero(~np.isfinite(found))[0])
        raise EngineError(
            f"token {where} of request {i} has the log-prob {found[where]}; the weights may have diverged"
        )
    return found
