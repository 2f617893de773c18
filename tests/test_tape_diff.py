"""Two recorded runs compared, and one run read in Python: identity before values, inputs before blame."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossrl.batch import Batch, Meaning, Ragged
from crossrl.stages.base import At
from crossrl.tape.api import open_run
from crossrl.tape.diff import diff_runs
from crossrl.tape.errors import CorruptRecord, Mismatch, RecordMissing, TapeError
from crossrl.tape.gap import gap_at
from crossrl.tape.layout import RunLayout
from crossrl.tape.tape import Tape, TapeOptions

SAMPLES = 6
RAW, SCALED = Meaning(1.0, "none", "hf", 0), Meaning(0.6, "none", "fsdp", 0)


@dataclass
class Fake:
    """A stage with given output, to plant what a real one would have done wrong."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    make: Callable[[Batch, At], Batch]

    def __call__(self, batch: Batch, at: At) -> Batch:
        return self.make(batch, at)


@dataclass
class Faults:
    """``mix_from``: from this step the trainer is given the next sample's prompt (C05). ``one_step``: without
    old_log_prob, the update computes the trainer's log-probs, but not of the last sample. ``bypass``: old_log_probs are
    the sampler's."""

    mix_from: int = 99
    sampler: Meaning = field(default_factory=lambda: Meaning(1.0, "none", "hf", 0))
    trainer: Meaning = field(default_factory=lambda: Meaning(1.0, "none", "fsdp", 0))
    gap: float = 0.0
    reward_shift: float = 0.0
    token: int = 0
    ids: str = "d"
    version: int = 0
    lr: float = 1e-6
    weights: str = "w"
    accept: tuple[str, ...] = ()
    one_step: bool = False
    bypass: bool = False


def prompts(step: int, ids: str = "d") -> Batch:
    names = tuple(f"{ids}/0/{step}/{i}" for i in range(SAMPLES))
    rows = [[100 + i, step] for i in range(SAMPLES)]
    text = [f"p{i}" for i in range(SAMPLES)]
    return Batch(
        names,
        {
            "group_id": text, "prompt_ids": Ragged.from_rows(rows, np.int32), "prompt": text, "data_source": text,
            "ground_truth": text, "extra_info": [{}] * SAMPLES,
        },
    )  # fmt: skip


def log_probs(batch: Batch) -> Ragged:
    """A function of prompt and response, as a policy's would be."""
    rows = [
        [-0.01 * (p[0] - 99) - 0.001 * t for t in r]
        for p, r in zip(batch.ragged("prompt_ids").rows(), batch.ragged("response_ids").rows(), strict=True)
    ]
    return Ragged.from_rows(rows, np.float32)


