"""The order of prompts: fixed by seed and epoch, exact over resumes, honest at the end."""

import json

import numpy as np
import pytest

from crossrl import schema
from crossrl.batch import Ragged
from crossrl.data.dataset import DataReport, PromptDataset, digest
from crossrl.data.errors import DataError
from crossrl.data.loader import DataExhausted, Draw, PromptLoader, validation_batches
from crossrl.data.rows import Row


def dataset(count, texts=None):
    texts = texts or [f"prompt {i}" for i in range(count)]
    rows = [
        Row(10 + i, [{"role": "user", "content": texts[i]}], "exact", str(i), {"i": i}, "f row") for i in range(count)
    ]
    ids = [np.arange(i + 1, dtype=np.int32) for i in range(count)]
    report = DataReport(count, 0, 0, 0, count, 1, count, 99)
    return PromptDataset(tuple(rows), Ragged.from_rows(ids, np.int32), digest(rows, ids), report)


def loader(data, **changes):
    return PromptLoader(data, **{"batch_size": 4, "n": 2, "seed": 7, "total_epochs": 2, **changes})


def rest(loads):
    batches = []
    while loads.remaining:
        batches.append(loads.next())
    return batches


def test_a_batch_is_groups_side_by_side_with_ids_that_are_derived():
    data = dataset(12)
    batch = loader(data, shuffle=False).next()
    d = data.digest[:12]
    assert batch.sample_id[:3] == (f"{d}.e0.r10.n0", f"{d}.e0.r10.n1", f"{d}.e0.r11.n0")
    assert batch["group_id"][:3] == [f"{d}.e0.r10", f"{d}.e0.r10", f"{d}.e0.r11"]
    schema.check(batch, ("group_id", "prompt_ids", "prompt", "data_source", "ground_truth", "extra_info"))
    assert set(batch.columns) == {"group_id", "prompt_ids", "prompt", "data_source", "ground_truth", "extra_info"}
    for i in range(8):
        row = data.rows[i // 2]
        assert batch["ground_truth"][i] == row.ground_truth
        assert batch["prompt"][i] == row.prompt
        assert batch["extra_info"][i] == row.extra_info
        assert batch.ragged("prompt_ids").row(i).tolist() == data.prompt_ids.row(i // 2).tolist()


def test_rows_with_the_same_text_are_two_groups():
    batch = loader(dataset(4, ["same"] * 4), shuffle=False).next()
    assert len(set(batch["group_id"])) == 4


def test_an_epoch_visits_rows_once_in_an_order_of_its_own():
    loads = loader(dataset(12), n=1)
    epochs = [
        [s.rsplit(".", 2)[1] for b in (loads.next(), loads.next(), loads.next()) for s in b.sample_id] for _ in "12"
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"r{10 + i}" for i in range(12))
    assert epochs[0] != epochs[1]
    assert epochs[0] != [f"r{10 + i}" for i in range(12)]


def test_without_shuffling_the_files_order_is_kept():
    loads = loader(dataset(8), n=1, shuffle=False)
    assert [d.row for d in loads.draw(16)] == [*range(8), *range(8)]


def test_the_order_depends_on_the_seed_and_on_no_global_generator():
    np.random.seed(0)
    a = loader(dataset(12)).draw(12)
    np.random.seed(1)
    assert loader(dataset(12)).draw(12) == a
    assert loader(dataset(12), seed=8).draw(12) != a


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 4, 6])
def test_c17_a_resumed_loader_goes_on_as_one_never_stopped(stop):
    whole = [b.sample_id for b in rest(loader(dataset(12)))]
    assert len(whole) == 6
    first = loader(dataset(12))
    for _ in range(stop):
        first.next()
    state = json.loads(json.dumps(first.state()))
    second = loader(dataset(12))
    second.load_state(state)
    assert [b.sample_id for b in rest(second)] == whole[stop:]
    assert second.remaining == 0


