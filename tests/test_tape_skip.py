"""Rollout skip: the first run stores each call of generation, later runs load call k for call k."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from crossrl.batch import Batch, Ragged
from crossrl.stages.base import At, apply
from crossrl.tape.errors import CorruptRecord, ReplayRefused, TapeError, TapeWriteError
from crossrl.tape.layout import RunLayout, SkipLayout, in_ray_session
from crossrl.tape.record import read_record
from crossrl.tape.tape import Tape

NAME = "e_p_GBS3_N2"


@dataclass
class Generate:
    """Writes the number of its call into each response, so that a response tells which call it came from."""

    name: str = "rollout"
    reads: tuple[str, ...] = ("prompt_ids",)
    writes: tuple[str, ...] = ("response",)
    calls: int = 0

    def __call__(self, batch: Batch, at: At) -> Batch:
        self.calls += 1
        return Batch(batch.sample_id, {"response": [f"call {self.calls} {at.split}"] * len(batch)})


def batch(call: int = 0, split: str = "train") -> Batch:
    ids = tuple(f"{split}/0/{call}/{i}" for i in range(2))
    columns = {
        "prompt_ids": Ragged.from_rows([[call, 1]] * 2, np.int32),
        "group_id": [f"{split}/0/{call}"] * 2,
        "prompt": ["p", "p"],
        "data_source": ["d", "d"],
        "ground_truth": [str(call)] * 2,
        "extra_info": [{}, {}],
    }
    return Batch(ids, columns)


def skip_run(
    folder: Path, calls: list[At], temperature: float = 1.0, state: dict[str, int] | None = None
) -> tuple[list[str], Generate, Tape]:
    """A run with rollout skip on; its training half is of no interest here."""
    tape = Tape(RunLayout(folder / "tape"), "run", lambda stage, split: {"rollout": {"temperature": temperature}})
    tape.load_state(state or {})
    stage = Generate()
    taped = tape.wrap(stage, "cache", SkipLayout(folder / "dump", "e", "p", 3, 2))
    responses = [apply(taped, batch(at.step, at.split), at)["response"][0] for at in calls]
    tape.close()
    return responses, stage, tape


STEPS = [At(1), At(2), At(3)]


def test_calls_are_stored_under_the_known_names_from_index_0(tmp_path: Path) -> None:
    skip_run(tmp_path, STEPS)
    assert sorted(p.name for p in (tmp_path / "dump").iterdir()) == [f"{NAME}_0", f"{NAME}_1", f"{NAME}_2"]
    record = read_record(tmp_path / "dump" / f"{NAME}_2", "eager")
    assert record.batch["response"] == ["call 3 train"] * 2 and record.batch["ground_truth"] == ["3", "3"]
    assert (record.header.index, record.header.step) == (2, 3)


def test_a_later_run_loads_call_k_for_call_k_and_generates_nothing(tmp_path: Path) -> None:
    first, _, _ = skip_run(tmp_path, STEPS)
    second, stage, _ = skip_run(tmp_path, STEPS)
    assert second == first == ["call 1 train", "call 2 train", "call 3 train"] and stage.calls == 0


def test_more_calls_than_stored_are_generated_and_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    skip_run(tmp_path, STEPS[:2])
    caplog.set_level(logging.INFO, "crossrl.tape")
    responses, stage, _ = skip_run(tmp_path, STEPS)
    assert responses == ["call 1 train", "call 2 train", "call 1 train"] and stage.calls == 1
    assert f"no data found at {tmp_path}/dump/{NAME}_2: call 2 runs and is stored" in caplog.text
    assert skip_run(tmp_path, STEPS)[1].calls == 0


def test_validation_is_counted_apart(tmp_path: Path) -> None:
    calls = [At(0, 0, "val"), At(1), At(1, 0, "val"), At(2)]
    skip_run(tmp_path, calls)
    names = sorted(p.name for p in (tmp_path / "dump").iterdir())
    assert names == [f"{NAME}_0", f"{NAME}_1", f"val_{NAME}_0", f"val_{NAME}_1"]
    without_validation, stage, _ = skip_run(tmp_path, [At(1), At(2)])
    assert stage.calls == 0 and without_validation == ["call 2 train", "call 4 train"]


def test_several_calls_in_one_step_have_their_own_index(tmp_path: Path) -> None:
    """Dynamic sampling generates again within the step."""
    tape = Tape(RunLayout(tmp_path / "tape"), "run", lambda stage, split: {})
    taped = tape.wrap(Generate(), "cache", SkipLayout(tmp_path / "dump", "e", "p", 3, 2))
    for i, at in enumerate([At(1, 0), At(1, 1), At(2, 0)]):
        apply(taped, batch(i), at)
    tape.close()
    found = [read_record(tmp_path / "dump" / f"{NAME}_{i}").header for i in range(3)]
    assert [(h.step, h.call, h.index) for h in found] == [(1, 0, 0), (1, 1, 1), (2, 0, 2)]


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    first, _, tape = skip_run(tmp_path, STEPS[:2])
    rest, _, _ = skip_run(tmp_path, STEPS[2:], state=tape.state())
    assert sorted(p.name for p in (tmp_path / "dump").iterdir())[-1] == f"{NAME}_2"
    again, stage, _ = skip_run(tmp_path, STEPS)
    assert again == first + rest and stage.calls == 0


def test_the_lines_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "crossrl.tape")
    skip_run(tmp_path, STEPS[:1])
    path = f"{tmp_path}/dump/{NAME}_0"
    assert [r.message for r in caplog.records] == [
        f"rollout skip: folder in use: {tmp_path}/dump ({NAME}_<index>; 0 stored calls there)",
        f"rollout skip: no data found at {path}: call 0 runs and is stored",
        f"rollout skip: stored in {path}",
    ]
    caplog.clear()
    skip_run(tmp_path, STEPS[:1])
    assert [r.message for r in caplog.records] == [
        f"rollout skip: folder in use: {tmp_path}/dump ({NAME}_<index>; 1 stored calls there)",
        f"rollout skip: loaded from {path} (call 0, 2 samples)",
    ]


def test_failures_are_logged_with_their_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    skip_run(tmp_path, STEPS[:1])
    file = tmp_path / "dump" / f"{NAME}_0" / "columns.json"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptRecord):
        skip_run(tmp_path, STEPS[:1])
    assert f"rollout skip: could not load from {file.parent}: {file}: has" in caplog.text
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "dump").write_text("a file where the folder should be")
    with pytest.raises(TapeWriteError, match="could not be written"):
        skip_run(tmp_path / "x", STEPS[:1])
    assert f"could not store in {tmp_path}/x/dump/{NAME}_0" in caplog.text


def test_a_folder_in_rays_session_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session = tmp_path / "ray" / "session_2026-01-01_00-00-00_1"
    skip_run(session, STEPS[:1])
    assert "lies in Ray's session folder, which is removed with the cluster" in caplog.text
    (tmp_path / "ray" / "session_latest").symlink_to(session)
    assert in_ray_session(Path("/tmp/ray/session_latest/dump")) and in_ray_session(tmp_path / "ray" / "session_latest")
    assert not in_ray_session(tmp_path / "dump") and not in_ray_session(Path("/tmp/x/session_1"))


def test_another_temperature_is_refused(tmp_path: Path) -> None:
    skip_run(tmp_path, STEPS)
    with pytest.raises(ReplayRefused, match=r"rollout\.temperature: recorded 1\.0, found 0\.5"):
        skip_run(tmp_path, STEPS, temperature=0.5)


def test_another_call_than_the_stored_one_is_refused(tmp_path: Path) -> None:
    """The data order changed: call 0 now has other samples."""
    skip_run(tmp_path, STEPS)
    with pytest.raises(ReplayRefused, match="'train/0/1/0' is not in this batch"):
        skip_run(tmp_path, [At(2)])


def test_the_old_name_without_an_index_is_read_for_call_0_only(tmp_path: Path) -> None:
    first, _, _ = skip_run(tmp_path, STEPS[:1])
    old = tmp_path / "dump" / "e_p_GBS3__N2"
    (tmp_path / "dump" / f"{NAME}_0").rename(old)
    again, stage, _ = skip_run(tmp_path, STEPS[:1])
    assert again == first and stage.calls == 0
    with pytest.raises(
        TapeError, match=r"e_p_GBS3__N2 \(a name without an index\).*call 1 must not use the same responses"
    ):
        skip_run(tmp_path, STEPS[:2])


def test_the_old_name_does_not_stand_in_the_way_of_indexed_calls(tmp_path: Path) -> None:
    skip_run(tmp_path, STEPS[:1])
    (tmp_path / "dump" / "e_p_GBS3__N2").mkdir()
    responses, stage, _ = skip_run(tmp_path, STEPS)
    assert stage.calls == 2 and responses[0] == "call 1 train"


def test_a_pickle_of_another_trainer_is_never_loaded(tmp_path: Path) -> None:
    old = tmp_path / "dump" / "e_p_GBS3__N2"
    old.mkdir(parents=True)
    (old / "gen_batch.dp").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "pwned").encode() + b"'\ntR.")
    with pytest.raises(TapeError, match=r"gen_batch\.dp, a pickle written by another trainer"):
        skip_run(tmp_path, STEPS[:1])
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a\0b"])
def test_a_name_that_would_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TapeError, match=r"trainer\.experiment_name="):
        SkipLayout(tmp_path, name, "p", 1, 1)
    with pytest.raises(TapeError, match=r"trainer\.project_name="):
        SkipLayout(tmp_path, "e", name, 1, 1)


def test_a_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert SkipLayout(Path("~/dump"), "e", "p", 1, 1).root == tmp_path / "dump"


def test_skip_and_record_can_be_combined(tmp_path: Path) -> None:
    """The run's own tape records what the skip loaded."""
    skip_run(tmp_path, STEPS)
    tape = Tape(RunLayout(tmp_path / "own"), "second", lambda stage, split: {"rollout": {"temperature": 1.0}})
    stage = Generate()
    skipping = tape.wrap(stage, "cache", SkipLayout(tmp_path / "dump", "e", "p", 3, 2))
    both = tape.wrap(skipping, "record")
    for at in STEPS:
        apply(both, batch(at.step), at)
    tape.close()
    assert stage.calls == 0
    own = read_record(tmp_path / "own" / "step_000003" / "rollout.0", "eager")
    assert own.batch["response"] == ["call 3 train"] * 2 and own.header.run_id == "second"
