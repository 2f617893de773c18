"""Data files to rows: all formats agree, values come back equal, and what is wrong is named."""

import datetime
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from crossrl.data.errors import DataError
from crossrl.data.rows import read_rows


def record(i, **changes):
    return {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{i} + 1 = ?"}],
        "data_source": "numeric",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"index": i, "split": "train"},
        **changes,
    }


def write(path, records):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records), encoding="utf-8")
    else:
        path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in records) + "\n\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_all_formats_give_the_same_rows(tmp_path, suffix):
    rows = read_rows(write(tmp_path / f"a{suffix}", [record(i) for i in range(3)]))
    assert [r.index for r in rows] == [0, 1, 2]
    assert rows[1].prompt == record(1)["prompt"]
    assert (rows[1].data_source, rows[1].ground_truth, rows[1].extra_info) == ("numeric", "2", record(1)["extra_info"])
    assert rows[2].place.startswith(f"{tmp_path / 'a'}{suffix} row 2")


def test_several_files_are_one_set_in_the_order_named(tmp_path):
    a = write(tmp_path / "a.parquet", [record(i) for i in range(2)])
    b = write(tmp_path / "b.jsonl", [record(i) for i in range(5, 7)])
    rows = read_rows([b, a])
    assert [(r.index, r.ground_truth) for r in rows] == [(0, "6"), (1, "7"), (2, "1"), (3, "2")]
    assert rows[2].place == f"{a} row 0"


def test_a_json_file_may_hold_lines(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("\n".join(json.dumps(record(i)) for i in range(2)), encoding="utf-8-sig")
    assert len(read_rows(str(file))) == 2


def test_a_plain_string_prompt_is_one_user_message(tmp_path):
    rows = read_rows(write(tmp_path / "a.jsonl", [record(0, prompt="524163>")]))
    assert rows[0].prompt == [{"role": "user", "content": "524163>"}]


def test_other_column_names_can_be_set(tmp_path):
    one = record(0, question="2?", kind="exact")
    rows = read_rows(write(tmp_path / "a.jsonl", [one]), prompt_key="question", source_key="kind")
    assert (rows[0].prompt[0]["content"], rows[0].data_source) == ("2?", "exact")


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_values_come_back_equal_in_value_and_type(tmp_path, suffix):
    extra = {
        "flags": [True, False],
        "missing": None,
        "nested": {"a": {"b": [1, 2.5, "x"] if suffix == ".jsonl" else [1, 2]}},
        "text": "naïve Ω 日本 \u2028 \x85 end",
        "big": 2**60,
    }
    answer = {"ground_truth": ["ja", "nein\u2028"], "style": "rule"}
    rows = read_rows(write(tmp_path / f"a{suffix}", [record(0, extra_info=extra, reward_model=answer)]))
    assert rows[0].extra_info == extra
    assert [type(v) for v in rows[0].extra_info["flags"]] == [bool, bool]
    assert rows[0].ground_truth == ["ja", "nein\u2028"]
    assert json.loads(json.dumps(rows[0].extra_info)) == extra


def test_parquet_maps_become_dicts_even_when_empty(tmp_path):
    kind = pa.struct([("m", pa.map_(pa.string(), pa.list_(pa.map_(pa.string(), pa.int64()))))])
    extra = [{"m": [("k", [[("a", 1)], []])]}, {"m": []}, {"m": None}]
    columns = {k: [record(i)[k] for i in range(3)] for k in ("prompt", "data_source", "reward_model")}
    table = pa.table({**columns, "extra_info": pa.array(extra, kind)})
    pq.write_table(table, tmp_path / "a.parquet")
    rows = read_rows(str(tmp_path / "a.parquet"))
    assert [r.extra_info for r in rows] == [{"m": {"k": [{"a": 1}, {}]}}, {"m": {}}, {"m": None}]


def test_keys_that_parquet_added_to_messages_are_dropped(tmp_path):
    prompt = [{"role": "user", "content": "hi", "name": "Ann"}, {"role": "assistant", "content": None}]
    rows = read_rows(write(tmp_path / "a.parquet", [record(0, prompt=prompt)]))
    assert rows[0].prompt == prompt


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"extra_info": {"meta": [{"when": datetime.date(2020, 1, 1)}]}},
            r"extra_info\.meta\[0\]\.when: a date cannot",
        ),
        ({"extra_info": {"raw": b"\xff"}}, r"extra_info\.raw: a bytes cannot"),
        ({"extra_info": {"x": float("nan")}}, r"extra_info\.x: nan is not a finite number"),
        ({"reward_model": {"ground_truth": b"1"}}, r"reward_model\.ground_truth: a bytes cannot"),
    ],
)
def test_a_value_that_json_cannot_hold_is_named_with_file_row_and_field(tmp_path, changes, message):
    file = write(tmp_path / "a.parquet", [record(0, **changes)])
    with pytest.raises(DataError, match=message) as error:
        read_rows(file)
    assert f"{file} row 0" in str(error.value)