def test_the_state_at_an_epochs_end_is_the_next_ones_start():
    loads = loader(dataset(12))
    for _ in range(3):
        loads.next()
    assert (loads.state()["epoch"], loads.state()["position"], loads.remaining) == (1, 0, 12)


def test_rows_that_do_not_fill_a_batch_are_left_out_of_that_epoch():
    loads = loader(dataset(10), n=1)
    assert (loads.steps_per_epoch, loads.remaining) == (2, 16)
    draws = loads.draw(100)
    assert len(draws) == 16
    assert [d.epoch for d in draws] == [0] * 8 + [1] * 8
    assert len({d.row for d in draws[:8]}) == 8
    assert {d.row for d in draws[:8]} != {d.row for d in draws[8:]}


def test_drawing_beyond_an_epoch_goes_on_only_as_far_as_planned():
    loads = loader(dataset(12))
    loads.draw(9)
    assert [d.epoch for d in loads.draw(6)] == [0, 0, 0, 1, 1, 1]
    assert loads.remaining == 9
    with pytest.raises(DataExhausted, match="10 prompts wanted, 9 left in the 2 planned epochs of 12"):
        loads.next(10)
    assert loads.remaining == 9
    assert len(loads.draw(10)) == 9
    assert loads.draw(10) == []
    endless = loader(dataset(12), total_epochs=None)
    assert endless.remaining is None
    assert endless.draw(100)[-1].epoch == 8


def test_a_batch_over_two_epochs_holds_a_row_twice_under_two_ids():
    loads = loader(dataset(4), batch_size=4)
    batch = loads.batch(loads.draw(8))
    assert len(set(batch.sample_id)) == 16


def test_a_batch_larger_than_the_data_is_refused_with_the_arithmetic():
    with pytest.raises(DataError, match=r"train_batch_size=16 is more than the 12 prompts.*12 // 16 = 0 steps"):
        loader(dataset(12), batch_size=16)
    for wrong in ({"batch_size": 0}, {"n": 0}):
        with pytest.raises(DataError, match="at least 1"):
            loader(dataset(12), **wrong)


def test_a_state_over_other_data_or_order_is_refused_naming_both():
    data, other = dataset(12), dataset(13)
    state = loader(data).state()
    with pytest.raises(
        DataError, match=f"data set digest: saved {data.digest}, now {other.digest}.*another trainer.default_local_dir"
    ):
        loader(other).load_state(state)
    for change, name in (
        ({"seed": 8}, "data seed"),
        ({"shuffle": False}, "shuffle"),
        ({"batch_size": 3}, "batch size"),
    ):
        with pytest.raises(DataError, match=f"{name}: saved .*, now {next(iter(change.values()))}"):
            loader(data, **change).load_state(state)
    del state["position"]
    with pytest.raises(DataError, match="lacks position"):
        loader(data).load_state(state)


@pytest.mark.parametrize(("epoch", "position"), [(0, 12), (0, -1), (-1, 0), ("0", 0), (0, 1.5)])
def test_a_place_outside_the_data_is_refused_and_changes_nothing(epoch, position):
    loads = loader(dataset(12))
    with pytest.raises(DataError, match="loader state"):
        loads.load_state({**loads.state(), "epoch": epoch, "position": position})
    assert (loads.epoch, loads.position) == (0, 0)


def test_validation_sees_every_row_once_under_ids_of_its_own():
    data = dataset(10)
    batches = list(validation_batches(data, 4, 2))
    assert [len(b) for b in batches] == [8, 8, 4]
    ids = [s for b in batches for s in b.sample_id]
    assert len(set(ids)) == 20
    assert ids[0] == f"val.{data.digest[:12]}.e0.r10.n0"
    assert [t for b in batches for t in b["ground_truth"]] == [str(i) for i in range(10) for _ in "12"]
    assert [len(b) for b in validation_batches(data, None, 1)] == [10]


def test_draws_are_plain_values():
    assert loader(dataset(4), shuffle=False).draw(2) == [Draw(0, 0), Draw(0, 1)]