def record_run(folder: Path, faults: Faults | None = None, steps: int = 4, skip: tuple[str, ...] = ()) -> Path:
    """A run of learning rate 0: rollout, reward, old_log_prob, update."""
    f = faults or Faults()

    def rollout(batch: Batch, at: At) -> Batch:
        ids = Ragged.from_rows([[i + f.token, 5, 6][: 1 + i % 3] for i in range(SAMPLES)], np.int32)
        columns: dict[str, Any] = {
            "response_ids": ids, "response_mask": Ragged.full_like(ids, 1, np.uint8),
            "rollout_log_probs": log_probs(batch.with_columns(response_ids=ids)),
            "response": [str(i) for i in range(SAMPLES)],
            "rollout_weight_version": np.full(SAMPLES, f.version, np.int64),
        }  # fmt: skip
        return Batch(batch.sample_id, columns, {"rollout_log_probs": f.sampler})

    def reward(batch: Batch, at: At) -> Batch:
        return Batch(batch.sample_id, {"reward": np.arange(SAMPLES) + f.reward_shift * (np.arange(SAMPLES) == 2)})

    def old(batch: Batch, at: At) -> Batch:
        meaning = f.sampler if f.bypass else f.trainer
        return Batch(batch.sample_id, {"old_log_probs": trainers(batch)}, {"old_log_probs": meaning})

    def trainers(batch: Batch) -> Ragged:
        values = log_probs(batch)
        return Ragged(values.values + np.float32(f.gap), values.lengths)

    def update(batch: Batch, at: At) -> Batch:
        info = {"loss": 0.5, "timing/step": 1.0}
        if not (f.one_step or f.bypass):
            return Batch(batch.sample_id, {}, {}, info)
        column = trainers(batch)
        column.values[column.offsets[-2] :] = np.nan
        return Batch(batch.sample_id, {"log_probs": column}, {"log_probs": f.trainer}, info)

    sampled = ("response_ids", "response_mask", "rollout_log_probs", "response", "rollout_weight_version")
    stages = [
        Fake("rollout", ("prompt_ids",), sampled, rollout),
        Fake("reward", ("response", "ground_truth"), ("reward",), reward),
        Fake("old_log_prob", ("prompt_ids", "response_ids"), ("old_log_probs",), old),
        Fake("update", ("old_log_probs", "reward"), (), update),
    ]
    if f.one_step:
        del stages[2]
    if f.one_step or f.bypass:
        stages[-1] = Fake("update", ("prompt_ids", "response_ids", "reward"), ("log_probs",), update)
    settings = {"rollout": {"temperature": 1.0}, "actor": {"lr": f.lr}, "weights": f.weights}

    def fingerprint(stage: str, split: str) -> dict[str, Any]:
        return settings if stage == "update" else {"weights": f.weights}

    tape = Tape(RunLayout(folder), folder.name, fingerprint, TapeOptions(accept=f.accept))
    for key in f.accept:  # as after loading a record that differed there
        tape.accepted.append(Mismatch(key, 1.0, 0.7))
    for step in range(1, steps + 1):
        batch = prompts(step, f.ids)
        for stage in stages:
            if stage.name in skip:
                taped: Any = stage
            else:
                taped = tape.wrap(stage, "record")
            given = batch
            if stage.name == "old_log_prob" and step >= f.mix_from:
                index = [(i + 1) % SAMPLES for i in range(SAMPLES)]
                columns = {**batch.columns, "prompt_ids": batch.ragged("prompt_ids").take(np.array(index))}
                given = Batch(batch.sample_id, columns, batch.meanings)
            batch = batch.join(taped(given.only(taped.reads), At(step)))
    tape.close()
    return folder


def test_equal_runs_are_equal(tmp_path: Path) -> None:
    diff = diff_runs(record_run(tmp_path / "a"), record_run(tmp_path / "b"))
    assert (diff.verdict, diff.first, diff.compared, diff.exit_code) == ("equal", None, 16, 0)
    assert "16 pairs of records compared: equal" in diff.text()


@pytest.mark.parametrize(
    ("faults", "verdict", "stage", "field_", "sample"),
    [
        (Faults(reward_shift=0.5), "values differ", "reward", "reward", "d/0/1/2"),
        (Faults(gap=0.125), "values differ", "old_log_prob", "old_log_probs", "d/0/1/0"),
        (Faults(token=1), "tokens differ", "rollout", "response_ids", "d/0/1/0"),
        (Faults(ids="e"), "samples differ", "rollout", "sample_id", "d/0/1/0"),
        (Faults(weights="v"), "weights differ", "rollout", "weights", None),
        (Faults(sampler=Meaning(0.6, "none", "hf", 0)), "meaning differs", "rollout", "rollout_log_probs", None),
        (Faults(version=1), "values differ", "rollout", "rollout_weight_version", "d/0/1/0"),
    ],
)
def test_the_first_difference_is_named(
    tmp_path: Path, faults: Faults, verdict: str, stage: str, field_: str, sample: str | None
) -> None:
    diff = diff_runs(record_run(tmp_path / "a"), record_run(tmp_path / "b", faults))
    assert diff.first is not None and diff.exit_code == 1
    assert (diff.verdict, diff.first.stage, diff.first.at.step) == (verdict, stage, 1)
    assert (diff.first.field, diff.first.sample_id) == (field_, sample)
    body = json.loads(json.dumps(diff.to_json()))
    assert (body["verdict"], body["first"]["field"], body["first"]["at"]["step"]) == (verdict, field_, 1)
    assert verdict in diff.text() and diff.first.line() in diff.text()


