"""Checkpoints that several ranks write together, and that any number of ranks reads."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import batch
from ranks_cases import policy_gradient, saved_spec, start
from safetensors.torch import load_file, save_file

from crossrl.checkpoint import CheckpointError, CheckpointStore, Saved
from crossrl.cluster.worker import WorkerDied
from crossrl.engines.base import EngineError, TrainEngine
from crossrl.engines.train.group import TrainGroup
from crossrl.engines.train.saving import export_hf
from crossrl.engines.train.spec import TrainSpec
from crossrl.models.digest import weights_digest
from crossrl.models.loading import distinct_parameters, load_causal_lm

GROUPS = [(3, [5, 1, 9]), (11, [2, 7, 4, 4]), (1, [6]), (5, [1, 1])]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TrainSpec:
    return saved_spec(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def pair(spec: TrainSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainGroup]:
    """Two ranks that have done two steps."""
    with contextlib.closing(start(spec, 2, tmp_path_factory.mktemp("logs"))) as group:
        train(group)
        yield group


def train(engine: TrainEngine, seeds: tuple[int, ...] = (0, 1)) -> None:
    for seed in seeds:
        data = batch(GROUPS, seed=seed, vocabulary=512)
        engine.step(data, policy_gradient, lr=1e-3, temperature=1.0, entropy=False)


def save(engine: TrainEngine, folder: Path) -> Saved:
    store = CheckpointStore(folder)
    path = store.save(2, engine.save, {"engine": engine.scalars()}, engine.digests(), engine.facts.state_bytes)
    assert store.steps() == [2] and not list(folder.glob(".*"))
    return store.load(path)


@pytest.fixture(scope="module")
def sharded(pair: TrainGroup, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(pair, tmp_path_factory.mktemp("sharded"))


@pytest.fixture(scope="module")
def whole(spec: TrainSpec, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    engine = spec.plain_engine()
    train(engine)
    return save(engine, tmp_path_factory.mktemp("whole"))


def load(engine: TrainEngine, saved: Saved) -> None:
    engine.load(saved.path, saved.state["engine"])
    assert engine.digests() == {part: saved.manifest[part] for part in ("weights", "optimizer")}
    assert engine.scalars() == saved.state["engine"]


def far(a: TrainEngine, b: TrainEngine) -> float:
    mine, other = a.state().named(), b.state().named()
    assert mine.keys() == other.keys()
    return max(float((mine[n] - other[n]).abs().max()) for n in mine)


def test_two_ranks_write_their_shards_and_a_manifest_of_them(sharded: Saved) -> None:
    assert sharded.manifest["format"] == 2
    assert {name.split("/")[0] for name in sharded.manifest["files"]} == {"model", "shards", "state.json"}
    shards = sorted((sharded.path / "shards").iterdir())
    assert len(shards) == 2 and not any(b"pickle" in p.read_bytes()[:4096] for p in shards)
    sizes = [sum(t.numel() for t in load_file(p).values()) for p in shards]
    assert abs(sizes[0] - sizes[1]) < 0.01 * sizes[0]  # each its own part and not all of it
    assert not (sharded.path / "model/model.safetensors").exists()


def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(sharded: Saved, pair: TrainGroup, spec: TrainSpec) -> None:
    one = spec.plain_engine()
    load(one, sharded)
    pair.load(sharded.path, sharded.state["engine"])
    train(one, (5,))
    train(pair, (5,))
    assert far(one, pair) < 2e-6
    with pytest.raises(AssertionError):  # the steps do change the state
        load_again = spec.plain_engine()
        load(load_again, sharded)
        assert far(one, load_again) < 2e-6


def test_a_checkpoint_of_one_process_goes_on_on_two_ranks(whole: Saved, pair: TrainGroup, spec: TrainSpec) -> None:
    load(pair, whole)
    one = spec.plain_engine()
    load(one, whole)
    train(one, (5,))
    train(pair, (5,))
    assert far(one, pair) < 2e-6


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_on_three(
    sharded: Saved, spec: TrainSpec, pair: TrainGroup, tmp_path: Path
) -> None:
    with contextlib.closing(start(spec, 3, tmp_path / "logs")) as three:
        load(three, sharded)
        again = save(three, tmp_path / "again")
        train(three, (5,))
        load(pair, again)
        train(pair, (5,))
        assert far(three, pair) < 2e-6
    assert again.manifest["weights"] == sharded.manifest["weights"]


def test_a_checkpoint_of_one_process_has_the_form_that_it_had(whole: Saved) -> None:
    assert whole.manifest["format"] == 1
    assert {"model/model.safetensors", "model/config.json", "optimizer.safetensors", "state.json"} <= set(
        whole.manifest["files"]
    )
    names = set(load_file(whole.path / "optimizer.safetensors"))
    assert {name.rsplit(".", 1)[1] for name in names} == {"exp_avg", "exp_avg_sq"}


def test_a_frozen_engine_takes_the_weights_alone(sharded: Saved, spec: TrainSpec) -> None:
    frozen = TrainSpec(spec.model, threads=1).plain_engine()
    frozen.load(sharded.path, sharded.state["engine"])
    assert frozen.digests("weights")["weights"] == sharded.manifest["weights"]


def copied(saved: Saved, target: Path) -> Path:
    shutil.copytree(saved.path, target)
    return target


@pytest.mark.parametrize("damage", ["dropped", "unknown", "shard", "dtype"])
def test_shards_that_do_not_hold_everything_are_refused_by_name_and_change_nothing(
    sharded: Saved, spec: TrainSpec, pair: TrainGroup, tmp_path: Path, damage: str
) -> None:
    path, name = copied(sharded, tmp_path / "global_step_2"), "weights/model.norm.weight"
    files = sorted((path / "shards").iterdir())
    if damage == "shard":
        files[0].unlink()
    else:
        for file in files:
            change(file, name, damage)
    words = (
        "there are 49152 of 98304 values"
        if damage == "shard"
        else "made.up"
        if damage == "unknown"
        else r"model\.norm\.weight"
    )
    for engine in (spec.plain_engine(), pair):
        before = engine.digests()
        with pytest.raises(EngineError, match=words):
            engine.load(path, sharded.state["engine"])
        assert engine.digests() == before


def change(file: Path, name: str, damage: str) -> None:
    """Write ``file`` anew without the tensor ``name``, or with another one."""
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors, places = load_file(file), json.loads(metadata["DCP_SHARDING_INFO"])
    if damage == "dropped":
        del tensors[name], places[name]
    elif damage == "dtype":
        tensors[name] = tensors[name].double()
    else:
        tensors["weights/made.up"], places["weights/made.up"] = tensors[name].clone(), places[name]
    save_file(tensors, file, metadata | {"DCP_SHARDING_INFO": json.dumps(places)})


def test_a_file_that_was_changed_is_refused_and_so_is_one_that_is_gone(sharded: Saved, tmp_path: Path) -> None:
    path = copied(sharded, tmp_path / "global_step_2")
    file = sorted((path / "shards").iterdir())[1]
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"00002-model.*was changed since it was saved"):
        CheckpointStore(tmp_path).load(path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"00002-model.*is missing"):
        CheckpointStore(tmp_path).load(path)


def test_a_value_that_is_lost_on_the_way_changes_the_digest(sharded: Saved, spec: TrainSpec) -> None:
    one = spec.plain_engine()
    load(one, sharded)
    with torch.no_grad():
        next(iter(dict(one.named_weights()).values()))[0, 0] += 1e-7
    assert one.digests()["weights"] != sharded.manifest["weights"]


@pytest.mark.parametrize("form", ["sharded", "whole"])
def test_any_checkpoint_becomes_a_hugging_face_folder_without_ranks(
    form: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    saved: Saved = request.getfixturevalue(form)
    export_hf(saved.path, tmp_path / "hf")
    model: Any = load_causal_lm(tmp_path / "hf")
    found = weights_digest((name, p.detach()) for name, p in distinct_parameters(model))
    assert found == saved.manifest["weights"]
    assert model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight


def pids(group: TrainGroup) -> list[int]:
    return [int(worker.process.split()[1]) for worker in group._calls.workers]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_under_one_rank_is_an_error_that_leaves_nothing_and_the_ranks_go_on(
    pair: TrainGroup, tmp_path: Path, rank: int
) -> None:
    """A limit on the size of a file stands for the full disk: the write fails in the middle."""
    pid = pids(pair)[rank]
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*global_step_2: .*[Ff]ile too large"):
            save(pair, tmp_path)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    assert save(pair, tmp_path).manifest["format"] == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_cannot_make_its_folder_is_an_error_of_all_at_once_and_the_ranks_go_on(
    pair: TrainGroup, tmp_path: Path, rank: int
) -> None:
    """The driver's folder is not there on another machine."""
    pair._calls.all("elsewhere", "move", rank, str(tmp_path / "not" / "here"))
    started = time.monotonic()
    try:
        with pytest.raises(
            CheckpointError, match=rf"here/shards'.*all ranks must write to one folder.*\(rank {rank}\)"
        ):
            save(pair, tmp_path / "run")
    finally:
        pair._calls.all("elsewhere", "move", rank, "")
    assert time.monotonic() - started < 20.0 and list((tmp_path / "run").iterdir()) == []
    assert save(pair, tmp_path / "run").manifest["format"] == 2


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_ranks_write_to_a_folder_of_their_own_is_never_published(
    pair: TrainGroup, spec: TrainSpec, tmp_path: Path, world: int
) -> None:
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    theirs.mkdir()
    with contextlib.ExitStack() as stack:
        group = pair if world == 2 else stack.enter_context(contextlib.closing(start(spec, 1, tmp_path / "logs")))
        group._calls.all("elsewhere", "move", -1, str(theirs))
        try:
            with pytest.raises(CheckpointError, match=r"does not hold model/config\.json.*must share the folder"):
                save(group, run)
        finally:
            group._calls.all("elsewhere", "move", -1, "")
        assert list(theirs.iterdir()) and list(run.iterdir()) == []  # they did write
        assert save(group, run).manifest["format"] == world


def test_a_folder_without_weights_is_never_published(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=r"model/\*\.safetensors and shards/\*\.safetensors are both missing"):
        store.save(1, lambda folder: (folder / "model.safetensors").write_bytes(b"") and None, {}, {}, 0)
    assert list(tmp_path.iterdir()) == [] and store.latest() is None


@pytest.mark.slow
def test_a_rank_killed_while_it_writes_leaves_nothing_that_looks_complete(spec: TrainSpec, tmp_path: Path) -> None:
    with contextlib.closing(start(spec, 2, tmp_path / "logs")) as group:
        folder, pid = tmp_path / "run", pids(group)[1]

        def kill() -> None:
            deadline = time.monotonic() + 30.0
            while not list(folder.glob(".global_step_2.*/shards")) and time.monotonic() < deadline:
                time.sleep(0.001)
            os.kill(pid, 9)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(WorkerDied, match="train-1"):
            save(group, folder)
        killer.join()
    assert list(folder.iterdir()) == [] and CheckpointStore(folder).latest() is None