@pytest.mark.parametrize("answer", [None, "", "  ", [], {}])
def test_an_empty_answer_is_an_error_that_names_the_row(tmp_path, answer):
    file = write(tmp_path / "a.jsonl", [record(0), record(1, reward_model={"ground_truth": answer})])
    with pytest.raises(DataError, match=r"a\.jsonl row 1 \(line 2\): empty answer"):
        read_rows(file)


@pytest.mark.parametrize("answer", [0, False, "0"])
def test_zero_and_false_are_answers(tmp_path, answer):
    file = write(tmp_path / "a.jsonl", [record(0, reward_model={"ground_truth": answer})])
    assert read_rows(file)[0].ground_truth == answer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_model": {"style": "rule"}}, "empty answer"),
        ({"reward_model": "5"}, "want a map with 'ground_truth'"),
        ({"data_source": None}, "data_source is None; want the name of a verifier"),
        ({"prompt": []}, r"prompt is \[\]; want a list of chat messages"),
        ({"prompt": [{"role": "user"}]}, r"prompt\[0\] is .* want a message with 'role' and 'content'"),
        ({"extra_info": "x"}, "extra_info is a str"),
        ({"images": [{"bytes": "x"}]}, "carries images; this version trains on text only"),
    ],
)
def test_a_bad_row_is_named(tmp_path, changes, message):
    file = write(tmp_path / "a.jsonl", [record(0), record(1, **changes)])
    with pytest.raises(DataError, match=rf"row 1 \(line 2\).*{message}"):
        read_rows(file)


def test_an_empty_media_column_is_no_reason_to_refuse(tmp_path):
    assert len(read_rows(write(tmp_path / "a.jsonl", [record(0, images=[], videos=None)]))) == 1


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_a_missing_column_is_named_with_those_that_are_there(tmp_path, suffix, column):
    one = record(0)
    one["question"] = one.pop(column)
    with pytest.raises(DataError, match=f"no column '{column}'; there are: .*ability, .*question"):
        read_rows(write(tmp_path / f"a{suffix}", [one]))


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.parquet' does not exist"):
        read_rows(str(tmp_path / "nowhere.parquet"))
    with pytest.raises(DataError, match=r"unknown type '\.csv'; want \.parquet, \.jsonl, \.json"):
        (tmp_path / "a.csv").write_text("x")
        read_rows(str(tmp_path / "a.csv"))
    with pytest.raises(DataError, match="is not a file"):
        read_rows(str(tmp_path))
    for content in (b"", b"PAR1 not really", b"PAR1" * 100):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(DataError, match="cannot be read as parquet"):
            read_rows(str(tmp_path / "a.parquet"))
    whole = (tmp_path / "b.parquet", tmp_path / "c.parquet")
    write(whole[0], [record(i) for i in range(100)])
    data = bytearray(whole[0].read_bytes())
    data[30:200] = b"\xff" * 170
    whole[1].write_bytes(data)
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read_rows(str(whole[1]))
    (tmp_path / "a.jsonl").write_text(json.dumps(record(0)) + "\n{broken\n")
    with pytest.raises(DataError, match=r"row 1 \(line 2\): not valid JSON"):
        read_rows(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        read_rows(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").write_text("[1]\n")
    with pytest.raises(DataError, match="want a JSON object"):
        read_rows(str(tmp_path / "a.jsonl"))


def test_no_rows_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"a\.jsonl' has no rows"):
        read_rows([write(tmp_path / "b.jsonl", [record(0)]), str(tmp_path / "a.jsonl")])
    with pytest.raises(DataError, match="no data files are named"):
        read_rows([])
