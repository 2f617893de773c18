"""Does a rollout engine hold the weights that it should? Tensor by tensor, and by what it makes of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from crossrl.batch import Batch, Ragged
from crossrl.checkpoint import CheckpointStore
from crossrl.engines.base import EngineError, RolloutEngine
from crossrl.engines.rollout.replicas import Replicas
from crossrl.models.digest import tensor_digests
from crossrl.models.loading import as_dtype
from crossrl.placement import Engines
from crossrl.sync.check import Difference, compare

# Between two programs that compute the same in one data type: nat, per token. Wrong weights are far beyond.
GAP = {"float32": 1e-3, "bfloat16": 0.5}
PROBES, PROMPT, RESPONSE = 4, 24, 12


@dataclass(frozen=True, slots=True)
class Holding:
    """One engine: how many of its tensors are as they should be, ``differences`` of the others. ``gap``: the largest
    difference between its log-probs and the trainer's on made-up tokens, nat; ``limit``: what numerics explain."""

    engine: str
    equal: int
    differences: tuple[Difference, ...]
    gap: float
    limit: float

    @property
    def right(self) -> bool:
        return self.equal > 0 and not self.differences and self.gap <= self.limit


def load_checkpoint(engines: Engines, folder: Path, trust_remote_code: bool = False) -> int:
    """Let the trainer hold the weights of checkpoint ``folder`` (``.../global_step_N``); its step. Raises
    ``CheckpointError``, ``EngineError``."""
    folder = folder.expanduser().absolute()
    saved = CheckpointStore(folder.parent).load(folder)
    engines.trainer.load(folder, saved.state["engine"], trust_remote_code)
    return saved.step


def check_engines(engines: Engines) -> list[Holding]:
    """What each rollout engine holds against what the trainer has, after the cast that the engine declares.

    The weights must have been brought (``engines.carrier.bring()``). Raises ``EngineError`` where there is nothing to
    compare.
    """
    rollout, trainer = engines.rollout, engines.trainer
    wanted = dict(trainer.named_weights())
    wanted |= {name: wanted[first] for name, first in trainer.facts.tied.items()}
    if rollout.cast:
        dtype = as_dtype(rollout.cast.rpartition(" ")[2])
        wanted = {name: tensor.to(dtype) for name, tensor in wanted.items()}
    digests = tensor_digests(wanted.items())
    prompts, responses = _probes(trainer.facts.vocab_size)
    mine = _trainer_log_probs(engines, prompts, responses)
    kind = rollout.cast.rpartition(" ")[2] if rollout.cast else trainer.facts.dtype
    if trainer.facts.device != "cpu":  # there the trainer computes in bfloat16, whatever its weights are
        kind = "bfloat16"
    out = []
    for view in _views(rollout):
        found = view.digests()
        bad = _differences(wanted, digests, found, view.tensor)
        equal = sum(found.get(n) == digest for n, digest in digests.items())
        gap = float(np.abs(view.score(prompts, responses, 1.0).values - mine).max())
        out.append(Holding(view.name, equal, tuple(bad), gap, GAP.get(kind, GAP["bfloat16"])))
    if not out or not wanted:
        raise EngineError(f"{len(out)} engines and {len(wanted)} tensors: nothing to compare")
    return out


@dataclass(frozen=True, slots=True)
class _View:
    """One engine, in this process or in another."""

    name: str
    digests: Callable[[], Mapping[str, str]]
    tensor: Callable[[str], torch.Tensor]
    score: Callable[[Sequence[np.ndarray], Sequence[np.ndarray], float], Ragged]


def _views(rollout: RolloutEngine | Replicas) -> list[_View]:
    if isinstance(rollout, Replicas):
        return [_View(e.worker.name, e.held_digests, e.held_tensor, e.score) for e in rollout.engines]
    return [_View("rollout", lambda: tensor_digests(rollout.held()), lambda n: dict(rollout.held())[n], rollout.score)]


def _differences(
    wanted: Mapping[str, torch.Tensor],
    digests: Mapping[str, str],
    found: Mapping[str, str],
    fetch: Callable[[str], torch.Tensor],
) -> list[Difference]:
    out = []
    for name in sorted({*wanted, *found}):
        if name not in found:
            out.append(Difference(name, "is not in the engine"))
        elif name not in wanted:
            out.append(Difference(name, "is in the engine only"))
        elif found[name] != digests[name] and (difference := compare(name, fetch(name), wanted[name])):
            out.append(difference)
    return out


def _probes(vocabulary: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    draw = np.random.Generator(np.random.Philox(7))
    prompts = [draw.integers(0, vocabulary, PROMPT).astype(np.int32) for _ in range(PROBES)]
    return prompts, [draw.integers(0, vocabulary, RESPONSE).astype(np.int32) for _ in range(PROBES)]


def _trainer_log_probs(engines: Engines, prompts: list[np.ndarray], responses: list[np.ndarray]) -> np.ndarray:
    ids = tuple(f"probe-{i}" for i in range(len(prompts)))
    columns = {"prompt_ids": Ragged.from_rows(prompts, np.int32), "response_ids": Ragged.from_rows(responses, np.int32)}
    values: np.ndarray = engines.trainer.log_probs(Batch(ids, columns), 1.0, entropy=False)[0].values
    return values
