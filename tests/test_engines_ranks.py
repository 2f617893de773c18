"""Training on several ranks is training on one: promises of ``TrainGroup`` on two real ranks (gloo, on CPU)."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models_for_tests import batch
from ranks_cases import On, policy_gradient, saved_spec, start

from crossrl.algorithms.objective import ObjectiveConfig, make_objective
from crossrl.batch import Batch, Ragged
from crossrl.engines.base import EngineError, EngineState, StepResult, TrainEngine
from crossrl.engines.train.dealing import deal
from crossrl.engines.train.group import TrainGroup
from crossrl.engines.train.optimizer import norm_of
from crossrl.engines.train.sharding import rows
from crossrl.engines.train.spec import TrainSpec
from crossrl.engines.train.wire import pack, unpack

# C24: lengths 1 to 9, one empty; the last one is truncated and masked.
FIVE = [(3, [1, 9]), (5, [0]), (2, [4, 6])]
GROUPS = [(3, [5, 1, 9]), (11, [2, 7, 4, 4]), (1, [6]), (5, [1, 1])]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TrainSpec:
    return saved_spec(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def pair(spec: TrainSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainGroup]:
    with contextlib.closing(start(spec, 2, tmp_path_factory.mktemp("logs"))) as group:
        yield group


@pytest.fixture(scope="module")
def fresh(spec: TrainSpec) -> EngineState:
    return spec.plain_engine().state()


@pytest.fixture
def group(pair: TrainGroup, fresh: EngineState) -> TrainGroup:
    """The two ranks, with the weights of the model folder."""
    tell(pair, "divide", 1.0)
    tell(pair, "micro", 2)
    pair.load_state(fresh)
    return pair


def tell(group: TrainGroup, method: str, *args: Any) -> None:
    group._calls.all(method, method, *args)


def masked(lengths: list[tuple[int, list[int]]], share: str = "last", seed: int = 0) -> Batch:
    data = batch(lengths, seed=seed, vocabulary=512)
    responses = data.ragged("response_ids")
    counts = np.ones(len(data), np.float32)
    counts[-1 if share == "last" else slice(None)] = 0.0
    mask = Ragged.spread(counts if share != "none" else np.ones(len(data), np.float32), responses.lengths)
    weights = Ragged(data.ragged("loss_weights").values * mask.values, responses.lengths)
    return data.only(["prompt_ids", "response_ids", "advantages"]).with_columns(loss_weights=weights, loss_mask=mask)


def step(engine: Any, data: Batch, **options: Any) -> StepResult:
    how = {"lr": 1e-3, "temperature": 0.7, "entropy": True, **options}
    return engine.step(data, how.pop("objective", policy_gradient), **how)


def gradient(engine: Any, data: Batch, **options: Any) -> dict[str, torch.Tensor]:
    """After a first step AdamW's first moment is the gradient times 0.1."""
    step(engine, data, **options)
    return {n: t.clone() / 0.1 for n, t in engine.state().optimizer.items() if n.endswith("exp_avg")}


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys() and a
    return max(float((a[n] - b[n]).abs().max()) for n in a)


