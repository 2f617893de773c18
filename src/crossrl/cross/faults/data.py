"""Faults of the data: other prompts or answers than the files hold. Seam: the loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crossrl.batch import Batch, Ragged
from crossrl.cross.faults.base import Fault, Site, replaced
from crossrl.data.loader import Draw

PROMPT = ("prompt", "data_source", "ground_truth", "extra_info")


def another_order(site: Site) -> None:
    loader = site.parts.loader
    last = len(loader.dataset) - 1

    def draw(inner: Callable[[int], list[Draw]], count: int) -> list[Draw]:
        return [Draw(d.epoch, last - d.row) for d in inner(count)]

    site.method(loader, "draw", draw)


def duplicate_group(site: Site) -> None:
    n = site.parts.loader.n

    def batch(inner: Callable[..., Batch], draws: Sequence[Draw]) -> Batch:
        out = inner(draws)
        if len(out) < 2 * n:
            return out
        index = np.arange(len(out))
        index[-n:] = index[:n]  # the last group is the first one once more, under its own ids
        columns: dict[str, Any] = {name: [out[name][i] for i in index] for name in PROMPT}
        return replaced(out, prompt_ids=out.ragged("prompt_ids").take(index), **columns)

    site.method(site.parts.loader, "batch", batch)


def answers_of_other_rows(site: Site) -> None:
    n = site.parts.loader.n

    def batch(inner: Callable[..., Batch], draws: Sequence[Draw]) -> Batch:
        out = inner(draws)
        answers = out["ground_truth"]
        return replaced(out, ground_truth=[*answers[n:], *answers[:n]])

    site.method(site.parts.loader, "batch", batch)


def prompt_cut(site: Site) -> None:
    def batch(inner: Callable[..., Batch], draws: Sequence[Draw]) -> Batch:
        out = inner(draws)
        rows = [row[1:] if len(row) > 1 else row for row in out.ragged("prompt_ids").rows()]
        return replaced(out, prompt_ids=Ragged.from_rows(rows, np.int32))

    site.method(site.parts.loader, "batch", batch)


def batch_repeated(site: Site) -> None:
    loader = site.parts.loader
    last: list[list[Draw]] = []
    draw = loader.draw

    def remember(count: int) -> list[Draw]:
        drawn = draw(count)
        seen = last[-1] if site.active and last and len(last[-1]) == len(drawn) else drawn
        last[:] = [drawn]
        return seen

    loader.draw = remember  # type: ignore[method-assign]


def _fault(name: str, symptom: str, plant: Callable[[Site], None], **more: Any) -> Fault:
    return Fault(f"data.{name}", "data", "data", symptom, plant, **more)


DATA = (
    _fault("another_order", "the same curve in other steps: two runs cannot be compared step by step", another_order),
    _fault("duplicate_group", "some prompts are seen more often than others; fewer prompts per step", duplicate_group),
    _fault(
        "answers_of_other_rows",
        "the reward hardly rises, and correct answers are scored as wrong from the first step on",
        answers_of_other_rows,
    ),
    _fault("prompt_cut", "the model answers another question than the one in the data file", prompt_cut),
    _fault(
        "batch_repeated",
        "each step trains on the prompts of the one before; the loader is one step behind",
        batch_repeated, earliest=2,
    ),
)  # fmt: skip
