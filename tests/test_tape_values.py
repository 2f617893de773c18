"""Strings, nested values and digests: what is stored comes back the same, and equal things have equal digests."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossrl.tape import digest
from crossrl.tape.values import BadJson, Unstorable, canonical, dumps, encode_column, join_column, loads, plain

_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(max_size=20),
)
_values = st.recursive(
    _leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
)


def same_type(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_type(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_type, a, b))
    return a == b and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


@given(_values)
@settings(max_examples=300, deadline=None)
def test_values_come_back_equal_in_value_type_and_order(value: Any) -> None:
    assert same_type(loads(dumps(plain(value))), value)


def test_a_round_trip_without_tags_would_be_noticed() -> None:
    """The planted control of the test above: plain ``json`` loses bytes, NaN and the difference of keys."""
    assert not same_type(json.loads(json.dumps({"a": "x"})), {"a": b"x"})


def test_not_finite_floats_and_lone_surrogates_come_back() -> None:
    back = loads(dumps(plain([math.nan, math.inf, -math.inf, -0.0, "\ud800 ü 漢"])))
    assert math.isnan(back[0]) and back[1:3] == [math.inf, -math.inf] and math.copysign(1, back[3]) == -1
    assert back[4] == "\ud800 ü 漢"


@pytest.mark.parametrize(
    ("given_", "stored"),
    [
        (np.bool_(True), True),
        (np.int64(7), 7),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.array([True, False]), [True, False]),
        (np.array([[1, 2], [3, 4]], np.uint8), [[1, 2], [3, 4]]),
        (np.array(["a", {"b": 1}], object), ["a", {"b": 1}]),
        (np.array(3.5), 3.5),
        ((1, "x"), [1, "x"]),
        (np.str_("s"), "s"),
    ],
)
def test_numpy_values_and_tuples_are_stored_by_the_stated_rule(given_: Any, stored: Any) -> None:
    assert same_type(loads(dumps(plain(given_))), stored)


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), np.datetime64("2020-01-01"), np.longdouble(1), 1 << 5000, lambda: 0, 1j, {1: "a"}]
)
def test_what_has_no_place_is_named_and_refused(value: Any) -> None:
    with pytest.raises(Unstorable, match=r"\$\.a\[1\]"):
        plain({"a": [0, value]})


def test_a_cycle_ends_in_a_clear_error() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(Unstorable, match="nested more than 64"):
        plain(loop)


def test_a_sub_field_that_cannot_be_stored_is_left_out_and_named() -> None:
    rows = [{"id": 1, "f": {"g": {9}, "h": None}}, {"id": np.bool_(False), "f": {"g": {8}}}, {3}]
    texts, left_out = encode_column("extra_info", rows, ["s0", "s1", "s2"], leave_out=True)
    assert [loads(t) for t in texts] == [{"id": 1, "f": {"h": None}}, {"id": False, "f": {}}, None]
    found = [(e.field, e.path, e.what, e.sample_id, e.count) for e in left_out]
    assert found == [
        ("extra_info", "$.f.g", "a value of type builtins.set", "s0", 2),
        ("extra_info", "$", "a value of type builtins.set", "s2", 1),
    ]
    with pytest.raises(Unstorable, match=r"extra_info of sample s0, \$\.f\.g"):
        encode_column("extra_info", rows, ["s0", "s1", "s2"], leave_out=False)


def test_samples_that_share_one_object_are_stored_and_counted_each() -> None:
    shared, odd = [{"role": "user"}], {"x": {1}}
    texts, left_out = encode_column("prompt", [shared, shared, odd, odd, shared], list("abcde"), leave_out=True)
    assert [loads(t) for t in texts] == [shared, shared, {}, {}, shared] and left_out[0].count == 2


def test_the_list_of_what_was_left_out_stays_short() -> None:
    rows = [{f"k{i}": {i}} for i in range(500)]
    _, left_out = encode_column("extra_info", rows, [f"s{i}" for i in range(500)], leave_out=True)
    assert len(left_out) == 51 and sum(e.count for e in left_out) == 500


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a":1,"a":2}', "twice"),
        (b"[NaN]", "NaN"),
        (b"[Infinity]", "Infinity"),
        (b"[1e999]", "out of range"),
        (b'"\xff"', "not UTF-8"),
        (b"[1", "not JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"$evil":1}', "unknown tag"),
        (b'{"$float":"1"}', "tag"),
        (b'{"$bytes":"*"}', "not JSON"),
        (b"9" * 5000, "not JSON"),
        (b"", "not JSON"),
    ],
)
def test_json_that_we_do_not_write_is_refused(text: bytes, why: str) -> None:
    with pytest.raises(BadJson, match=why):
        loads(text)


def test_canonical_json_ignores_the_order_of_keys_only() -> None:
    assert canonical({"a": 1, "b": [1, 2]}) == canonical({"b": [1, 2], "a": 1})
    assert canonical({"b": [1, 2]}) != canonical({"b": [2, 1]})
    assert canonical(1) != canonical(1.0) != canonical(True)


def test_a_digest_does_not_depend_on_the_number_of_threads() -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 * digest.CHUNK + 5, np.uint8)
    digests = {digest.tree("x", [data], threads) for threads in (1, 2, 5)}
    leaves = b"".join(hashlib.sha256(data[i : i + digest.CHUNK]).digest() for i in range(0, data.size, digest.CHUNK))
    assert digests == {"sha256:" + hashlib.sha256(b"x\n" + leaves).hexdigest()}


def test_column_digests_tell_type_order_lengths_and_split_apart() -> None:
    ones = np.ones(4, np.int32)
    two = np.array([2, 2], np.int64)
    digests = [
        digest.ragged_digest("int32", two, ones),
        digest.ragged_digest("float32", two, ones),
        digest.ragged_digest("int32", np.array([1, 3]), ones),
        digest.ragged_digest("int32", np.array([2, 2, 0]), ones),
        digest.ragged_digest("int32", two, np.array([1, 1, 1, 2], np.int32)),
        digest.ragged_digest("int32", two, np.array([1, 1, 2, 1], np.int32)),
        digest.number_digest("int32", ones),
        digest.number_digest("int32", ones[:0]),
        digest.value_digest(4, b"[1,1,1,1]"),
        digest.value_digest(1, b"[1,1,1,1]"),
    ]
    assert len(set(digests)) == len(digests)


def test_a_byte_order_or_stride_of_memory_does_not_change_a_digest() -> None:
    values = np.arange(10, dtype=np.int32)
    expected = digest.number_digest("int32", values)
    assert digest.number_digest("int32", values.astype(">i4")) == expected
    assert digest.number_digest("int32", np.arange(20, dtype=np.int32)[::2] // 2) == expected


def test_named_tensors_digest_by_name_type_and_shape() -> None:
    data = np.zeros(6, np.float32)
    one = digest.named_digest([("a", "float32", (2, 3), data), ("b", "bfloat16", (), b"\0\0")])
    assert one == digest.named_digest([("b", "bfloat16", (), b"\0\0"), ("a", "float32", (2, 3), data)])
    assert one != digest.named_digest([("a", "float32", (3, 2), data), ("b", "bfloat16", (), b"\0\0")])
    assert one != digest.named_digest([("a", "float32", (2, 3), data), ("b", "float16", (), b"\0\0")])


def test_a_column_is_readable_json() -> None:
    texts, _ = encode_column("response", ["a", "b"], ["s0", "s1"], leave_out=True)
    assert json.loads(join_column(texts)) == ["a", "b"]
