"""The modes of a taped stage: what runs, what is loaded, what is refused and why."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossrl.batch import Batch, Meaning, Ragged
from crossrl.stages.base import At, Stage, apply
from crossrl.tape.capture import capture
from crossrl.tape.errors import (
    CannotStore,
    CorruptRecord,
    RecordExists,
    RecordMissing,
    ReplayRefused,
    TapeError,
    TapeFull,
    TapeWriteError,
    WaitTimeout,
)
from crossrl.tape.header import Header
from crossrl.tape.layout import RunLayout
from crossrl.tape.modes import RULES
from crossrl.tape.record import Draft, Record, read_record, write_record
from crossrl.tape.space import check_space, estimate_bytes
from crossrl.tape.tape import Tape, TapeOptions


@dataclass
class Rollout:
    """Answers each prompt with its first token plus ``shift``."""

    name: str = "rollout"
    reads: tuple[str, ...] = ("prompt_ids",)
    writes: tuple[str, ...] = ("response_ids", "rollout_log_probs", "response")
    shift: int = 0
    calls: int = 0

    def __call__(self, batch: Batch, at: At) -> Batch:
        self.calls += 1
        answers = [int(row[0]) + self.shift for row in batch.ragged("prompt_ids").rows()]
        columns = {
            "response_ids": Ragged.from_rows([[a, 0] for a in answers], np.int32),
            "rollout_log_probs": Ragged.from_rows([[-0.5 * a, -0.1] for a in answers], np.float32),
            "response": [str(a) for a in answers],
        }
        info = {"metrics": {"rollout/tokens": 2.0 * len(batch), "timing/generate": float(self.calls)}}
        return Batch(batch.sample_id, columns, {"rollout_log_probs": Meaning(1.0, "none", "toy", 0)}, info)


@dataclass
class Reward:
    name: str = "reward"
    reads: tuple[str, ...] = ("response", "ground_truth")
    writes: tuple[str, ...] = ("reward",)
    calls: int = 0

    def __call__(self, batch: Batch, at: At) -> Batch:
        self.calls += 1
        right = [float(a == b) for a, b in zip(batch["response"], batch["ground_truth"], strict=True)]
        return Batch(batch.sample_id, {"reward": np.array(right)})


@dataclass
class Update:
    name: str = "update"
    reads: tuple[str, ...] = ("response_ids", "reward")
    writes: tuple[str, ...] = ()
    weights: float = 0.0

    def __call__(self, batch: Batch, at: At) -> Batch:
        before, self.weights = self.weights, self.weights + float(batch.array("reward").sum())
        return Batch(batch.sample_id, {}, {}, {"weights_before": str(before), "weights_after": str(self.weights)})


def prompts(numbers: list[int], **columns: Any) -> Batch:
    """One sample per number; the answer to prompt k is k."""
    default: dict[str, Any] = {
        "group_id": [f"data/0/{k}" for k in numbers],
        "prompt_ids": Ragged.from_rows([[k, 7] for k in numbers], np.int32),
        "prompt": [[{"role": "user", "content": f"say {k}"}] for k in numbers],
        "data_source": ["toy"] * len(numbers),
        "ground_truth": [str(k) for k in numbers],
        "extra_info": [{"row": np.int64(k), "nested": {"k": [k]}} for k in numbers],
    }
    return Batch(tuple(f"data/0/{k}/0" for k in numbers), {**default, **columns})


SETTINGS: dict[str, Any] = {"rollout": {"temperature": 1.0, "n": 1}, "tokenizer": "sha256:t", "weights": "sha256:w0"}


@dataclass
class Run:
    """A run of the toy stages, on a tape."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=lambda: SETTINGS)
    options: TapeOptions = field(default_factory=TapeOptions)
    rollout: Rollout = field(default_factory=Rollout)
    reward: Reward = field(default_factory=Reward)
    update: Update = field(default_factory=Update)

    def __post_init__(self) -> None:
        self.tape = Tape(RunLayout(self.folder), "run", lambda stage, split: self.settings, self.options, lambda: 0)

    def step(self, batch: Batch, at: At, rollout: str = "live", reward: str = "live", update: str = "live") -> Batch:
        stages: list[Stage] = [
            self.tape.wrap(self.rollout, rollout),
            self.tape.wrap(self.reward, reward),
            self.tape.wrap(self.update, update),
        ]
        for stage in stages:
            batch = apply(stage, batch, at)
        return batch

    def record(self, batch: Batch, *steps: int) -> Batch:
        out = batch
        for step in steps:
            out = self.step(batch, At(step), "record", "record", "record")
        self.tape.close()
        return out


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    Run(tmp_path / "tape").record(prompts([1, 2, 3, 4]), 1, 2)
    return tmp_path / "tape"