def test_a_difference_within_the_tolerance_passes(tmp_path: Path) -> None:
    a, b = record_run(tmp_path / "a"), record_run(tmp_path / "b", Faults(reward_shift=0.5))
    assert diff_runs(a, b, {"reward": 0.5}).verdict == "equal"  # where it is written, and where update reads it
    assert diff_runs(a, b, {"reward": 0.4}).verdict == "values differ"


def test_an_input_of_unknown_value_does_not_pass_with_a_tolerance(tmp_path: Path) -> None:
    a = record_run(tmp_path / "a", skip=("reward",))
    b = record_run(tmp_path / "b", Faults(reward_shift=9.0), skip=("reward",))
    diff = diff_runs(a, b, {"reward": 0.5})
    assert diff.first is not None and (diff.verdict, diff.first.field) == ("inputs differ", "reward")
    assert "reward is not recorded in both, so its tolerance cannot be applied" in diff.text()


def test_settings_that_differ_are_listed_whatever_the_verdict(tmp_path: Path) -> None:
    diff = diff_runs(record_run(tmp_path / "a"), record_run(tmp_path / "b", Faults(lr=2e-6)))
    assert diff.verdict == "settings differ" and diff.exit_code == 1
    assert [(m.key, m.recorded, m.found) for m in diff.settings["update"]] == [("actor.lr", 1e-6, 2e-6)]
    assert "actor.lr: A 1e-06, B 2e-06" in diff.text()


def test_c05_mixed_up_samples_are_inputs_that_differ_not_wrong_inference(tmp_path: Path) -> None:
    healthy, mixed = record_run(tmp_path / "a"), record_run(tmp_path / "b", Faults(mix_from=3))
    diff = diff_runs(healthy, mixed)
    assert diff.first is not None and diff.verdict == "inputs differ"
    assert (diff.first.stage, diff.first.at.step, diff.first.field) == ("old_log_prob", 3, "prompt_ids")
    assert "d/0/3/0, d/0/3/1" in diff.text() and "Samples were mixed up between two stages" in diff.text()
    run = open_run(mixed)
    assert [gap_at(run, step).verdict for step in (1, 2, 3, 4)] == ["comparable"] * 2 + ["inputs differ"] * 2
    before = gap_at(run, 2)
    assert before.gap is not None and before.gap.max_abs == 0.0
    found = gap_at(run, 3)
    assert found.gap is None and found.inputs[0].field == "prompt_ids" and "d/0/3/0" in found.reason


def test_c05_needs_no_second_run_and_is_found_with_the_same_fault_on_both_sides(tmp_path: Path) -> None:
    a, b = (record_run(tmp_path / n, Faults(mix_from=3)) for n in "ab")
    diff = diff_runs(a, b)
    assert diff.verdict == "inputs differ" and "within run A" in diff.text()


def test_the_numbers_alone_would_blame_inference(tmp_path: Path) -> None:
    """The planted control of C05: compared by value only, step 3 looks like a large sampler-trainer gap."""
    run = open_run(record_run(tmp_path / "b", Faults(mix_from=3)))
    view = run.samples(3)[0]
    assert view.sampler_log_probs is not None and view.trainer_log_probs is not None
    assert np.abs(view.sampler_log_probs - view.trainer_log_probs).max() > 0.005


