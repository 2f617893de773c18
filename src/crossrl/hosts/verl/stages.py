"""The stages of verl's step as stages of ours: what the tape wraps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from crossrl.batch import Batch
from crossrl.hosts.verl.prompts import FIELDS
from crossrl.stages.base import At


class Generate:
    """Generation by verl. ``ask`` is set for each call: it returns verl's own result, and the same as a batch.

    ``native``: verl's result of the last call; None when the tape did not let it come to that.
    """

    name = "rollout"
    reads: tuple[str, ...] = FIELDS

    def __init__(self, log_probs: bool) -> None:
        self.writes: tuple[str, ...] = (
            "prompt_ids", "response_ids", "response_mask", *(("rollout_log_probs",) if log_probs else ()),
            "finish_reason", "rollout_weight_version", "response", "verl",
        )  # fmt: skip
        self.ask: Callable[[], tuple[Any, Batch]]
        self.native: Any = None

    def __call__(self, batch: Batch, at: At) -> Batch:
        self.native, out = self.ask()
        return out


class Update:
    """The actor's update by verl; ``run`` is set for each call and returns verl's result and the facts about it."""

    name = "update"
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.run: Callable[[At], tuple[Any, dict[str, Any]]]
        self.native: Any = None

    def __call__(self, batch: Batch, at: At) -> Batch:
        self.native, info = self.run(at)
        return Batch(batch.sample_id, {}, {}, info)


class Computed:
    """Something that verl has computed already: the tape may record it, and that is all."""

    def __init__(self, name: str, reads: tuple[str, ...], writes: tuple[str, ...], whole: Batch) -> None:
        self.name, self.reads, self.writes, self._whole = name, reads, writes, whole

    def __call__(self, batch: Batch, at: At) -> Batch:
        return self._whole.only(self.writes)


_COMPUTED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "reward": (("response",), ("score", "reward", "reward_status", "reward_extra")),
    "old_log_prob": (("response_ids",), ("old_log_probs", "entropy")),
    "ref_log_prob": (("response_ids",), ("ref_log_probs",)),
    "advantage": (("reward",), ("advantages", "loss_mask", "is_weights")),
}


def computed_stages(whole: Batch) -> Iterator[Computed]:
    """Those of which ``whole`` has the first column that they write."""
    for name, (reads, writes) in _COMPUTED.items():
        if writes[0] in whole:
            yield Computed(name, reads, tuple(w for w in writes if w in whole), whole)