def test_the_table_is_the_one_of_the_design() -> None:
    assert {mode: (rule.found, rule.missing) for mode, rule in RULES.items()} == {
        "live": ("ignore", "run"),
        "record": ("refuse", "store"),
        "cache": ("load", "store"),
        "replay": ("load", "refuse"),
        "publish": ("load", "store"),
        "follow": ("load", "wait"),
        "verify": ("compare", "refuse"),
    }


def test_an_unknown_mode_is_refused_with_the_names(tmp_path: Path) -> None:
    with pytest.raises(TapeError, match=r"'recrod' is unknown; there are: live, record"):
        Run(tmp_path).tape.wrap(Rollout(), "recrod")


def test_a_live_stage_is_the_stage_itself(tmp_path: Path) -> None:
    stage = Rollout()
    assert Run(tmp_path).tape.wrap(stage, "live") is stage


def test_a_taped_stage_has_the_name_reads_and_writes_of_its_stage(tmp_path: Path) -> None:
    taped = Run(tmp_path).tape.wrap(Reward(), "record")
    assert (taped.name, taped.reads, taped.writes) == (Reward().name, Reward().reads, Reward().writes)
    assert isinstance(taped, Stage)


def test_recording_changes_nothing_for_the_loop(tmp_path: Path) -> None:
    batch = prompts([1, 2, 3])
    live = Run(tmp_path / "a").step(batch, At(1))
    taped = Run(tmp_path / "b").step(batch, At(1), "record", "record", "record")
    assert set(live.columns) == set(taped.columns)
    assert capture(live).columns["reward"].digest() == capture(taped).columns["reward"].digest()


def test_a_rollout_record_carries_prompt_answer_and_response_together(recorded: Path) -> None:
    record = read_record(recorded / "step_000001" / "rollout.0", "eager")
    batch = record.batch
    assert [batch[n][2] for n in ("response", "ground_truth", "prompt")] == [
        "3", "3", [{"role": "user", "content": "say 3"}],
    ]  # fmt: skip
    assert batch["extra_info"][2] == {"row": 3, "nested": {"k": [3]}} and batch["group_id"][2] == "data/0/3"
    assert set(record.header.reads) == {
        "prompt_ids", "group_id", "prompt", "data_source", "ground_truth", "extra_info",
    }  # fmt: skip


def test_a_record_of_an_update_has_its_facts(recorded: Path) -> None:
    header = read_record(recorded / "step_000002" / "update.0").header
    assert header.info == {"weights_before": "4.0", "weights_after": "8.0"}
    assert (header.stage, header.step, header.split, header.weight_version) == ("update", 2, "train", 0)
    assert set(header.reads) == {"response_ids", "reward"} and header.versions["crossrl"]


def test_record_refuses_before_it_runs_when_a_record_is_there(recorded: Path) -> None:
    run = Run(recorded)
    with pytest.raises(RecordExists, match=r"step_000001/rollout\.0 is already there.*never overwritten") as refused:
        run.step(prompts([1, 2, 3, 4]), At(1), "record")
    assert f"tape.mode=replay, tape.replay_from={recorded}" in str(refused.value)
    assert run.rollout.calls == 0


def test_replay_loads_and_runs_nothing(recorded: Path) -> None:
    run = Run(recorded, rollout=Rollout(shift=99))
    out = run.step(prompts([1, 2, 3, 4]), At(1), "replay", "replay")
    assert (run.rollout.calls, run.reward.calls) == (0, 0)
    assert out["response"] == ["1", "2", "3", "4"] and out.array("reward").tolist() == [1.0] * 4
    assert out.meanings["rollout_log_probs"] == Meaning(1.0, "none", "toy", 0)


def test_replay_without_a_record_names_the_step(recorded: Path) -> None:
    with pytest.raises(
        RecordMissing, match=r"no record of step 3, call 0 \(train\) at .*step_000003/rollout\.0"
    ) as lost:
        Run(recorded).step(prompts([1]), At(3), "replay")
    assert "Record it first (tape.mode=record), or leave it out: tape.steps" in str(lost.value)