@pytest.mark.parametrize(
    ("sampler", "trainer", "verdict"),
    [
        (Meaning(0.6, "none", "hf", 0), Meaning(0.6, "none", "fsdp", 0), "comparable"),  # (b)
        (Meaning(1.0, "none", "hf", 0), Meaning(0.6, "none", "fsdp", 0), "different meaning"),  # (a) at 0.6
        (Meaning(0.6, "top_p=0.8", "hf", 0), Meaning(0.6, "none", "fsdp", 0), "ratios not comparable"),  # (c) at 0.8
    ],
)
def test_c07_what_log_probs_mean_comes_before_their_gap(
    tmp_path: Path, sampler: Meaning, trainer: Meaning, verdict: str
) -> None:
    a, b = (record_run(tmp_path / n, Faults(sampler=sampler, trainer=trainer, gap=0.5)) for n in "ab")
    view = gap_at(open_run(a), 1)
    assert view.verdict == verdict and view.lag == 0
    assert (view.gap is None) == (verdict == "different meaning")
    diff = diff_runs(a, b)
    assert diff.verdict == "equal" and bool(diff.warnings) == (verdict != "comparable")
    assert "lag" not in diff.text() and "lag" not in view.reason
    if verdict != "comparable":
        assert verdict in diff.text()


def test_lag_is_reported_only_from_weight_versions(tmp_path: Path) -> None:
    faults = Faults(version=2, trainer=Meaning(1.0, "none", "fsdp", 5))
    assert gap_at(open_run(record_run(tmp_path / "a", faults)), 1).lag == 3


@pytest.mark.parametrize("faults", [Faults(one_step=True, gap=0.125), Faults(bypass=True, gap=0.125)])
def test_without_old_log_probs_of_the_trainer_those_of_the_update_are_compared(tmp_path: Path, faults: Faults) -> None:
    run = open_run(record_run(tmp_path / "a", faults))
    view = gap_at(run, 1)
    assert view.gap is not None and (view.verdict, view.column) == ("comparable", "log_probs")
    assert view.gap.max_abs == pytest.approx(0.125) and view.gap.uncomputed == 3
    first, *_, last = run.samples(1)
    assert first.worst()[0][2:] == pytest.approx((-0.01, 0.115))
    assert last.worst() == [] and last.tokens()[0][3] is None  # the update did not compute it
    assert gap_at(open_run(record_run(tmp_path / "b", Faults(gap=0.125))), 1).column == "old_log_probs"


def test_a_gap_without_log_probs_of_the_trainer_names_what_is_recorded(tmp_path: Path) -> None:
    run = open_run(record_run(tmp_path / "a", skip=("old_log_prob", "update")))
    with pytest.raises(RecordMissing, match=r"no log-probs of the trainer .*step 1 .*recorded: rollout\.0, reward\.0"):
        gap_at(run, 1)
    assert run.samples(1)[0].trainer_log_probs is None and run.samples(1)[0].worst() == []


def test_runs_with_nothing_in_common_are_not_equal(tmp_path: Path) -> None:
    a = record_run(tmp_path / "a", skip=("reward", "old_log_prob", "update"))
    b = record_run(tmp_path / "b", skip=("rollout",))
    diff = diff_runs(a, b)
    assert (diff.verdict, diff.exit_code, diff.compared) == ("nothing to compare", 2, 0)
    with pytest.raises(RecordMissing, match="no recorded steps"):
        diff_runs(a, tmp_path / "none")


def test_a_run_that_is_only_shorter_is_equal_as_far_as_both_go(tmp_path: Path) -> None:
    a, b = record_run(tmp_path / "a"), record_run(tmp_path / "b", steps=2)
    diff = diff_runs(a, b)
    assert (diff.verdict, diff.compared, diff.exit_code) == ("equal as far as both go", 8, 0)
    assert "8 pairs of records compared: equal as far as both go: steps 1 to 2\n" in diff.text()
    assert diff.warnings == ("A has the steps 1 to 4 (4), B 1 to 2 (2); the common ones are compared",)
    assert diff_runs(a, record_run(tmp_path / "c", Faults(gap=1.0), steps=2)).verdict == "values differ"