@pytest.mark.parametrize("share", ["none", "last", "all"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_gradient_on_two_ranks_is_that_on_one_for_any_micro_batch(
    group: TrainGroup, spec: TrainSpec, size: int, share: str
) -> None:
    data = masked(FIVE, share)
    tell(group, "micro", size)
    one, two = gradient(spec.plain_engine(), data), gradient(group, data)
    assert worst(one, two) < 1e-6
    assert share == "all" or max(float(g.abs().max()) for g in one.values()) > 0.01


def test_a_mean_over_ranks_instead_of_the_sum_would_be_seen(group: TrainGroup, spec: TrainSpec) -> None:
    tell(group, "divide", 2.0)
    assert worst(gradient(spec.plain_engine(), masked(FIVE)), gradient(group, masked(FIVE))) > 1e-3


def test_a_step_means_the_same_as_on_one_rank(group: TrainGroup, spec: TrainSpec) -> None:
    one, data = spec.plain_engine(), masked(GROUPS)
    for seed in range(3):
        skip = np.zeros(len(data), bool)
        skip[seed] = True
        a, b = (step(engine, masked(GROUPS, seed=seed), skip=skip) for engine in (one, group))
        assert b.loss == pytest.approx(a.loss, abs=1e-6) and b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
        assert (b.lr, b.sums, b.tokens, b.skipped_samples) == (a.lr, a.sums, a.tokens, a.skipped_samples)
        np.testing.assert_allclose(b.log_probs.values, a.log_probs.values, atol=2e-5, rtol=0)
        np.testing.assert_array_equal(b.log_probs.lengths, a.log_probs.lengths)
    assert one.scalars() == group.scalars() == {"steps_done": 3, "weight_version": 3}
    assert worst(dict(one.state().weights), dict(group.state().weights)) < 3e-6


def test_log_probs_and_entropies_are_those_of_one_process_bit_for_bit(group: TrainGroup, spec: TrainSpec) -> None:
    one, data = spec.plain_engine(), batch([*GROUPS, (4, [0, 3])], vocabulary=512)
    for lengths in (data, data.take([0]), data.take([])):
        (a, ha), (b, hb) = (engine.log_probs(lengths, 0.7, entropy=True) for engine in (one, group))
        assert ha is not None and hb is not None
        np.testing.assert_array_equal(b.values, a.values)
        np.testing.assert_array_equal(hb.values, ha.values)
        np.testing.assert_array_equal(b.lengths, a.lengths)
    assert group.log_probs(data, 0.7, entropy=False)[1] is None


def test_a_rank_without_samples_takes_part(group: TrainGroup, spec: TrainSpec) -> None:
    data = masked([(4, [3, 5, 2])], "none")  # one group: all of it is dealt to rank 0
    assert [len(mine) for mine in group._deal(data, np.ones(3, bool))] == [3, 0]
    assert worst(gradient(spec.plain_engine(), data), gradient(group, data)) < 1e-6


def test_a_step_on_nothing_applies_decay_and_momentum(group: TrainGroup, spec: TrainSpec) -> None:
    one, data = spec.plain_engine(), masked(FIVE)
    for engine in (one, group):
        step(engine, data)
        engine.log_probs(data, 1.0, False)
        outcome = step(engine, data, skip=np.ones(5, bool))
        assert (outcome.loss, outcome.grad_norm, outcome.tokens, outcome.skipped_samples) == (0.0, 0.0, 0, 5)
    assert worst(dict(one.state().weights), dict(group.state().weights)) < 1e-6
    a, b = (engine.log_probs(data, 1.0, False)[0].values for engine in (one, group))
    np.testing.assert_allclose(a, b, atol=1e-5)  # no rank computes with weights of before


def test_equal_inputs_give_equal_bits(group: TrainGroup, fresh: EngineState) -> None:
    results = []
    for _ in range(2):
        group.load_state(fresh)
        outcome = [step(group, masked(GROUPS, seed=seed)) for seed in range(2)]
        results.append((group.digests(), [(r.loss, r.grad_norm) for r in outcome]))
    assert results[0] == results[1]


def test_the_runs_own_objective_travels(group: TrainGroup, spec: TrainSpec) -> None:
    data = masked(GROUPS)
    data = data.with_columns(old_log_probs=Ragged.full_like(data.ragged("advantages"), -6.0, np.float32))
    objective = make_objective(ObjectiveConfig(entropy_coeff=0.1))
    a, b = (step(engine, data, objective=objective) for engine in (spec.plain_engine(), group))
    assert a.sums.keys() == b.sums.keys() and len(a.sums) > 5
    for key, value in a.sums.items():
        assert b.sums[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


def test_an_objective_that_cannot_travel_is_refused(group: TrainGroup) -> None:
    with pytest.raises(EngineError, match="cannot be sent to the ranks"):
        step(group, masked(FIVE), objective=lambda given: policy_gradient(given))
    step(group, masked(FIVE))


def poisoned(sample: int) -> Batch:
    data = masked(GROUPS, "none")
    values = data.ragged("advantages").values.copy()
    values[data.ragged("advantages").offsets[sample]] = np.nan
    rest = data.only(["prompt_ids", "response_ids", "loss_weights", "loss_mask"])
    return rest.with_columns(advantages=Ragged(values, data.ragged("advantages").lengths))


def test_what_is_not_finite_on_one_rank_stops_all_before_the_weights_change(
    group: TrainGroup, fresh: EngineState, spec: TrainSpec
) -> None:
    before = group.digests()
    with pytest.raises(EngineError, match=r"the loss is nan in the micro-batch of samples \[.*s7.*rank"):
        step(group, poisoned(7))
    with pytest.raises(EngineError, match=r"gradient norm is (nan|inf).*model\.embed_tokens\.weight"):
        step(group, masked(GROUPS), objective=On(1, "explode"))
    with pytest.raises(EngineError, match=r"no such column.*\(rank 1\)"):
        step(group, masked(GROUPS), objective=On(1, "raise"))
    assert group.digests() == before and group.weight_version == 0
    assert worst(gradient(spec.plain_engine(), masked(FIVE)), gradient(group, masked(FIVE))) < 1e-6  # nothing is left


def test_a_prompt_without_tokens_is_named_and_blocks_nobody(group: TrainGroup) -> None:
    with pytest.raises(EngineError, match="sample s1 has a prompt of no tokens"):
        group.log_probs(batch([(2, [3]), (0, [2])], vocabulary=512), 1.0, False)
    group.log_probs(batch([(2, [3]), (1, [2])], vocabulary=512), 1.0, False)


def test_the_state_is_whole_and_travels_both_ways(group: TrainGroup, spec: TrainSpec) -> None:
    one = spec.plain_engine()
    for seed in range(2):
        step(one, masked(GROUPS, seed=seed))
    group.load_state(one.state())
    assert group.digests() == one.digests() and group.digests("weights").keys() == {"weights"}
    assert group.scalars() == one.scalars() and group.facts == replace(one.facts, ranks=2)
    for part in ("weights", "optimizer"):
        mine, whole = getattr(one.state(), part), getattr(group.state(), part)
        assert mine.keys() == whole.keys() and all(torch.equal(mine[n], whole[n]) for n in mine)
    assert dict(group.named_weights()).keys() == one.state().weights.keys()
    step(one, masked(FIVE)), step(group, masked(FIVE))
    assert worst(dict(one.state().optimizer), dict(group.state().optimizer)) < 1e-6


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "dtype"])
def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(
    group: TrainGroup, fresh: EngineState, damage: str
) -> None:
    before = group.digests()
    tensors = {name: tensor + 1.0 for name, tensor in fresh.weights.items()}
    name = "model.norm.weight"
    if damage == "missing":
        del tensors[name]
    elif damage == "unknown":
        name = "made.up"
        tensors[name] = torch.zeros(3)
    else:
        tensors[name] = torch.zeros(7) if damage == "shape" else tensors[name].double()
    with pytest.raises(EngineError, match=name.replace(".", r"\.")):
        group.load_state(EngineState(tensors, fresh.optimizer, fresh.scalars))
    assert group.digests() == before


def test_the_exported_model_is_that_of_one_process(group: TrainGroup, spec: TrainSpec, tmp_path: Path) -> None:
    one = spec.plain_engine()
    for engine, name in ((one, "one"), (group, "two")):
        engine.save_hf(tmp_path / name)
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    assert (tmp_path / "one/config.json").read_text() == (tmp_path / "two/config.json").read_text()


def test_changed_is_proven_by_the_weights_themselves(group: TrainGroup, spec: TrainSpec, fresh: EngineState) -> None:
    for engine in (spec.plain_engine(), group):
        engine.sent()
        assert engine.changed is False
        step(engine, masked(FIVE), lr=0.0)
        assert engine.changed is None  # a step that moved nothing proves nothing
        step(engine, masked(FIVE))
        assert engine.changed is True
        engine.load_state(fresh)
        assert engine.changed is None
        engine.sent()
        assert engine.changed is False


class Receiving:
    """Receivers of weights, ``at`` these machines, in threads of this process."""

    def __init__(self, group: TrainGroup, at: Mapping[str, str] | None = None, **options: Any) -> None:
        from crossrl.engines.train.sending import this_machine
        from crossrl.sync.receiver import WeightReceiver
        from crossrl.sync.target import HeldTensors

        shapes = group._layout["weights"]
        machines = at or {"engine": this_machine()}
        addresses = group.open_sender(machines, limit_s=20.0, **options)
        self.targets, self.receivers = {}, {}
        for name in machines:
            held = {n: torch.zeros(shape, dtype=getattr(torch, dtype)) for n, (shape, dtype) in shapes.items()}
            self.targets[name] = HeldTensors(held, group.facts.tied)
            self.receivers[name] = WeightReceiver(addresses[name], name, self.targets[name])
        self.addresses = addresses

    @property
    def target(self) -> Any:
        return next(iter(self.targets.values()))

    def send(self, group: TrainGroup, version: int) -> Any:
        def receive(receiver: Any) -> None:
            with contextlib.suppress(Exception):  # the sender hears of it
                receiver.receive(30.0)

        threads = [threading.Thread(target=receive, args=(r,)) for r in self.receivers.values()]
        for thread in threads:
            thread.start()
        try:
            return group.send(version)
        finally:
            for thread in threads:
                thread.join(40.0)
                assert not thread.is_alive()

    def close(self) -> None:
        for receiver in self.receivers.values():
            receiver.close()


def test_on_each_machine_one_rank_sends_to_the_engines_there(group: TrainGroup) -> None:
    from crossrl.sync.messages import SyncError

    tell(group, "apart", True)
    try:
        with pytest.raises(EngineError, match=r"b is on elsewhere, where no process trains \(those are on machine-0, "):
            group.open_sender({"a": "machine-0", "b": "elsewhere"})
        receiving = Receiving(group, {"a": "machine-0", "b": "machine-1", "c": "machine-1"})
        with contextlib.closing(receiving):
            step(group, masked(FIVE))
            assert len(set(receiving.addresses.values())) == 2
            sent = receiving.send(group, 1)
            assert set(sent.prefix_caches) == {"a", "b", "c"} and group.changed is False
            for target in receiving.targets.values():
                held = dict(target.held())
                assert target.weight_version == 1
                assert all(torch.equal(held[n], t) for n, t in group.state().weights.items())
            for name in ("a", "c"):  # what fails on either machine fails the sync, and the next one mends it
                lost = receiving.targets[name].tensors.pop("model.norm.weight")
                with pytest.raises(SyncError, match=r"model\.norm\.weight"):
                    receiving.send(group, 2)
                receiving.targets[name].tensors["model.norm.weight"] = lost
            assert receiving.send(group, 3).version == 3
        group.close_sender()
    finally:
        tell(group, "apart", False)


def test_weights_go_from_the_ranks_to_a_receiver(group: TrainGroup) -> None:
    from crossrl.sync.messages import SyncError

    receiving = Receiving(group)
    with contextlib.closing(receiving):
        step(group, masked(FIVE))
        sent = receiving.send(group, 1)
        held = dict(receiving.target.held())
        assert sent.version == receiving.target.weight_version == 1 and group.changed is False
        assert set(held) - set(group.state().weights) == {"lm_head.weight"}
        assert all(torch.equal(held[n], t) for n, t in group.state().weights.items())

        lost = receiving.target.tensors.pop("model.norm.weight")
        with pytest.raises(SyncError, match=r"model\.norm\.weight"):
            receiving.send(group, 2)
        receiving.target.tensors["model.norm.weight"] = lost
        assert receiving.send(group, 2).version == 2

        tell(group, "stale", True)
        step(group, masked(FIVE))
        with pytest.raises(SyncError, match="the old weights were sent"):
            receiving.send(group, 3)
        tell(group, "stale", False)
        assert receiving.send(group, 3).version == 3
    group.close_sender()


def test_samples_are_dealt_by_tokens_and_groups_stay_together() -> None:
    data = batch([(2, [9, 9]), (3, [1]), (4, [8]), (5, [7, 1]), (2, [0])])
    prompts, responses = data.ragged("prompt_ids"), data.ragged("response_ids")
    dealt = deal(prompts, responses, np.ones(7, bool), 2)
    assert [mine.tolist() for mine in dealt] == [[0, 1, 2, 6], [3, 4, 5]]
    skipped = deal(prompts, responses, np.arange(7) > 1, 2)  # without the largest group
    assert [mine.tolist() for mine in skipped] == [[0, 1, 4, 5, 6], [2, 3]]
    assert [mine.tolist() for mine in deal(prompts.take([]), responses.take([]), np.ones(0, bool), 2)] == [[], []]


def test_rows_of_a_shard_are_those_of_fsdp() -> None:
    for count in (1, 5, 6, 7):
        for world in (1, 2, 3, 4):
            expected = [len(part) for part in torch.arange(count).chunk(world)]
            found = [len(range(count)[rows(count, rank, world)]) for rank in range(world)]
            assert found == expected + [0] * (world - len(expected))


def test_the_norm_does_not_depend_on_how_values_are_split() -> None:
    """In float32 PyTorch's own differs in the fourth digit between a large matrix and its rows."""
    matrix = torch.randn(3000, 4000, generator=torch.Generator().manual_seed(0))
    exact = float(matrix.double().norm())
    assert norm_of([matrix]) == pytest.approx(exact, rel=1e-7)
    assert norm_of([*matrix[:1000].split(7), matrix[1000:]]) == pytest.approx(exact, rel=1e-7)
    assert norm_of([]) == 0.0 and norm_of([torch.empty(0, 3)]) == 0.0
    assert norm_of([torch.tensor([1.0, float("nan")])]) != norm_of([torch.tensor([1.0, 2.0])])


def test_one_process_and_several_ranks_have_the_same_port(group: TrainGroup, spec: TrainSpec) -> None:
    port = {name: value for name, value in vars(TrainEngine).items() if not name.startswith("_")}
    assert len(port) >= 18 and {"save", "send", "changed", "close"} <= port.keys()
    for engine in (spec.plain_engine(), group):
        for name in (*port, *TrainEngine.__annotations__):
            assert inspect.getattr_static(engine, name, None) is not None, f"{type(engine).__name__} has no {name}"
        for name in (name for name, value in port.items() if inspect.isfunction(value)):
            wanted, found = (inspect.signature(getattr(kind, name)) for kind in (TrainEngine, type(engine)))
            assert list(found.parameters) == list(wanted.parameters), f"{type(engine).__name__}.{name}{found}"


def test_tensors_that_came_in_memory_of_others_may_be_changed() -> None:
    """Ray gives views of its own memory, which are read-only."""
    packed = pack({"w": torch.arange(6.0).reshape(2, 3)})
    packed["w"].data.flags.writeable = False
    tensor = unpack(packed)["w"]
    tensor += 1
    assert tensor.tolist() == [[1, 2, 3], [4, 5, 6]] and unpack(packed)["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_folder_of_another_machine_is_refused_for_an_export(group: TrainGroup, tmp_path: Path) -> None:
    tell(group, "elsewhere", -1, str(tmp_path / "theirs"))
    try:
        with pytest.raises(OSError, match=r"ours does not hold .*model\.safetensors.*must share the folder"):
            group.save_hf(tmp_path / "ours")
    finally:
        tell(group, "elsewhere", -1, "")
    group.save_hf(tmp_path / "ours")
