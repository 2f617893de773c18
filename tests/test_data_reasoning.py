"""reasoning-gym data sets by name: rows that score themselves, the same in every process."""

import json

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from crossrl.data import reasoning
from crossrl.data.errors import DataError
from crossrl.data.rows import read_rows
from crossrl.rewards import verifiers


@pytest.mark.parametrize(
    "spec",
    [
        "reasoning_gym:chain_sum?min_terms=2&negative=true&name=a b&xs=[1,2]",
        "reasoning_gym:chain_sum/min_terms:2/negative:true/name:a b/xs:[1,2]",
    ],
)
def test_settings_are_json_values_or_strings(spec):
    want = {"seed": 5, "min_terms": 2, "negative": True, "name": "a b", "xs": [1, 2]}
    assert reasoning.parse_spec(spec, 5) == ("chain_sum", want)


def test_the_spelling_with_slashes_needs_no_quotes_in_an_override():
    spec = "reasoning_gym:chain_sum/min_terms:2/seed:7"
    override = OverridesParser.create().parse_override(f"data.train_files=[{spec},b.parquet]")
    assert override.value() == [spec, "b.parquet"]
    assert reasoning.parse_spec(spec, 0) == ("chain_sum", {"seed": 7, "min_terms": 2})


def test_rows_are_scored_from_what_they_carry():
    rows = read_rows(["reasoning_gym:chain_sum?min_terms=2&max_terms=3&size=4", "reasoning_gym:arc_agi?size=2"])
    assert [r.data_source for r in rows] == ["reasoning_gym:chain_sum"] * 4 + ["reasoning_gym:arc_agi"] * 2
    assert [r.index for r in rows] == list(range(6))
    for row in rows:  # arc_agi compares tuples, which plain JSON would turn into lists
        extra = json.loads(json.dumps(row.extra_info))
        assert verifiers.reasoning_gym(row.data_source, row.ground_truth, row.ground_truth, extra) == 1.0
        assert verifiers.reasoning_gym(row.data_source, "what?", row.ground_truth, extra) < 0.5
    assert rows[0].prompt[0]["role"] == "user"
    assert rows[0].extra_info["reasoning_gym"]["config"]["seed"] == 0


def test_training_and_validation_share_no_items_by_default():
    def questions(seed):
        data = reasoning.build("chain_sum", {"seed": seed, "size": 50})
        return {data[i]["question"] for i in range(50)}

    train = questions(reasoning.TRAIN_SEED)
    assert not train & questions(reasoning.VAL_SEED)
    assert len(train & questions(reasoning.TRAIN_SEED + 1)) > 40  # why the default seeds are far apart


def test_items_do_not_depend_on_the_hash_seed_of_the_process(monkeypatch):
    rows = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        rows.append(read_rows("reasoning_gym:isomorphic_strings?size=3"))
    assert rows[0] == rows[1]


def test_a_task_without_a_single_answer_needs_none():
    rows = read_rows("reasoning_gym:graph_color?size=2")
    assert rows[0].ground_truth is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("reasoning_gym:chain_sun?size=2", "no data set 'chain_sun'; there is: chain_sum"),
        ("reasoning_gym:chain_sum?size", "'size' is not key=value"),
        ("reasoning_gym:", "names no data set"),
    ],
)
def test_a_spec_that_cannot_work_is_named(spec, message):
    with pytest.raises(DataError, match=message):
        read_rows(spec)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"terms": 2}, "no setting 'terms'; it has: min_terms"),
        ({"min_terms": 0}, "refuses the settings .*AssertionError"),
    ],
)
def test_a_setting_that_cannot_work_is_named(config, message):
    with pytest.raises(DataError, match=message):
        reasoning.build("chain_sum", config)


def test_a_missing_package_is_named_with_the_extra(monkeypatch, tmp_path):
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DataError, match=r"pip install 'crossrl\[tasks\]'"):
        read_rows("reasoning_gym:chain_sum?size=2")


@pytest.mark.parametrize(
    "value", [(1, (2, [3, ()])), {"a": (1,)}, {1: "x", (2, 3): ["y"]}, {"__tuple__": [1]}, None, "é", [True, 1.5]]
)
def test_entries_come_back_equal_in_value_and_type(value):
    again = reasoning.decode_entry(json.loads(json.dumps(reasoning.encode_entry(value))))
    assert repr(again) == repr(value)
