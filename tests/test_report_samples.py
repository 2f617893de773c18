"""Samples on disk are readable JSON Lines in verl's form, whole, whatever a verifier returned."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from crossrl.report import ReportError, Sample
from crossrl.report.samples import read_samples, write_samples


def test_a_row_has_verls_names_and_what_the_verifier_returned(tmp_path: Path) -> None:
    sample = Sample("2 + 3 = ?", "5", "5", 1.0, {"acc": True, "sample_id": "d0/0/1/0"})
    path = write_samples(tmp_path / "rollouts", 7, [sample, sample])
    assert path == tmp_path / "rollouts" / "7.jsonl"
    row = {
        "input": "2 + 3 = ?",
        "output": "5",
        "gts": "5",
        "score": 1.0,
        "step": 7,
        "acc": True,
        "sample_id": "d0/0/1/0",
    }
    assert read_samples(path) == [row, row]


def test_text_stays_readable(tmp_path: Path) -> None:
    path = write_samples(tmp_path, 1, [Sample("Übung: 二 + 三\n", "5 😀", "五", 0.0)])
    text = path.read_text(encoding="utf-8")
    assert "Übung: 二 + 三" in text
    assert "😀" in text
    assert len(text.splitlines()) == 1
    assert read_samples(path)[0]["input"] == "Übung: 二 + 三\n"


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        (np.float32("nan"), "nan"),
        ({"a": {"b": (1, float("inf"))}, 3: None}, {"a": {"b": [1, "inf"]}, "3": None}),
        (MappingProxyType({"x": 1}), {"x": 1}),
        ("\ud800 half a pair", "\\ud800 half a pair"),
        (b"bytes", "b'bytes'"),
        (None, None),
    ],
)
def test_any_value_is_stored_as_json(tmp_path: Path, value: object, stored: object) -> None:
    path = write_samples(tmp_path, 1, [Sample("p", "r", value, 0.5, {"odd": value})])

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert row["odd"] == stored
    assert row["gts"] == stored


def test_a_verifier_cannot_replace_the_samples_own_fields(tmp_path: Path) -> None:
    row = read_samples(write_samples(tmp_path, 2, [Sample("p", "r", "g", 0.5, {"score": 9, "step": 9, "input": ""})]))[
        0
    ]
    assert (row["score"], row["step"], row["input"]) == (0.5, 2, "p")


def test_an_unscored_sample_has_no_score(tmp_path: Path) -> None:
    assert read_samples(write_samples(tmp_path, 1, [Sample("p", "r", "g", float("nan"))]))[0]["score"] is None


def test_a_step_done_again_replaces_its_file_whole(tmp_path: Path) -> None:
    for count in (3, 1):
        path = write_samples(tmp_path, 1, [Sample("p", "r", "g", 0.0)] * count)
    assert len(read_samples(path)) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"cannot write samples to .*/file/1\.jsonl"):
        write_samples(tmp_path / "file", 1, [Sample("p", "r", "g", 0.0)])
