"""A transfer is a transaction: every tensor arrives and is proven to, or no version moves and the error says why."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_cases import PAGE, TIED, Failing, Pair, Slow, Whole, engine, manifest, pair, raw, weights, zeros

from crossrl.models.digest import tensor_digest, values_between
from crossrl.sync import receiver as receiver_module
from crossrl.sync import sender as sender_module
from crossrl.sync.check import check
from crossrl.sync.manifest import Manifest
from crossrl.sync.messages import Message, ProtocolError, SyncError
from crossrl.sync.plan import Piece, pack
from crossrl.sync.target import HeldTensors, Loader


def test_all_weights_arrive_bit_for_bit_and_the_version_moves() -> None:
    new = weights(1)
    with pair(engine(), engine(), Whole(weights())) as both:
        sent = both.send(new, version=7)
        for held in both.engines:
            assert raw(held.tensors) == raw(new)
            assert held.weight_version == 7 and not held.unusable
        assert sent.digest and {w.result.digest for w in both.workers if w.result} == {sent.digest}
        assert sent.buckets >= 5 and sent.tensors == len(new)
        assert sent.prefix_caches == {"engine-0": "none is kept", "engine-1": "none is kept", "engine-2": "cleared"}
        assert both.send(weights(2), version=8).digest != sent.digest


# C13, and what else a payload can have wrong


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex128]


def without(name: str) -> dict[str, torch.Tensor]:
    return {n: t for n, t in weights(1).items() if n != name}


PAYLOADS = {
    "missing": (list(without("norm").items()), None, "norm did not come"),
    "nothing": ([], None, "count did not come; embed did not come"),
    "unknown": ([*weights(1).items(), ("extra", torch.ones(2))], None, "extra came without being announced"),
    "duplicate": ([*weights(1).items(), ("mask", weights(1)["mask"])], None, "mask came twice"),
    "duplicate of many parts": ([*weights(1).items(), ("embed", weights(1)["embed"])], None, "embed came twice"),
    "shape": ([*without("count").items(), ("count", torch.ones(4, dtype=torch.int64))], None, "count came as (4,) int"),
    "dtype": ([*without("norm").items(), ("norm", torch.ones(48))], None, "norm came as (48,) float32"),
    "announced and sent without one": (
        list(without("norm").items()), manifest(without("norm")), "norm was not announced"),
    "announced and sent with one too many": (
        [*weights(1).items(), ("extra", torch.ones(2))], manifest({**weights(1), "extra": torch.ones(2)}),
        "extra was announced but the model has no such weight"),
    "tie that the engine has not": (
        list(without("norm").items()), Manifest.of(without("norm").items(), {**TIED, "norm": "embed"}),
        "norm was not announced"),
}  # fmt: skip


@pytest.mark.parametrize("case", PAYLOADS)
def test_a_payload_that_is_not_what_the_engine_takes_fails_and_names_the_tensor(case: str) -> None:
    payload, announced, said = PAYLOADS[case]
    with pair(engine(), engine()) as both:
        both.send(weights(3), version=1)
        with pytest.raises(SyncError, match=re.escape(said)) as caught:
            both.send(payload, 2, announced or manifest(weights(1)))
        assert "keep their version" in str(caught.value)
        assert [held.weight_version for held in both.engines] == [1, 1]
        assert all(said in held.unusable for held in both.engines)  # also of the one that did not find it first
        both.send(weights(4), version=3)  # a full transfer mends it
        assert all(raw(held.tensors) == raw(weights(4)) and not held.unusable for held in both.engines)


def test_old_weights_after_a_real_update_are_refused_and_pass_after_one_without_gradient() -> None:
    with pair(engine()) as one:
        one.send(weights(1), 1, changed=True)
        with pytest.raises(SyncError, match="the old weights were sent"):
            one.send(weights(1), 2, changed=True)
        assert one.engines[0].weight_version == 1 and "the old weights were sent" in one.engines[0].unusable
        one.send(weights(1), 2, changed=False)
        one.send(weights(1), 3)
        one.send(weights(2), 4, changed=True)
        assert one.engines[0].weight_version == 4


def test_sending_nothing_does_not_move_the_version() -> None:
    with pair(engine(weight_version=5), limit_s=0.2) as one:
        with pytest.raises(SyncError, match="announces no tensor"):
            one.send({}, 6, Manifest({}))
        assert one.engines[0].weight_version == 5 and not one.engines[0].unusable
        assert "no transfer began" in str(one.workers[0].error)


def test_an_adapter_that_is_declared_and_empty_is_refused_by_either_side() -> None:
    base = weights(1)
    empty = Manifest.of(base.items(), TIED, adapters={"policy": []})
    absent = Manifest.of(base.items(), TIED, adapters={"policy": ["lora_a"]})
    for announced, said in ((empty, "adapter policy is declared, but none"), (absent, "lora_a of adapter policy")):
        with pair(engine(), limit_s=0.2) as one, pytest.raises(SyncError, match=said):
            one.send(base, 1, announced)


def test_a_receiver_does_not_trust_the_sender_with_the_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    base = weights(1)
    announced = Manifest.of(base.items(), TIED, adapters={"policy": []})
    with pair(engine()) as one:
        real = Manifest.check
        monkeypatch.setattr(Manifest, "check", lambda self: None if self is announced else real(self))
        with pytest.raises(SyncError, match=r"engine-0 .* failed at begin: .*adapter policy is declared"):
            one.send(base, 1, announced)
        assert one.engines[0].weight_version == 0 and not one.engines[0].unusable  # it was not begun there


class Rounding(HeldTensors):
    """Takes float32 and holds bfloat16, silently."""

    def load_part(self, name: str, shape: tuple[int, ...], start: int, values: torch.Tensor) -> None:
        super().load_part(name, shape, start, values)

    def held(self):  # type: ignore[no-untyped-def]
        for name, tensor in super().held():
            yield name, tensor.bfloat16() if name in ("embed", "head") else tensor


def test_a_cast_that_was_not_declared_is_refused_and_a_declared_one_is_proven() -> None:
    with pair(engine(Rounding)) as one:
        with pytest.raises(SyncError, match="embed was sent as float32 and is held as bfloat16; declared was float32"):
            one.send(weights(1))
        announced = Manifest.of(weights(1).items(), TIED, casts={"embed": "bfloat16"})
        one.send(weights(1), 2, announced)
        assert one.engines[0].weight_version == 2
    with pair(engine()) as one, pytest.raises(SyncError, match="held as float32; declared was bfloat16"):
        one.send(weights(1), 2, announced)


class Untied(HeldTensors):
    """Keeps the output head apart, as it was."""

    def held(self):  # type: ignore[no-untyped-def]
        yield from self.tensors.items()
        yield "head", torch.zeros_like(self.tensors["embed"])


@pytest.mark.parametrize("digest", [True, False])
def test_a_broken_tie_is_refused_and_named(digest: bool) -> None:
    with pair(engine(), engine(Untied), digest=digest) as both:
        with pytest.raises(SyncError, match=r"engine-1 .*head is no longer tied to embed"):
            both.send(weights(1))
        assert [held.weight_version for held in both.engines] == [0, 0]


class Corrupting(HeldTensors):
    """Swaps two values: any sum, and any exclusive or, of all values stays the same."""

    def check_update(self) -> None:
        super().check_update()
        flat = self.tensors["embed"].view(-1)
        flat[[0, 1]] = flat[[1, 0]]


def test_swapped_values_are_found_and_named_and_no_version_moves_anywhere() -> None:
    with pair(engine(), engine(Corrupting), engine()) as three:
        with pytest.raises(SyncError, match=r"engine-1 .* does not hold what was sent: embed does not"):
            three.send(weights(1), 2)
        assert [held.weight_version for held in three.engines] == [0, 0, 0]


def test_control_a_version_that_moves_before_all_digests_agree_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = HeldTensors.check_update
    monkeypatch.setattr(HeldTensors, "check_update", lambda self: (real(self), self.finish_update(), None)[2])
    with pair(engine(), engine(Corrupting)) as both:
        with pytest.raises(SyncError):
            both.send(weights(1), 2)
        assert [held.weight_version for held in both.engines] != [0, 0]


def test_without_digests_swapped_values_pass_so_the_digest_is_what_finds_them() -> None:
    with pair(engine(Corrupting), digest=False) as one:
        assert one.send(weights(1), 2).digest == ""
        assert one.engines[0].weight_version == 2
        with pytest.raises(SyncError, match="digests, which are off"):
            one.sender.send(3, manifest(weights(1)), weights(1).items(), changed=True)


# C10: order


def overwrite(monkeypatch: pytest.MonkeyPatch, acknowledged_by_all: bool = True) -> None:
    """Fill a slot with a constant as soon as its bucket counts as acknowledged."""
    transfer = sender_module._Transfer

    def all_copied(self, number: int) -> None:  # type: ignore[no-untyped-def]
        if number < 0:
            return
        members = self._members if acknowledged_by_all else self._members[:1]
        self._peers.wait(members, "copy", lambda p: p.copied >= number, self._sender.limit_s)
        self._buffer.slot(number).fill_(0x5A)

    monkeypatch.setattr(transfer, "_all_copied", all_copied)


def c10() -> Pair:
    return Pair(engine(), engine(Slow), Whole(weights()))


def test_c10_both_receivers_hold_what_was_sent_though_the_buffer_is_overwritten_at_once(monkeypatch) -> None:
    overwrite(monkeypatch)
    case = c10()
    try:
        case.send(weights(1))
        assert all(raw(held.tensors) == raw(weights(1)) for held in case.engines)
    finally:
        case.close()


def test_c10_control_acknowledging_before_the_barrier_is_found(monkeypatch) -> None:
    overwrite(monkeypatch, acknowledged_by_all=False)
    case = c10()
    try:
        with pytest.raises(SyncError, match=r"engine-1 .* does not hold what was sent"):
            case.send(weights(1))
        assert raw(case.engines[1].tensors) != raw(weights(1))
    finally:
        case.close()


def test_c10_control_an_engine_that_keeps_a_view_of_the_bucket_is_found(monkeypatch) -> None:
    """Where moving to the device is no copy: what ``Loader`` copies for engines that take whole tensors."""
    overwrite(monkeypatch)

    def aliases(self, pieces, slot):  # type: ignore[no-untyped-def]
        for piece in pieces:
            if piece.count == torch.Size(piece.shape).numel():
                yield piece.name, piece.view(slot).view(piece.shape)

    monkeypatch.setattr(Loader, "_whole", aliases)
    with pair(Whole(weights())) as one, pytest.raises(SyncError, match="a view of the shared memory is still held"):
        one.send(weights(1))


def in_order(case: Pair) -> list[str]:
    """What the logs show to be out of order; ("" for nothing)."""
    sender = case.sender.log.events
    wrong = []
    last = max(e.bucket for e in sender if e.did == "filled" and e.bucket is not None)
    assert last >= 4
    for number in range(last + 1):
        told = [e.at for e in sender if (e.did, e.kind, e.bucket) == ("got", "copied", number)]
        again = [e.at for e in sender if (e.did, e.bucket) == ("filling", number + 2)]
        if len(told) != len(case.engines) or any(at < max(told) for at in again):
            wrong.append(f"bucket {number} was filled again before all had copied it")
    freed = next(e.at for e in sender if e.did == "closed")
    for receiver in case.receivers:
        events = receiver.log.events
        for number in range(last + 1):
            loaded = next(i for i, e in enumerate(events) if (e.did, e.bucket) == ("loaded", number))
            said = next(i for i, e in enumerate(events) if (e.did, e.kind, e.bucket) == ("sent", "copied", number))
            if said < loaded:
                wrong.append(f"{receiver.name} acknowledged bucket {number} before it was loaded")
        closed = next((i for i, e in enumerate(events) if e.did == "closed"), -1)
        if (events[-1].did, events[-1].kind) != ("sent", "released") or closed in (-1, len(events) - 1):
            wrong.append(f"{receiver.name} let go of the buffer after its last message")
        if freed < events[closed].at:
            wrong.append(f"the memory was freed before {receiver.name} let go")
    return wrong


def test_the_logs_show_the_order_acknowledged_after_all_copied_and_freed_after_all_released() -> None:
    case = c10()
    try:
        case.send(weights(1))
        assert in_order(case) == []
    finally:
        case.close()


def test_control_the_order_test_finds_an_early_acknowledgement(monkeypatch) -> None:
    overwrite(monkeypatch, acknowledged_by_all=False)
    case = Pair(engine(), engine(Slow), digest=False)
    try:
        case.send(weights(1))
        assert any("before all had copied it" in wrong for wrong in in_order(case))
    finally:
        case.close()


def test_control_the_order_test_finds_a_last_message_before_the_buffer_is_let_go(monkeypatch) -> None:
    monkeypatch.setattr(receiver_module._Transfer, "_close_buffer", lambda self: None)
    case = Pair(engine())
    try:
        case.send(weights(1))
        assert any("after its last message" in wrong for wrong in in_order(case))
    finally:
        case.close()


# Any tensor


def test_every_size_dtype_and_stride_is_cut_and_put_together_by_one_path() -> None:
    named = {f"t{n}": torch.arange(n, dtype=torch.int32) for n in (0, 1, 3, 1023, 1024, 1025, 5000)}
    named |= {"t": torch.randn(6, 5, 4).permute(2, 0, 1), "c": torch.randn(70, 3).t(), "z": torch.ones(9).cfloat()}
    for size in (64, 4096, 1 << 20):
        slots: dict[int, torch.Tensor] = {}
        buckets = list(pack(named.items(), size, lambda i: slots.setdefault(i, torch.zeros(size, dtype=torch.uint8))))  # noqa: B023
        assert [number for number, _ in buckets] == list(range(len(slots)))
        held = HeldTensors(zeros(named))
        held.begin_update(1, Manifest.of(named.items()).tensors)
        loader, whole = Loader(held), Loader(Whole(named))
        for number, pieces in buckets:
            assert all(p.offset % 64 == 0 and p.offset <= size for p in pieces)
            pieces = [Piece.from_json(p.to_json()) for p in pieces]
            loader.take(pieces, slots[number])
            whole.take(pieces, slots[number])
        held.check_update()
        assert raw(held.tensors) == raw(named) == raw(whole.target.next)  # type: ignore[attr-defined]


@given(
    sizes=st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(DTYPES), st.booleans()), max_size=9
    ),
    bucket=st.sampled_from([64, 128, 4096]),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_cut_is_put_together_again(sizes, bucket) -> None:
    named = {}
    for i, (shape, dtype, turned) in enumerate(sizes):
        tensor = torch.randn(shape, dtype=torch.float64).to(dtype)
        named[f"t{i}"] = tensor.permute(tuple(reversed(range(tensor.dim())))) if turned else tensor
    slots: dict[int, torch.Tensor] = {}
    buckets = pack(named.items(), bucket, lambda i: slots.setdefault(i, torch.zeros(bucket, dtype=torch.uint8)))
    held = HeldTensors(zeros(named))
    held.begin_update(1, Manifest.of(named.items()).tensors)
    for number, pieces in buckets:
        Loader(held).take(pieces, slots[number])
        slots[number].fill_(0x5A)
    held.check_update()
    assert raw(held.tensors) == raw(named)


def test_values_between_are_those_of_the_flat_tensor() -> None:
    for tensor in (torch.randn(5, 4, 3).permute(2, 0, 1), torch.randn(7, 3).t(), torch.randn(6), torch.tensor(2.0)):
        flat = tensor.reshape(-1)
        for start in range(len(flat)):
            for stop in range(start, len(flat) + 1):
                runs = [run.reshape(-1) for run in values_between(tensor, start, stop)]
                assert torch.equal(torch.cat(runs) if runs else flat[:0], flat[start:stop])


def test_a_digest_depends_on_value_order_dtype_and_shape_and_not_on_strides() -> None:
    x = torch.randn(300, 200)
    assert tensor_digest(x) == tensor_digest(x.t().contiguous().t())
    others = [x.reshape(200, 300), x.flip(0), x.bfloat16(), x.view(torch.int32), x.index_fill(0, torch.tensor([7]), 0)]
    assert len({tensor_digest(t) for t in (x, *others)}) == 6
    assert tensor_digest(torch.empty(0, 2)) != tensor_digest(torch.empty(0, 3))


def test_extra_memory_is_two_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment has two slots, and an engine that takes parts gets nothing but views of them."""
    given = []

    class Watching(HeldTensors):
        def load_part(self, name, shape, start, values):  # type: ignore[no-untyped-def]
            given.append(values.untyped_storage().nbytes())
            super().load_part(name, shape, start, values)

    with pair(engine(Watching)) as one:
        one.send(weights(1))
    assert set(given) == {2 * PAGE}


