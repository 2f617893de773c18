"""Ranks of their own for each test: the ends that a group of ranks can come to, and a group of one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from models_for_tests import batch, tiny, wide
from ranks_cases import On, policy_gradient, saved_spec, spec_of, start

from crossrl.batch import Batch
from crossrl.cluster.worker import WorkerDied, WorkerError, WorkerLate
from crossrl.engines.base import EngineError
from crossrl.engines.train.group import TrainGroup
from crossrl.engines.train.spec import TrainSpec

pytestmark = pytest.mark.slow
LIMIT_S = 4.0
GROUPS = [(3, [5, 1, 9]), (11, [2, 7, 4, 4]), (1, [6]), (5, [1, 1])]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TrainSpec:
    return saved_spec(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def group(spec: TrainSpec, tmp_path: Path) -> Iterator[TrainGroup]:
    with contextlib.closing(start(spec, 2, tmp_path, LIMIT_S)) as group:
        yield group


def data() -> Batch:
    return batch(GROUPS, vocabulary=512)


def step(group: TrainGroup, what: str) -> None:
    group.step(data(), On(1, what), lr=1e-3, temperature=1.0, entropy=False)


def ends(group: TrainGroup, run: Callable[[], None], error: type[WorkerError], words: str) -> None:
    """``run`` fails within about the limit, in ``words`` that blame rank 1; the group is gone then, and says so."""
    pids = [int(worker.process.split()[1]) for worker in group._calls.workers]
    started = time.monotonic()
    with pytest.raises(error, match=words) as caught:
        run()
    assert time.monotonic() - started < LIMIT_S + 8.0
    assert caught.value.worker == "train-1"
    assert "last checkpoint" in str(caught.value)
    with pytest.raises(EngineError, match=r"not there any more: .*train-1"):
        group.log_probs(data(), 1.0, False)
    time.sleep(0.2)
    assert not any(Path(f"/proc/{pid}").is_dir() and "Z" not in state(pid) for pid in pids)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_a_rank_that_dies_is_named_and_not_the_one_that_lost_it(group: TrainGroup) -> None:
    ends(group, lambda: step(group, "die"), WorkerDied, r"train-1 \(process \d+\) has died at step \(signal SIGKILL\)")


def test_a_rank_that_hangs_is_named_within_the_limit(group: TrainGroup) -> None:
    ends(
        group,
        lambda: step(group, "hang"),
        WorkerLate,
        r"for train-1 \(process \d+\) to do an optimizer step.*loss of m",
    )


@pytest.mark.long
def test_a_rank_that_is_stopped_is_named_within_the_limit(group: TrainGroup) -> None:
    ends(group, lambda: step(group, "stop"), WorkerLate, r"for train-1 .*rank 1 gives no sign of life")


def test_a_rank_that_fails_is_named_with_its_own_words(group: TrainGroup) -> None:
    group._calls.all("broken", "break", 1)
    ends(group, lambda: step(group, ""), WorkerError, r"train-1 \(process \d+\) failed at step: IndexError: list index")


@pytest.mark.long
def test_a_rank_that_dies_between_two_calls_is_named(group: TrainGroup) -> None:
    os.kill(int(group._calls.workers[1].process.split()[1]), 9)
    ends(group, lambda: step(group, ""), WorkerDied, r"train-1 \(process \d+\) has died")


def test_a_model_that_cannot_be_loaded_ends_the_start_with_the_reason(spec: TrainSpec, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"no such model folder: /nowhere.*nothing was trained yet"):
        start(spec_of(Path("/nowhere")), 2, tmp_path)


@pytest.mark.long
def test_a_start_has_a_limit_of_its_own_and_promises_no_checkpoint(spec: TrainSpec, tmp_path: Path) -> None:
    words = r"waited [01] s for train-0 .*train-1 .* to start: no answer.*not started.*nothing was trained yet$"
    with pytest.raises(WorkerLate, match=words) as caught:
        start(spec, 2, tmp_path, start_s=0.3)  # PyTorch alone takes longer to import
    assert "checkpoint" not in str(caught.value)


def test_what_one_rank_alone_refuses_is_told_at_once_and_ends_the_group(spec: TrainSpec, tmp_path: Path) -> None:
    with contextlib.closing(start(spec, 2, tmp_path, limit_s=100.0)) as group:
        started = time.monotonic()
        with pytest.raises(OSError, match=r"no space left on machine-1; train-0 \(process \d+\) did not come to the"):
            group._calls.all("apart_in_the_end", "write", 1)
        assert time.monotonic() - started < 20.0
        with pytest.raises(EngineError, match="not there any more: no space left on machine-1"):
            group.log_probs(data(), 1.0, False)


@pytest.mark.long
def test_ranks_with_other_weights_do_not_start(spec: TrainSpec, tmp_path: Path) -> None:
    other = tmp_path / "other"
    wide(seed=1, tie_word_embeddings=True).save_pretrained(other)
    with pytest.raises(WorkerError, match=r"ranks \[1\] have loaded other weights than rank 0"):
        start([spec, spec_of(other)], 2, tmp_path)


def test_one_rank_is_the_plain_engine_bit_for_bit(spec: TrainSpec, tmp_path: Path) -> None:
    one = spec.plain_engine()
    with contextlib.closing(start(spec, 1, tmp_path)) as group:
        assert group.facts == one.facts
        for _ in range(2):
            a, b = (
                engine.step(data(), policy_gradient, lr=1e-3, temperature=0.7, entropy=True) for engine in (one, group)
            )
            np.testing.assert_array_equal(a.log_probs.values, b.log_probs.values)
            assert (a.loss, a.grad_norm, a.sums) == (b.loss, b.grad_norm, b.sums)
        assert one.digests() == group.digests()


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.long)])
def test_weights_that_are_kept_during_a_step_give_the_same_gradient(
    spec: TrainSpec, tmp_path: Path, checkpointing: bool
) -> None:
    """``reshard`` False, and gradient checkpointing with and without it."""
    kept = spec_of(Path(spec.model), reshard=checkpointing, gradient_checkpointing=checkpointing)
    one = spec.plain_engine()
    with contextlib.closing(start(kept, 3 if checkpointing else 2, tmp_path)) as group:
        for _ in range(2):
            group.log_probs(data(), 1.0, False)
            a, b = (
                engine.step(data(), policy_gradient, lr=1e-3, temperature=0.7, entropy=True) for engine in (one, group)
            )
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
        mine, whole = one.state().named(), group.state().named()
        assert max(float((mine[n] - whole[n]).abs().max()) for n in mine) < 3e-6


@pytest.mark.long
@pytest.mark.parametrize("name", ["GptOss", "Bloom"])
def test_experts_and_models_without_packed_attention_are_sharded_as_well(name: str, tmp_path: Path) -> None:
    tiny(name).save_pretrained(tmp_path / "model")
    given, spec = batch(GROUPS), spec_of(tmp_path / "model")
    one = spec.plain_engine()
    with contextlib.closing(start(spec, 2, tmp_path / "logs")) as group:
        assert group.facts.packed == one.facts.packed == (name != "Bloom")
        a, b = (engine.log_probs(given, 0.7, True)[0].values for engine in (one, group))
        np.testing.assert_array_equal(a, b)
        for engine in (one, group):
            engine.step(given, policy_gradient, lr=1e-3, temperature=0.7, entropy=True)
        mine, whole = one.state().optimizer, group.state().optimizer
        assert max(float((mine[n] - whole[n]).abs().max()) for n in mine) < 1e-7


@pytest.mark.long
def test_a_frozen_model_is_scored_on_two_ranks_and_not_trained(spec: TrainSpec, tmp_path: Path) -> None:
    frozen = replace(spec, optimizer=None)
    expected, _ = frozen.plain_engine().log_probs(data(), 1.0, False)
    with contextlib.closing(start(frozen, 2, tmp_path)) as group:
        np.testing.assert_array_equal(group.log_probs(data(), 1.0, False)[0].values, expected.values)
        assert group.facts.state_tensors == len(dict(group.named_weights()))
        with pytest.raises(EngineError, match="without an optimizer"):
            group.step(data(), policy_gradient, lr=1e-3, temperature=1.0, entropy=False)
        group.log_probs(data(), 1.0, False)
