"""What a receiver looks at before new weights are in force, without holding them twice."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from sync_cases import TIED, weights

from crossrl.models.digest import tensor_digest
from crossrl.sync import check
from crossrl.sync.check import HASHING, differing, survey
from crossrl.sync.manifest import Manifest
from crossrl.sync.messages import SyncError

COUNT = 40


def test_tensors_that_are_made_for_the_look_are_let_go_at_once() -> None:
    alive, most = weakref.WeakSet[torch.Tensor](), 0

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(COUNT):
            tensor = torch.full((1000,), float(number))
            alive.add(tensor)
            most = max(most, len(alive))
            yield f"w{number}", tensor
            del tensor

    seen = survey(made(), {}, digests=True)
    assert len(seen) == COUNT and most <= HASHING + 2 < COUNT
    assert {n: s.digest for n, s in seen.items()} == {
        f"w{number}": tensor_digest(torch.full((1000,), float(number))) for number in range(COUNT)
    }


def test_as_many_as_said_are_hashed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "HASHING", 3)
    lock, running, most = threading.Lock(), 0, 0
    together = threading.Barrier(3)

    def counted(tensor: torch.Tensor) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(20.0)  # passes when three are in here at once
        with lock:
            running -= 1
        return ""

    monkeypatch.setattr(check, "tensor_digest", counted)
    survey(((f"w{i}", torch.zeros(1)) for i in range(6)), {}, digests=True)
    assert most == 3


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("order", [("embed", "head", "more"), ("more", "head", "embed")])
def test_ties_are_looked_at_in_any_order(
    digests: bool, order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = list[int]()
    monkeypatch.setattr(check, "tensor_digest", lambda t: (hashed.append(1), tensor_digest(t))[1])
    tied = {"head": "embed", "more": "embed"}
    whole = torch.arange(6.0)
    for tensors, untied in (
        ({"embed": whole, "head": whole, "more": whole}, set()),
        ({"embed": whole, "head": whole.clone(), "more": whole}, set()),
        ({"embed": whole, "head": whole + 1, "more": whole}, {"head"}),
        ({"embed": whole, "head": whole, "more": whole.reshape(2, 3)}, {"more"}),
    ):
        hashed.clear()
        seen = survey(((name, tensors[name]) for name in order), tied, digests)
        assert {name for name, one in seen.items() if one.untied} == untied
        if all(t is whole for t in tensors.values()):
            assert len(hashed) == digests  # the same memory is not hashed twice, nor at all where no digest is wanted


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(SyncError, match="says twice what it holds as w"):
        survey([("w", torch.zeros(1)), ("w", torch.ones(1))], {}, digests=True)


def test_every_difference_is_named() -> None:
    sent = weights(1)
    manifest = Manifest.of(sent.items(), TIED)
    whole = {**sent, **{name: sent[first] for name, first in TIED.items()}}
    wanted = {name: tensor_digest(tensor) for name, tensor in whole.items()}
    assert differing(manifest, survey(whole.items(), TIED, True), wanted) == []
    held = {name: tensor.clone() for name, tensor in whole.items() if name != "mask"}
    held["norm"] = held["norm"].double()
    held["head"][0, 0] += 1
    held["more"] = torch.ones(1)
    found = differing(manifest, survey(held.items(), TIED, True), wanted)
    for words in ("more is in the engine only", "mask is not in the engine", "head is no longer tied to embed"):
        assert any(line.startswith(words) for line in found), (words, found)
    assert any(line.startswith("norm was sent as") and "held as float64" in line for line in found) and len(found) == 4
