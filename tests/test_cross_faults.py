"""The catalogue of planted faults: each acts where and when it says, and each harmless difference runs."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from crossrl.batch import Batch
from crossrl.cli.main import main
from crossrl.cli.train_command import planting
from crossrl.config import LoadedConfig, load_config
from crossrl.cross import faults
from crossrl.cross.faults import FAULTS, HARMLESS, FaultError
from crossrl.cross.faults.base import Around, Clock
from crossrl.cross.faults.weights import computing_with
from crossrl.cross.findings import PART
from crossrl.report import Reporter
from crossrl.stages.base import At
from crossrl.tape.api import RunTape, open_run
from crossrl.tape.diff import Diff, diff_runs
from crossrl.trainer import Trainer


class Runs:
    """Recorded runs on twelve prompts, two steps unless said otherwise; one without faults runs once."""

    def __init__(self, demo_files: Path, folder: Path) -> None:
        self.demo_files, self.folder = demo_files, folder
        pq.write_table(pq.read_table(demo_files / "train.parquet").slice(0, 12), folder / "train.parquet")
        self.clean = functools.cache(lambda *overrides: self.run(f"clean-{len(list(folder.iterdir()))}", *overrides))

    def load(self, name: str, *overrides: str) -> LoadedConfig:
        base = [
            f"data.train_files={self.folder}/train.parquet", "data.train_batch_size=4", "data.max_prompt_length=8",
            "data.max_response_length=8", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.optim.lr=1e-3",
            f"actor_rollout_ref.model.path={self.demo_files}/model", "reward.num_workers=1",
            f"reward.custom_reward_function.path={self.demo_files}/sort_reward.py", "trainer.num_threads=1",
            "trainer.device=cpu", f"trainer.default_local_dir={self.folder / name}", "trainer.logger=[]",
            "trainer.total_training_steps=2", "tape.mode=record",
        ]  # fmt: skip
        return load_config([*base, *overrides])

    def run(self, name: str, *overrides: str) -> Path:
        loaded, plant = planting(self.load(name, *overrides))
        with Reporter() as reporter:
            assert Trainer(loaded, reporter, plant=plant).fit() == 0
        return self.folder / name

    def planted(self, name: str, start: int = 1) -> Diff:
        """The first difference that fault ``name`` makes."""
        needs = FAULTS[name].needs
        if FAULTS[name].first_step(start) > 2:
            needs = (*needs, "trainer.total_training_steps=3")
        faulty = self.run(f"{name}@{start}", *needs, f"cross.plant={name}@{start}")
        return diff_runs(self.clean(*needs), faulty)


@pytest.fixture(scope="module")
def runs(demo_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(demo_files, tmp_path_factory.mktemp("runs"))


def check(found: Diff, name: str, start: int) -> None:
    """The first difference is at the stage and step that the catalogue says."""
    fault = FAULTS[name]
    assert found.first is not None, f"{name} changes nothing"
    stage = "rollout" if fault.stage == "data" else fault.stage
    assert (found.first.stage, found.first.at.step) == (stage, fault.first_step(start)), found.text()
    # Who was handed other prompts is not at fault for answering them.
    assert (found.verdict in ("samples differ", "inputs differ")) == (fault.stage == "data"), found.text()


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_changes_the_record_of_its_stage_first_and_not_before_its_step(runs: Runs, name: str) -> None:
    check(runs.planted(name), name, 1)


LATER = (
    "inference.stale_weights", "inference.frozen_tensor", "training.moment_zeroed", "reward.flipped",
    "data.batch_repeated", "sync.skipped_once",
)  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_a_fault_planted_for_a_later_step_acts_from_there_on(runs: Runs, name: str) -> None:
    check(runs.planted(name, start=2), name, 2)


def test_the_catalogue_is_as_large_as_it_must_be_and_says_where_each_fault_is() -> None:
    assert len(FAULTS) >= 30 and len(HARMLESS) >= 8
    words = {"weight sync": "sync"}
    for name, fault in FAULTS.items():
        assert fault.name == name and fault.part == PART[fault.stage] and fault.symptom
        assert name.startswith(f"{words.get(fault.part, fault.part)}.")
    assert [name for name, fault in FAULTS.items() if fault.harmless] == ["reward.constant_offset"]


def fields(run: RunTape, stage: str) -> dict[str, str]:
    return {name: entry.digest for name, entry in run.record(1, stage).header.fields.items()}


def test_a_constant_for_one_group_changes_rewards_and_nothing_that_training_sees(runs: Runs) -> None:
    clean, offset = open_run(runs.clean()), open_run(runs.run("offset", "cross.plant=reward.constant_offset"))
    rewards = [run.record(1, "reward").batch.array("reward") for run in (clean, offset)]
    assert np.array_equal(np.flatnonzero(rewards[0] != rewards[1]), np.arange(4))
    assert fields(clean, "reward") != fields(offset, "reward")
    assert fields(clean, "advantage") == fields(offset, "advantage")


def test_a_fault_changes_the_run_it_is_planted_in_and_no_other(runs: Runs) -> None:
    clean = runs.clean()
    everything = [name for name, fault in FAULTS.items() if not fault.needs]
    assert len(everything) > 20
    assert diff_runs(clean, runs.run("all", f'cross.plant="{",".join(everything)}"')).exit_code == 1
    assert diff_runs(clean, runs.run("afterwards")).exit_code == 0


def test_weights_that_were_exchanged_for_a_moment_come_back_bit_for_bit(runs: Runs) -> None:
    loaded = runs.load("weights", "tape.mode=off")
    trainer = Trainer(loaded, Reporter())
    with trainer.open():
        engine = trainer.parts.engine
        before = {n: t.clone() for n, t in engine.held()}
        other = {n: torch.randn_like(t) for n, t in before.items() if "embed" not in n}  # tied to the head
        with pytest.raises(ZeroDivisionError), computing_with(engine, other):
            assert all(torch.equal(t, other[n]) for n, t in engine.held() if n in other)
            raise ZeroDivisionError
        assert all(torch.equal(t, before[n]) for n, t in engine.held())


class Nothing:
    """A stage."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __init__(self, name: str, seen: list[int], clock: Clock) -> None:
        self.name, self.seen, self.clock = name, seen, clock

    def __call__(self, batch: Batch, at: At) -> Batch:
        self.seen.append(self.clock.step)
        return batch


