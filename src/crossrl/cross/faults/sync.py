"""Faults of the weight sync: what the engine holds is not what was sent, and the transaction sees nothing of it.

Seam: ``load``, where tensors are on their way. They need an engine with weights of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from crossrl.cross.faults import conditions as when
from crossrl.cross.faults.base import Fault, FaultError, Site
from crossrl.cross.faults.weights import a_matrix

Named = Iterable[tuple[str, torch.Tensor]]


def _on_the_wire(site: Site, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Other tensors than were sent, with the same names, shapes and dtypes."""

    def load(inner: Callable[[Named], None], named: Named) -> None:
        inner(change(dict(named)).items())

    site.method(site.parts.local_engine, "load", load)


def skipped_once(site: Site) -> None:
    def change(sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return _held(site, sent) if site.clock.step == site.start else sent

    _on_the_wire(site, change)


def skipped_always(site: Site) -> None:
    _on_the_wire(site, lambda sent: _held(site, sent))


def _held(site: Site, sent: dict[str, torch.Tensor], names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """``sent`` with what the engine has already (of ``names``; None: of all) instead."""
    held = dict(site.parts.local_engine.held())
    keep = set(sent if names is None else names)
    return {n: held[n].to(t.dtype) if n in keep else t for n, t in sent.items()}


def transposed(site: Site) -> None:
    name = a_matrix(site.parts.local_engine.held(), square=True)
    _on_the_wire(site, lambda sent: {**sent, name: sent[name].T.contiguous()})


def permuted(site: Site) -> None:
    name = a_matrix(site.parts.local_engine.held())
    _on_the_wire(site, lambda sent: {**sent, name: sent[name].roll(1, 0)})


def cast_bf16(site: Site) -> None:
    _on_the_wire(site, lambda sent: {n: t.bfloat16().to(t.dtype) for n, t in sent.items()})


def tensor_lost(site: Site) -> None:
    name = a_matrix(site.parts.local_engine.held())
    _on_the_wire(site, lambda sent: _held(site, sent, [name]))


def head_not_tied(site: Site) -> None:
    model = site.parts.local_engine.policy.model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        raise FaultError("sync.head_not_tied: the head of this model has weights of its own; choose another fault")

    def change(sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if head.weight is embedding.weight:
            head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        return sent

    _on_the_wire(site, change)


def one_version_late(site: Site) -> None:
    engine, load = site.parts.local_engine, site.parts.local_engine.load
    last: list[dict[str, torch.Tensor]] = []

    def late(named: Named) -> None:
        sent = dict(named)
        load((last[0] if site.active and last else sent).items())
        last[:] = [{n: t.clone() for n, t in sent.items()}]

    engine.load = late  # type: ignore[method-assign]


def half_a_tensor(site: Site) -> None:
    name = a_matrix(site.parts.local_engine.held())

    def change(sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        torn, old = sent[name].clone(), _held(site, {name: sent[name]})[name]
        torn[len(torn) // 2 :] = old[len(torn) // 2 :]
        return {**sent, name: torn}

    _on_the_wire(site, change)


def _fault(name: str, symptom: str, plant: Callable[[Site], None], **more: Any) -> Fault:
    how = {"needs": when.OWN_WEIGHTS, "ready": when.has_own_weights, **more}
    return Fault(f"sync.{name}", "weight sync", "sync", symptom, plant, **how)


SYNC = (
    _fault("skipped_once", "the gap is large in one step and gone in the next", skipped_once),
    _fault(
        "skipped_always",
        "the gap grows with every step; rewards in training stay as they were while validation of checkpoints rises",
        skipped_always,
    ),
    _fault("transposed", "sampled text is gibberish after the first update; the checkpoints are fine", transposed),
    _fault("permuted", "sampled text is gibberish after the first update; the checkpoints are fine", permuted),
    _fault(
        "cast_bf16",
        "a small gap on all tokens, though sampler and trainer both say float32",
        cast_bf16,
        needs=when.EXACT_WEIGHTS, ready=when.has_exact_weights,
    ),
    _fault("head_not_tied", "the gap grows slowly; the engine's head stays as it was", head_not_tied),
    _fault("tensor_lost", "the gap grows slowly; one layer of the engine stays as it was", tensor_lost),
    _fault("one_version_late", "the gap is about one update in every step from the second on", one_version_late),
    _fault(
        "half_a_tensor",
        "a gap that comes and goes with the load of the machine: a buffer was filled again before it was read",
        half_a_tensor,
    ),
)  # fmt: skip