def test_what_a_stage_depends_on_may_differ_by_split(tmp_path: Path) -> None:
    """The settings of validation's calls are compared with validation's records only, and the reverse."""

    def run(train: float, val: float) -> Run:
        made = Run(tmp_path)
        made.tape.fingerprint = lambda stage, split: {"temperature": train if split == "train" else val}
        return made

    first = run(1.0, 0.0)
    for split in ("train", "val"):
        first.step(prompts([1]), At(1, split=split), "record")
    first.tape.close()
    run(1.0, 0.5).step(prompts([1]), At(1), "replay")
    run(0.5, 0.0).step(prompts([1]), At(1, split="val"), "replay")
    with pytest.raises(ReplayRefused, match=r"temperature: recorded 0\.0, found 0\.5"):
        run(1.0, 0.5).step(prompts([1]), At(1, split="val"), "replay")
    with pytest.raises(ReplayRefused, match=r"temperature: recorded 1\.0, found 0\.5"):
        run(0.5, 0.0).step(prompts([1]), At(1), "replay")
    strict = run(1.0, 0.5).tape
    strict.preflight(strict.wrap(Rollout(), "replay"))
    with pytest.raises(ReplayRefused, match="temperature"):
        strict.preflight(strict.wrap(Rollout(), "replay"), At(1, split="val"))