def test_between_two_steps_the_clock_shows_the_next_one() -> None:
    """Prompts are drawn before the first stage of a step, and validation comes between two; also after a resume."""
    clock, seen = Clock(), list[int]()
    rollout, sync = (Around(Nothing(name, seen, clock), clock.around) for name in ("rollout", "sync"))
    for stage, at, after in (
        (sync, At(4), 5), (rollout, At(4, 0, "val"), 5), (rollout, At(5), 5), (sync, At(5), 6),
        (rollout, At(5, 0, "val"), 6),
    ):  # fmt: skip
        stage(Batch(()), at)
        assert clock.step == after
    assert seen == [4, 4, 5, 5, 5]


# Harmless differences

SAME_BITS = ("harmless.own_weights", "harmless.batch_composition", "harmless.reward_workers", "harmless.logging",
             "harmless.checkpoint_cadence", "harmless.gradient_checkpointing", "harmless.threads",
             "harmless.micro_batch")  # fmt: skip


@pytest.mark.parametrize(
    "name",  # two threads on a busy machine wait for each other
    [pytest.param(name, marks=pytest.mark.slow if name == "harmless.threads" else ()) for name in HARMLESS],
)
def test_a_harmless_difference_runs_and_changes_no_more_than_rounding(runs: Runs, name: str) -> None:
    harmless = runs.run(name, *HARMLESS[name].overrides)
    mine, theirs = open_run(runs.clean()).record(1, "rollout"), open_run(harmless).record(1, "rollout")
    for field in ("prompt_ids", "response_ids"):
        assert mine.header.fields[field].digest == theirs.header.fields[field].digest
    a, b = (record.batch.ragged("rollout_log_probs").values for record in (mine, theirs))
    limit = 0.1 if "bf16" in name else 1e-5
    assert 0 <= np.abs(a - b).max() < limit
    assert (np.abs(a - b).max() > 0) == (name not in SAME_BITS)