def test_the_next_bucket_is_filled_while_the_last_is_loaded() -> None:
    with pair(engine(Slow)) as one:
        one.send(weights(1))
        events = one.sender.log.events
        copied = next(e.at for e in events if (e.did, e.kind, e.bucket) == ("got", "copied", 0))
        assert next(e.at for e in events if (e.did, e.bucket) == ("filled", 1)) < copied


# Proof on demand


def test_check_lists_what_an_engine_holds_otherwise() -> None:
    held = engine()
    held.tensors = {n: t.clone() for n, t in weights(1).items()}
    assert check(held, weights(1), TIED) == []
    held.tensors["embed"][3, 4] += 0.5
    del held.tensors["mask"]
    held.tensors["more"] = torch.ones(1)
    held.tensors["norm"] = held.tensors["norm"].float()
    found = {d.name: d for d in check(held, weights(1), TIED)}
    assert set(found) == {"embed", "head", "mask", "more", "norm"}
    assert str(found["embed"]) == "embed has 1 of 2880 values that differ, by up to 0.5"
    assert found["embed"].largest == pytest.approx(0.5)
    with pytest.raises(SyncError, match="nothing to compare"):
        check(held, {})


# The protocol


def test_an_engine_that_keeps_its_old_version_is_named() -> None:
    class Stuck(HeldTensors):
        def finish_update(self) -> None:
            super().finish_update()
            self.weight_version = 0

    with (
        pair(engine(), engine(Stuck)) as both,
        pytest.raises(SyncError, match=r"engine-1 .* has version 0 after an update"),
    ):
        both.send(weights(1), 3)


