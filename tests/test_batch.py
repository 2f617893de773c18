"""Columns are joined by sample id, never overwritten, and always as the schema says."""

import numpy as np
import pytest

from crossrl import schema
from crossrl.batch import Batch, BatchError, Meaning, Ragged


def ragged(*rows, dtype=np.int32):
    return Ragged.from_rows(rows, dtype)


def test_ragged_rows_round_trip_with_empty_ones():
    column = ragged([1, 2, 3], [], [4])
    assert [r.tolist() for r in column.rows()] == [[1, 2, 3], [], [4]]
    assert column.take(np.array([2, 0])).values.tolist() == [4, 1, 2, 3]
    assert column.sums().tolist() == [6.0, 0.0, 4.0]
    assert column.sample_index.tolist() == [0, 0, 0, 2]


@pytest.mark.parametrize("lengths", [[2, 2], [4, -1], [3]])
def test_ragged_refuses_lengths_that_do_not_fit(lengths):
    if sum(lengths) == 3 and min(lengths) >= 0:
        Ragged(np.arange(3), np.array(lengths))
        return
    with pytest.raises(BatchError):
        Ragged(np.arange(3), np.array(lengths))


def test_join_is_by_id_and_not_by_position():
    left = Batch(("a", "b", "c"), {"reward": np.array([1.0, 2.0, 3.0])})
    right = Batch(("c", "a", "b"), {"advantages": ragged([3], [1, 1], [2], dtype=np.float32)})
    joined = left.join(right)
    assert joined.sample_id == ("a", "b", "c")
    assert [r.tolist() for r in joined.ragged("advantages").rows()] == [[1, 1], [2], [3]]


def test_join_names_the_id_that_does_not_fit():
    with pytest.raises(BatchError, match="'b'"):
        Batch(("a", "b")).join(Batch(("a", "c")))


def test_a_column_is_never_overwritten():
    batch = Batch(("a",), {"reward": np.array([1.0])})
    with pytest.raises(BatchError, match="'reward' is already there"):
        batch.join(Batch(("a",), {"reward": np.array([2.0])}))


def test_an_id_that_occurs_twice_is_named():
    with pytest.raises(BatchError, match="'x' occurs twice"):
        Batch(("x", "y", "x"))


def test_concat_refuses_log_probs_of_different_meaning():
    one = Batch(("a",), {"old_log_probs": ragged([0], dtype=np.float32)}, {"old_log_probs": Meaning(1.0)})
    two = Batch(("b",), {"old_log_probs": ragged([0], dtype=np.float32)}, {"old_log_probs": Meaning(0.6)})
    with pytest.raises(BatchError, match="different meanings"):
        Batch.concat([one, two])
    assert len(Batch.concat([one, Batch(("b",), two.columns, one.meanings)])) == 2


def test_take_copies():
    values = np.array([1.0, 2.0])
    taken = Batch(("a", "b"), {"reward": values}).take([0, 1])
    values[0] = 9.0
    assert taken.array("reward").tolist() == [1.0, 2.0]


def response(**columns):
    return Batch(("a", "b"), {"response_ids": ragged([1, 2], [3]), **columns})


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (ragged([0.0, -1.0], [-2.0], dtype=np.float64), "float32"),
        (ragged([0.0], [-2.0], dtype=np.float32), "sample a has 1 values"),
        (ragged([0.0, np.nan], [-2.0], dtype=np.float32), "nan in sample a"),
        (np.array([0.0, 0.0], np.float32), "want a ragged column"),
    ],
)
def test_the_schema_names_what_is_wrong_with_a_field(column, says):
    with pytest.raises(BatchError, match=says):
        schema.check(response(old_log_probs=column))
    schema.check(response(old_log_probs=ragged([0.0, -1.0], [-2.0], dtype=np.float32)))


def test_a_missing_score_is_nan_and_infinity_is_not_allowed():
    schema.check(Batch(("a", "b"), {"reward": np.array([1.0, np.nan])}))
    with pytest.raises(BatchError, match="inf in sample b"):
        schema.check(Batch(("a", "b"), {"reward": np.array([1.0, np.inf])}))


def test_an_unknown_field_is_an_error():
    with pytest.raises(BatchError, match="'rewards' is not in the schema"):
        schema.check(Batch(("a",), {"rewards": np.array([1.0])}))
