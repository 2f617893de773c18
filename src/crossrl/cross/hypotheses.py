"""Cheap explanations for log-probs that differ, each tried with the examiner's trainer on the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from crossrl.batch import Batch, Ragged
from crossrl.cross import noise
from crossrl.cross.noise import Kind

if TYPE_CHECKING:
    from crossrl.cross.case import Case

# A hypothesis must explain most of what is there: what is left is noise, or at most this share of the gap.
LEFT = 0.1
SAMPLES = 16  # for truncation, which needs the whole distribution at each token
TOP_K = (1, 2, 3, 4, 5, 6, 8, 10, 16, 20, 32, 40, 50, 64, 100, 200)
TOP_P = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)


def explain(case: Case, given: Batch, recorded: Ragged, kind: Kind, stage: str) -> str:
    """What brings the recorded log-probs to (nearly) those computed here, such as "they match the weights of one step
    before"; "" if nothing that was tried does.

    ``given``: the samples with ``group_id``, ``prompt_ids``, ``response_ids``; ``recorded``: their log-probs; ``kind``:
    the noise class of the comparison. The trainer's state is put back afterwards.
    """
    temperature = case.parts.update.plan.temperature
    batch = given.only(("group_id", "prompt_ids", "response_ids"))
    own = _score(case, batch, temperature)
    start = _gap(recorded.values, own.values)
    limit = noise.LOG_PROBS["bfloat16" if kind == "bfloat16" else "float32"].mean
    if start <= limit:
        return ""
    best, phrase = max(limit, LEFT * start), ""
    for text, values in _candidates(case, batch, recorded, own, temperature, stage):
        gap = _gap(recorded.values, values)
        if gap < best:
            best, phrase = gap, text
    return f"{phrase} (mean gap {best:.2g} nat instead of {start:.2g})" if phrase else ""


def _candidates(
    case: Case, batch: Batch, recorded: Ragged, own: Ragged, temperature: float, stage: str
) -> Iterator[tuple[str, np.ndarray]]:
    for text, other in (("they match the raw distribution: the temperature was not applied", 1.0),
                        ("they match the temperature applied twice", temperature**2)):  # fmt: skip
        if other != temperature:
            yield text, _score(case, batch, other).values
    yield "they match the log-probs of the token before: shifted by one", _shifted(own, 1)
    yield "they match the log-probs of the token after: shifted by one", _shifted(own, -1)
    yield from _other_weights(case, batch, temperature, stage)
    if stage == "rollout" and case.parts.trainer.facts.device == "cpu":
        yield from _truncated(case, batch, recorded, own, temperature)


def _other_weights(case: Case, batch: Batch, temperature: float, stage: str) -> Iterator[tuple[str, np.ndarray]]:
    held = case.states.now()
    others = [(case.step - 2, "they match the weights of one step before")]
    if stage == "old_log_prob":
        others.append((case.step, "they match the weights after this step's update"))
    try:
        for step, text in others:
            state = case.states.after(step) if step >= 0 else None
            if state is not None and case.states.load(state).kind == "recorded":
                yield text, _score(case, batch, temperature).values
    finally:
        case.states.load(held)


def _truncated(
    case: Case, batch: Batch, recorded: Ragged, own: Ragged, temperature: float
) -> Iterator[tuple[str, np.ndarray]]:
    """Renormalised after top-k or top-p: each log-prob is higher by minus the log of the mass that was kept."""
    count = min(SAMPLES, len(batch))
    tokens = int(own.lengths[:count].sum())
    raised = recorded.values[:tokens] - own.values[:tokens]
    if not tokens or float(np.mean(raised)) <= 0:
        return
    ordered = np.concatenate([_sorted_probs(case, batch, i, temperature) for i in range(count)])
    mass = np.cumsum(ordered, axis=1)
    for k in TOP_K:
        if k < mass.shape[1]:
            yield f"they match a sampler with top_k={k}", _padded(own, own.values[:tokens] - np.log(mass[:, k - 1]))
    for p in TOP_P:
        kept = (mass - ordered < p).sum(axis=1)
        yield (
            f"they match a sampler with top_p={p}",
            _padded(own, own.values[:tokens] - np.log(mass[np.arange(tokens), kept - 1])),
        )


def _sorted_probs(case: Case, batch: Batch, i: int, temperature: float) -> np.ndarray:
    """float64 ``[T, V]``: of each response token's position, the probabilities, largest first."""
    prompt, response = batch.ragged("prompt_ids").row(i), batch.ragged("response_ids").row(i)
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    with torch.no_grad():
        logits = case.parts.local_trainer.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.softmax(logits.double() / temperature, -1).sort(-1, descending=True).values.numpy()


def _padded(own: Ragged, values: np.ndarray) -> np.ndarray:
    """NaN for the samples that were not looked at."""
    return np.concatenate([values, np.full(len(own.values) - len(values), np.nan)])


def _shifted(own: Ragged, by: int) -> np.ndarray:
    """Each value that of ``by`` positions before it in its sample; NaN where there is none."""
    rows = []
    for row in own.rows():
        moved = np.full(len(row), np.nan)
        if by > 0:
            moved[by:] = row[:-by]
        else:
            moved[:by] = row[-by:]
        rows.append(moved)
    return np.concatenate(rows) if rows else np.zeros(0)


def _score(case: Case, batch: Batch, temperature: float) -> Ragged:
    return case.parts.trainer.log_probs(batch, temperature, False)[0]


def _gap(a: np.ndarray, b: np.ndarray) -> float:
    """Mean of the absolute difference over what is a number in both."""
    with np.errstate(invalid="ignore"):
        d = np.abs(a.astype(np.float64) - b.astype(np.float64))
    d = d[np.isfinite(d)]
    return float(d.mean()) if d.size else float("inf")