# Planting


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.needs])
def test_a_fault_that_would_have_no_effect_is_refused_with_what_it_needs(runs: Runs, name: str) -> None:
    none = (
        "actor_rollout_ref.model.use_remove_padding=False", "algorithm.adv_estimator=rloo",
    )  # fmt: skip
    with pytest.raises(FaultError, match="would have no effect") as caught:
        planting(runs.load("none", *none, f"cross.plant={name}"))
    assert all(override in str(caught.value) for override in FAULTS[name].needs)
    planting(runs.load("some", *none, *FAULTS[name].needs, f"cross.plant={name}"))


def test_faults_are_parsed_with_their_steps_and_what_is_unknown_is_refused_with_the_nearest() -> None:
    found = faults.parse("reward.flipped, sync.permuted@3")
    assert [(p.fault.name, p.start) for p in found] == [("reward.flipped", 1), ("sync.permuted", 3)]
    for text, message in (
        ("stale_weights", "nearest: inference.stale_weights"),
        ("sync.permutd", "nearest: sync.permuted"),
        ("reward.flipped@0", "step from 1"),
        ("reward.flipped@x", "step from 1"),
        ("", "no such fault"),
        ("reward.flipped,", "no such fault"),
        ("harmless.bf16_inference", "actor_rollout_ref.rollout.dtype=bfloat16"),
    ):
        with pytest.raises(FaultError, match=message):
            faults.parse(text)


def test_a_head_of_its_own_cannot_be_untied(runs: Runs) -> None:
    untied = "actor_rollout_ref.model.override_config={tie_word_embeddings:false}"
    with pytest.raises(FaultError, match="weights of its own"):
        runs.run("untied", untied, *FAULTS["sync.head_not_tied"].needs, "cross.plant=sync.head_not_tied")


def test_the_run_says_aloud_that_a_fault_is_planted(
    runs: Runs, demo_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        f"data.train_files={runs.folder}/train.parquet", "data.train_batch_size=4", "trainer.total_training_steps=1",
        f"actor_rollout_ref.model.path={demo_files}/model", "data.max_prompt_length=8", "data.max_response_length=8",
        f"reward.custom_reward_function.path={demo_files}/sort_reward.py", "reward.num_workers=1",
        f"trainer.default_local_dir={tmp_path}/run",
    ]  # fmt: skip
    assert main(["train", *given, "cross.plant=training.advantage_sign@1"]) == 0
    said = capsys.readouterr()
    assert "A FAULT IS PLANTED IN THIS RUN: training.advantage_sign (from step 1 on)" in said.out + said.err
    assert main(["train", *given, "cross.plant=training.advantage_sing"]) == 2
    assert "nearest: training.advantage_sign" in capsys.readouterr().err


def test_the_list_of_faults_is_complete_and_can_be_narrowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "list"]) == 0
    text = capsys.readouterr().out
    assert not [name for name in (*FAULTS, *HARMLESS) if name not in text]
    assert main(["faults", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [f["name"] for f in listed["faults"]] == list(FAULTS)
    assert [h["name"] for h in listed["harmless"]] == list(HARMLESS)
    assert main(["faults", "list", "sync", "reward.flipped", "--json"]) == 0
    names = [f["name"] for f in json.loads(capsys.readouterr().out)["faults"]]
    assert names == [n for n in FAULTS if n.startswith("sync.") or n == "reward.flipped"]
    assert main(["faults", "list", "sink"]) == 2
    assert "no such fault" in capsys.readouterr().err


def test_a_fault_of_the_packed_form_is_refused_where_the_model_falls_back_to_its_own(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossrl.models.policy.TOLERANCE", {torch.float32: -1.0})  # the check at the start fails
    for name in ("inference.cache_kept", "inference.head_bf16"):
        with pytest.raises(FaultError, match=f"{name}: this model is not sampled in packed form"):
            runs.run(f"plain-{name}", f"cross.plant={name}")


def test_a_fault_that_changes_nothing_or_at_another_place_would_be_noticed(runs: Runs) -> None:
    clean, other = runs.clean(), runs.run("wrong", "cross.plant=reward.length_bonus@2")
    with pytest.raises(AssertionError, match="changes nothing"):
        check(diff_runs(clean, clean), "reward.length_bonus", 1)
    found = diff_runs(clean, other)
    check(found, "reward.length_bonus", 2)
    for name, start in (("reward.length_bonus", 1), ("training.advantage_sign", 2), ("data.prompt_cut", 2)):
        with pytest.raises(AssertionError):
            check(found, name, start)