def test_calls_and_splits_have_their_own_records(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for at in (At(1, 0), At(1, 1), At(1, 0, "val")):
        run.step(prompts([at.call + 1]), at, "record")
    run.tape.close()
    names = sorted(p.name for p in (tmp_path / "step_000001").iterdir())
    assert names == ["rollout.0", "rollout.1", "val.rollout.0"]


def test_a_replay_in_another_order_is_refused_and_when_accepted_joined_by_id(recorded: Path) -> None:
    """C01: the data order is reversed; a response is never scored against another sample's answer."""
    batch = prompts([4, 3, 2, 1])
    with pytest.raises(ReplayRefused) as refused:
        Run(recorded).step(batch, At(1), "replay")
    assert [m.key for m in refused.value.mismatches] == ["order"]
    assert "order: recorded \"'data/0/1/0' at position 0\", found \"'data/0/4/0' there\"" in str(refused.value)
    run = Run(recorded, options=TapeOptions(accept=("order",)))
    out = run.step(batch, At(1), "replay")
    assert out["response"] == ["4", "3", "2", "1"] and out.array("reward").tolist() == [1.0] * 4


def test_joining_by_row_number_would_score_against_other_answers(recorded: Path) -> None:
    """The planted control of C01."""
    record = read_record(recorded / "step_000001" / "rollout.0").batch
    by_row = prompts([4, 3, 2, 1]).with_columns(response=record["response"])
    assert Reward()(by_row.only(Reward().reads), At(1)).array("reward").tolist() != [1.0] * 4


def test_other_samples_cannot_be_accepted(recorded: Path) -> None:
    """C01 with another prompt set: there is nothing to join, so no override helps."""
    run = Run(recorded, options=TapeOptions(accept=("sample_id",)))
    with pytest.raises(
        ReplayRefused, match=r"'data/0/4/0' is not in this batch.*'data/0/5/0' is not in the record"
    ) as refused:
        run.step(prompts([1, 2, 3, 5]), At(1), "replay")
    assert "sample_id cannot be accepted" in str(refused.value) and "tape.accept" not in str(refused.value)
    with pytest.raises(ReplayRefused, match="4 samples"):
        run.step(prompts([1, 2, 3, 4, 5]), At(1), "replay")


def test_another_answer_under_the_same_id_is_refused_by_name(recorded: Path) -> None:
    """C01: the recorded answers travel with the responses; a data file whose answers were changed is found."""
    batch = prompts([1, 2, 3, 4], ground_truth=["1", "2", "30", "4"])
    with pytest.raises(ReplayRefused) as refused:
        Run(recorded).step(batch, At(1), "replay")
    assert [m.line() for m in refused.value.mismatches] == [
        "reads.ground_truth: recorded \"'3' in sample 'data/0/3/0' (1 of 4 samples differ)\", found \"'30'\""
    ]


def test_other_token_ids_are_refused_by_name(recorded: Path) -> None:
    batch = prompts([1, 2, 3, 4], prompt_ids=Ragged.from_rows([[1, 7], [2, 8], [3, 7], [4, 7]], np.int32))
    with pytest.raises(
        ReplayRefused, match=r"\[2, 7\] in sample 'data/0/2/0' \(1 of 4 samples differ\)\", found '\[2, 8\]'"
    ):
        Run(recorded).step(batch, At(1), "replay")


def changed(**entries: Any) -> dict[str, Any]:
    return {**SETTINGS, **entries}


@pytest.mark.parametrize(
    ("settings", "key", "line"),
    [
        (changed(rollout={"temperature": 0.6, "n": 1}), "rollout.temperature", "recorded 1.0, found 0.6"),
        (changed(rollout={"temperature": 1.0, "n": 4}), "rollout.n", "recorded 1, found 4"),
        (changed(rollout={"temperature": 1.0}), "rollout.n", "recorded 1, found '(absent)'"),
        (changed(tokenizer="sha256:u"), "tokenizer", "recorded 'sha256:t', found 'sha256:u'"),
        (changed(template="x"), "template", "recorded '(absent)', found 'x'"),
        (changed(rollout={"temperature": True, "n": 1}), "rollout.temperature", "recorded 1.0, found True"),
    ],
)
@pytest.mark.parametrize("mode", ["replay", "cache", "follow"])
def test_another_setting_is_refused_named_and_can_be_accepted(
    recorded: Path, settings: dict[str, Any], key: str, line: str, mode: str
) -> None:
    run = Run(recorded, settings)
    with pytest.raises(ReplayRefused) as refused:
        run.step(prompts([1, 2, 3, 4]), At(1), mode)
    assert f"{key}: {line}" in str(refused.value) and f"tape.accept=[{key}]" in str(refused.value)
    assert run.rollout.calls == 0
    accepting = Run(recorded, settings, TapeOptions(accept=(key,)))
    accepting.step(prompts([1, 2, 3, 4]), At(1), mode)
    assert [m.key for m in accepting.tape.accepted] == [key]


def test_all_differences_are_listed_at_once(recorded: Path) -> None:
    run = Run(
        recorded, changed(tokenizer="u", rollout={"temperature": 0.6, "n": 2}), TapeOptions(accept=("tokenizer",))
    )
    with pytest.raises(ReplayRefused) as refused:
        run.step(prompts([4, 3, 2, 1], ground_truth=list("abcd")), At(1), "replay")
    assert [m.key for m in refused.value.mismatches] == [
        "rollout.n", "rollout.temperature", "order", "reads.ground_truth",
    ]  # fmt: skip


def test_equal_settings_written_in_another_way_are_equal(recorded: Path) -> None:
    """An int for a float, NumPy numbers, another order of keys."""
    same = {"weights": "w", "tokenizer": "sha256:t", "rollout": {"n": np.int64(1), "temperature": 1}}
    Run(recorded, same).step(prompts([1, 2, 3, 4]), At(1), "replay")


def test_an_accepted_difference_is_written_into_the_new_runs_records(recorded: Path, tmp_path: Path) -> None:
    settings = changed(tokenizer="sha256:u")
    run = Run(tmp_path / "new", settings, TapeOptions(accept=("tokenizer",)))
    loaded = run.tape.wrap(run.rollout, "replay", RunLayout(recorded, label="old run"))
    batch = apply(loaded, prompts([1, 2, 3, 4]), At(1))
    apply(run.tape.wrap(run.reward, "record"), batch, At(1))
    run.tape.close()
    (accepted,) = read_record(tmp_path / "new" / "step_000001" / "reward.0").header.accepted
    assert (accepted.key, accepted.recorded, accepted.found) == ("tokenizer", "sha256:t", "sha256:u")
    clean = Run(tmp_path / "clean")
    clean.step(prompts([1]), At(1), "record")
    clean.tape.close()
    assert read_record(tmp_path / "clean" / "step_000001" / "rollout.0").header.accepted == ()


def test_a_stage_loaded_from_one_tape_and_recorded_on_another_counts_its_calls_once(
    recorded: Path, tmp_path: Path
) -> None:
    run = Run(tmp_path / "new")
    both = run.tape.wrap(run.tape.wrap(run.rollout, "replay", RunLayout(recorded)), "record")
    for step in (1, 2):
        apply(both, prompts([1, 2, 3, 4]), At(step))
    run.tape.close()
    assert run.rollout.calls == 0
    assert [read_record(tmp_path / "new" / f"step_00000{s}" / "rollout.0").header.index for s in (1, 2)] == [0, 1]


def test_an_override_that_accepted_nothing_is_reported(recorded: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(recorded, options=TapeOptions(accept=("rollout.temprature",)))
    run.step(prompts([1, 2, 3, 4]), At(1), "replay")
    run.tape.close()
    assert "tape.accept names rollout.temprature, but no record differed there" in caplog.text


def test_other_weights_are_accepted_for_a_loaded_rollout_but_not_for_verify_or_other_stages(recorded: Path) -> None:
    other = changed(weights="sha256:w1")
    Run(recorded, other).step(prompts([1, 2, 3, 4]), At(1), "replay")
    with pytest.raises(ReplayRefused, match="weights: recorded 'sha256:w0', found 'sha256:w1'"):
        Run(recorded, other).step(prompts([1, 2, 3, 4]), At(1), "verify")
    with pytest.raises(ReplayRefused, match="weights"):
        Run(recorded, other).step(prompts([1, 2, 3, 4]), At(1), "live", "replay")


def test_preflight_refuses_settings_before_the_first_step(recorded: Path) -> None:
    run = Run(recorded, changed(tokenizer="sha256:u"))
    with pytest.raises(ReplayRefused, match="tokenizer"):
        run.tape.preflight(run.tape.wrap(run.rollout, "replay"))
    run.tape.preflight(run.tape.wrap(run.rollout, "record"))
    Run(recorded).tape.preflight(Run(recorded).tape.wrap(Rollout(), "replay"))


def test_a_record_of_another_stage_or_without_a_needed_field_is_refused(recorded: Path, tmp_path: Path) -> None:
    folder = recorded / "step_000003"
    folder.mkdir()
    (recorded / "step_000001" / "reward.0").rename(folder / "rollout.0")
    with pytest.raises(ReplayRefused, match=r"(?s)stage: recorded 'reward', found 'rollout'.*writes\.response"):
        Run(recorded, options=TapeOptions(accept=("stage",))).step(prompts([1, 2, 3, 4]), At(3), "replay")


def test_a_stage_that_now_writes_more_is_refused(recorded: Path) -> None:
    run = Run(recorded)
    run.rollout.writes = (*run.rollout.writes, "finish_reason")
    with pytest.raises(ReplayRefused, match=r"writes\.finish_reason: recorded '\(absent\)'"):
        run.step(prompts([1, 2, 3, 4]), At(1), "replay")


@pytest.mark.parametrize("mode", ["replay", "cache", "follow", "verify"])
def test_a_corrupt_record_is_refused_in_every_mode_that_reads(recorded: Path, mode: str) -> None:
    path = recorded / "step_000001" / "rollout.0" / "columns.json"
    path.write_bytes(path.read_bytes().replace(b'"2"', b'"3"'))
    run = Run(recorded)
    with pytest.raises(CorruptRecord, match=r"columns\.json: field '\w+' at offset \d+: digest"):
        run.step(prompts([1, 2, 3, 4]), At(1), mode)
    assert run.rollout.calls == 0


def test_a_state_changing_stage_cannot_be_loaded_without_its_state(recorded: Path) -> None:
    run = Run(recorded)
    for mode in ("replay", "cache", "follow"):
        with pytest.raises(TapeError, match="'update' changes state"):
            run.tape.wrap(run.update, mode)
    restored: list[Record] = []
    taped = run.tape.wrap(run.update, "replay", restore=lambda record, at: restored.append(record))
    batch = run.step(prompts([1, 2, 3, 4]), At(1), "replay", "replay")
    apply(taped, batch, At(1))
    assert restored[0].header.info["weights_after"] == "4.0"


def test_verify_of_an_unchanged_stage_is_bit_equal(recorded: Path) -> None:
    run = Run(recorded)
    run.step(prompts([1, 2, 3, 4]), At(1), "verify", "verify", "verify")
    assert [(c.stage, c.differences, c.fields) for c in run.tape.comparisons] == [
        ("rollout", (), 3), ("reward", (), 1), ("update", (), 0),
    ]  # fmt: skip
    assert (run.rollout.calls, run.reward.calls) == (1, 1)


def test_verify_says_what_differs_where_and_how_much_and_judges_each_stage_alone(recorded: Path) -> None:
    @dataclass
    class Faulty(Rollout):
        def __call__(self, batch: Batch, at: At) -> Batch:
            out = super().__call__(batch, at)
            values = out.ragged("rollout_log_probs").values.copy()
            values[[3, 6]] += np.float32([0.25, 0.5])
            return replace(out, columns={**out.columns, "rollout_log_probs": Ragged(values, np.full(4, 2))})

    run = Run(recorded, rollout=Faulty())
    run.step(prompts([1, 2, 3, 4]), At(1), "verify", "verify")
    (difference,) = run.tape.comparisons[0].differences
    assert (difference.field, difference.sample_id, difference.position) == ("rollout_log_probs", "data/0/2/0", 1)
    assert difference.recorded == pytest.approx(-0.1) and difference.found == pytest.approx(0.15)
    assert (difference.differing, difference.total) == (2, 8)
    assert difference.max_abs == pytest.approx(0.5) and "position 1" in difference.line()
    assert run.tape.comparisons[1].differences == ()
    tolerant = Run(recorded, options=TapeOptions(tolerance={"rollout_log_probs": 0.51}), rollout=Faulty())
    tolerant.step(prompts([1, 2, 3, 4]), At(1), "verify")
    assert tolerant.tape.comparisons[0].differences == ()


def test_verify_reports_lengths_texts_and_facts(recorded: Path) -> None:
    @dataclass
    class Other(Rollout):
        def __call__(self, batch: Batch, at: At) -> Batch:
            out = super().__call__(batch, at)
            ids = Ragged.from_rows([[1, 0], [2], [3, 0], [4, 0]], np.int32)
            columns = {**out.columns, "response_ids": ids, "response": ["1", "2", "3", "vier"]}
            return Batch(out.sample_id, columns, {}, {"metrics": {"rollout/tokens": 7.0}})

    run = Run(recorded, rollout=Other())
    run.step(prompts([1, 2, 3, 4]), At(1), "verify")
    found = [(d.field, d.kind, d.sample_id, d.recorded, d.found) for d in run.tape.comparisons[0].differences]
    assert found == [
        ("rollout_log_probs", "meaning", None, Meaning(1.0, "none", "toy", 0), None),
        ("response", "value", "data/0/4/0", "4", "vier"),
        ("response_ids", "length", "data/0/2/0", 2, 1),
        ("info.metrics.rollout/tokens", "info", None, 8.0, 7.0),
    ]


def test_wall_clock_times_are_neither_compared_nor_replayed(recorded: Path) -> None:
    recorded_info = read_record(recorded / "step_000002" / "rollout.0").batch.info
    assert recorded_info["metrics"]["timing/generate"] == 2.0
    run = Run(recorded)
    run.step(prompts([1, 2, 3, 4]), At(2), "verify")
    assert run.tape.comparisons[0].differences == ()


def test_two_identical_runs_have_equal_digests_stage_by_stage(recorded: Path, tmp_path: Path) -> None:
    Run(tmp_path / "again").record(prompts([1, 2, 3, 4]), 1, 2)
    Run(tmp_path / "other", rollout=Rollout(shift=1)).record(prompts([1, 2, 3, 4]), 1, 2)

    def digests(folder: Path) -> dict[str, str]:
        return {f"{p.parent.name}/{p.name}": read_record(p).header.content for p in sorted(folder.glob("step_*/*"))}

    assert len(digests(recorded)) == 6 and digests(recorded) == digests(tmp_path / "again")
    assert digests(recorded)["step_000001/rollout.0"] != digests(tmp_path / "other")["step_000001/rollout.0"]


def test_cache_runs_and_stores_what_is_missing(recorded: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "crossrl.tape")
    run = Run(recorded)
    for step in (1, 2, 3):
        run.step(prompts([1, 2, 3, 4]), At(step), "cache")
    run.tape.close()
    assert run.rollout.calls == 1 and (recorded / "step_000003" / "rollout.0").is_dir()
    assert "no data found at" in caplog.text


def test_follow_waits_for_the_peers_record(recorded: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "shared")
    source = read_record(recorded / "step_000001" / "rollout.0")

    def publish() -> None:
        time.sleep(0.1)
        peer = Run(tmp_path / "shared")
        peer.step(prompts([1, 2, 3, 4]), At(1), "publish")
        peer.tape.close()

    thread = threading.Thread(target=publish)
    thread.start()
    out = run.step(prompts([1, 2, 3, 4]), At(1), "follow")
    thread.join()
    assert run.rollout.calls == 0 and out["response"] == source.batch["response"]


def test_a_wait_has_a_limit_and_says_what_for(tmp_path: Path) -> None:
    run = Run(tmp_path, options=TapeOptions(wait_s=0.1))
    with pytest.raises(WaitTimeout, match=r"step_000001/rollout\.0 did not appear within 0\.1 s \(rollout of step 1"):
        run.step(prompts([1]), At(1), "follow")


def test_publish_goes_on_with_what_the_run_has_published_before_and_never_overwrites_it(recorded: Path) -> None:
    before = {p: p.read_bytes() for p in recorded.rglob("*") if p.is_file()}
    run = Run(recorded)
    run.step(prompts([1, 2, 3, 4]), At(1), "publish")
    run.tape.close()
    assert run.rollout.calls == 0
    assert {p: p.read_bytes() for p in recorded.rglob("*") if p.is_file()} == before
    with pytest.raises(ReplayRefused):
        Run(recorded).step(prompts([1, 2, 3, 5]), At(1), "publish")


def test_a_write_failure_stops_the_run_at_the_next_stage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = Run(tmp_path / "file")
    with pytest.raises(TapeWriteError, match="could not be written"):
        for step in range(1, 1000):
            run.step(prompts([1]), At(step), "record")
            time.sleep(0.001)
    assert run.rollout.calls < 999


def test_a_sub_field_that_cannot_be_stored_is_named_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C03: array boolean, missing answer, nested map, non-ASCII text, and something that has no place in a record."""
    extra = [{"ok": np.bool_(True), "größe": {"tiefe": [None]}, "odd": {1, 2}}, {"ok": np.array([True, False])}]
    batch = prompts([1, 2], extra_info=extra, ground_truth=["1", None])
    run = Run(tmp_path)
    run.step(batch, At(1), "record", "record", "record")
    run.tape.close()
    assert (
        "field extra_info of 1 sample(s) (first data/0/1/0) holds a value of type builtins.set at $.odd" in caplog.text
    )
    record = read_record(tmp_path / "step_000001" / "rollout.0", "eager")
    assert record.batch["extra_info"] == [{"ok": True, "größe": {"tiefe": [None]}}, {"ok": [True, False]}]
    assert record.batch["extra_info"][0]["ok"] is True and record.batch["ground_truth"] == ["1", None]
    assert [(e.field, e.path) for e in record.header.left_out] == [("extra_info", "$.odd")]
    replayed = Run(tmp_path)
    replayed.step(batch, At(1), "replay")
    strict = Run(tmp_path / "strict", options=TapeOptions(unstorable="refuse"))
    with pytest.raises(CannotStore, match=r"(?s)extra_info of sample data/0/1/0, \$\.odd.*tape\.unstorable=leave_out"):
        strict.step(batch, At(1), "record")


def test_a_replay_needs_in_full_what_the_stage_writes(tmp_path: Path) -> None:
    @dataclass
    class Odd(Reward):
        def __call__(self, batch: Batch, at: At) -> Batch:
            out = super().__call__(batch, at)
            return out.with_columns(reward_extra=[{"o": object()}] * len(batch))

    batch = prompts([1, 2]).with_columns(response=["1", "2"])
    run = Run(tmp_path)
    stage = Odd(writes=("reward", "reward_extra"))
    apply(run.tape.wrap(stage, "record"), batch, At(1))
    run.tape.close()
    with pytest.raises(ReplayRefused, match=r"left_out\.reward_extra: recorded .*builtins\.object"):
        apply(Run(tmp_path).tape.wrap(stage, "replay"), batch, At(1))


def test_a_stage_that_changes_its_input_does_not_change_the_record(tmp_path: Path) -> None:
    @dataclass
    class Careless(Rollout):
        def __call__(self, batch: Batch, at: At) -> Batch:
            out = super().__call__(batch, at)
            batch.ragged("prompt_ids").values[:] = 0
            return out

    run = Run(tmp_path, rollout=Careless())
    run.step(prompts([1, 2]), At(1), "record")
    run.tape.close()
    assert read_record(tmp_path / "step_000001" / "rollout.0").batch.ragged("prompt_ids").values.tolist() == [
        1,
        7,
        2,
        7,
    ]


def test_a_change_after_the_stage_does_not_reach_the_record(tmp_path: Path) -> None:
    run = Run(tmp_path)
    out = run.step(prompts([1, 2]), At(1), "record", "record")
    out.ragged("response_ids").values[:] = 99
    out.array("reward")[:] = 99
    out["extra_info"][0]["nested"]["k"].append(99)
    run.tape.close()
    batch = read_record(tmp_path / "step_000001" / "rollout.0").batch
    assert batch.ragged("response_ids").values.tolist() == [1, 0, 2, 0] and batch["extra_info"][0]["nested"] == {
        "k": [1]
    }
    assert read_record(tmp_path / "step_000001" / "reward.0").batch.array("reward").tolist() == [1.0, 1.0]


def test_only_the_chosen_steps_are_recorded(tmp_path: Path) -> None:
    run = Run(tmp_path, options=TapeOptions(steps=frozenset({2})))
    run.record(prompts([1]), 1, 2, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000002"] and run.rollout.calls == 3


def test_the_choice_of_steps_limits_replay_but_not_a_cache(recorded: Path, tmp_path: Path) -> None:
    run = Run(recorded, options=TapeOptions(steps=frozenset({2})))
    for step in (1, 2):
        run.step(prompts([1, 2, 3, 4]), At(step), "replay")
    assert run.rollout.calls == 1
    skipping = Run(recorded, options=TapeOptions(steps=frozenset({2})))
    for step in (1, 2):
        skipping.step(prompts([1, 2, 3, 4]), At(step), "cache")
    assert skipping.rollout.calls == 0


def test_c03_two_ranks_that_dump_into_one_folder_are_refused_at_their_first_call(tmp_path: Path) -> None:
    Run(tmp_path).record(prompts([1]), 1, 2, 3)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    other = Run(tmp_path, rollout=Rollout(shift=5))
    with pytest.raises(RecordExists):
        other.step(prompts([1]), At(1), "record")
    assert other.rollout.calls == 0 and {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert len({p.parent for p in before}) == 9


def test_only_the_newest_steps_are_kept(tmp_path: Path) -> None:
    Run(tmp_path, options=TapeOptions(keep=2)).record(prompts([1]), 1, 2, 3, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000003", "step_000004"]


def test_the_size_limit_stops_with_a_clear_message(tmp_path: Path) -> None:
    one = Run(tmp_path / "one")
    one.record(prompts([1]), 1)
    size = sum(p.stat().st_size for p in (tmp_path / "one").rglob("*") if p.is_file())
    limit = size + 40_000
    run = Run(tmp_path / "two", options=TapeOptions(max_bytes=limit))
    with pytest.raises(TapeFull, match=r"more than tape\.max_bytes=\d+\. Raise it, or record less: tape\.keep"):
        for step in range(1, 20):
            run.step(prompts([1]), At(step), "record", "record", "record")
    run.tape.flush()
    assert size < sum(p.stat().st_size for p in (tmp_path / "two").rglob("*") if p.is_file()) <= limit
    kept = Run(tmp_path / "three", options=TapeOptions(max_bytes=limit, keep=1))
    for step in range(1, 20):
        kept.step(prompts([1]), At(step), "record", "record", "record")
        kept.tape.flush()
    assert [p.name for p in (tmp_path / "three").iterdir()] == ["step_000019"]


def test_room_is_checked_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(TapeFull, match=r"needs about .* GB .* are free there.*tape\.keep"):
        check_space(tmp_path / "not" / "yet", 1 << 60)
    with pytest.raises(TapeFull):
        Run(tmp_path).tape.start(1 << 60)
    Run(tmp_path).tape.start(1000)
    Run(tmp_path, options=TapeOptions(max_bytes=1000)).tape.start(1 << 60)


def test_the_estimate_is_near_the_real_size(tmp_path: Path) -> None:
    samples, tokens = 512, 200
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2 * tokens, samples)
    columns: dict[str, Any] = {
        "response_ids": Ragged(rng.integers(0, 50_000, lengths.sum()).astype(np.int32), lengths),
        "response_mask": Ragged(np.ones(lengths.sum(), np.uint8), lengths),
        "rollout_log_probs": Ragged(rng.random(lengths.sum()).astype(np.float32), lengths),
        "finish_reason": ["stop"] * samples,
        "response": ["word " * int(n) for n in lengths],
    }
    batch = Batch(tuple(f"0123456789ab/0/{i}/0" for i in range(samples)), columns)
    size = write_record(tmp_path / "r", Draft(Header("r", "rollout", 1), capture(batch)))
    estimate = estimate_bytes(columns, samples, 0, float(lengths.mean()))
    assert 0.8 * size < estimate < 1.3 * size


def test_a_resumed_run_sets_later_records_aside_and_ends_with_the_tape_of_an_uninterrupted_one(tmp_path: Path) -> None:
    batch = prompts([1, 2])
    Run(tmp_path / "whole").record(batch, 1, 2, 3)
    first = Run(tmp_path / "cut")
    first.step(batch, At(1), "record", "record", "record")
    state, weights = first.tape.state(), first.update.weights
    first.step(batch, At(2), "record", "record", "record")  # killed after this; its checkpoint is that of step 1
    first.tape.close()
    second = Run(tmp_path / "cut", update=Update(weights=weights))
    second.tape.load_state(state)
    aside = second.tape.set_aside(after_step=1)
    assert aside == tmp_path / "cut" / "superseded-0" and [p.name for p in aside.iterdir()] == ["step_000002"]
    second.record(batch, 2, 3)

    def tape(folder: Path) -> dict[str, Any]:
        records = {f"{p.parent.name}/{p.name}": read_record(p).header for p in sorted(folder.glob("step_*/*"))}
        return {name: (h.content, h.index, h.reads, h.fingerprints, h.step) for name, h in records.items()}

    assert tape(tmp_path / "cut") == tape(tmp_path / "whole") and len(tape(tmp_path / "whole")) == 9
    assert second.tape.set_aside(after_step=3) is None


def test_leftovers_of_a_killed_run_are_removed_at_the_next_start(tmp_path: Path) -> None:
    Run(tmp_path).record(prompts([1]), 1)
    for folder in (tmp_path / ".tmp-a", tmp_path / "step_000001" / ".tmp-rollout.0-1-2"):
        folder.mkdir()
        os.utime(folder, (0, 0))
    Run(tmp_path).tape.start()
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_dir()) == [
        "reward.0", "rollout.0", "step_000001", "update.0",
    ]  # fmt: skip


def test_a_stage_that_fails_leaves_no_record(tmp_path: Path) -> None:
    @dataclass
    class Broken(Rollout):
        def __call__(self, batch: Batch, at: At) -> Batch:
            raise RuntimeError("engine died")

    run = Run(tmp_path, rollout=Broken())
    with pytest.raises(RuntimeError, match="engine died"):
        run.step(prompts([1]), At(1), "record")
    run.tape.close()
    assert not list(tmp_path.iterdir())