def test_a_run_that_lacks_a_stage_or_a_step_in_between_is_not_equal(tmp_path: Path) -> None:
    a = record_run(tmp_path / "a")
    diff = diff_runs(a, record_run(tmp_path / "b", steps=2, skip=("reward",)))
    assert (diff.verdict, diff.compared, diff.exit_code) == ("records missing", 6, 1)
    assert "reward.0 of 2 steps from 1 to 2 is recorded in A only" in diff.warnings
    assert "records missing: within steps 1 to 2, which both cover" in diff.text()
    c = record_run(tmp_path / "c")
    shutil.rmtree(c / "step_000002")
    diff = diff_runs(c, a)
    assert (diff.verdict, diff.compared, diff.exit_code) == ("records missing", 12, 1)
    assert "everything of step 2 is recorded in B only" in diff.warnings
    worse = diff_runs(c, record_run(tmp_path / "d", Faults(reward_shift=1.0)))
    assert worse.verdict == "values differ"  # a difference says more than a gap


def test_accepted_deviations_of_either_run_are_mentioned(tmp_path: Path) -> None:
    a, b = record_run(tmp_path / "a"), record_run(tmp_path / "b", Faults(accept=("rollout.temperature",)))
    diff = diff_runs(a, b)
    (line,) = diff.warnings
    assert line.startswith("run B is not a valid reproduction; it accepted: rollout.temperature: recorded 1.0, found")
    assert line in diff.text() and not diff_runs(a, record_run(tmp_path / "c")).warnings


def test_a_corrupt_record_is_not_compared(tmp_path: Path) -> None:
    a, b = record_run(tmp_path / "a"), record_run(tmp_path / "b")
    file = b / "step_000001" / "rollout.0" / "columns.json"
    file.write_bytes(file.read_bytes().replace(b'"3"', b'"4"'))
    with pytest.raises(CorruptRecord, match=r"columns\.json"):
        diff_runs(a, b)


def test_a_run_reads_like_a_book(tmp_path: Path) -> None:
    record_run(tmp_path / "out" / "tape")
    run = open_run(tmp_path / "out")
    assert run.steps() == [1, 2, 3, 4]
    assert run.stages(2) == ["rollout", "reward", "old_log_prob", "update"]
    assert run.record(2, "reward").batch.array("reward").tolist() == list(range(SAMPLES))
    view = run.sample("d/0/3/2")
    assert (view.step, view.prompt, view.response, view.reward) == (3, "p2", "2", 2.0)
    assert [t[:2] for t in view.tokens()] == [(0, 2), (1, 5), (2, 6)]
    assert view.sampler_log_probs is not None and view.meanings["old_log_probs"].engine == "fsdp"
    assert len(run.samples(1)) == SAMPLES
    with pytest.raises(RecordMissing, match=r"no record at .*recorded at step 2 \(train\): rollout\.0, reward\.0"):
        run.record(2, "advantage")
    with pytest.raises(RecordMissing, match="sample 'nobody' is not recorded in 4 steps"):
        run.sample("nobody")


def test_the_tokens_that_differ_most_come_first(tmp_path: Path) -> None:
    view = open_run(record_run(tmp_path / "b", Faults(mix_from=1))).sample("d/0/1/2")
    worst = view.worst(2)
    assert len(worst) == 2 and abs(worst[0][2] - worst[0][3]) >= abs(worst[1][2] - worst[1][3])


def test_the_inputs_of_a_stage_are_put_together_from_earlier_records(tmp_path: Path) -> None:
    run = open_run(record_run(tmp_path / "a"))
    batch = run.inputs(2, "old_log_prob")
    assert set(batch.columns) == {"prompt_ids", "response_ids"}
    assert (
        log_probs(batch).values.tolist() == run.record(2, "old_log_prob").batch.ragged("old_log_probs").values.tolist()
    )
    assert run.inputs(2, "update").meanings["old_log_probs"].engine == "fsdp"
    assert set(run.inputs(1, "rollout").columns) == set(prompts(1).columns)


def test_inputs_that_were_not_recorded_or_not_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TapeError, match="its input 'response' is in no record of step 1"):
        open_run(record_run(tmp_path / "a", skip=("rollout",))).inputs(1, "reward")
    with pytest.raises(TapeError, match="old_log_prob read another 'prompt_ids'"):
        open_run(record_run(tmp_path / "b", Faults(mix_from=1))).inputs(1, "old_log_prob")