def test_a_receiver_that_waited_in_vain_is_served_when_it_comes_again() -> None:
    with pair(engine()) as one:
        for _ in range(3):
            with pytest.raises(SyncError, match=r"engine-0 waited 0 s for weights from .*: no transfer began"):
                one.receivers[0].receive(limit_s=0)
        one.send(weights(1), 3)
        assert one.engines[0].weight_version == 3


def test_a_message_of_another_version_or_kind_is_refused() -> None:
    good = Message("copied", "s", {"bucket": 1}).encode()
    assert Message.decode(good) == Message("copied", "s", {"bucket": 1})
    for bad, said in (
        (good.replace(b'"protocol":1', b'"protocol":2'), "speaks version 2"),
        (good.replace(b"copied", b"copies"), "no such message"),
        (good.replace(b"bucket", b"backet"), "no such message"),
        (b"\x80\x04pickle", "not a message"),
        (b"[]", "not a message"),
    ):
        with pytest.raises(ProtocolError, match=said):
            Message.decode(bad)


def test_a_manifest_that_contradicts_itself_is_refused() -> None:
    one = {"w": torch.ones(2)}
    for wrong, said in (
        (Manifest.of(one.items(), tied={"h": "v"}), "h is tied to v, which is not sent"),
        (Manifest.of(one.items(), tied={"w": "w"}), "w is sent and also tied"),
        (Manifest.of(one.items(), casts={"v": "bfloat16"}), "v has a cast"),
    ):
        with pytest.raises(SyncError, match=said):
            wrong.check()


def test_a_failing_engine_names_itself_and_its_phase() -> None:
    for where, phase in (("load", "load"), ("check", "check"), ("clear", "release"), ("finish", "release")):
        with pair(engine(), engine(Failing, where=where)) as both:
            said = rf"engine-1 .* failed at {phase}: ValueError: no memory left in {where}"
            with pytest.raises(SyncError, match=said):
                both.send(weights(1))
            assert both.engines[1].weight_version == 0 and "no memory left" in both.engines[1].unusable
            both.send(weights(2), 2)
            assert [held.weight_version for held in both.engines] == [2, 2]
