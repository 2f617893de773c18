"""The seam: a stage sees what it declares, writes what it declares, and dynamic sampling keeps what it accepted."""

import numpy as np
import pytest

from crossrl.batch import Batch, BatchError, Ragged
from crossrl.loop import NoSignal, Sampler, StepLog, collect, train_step
from crossrl.stages.base import At, apply


class Score:
    """A stage whose rewards are given by a function of the sample id."""

    name, reads, writes = "reward", ("group_id",), ("reward",)

    def __init__(self, reward):
        self.reward = reward
        self.calls = []

    def __call__(self, batch, at):
        self.calls.append((at.call, tuple(batch.columns)))
        return Batch(batch.sample_id, {"reward": np.array([self.reward(s) for s in batch.sample_id], np.float64)})


def prompts(groups, n=2, first=0):
    ids = [f"d.e0.r{g}.n{k}" for g in range(first, first + groups) for k in range(n)]
    return Batch(tuple(ids), {"group_id": [i.rsplit(".", 1)[0] for i in ids],
                              "prompt_ids": Ragged.from_rows([[1]] * len(ids), np.int32)})  # fmt: skip


def source(*sizes):
    left, first = list(sizes), 0

    def draw(groups):
        nonlocal first
        if not left:
            return None
        size = left.pop(0)
        first += size
        return prompts(size, first=first - size)

    return draw


def test_a_stage_gets_only_the_fields_that_it_reads():
    stage = Score(lambda s: 1.0)
    apply(stage, prompts(1), At(1))
    assert stage.calls == [(0, ("group_id",))]


def test_a_stage_that_writes_another_field_is_an_error():
    stage = Score(lambda s: 1.0)
    stage.writes = ("reward", "score")
    with pytest.raises(BatchError, match="score"):
        apply(stage, prompts(1), At(1))


def test_a_stage_that_drops_a_sample_is_an_error():
    class Drops(Score):
        def __call__(self, batch, at):
            return super().__call__(batch.take([0]), at)

    with pytest.raises(BatchError, match="1 missing"):
        apply(Drops(lambda s: 1.0), prompts(1), At(1))


def even_groups_differ(sample):
    group, repeat = int(sample.split(".")[2][1:]), int(sample[-1])
    return float(repeat) if group % 2 == 0 else 1.0


def run_collect(sampler):
    log, stage = StepLog(), Score(even_groups_differ)
    return collect(lambda name, b, call: apply(stage, b, At(1, call)) if name == "reward" else b, sampler, log), log


def test_dynamic_sampling_draws_until_enough_groups_differ():
    batch, log = run_collect(Sampler(source(4, 4, 4), groups=4, want=3))
    assert [i.rsplit(".", 1)[0] for i in batch.sample_id] == [f"d.e0.r{g}" for g in (0, 0, 2, 2, 4, 4)]
    assert log.metrics["sampler/draws"] == 2 and not log.notes


def test_dynamic_sampling_uses_what_it_has_when_data_end_and_reports_the_shortfall():
    batch, log = run_collect(Sampler(source(2), groups=2, want=3))
    assert len(batch) == 2
    assert log.notes == ["only 1 of 3 groups carry a signal after 1 draws: used as they are"]


def test_dynamic_sampling_without_any_signal_is_an_error():
    stage = Score(lambda s: 1.0)
    with pytest.raises(NoSignal, match="0 of 4 samples have no score"):
        collect(lambda name, b, call: apply(stage, b, At(1)) if name == "reward" else b,
                Sampler(source(2), groups=2, want=1, max_draws=1), StepLog())  # fmt: skip


def test_when_the_data_end_in_the_middle_of_looking_for_a_signal_the_run_ends_and_does_not_fail():
    stage = Score(lambda s: 1.0)
    found = collect(lambda name, b, call: apply(stage, b, At(1)) if name == "reward" else b,
                    Sampler(source(2), groups=2, want=1), StepLog())  # fmt: skip
    assert found is None


def test_a_signal_that_no_sample_has_is_an_error_even_at_the_end_of_the_data():
    stage = Score(lambda s: float("nan"))
    with pytest.raises(NoSignal, match="4 of 4 samples have no score"):
        collect(lambda name, b, call: apply(stage, b, At(1)) if name == "reward" else b,
                Sampler(source(2), groups=2, want=1), StepLog())  # fmt: skip


def test_no_data_left_is_not_a_step():
    assert train_step({"reward": Score(even_groups_differ)}, Sampler(source(), groups=2), 1, StepLog()) is None


def test_each_call_of_generation_within_a_step_has_its_own_index():
    stage = Score(even_groups_differ)
    train_step({"reward": stage}, Sampler(source(1, 1, 1, 1), groups=1, want=2), 1, StepLog())
    assert [call for call, _ in stage.calls] == [0, 1, 2]
