"""``crossrl import verl``: dumps in the shapes that verl writes, and in those that something went wrong with."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossrl.cli.main import main
from crossrl.hosts.verl_dumps.errors import DumpError
from crossrl.hosts.verl_dumps.importer import Options, import_verl
from crossrl.hosts.verl_dumps.pickled import Neutral, _take
from crossrl.hosts.verl_dumps.proto import proto_dump
from crossrl.tape import open_run

Cli = Callable[..., tuple[int, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """``cli(words...)``: exit code, and what was printed to both streams."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: object) -> tuple[int, str]:
        code = main([str(w) for w in words])
        out, err = capsys.readouterr()
        return code, out + err

    return run


# -- dumps as verl writes them --

SAMPLES = [("what is 1+1?", "two", "2", 1.0), ("what is 1+1?", "3", "2", 0.0),
           ("what is 2+2?", "4\u2028or so", "4", 1.0), ("what is 2+2?", "five", "4", 0.25)]  # fmt: skip


def entries(step: int, samples: Sequence[tuple[str, str, Any, float]] = SAMPLES, **extra: Sequence[Any]) -> list[dict]:
    base = [{"input": i, "output": o, "gts": g, "score": s, "step": step} for i, o, g, s in samples]
    return [row | {k: v[n] for k, v in extra.items()} for n, row in enumerate(base)]


def write(folder: Path, step: int, rows: Sequence[dict]) -> Path:
    """As 0.8.0 and 0.9.1 do it; the older ones write the same bytes at once."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    return path


def with_queue(step: int, order: Sequence[int] = (0, 1, 2, 3)) -> list[dict]:
    """The trainer with the transfer queue: random uids, sorted by them."""
    groups = {0: uuid.uuid4().hex, 2: uuid.uuid4().hex}
    uids = [f"{groups[n - n % 2]}_{n % 2}_0" for n in range(4)]
    rows = entries(step, uid=uids)
    return [rows[n] for n in order]


def imported(dump: Path, out: Path, **options: Any) -> Path:
    import_verl(Options(out, dump, **options))
    return out


def content(folder: Path, stage: str = "rollout", step: int = 1) -> str:
    return open_run(folder).record(step, stage).header.content


# -- what is in the tape --


def test_a_dump_is_a_tape_with_what_the_dump_has_and_nothing_else(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path / "dump", step, entries(step, acc=[1, 0, 1, 0], pred=["2", "3", "4", None]))
    run = open_run(imported(tmp_path / "dump", tmp_path / "out"))
    assert run.steps() == [1, 2] and run.stages(1) == ["rollout", "reward"]
    rollout, reward = run.record(1, "rollout"), run.record(1, "reward")
    assert set(rollout.batch.columns) == {"group_id", "prompt", "response", "ground_truth"}
    assert set(reward.batch.columns) == {"score", "reward_extra"}
    rollout.check(), reward.check()
    by_text = {view.response: view for view in run.samples(1)}
    assert set(by_text) == {"two", "3", "4\u2028or so", "five"}
    assert by_text["five"].columns["score"] == 0.25
    assert by_text["five"].columns["reward_extra"] == {"acc": 0, "pred": None}
    assert by_text["five"].columns["ground_truth"] == "4" and by_text["five"].prompt == "what is 2+2?"


def test_the_record_says_where_it_comes_from(tmp_path: Path) -> None:
    import hashlib

    path = write(tmp_path / "dump", 1, with_queue(1))
    header = open_run(imported(tmp_path / "dump", tmp_path / "out")).record(1, "rollout").header
    origin = header.info["imported"]
    assert origin["path"]["file"] == str(path) and origin["by"].startswith("crossrl import verl")
    assert origin["path"]["digest"] == "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    for sample, line, uid in zip(header.sample_id, origin["path"]["line"], origin["path"]["uid"], strict=True):
        assert rows[line - 1]["uid"] == uid
        assert sample.endswith(f"/{uid.split('_')[1]}")  # the repeat is verl's session
    assert header.weight_version is None and not header.meanings


def test_validation_is_apart_from_training(tmp_path: Path) -> None:
    write(tmp_path / "dump", 1, entries(1))
    write(tmp_path / "val", 0, entries(0, SAMPLES[:1], reward=[1.0]))
    write(tmp_path / "val", 1, entries(1, SAMPLES[:1], reward=[1.0]))
    out = imported(tmp_path / "dump", tmp_path / "out", val=tmp_path / "val")
    run = open_run(out)
    assert run.steps() == [0, 1]
    assert (run.stages(0), run.stages(0, "val")) == ([], ["rollout", "reward"])
    assert [len(run.samples(1, split)) for split in ("train", "val")] == [4, 1]
    assert run.record(1, "rollout", split="val").header.split == "val"


def test_a_missing_answer_or_score_is_missing_and_not_invented(tmp_path: Path) -> None:
    rows = entries(1, [("q", "a", None, 1.0), ("q", "b", None, 0.0)])
    rows[1]["score"] = None
    write(tmp_path / "dump", 1, rows)
    without = [{k: v for k, v in row.items() if k != "gts"} for row in rows]
    write(tmp_path / "older", 1, without)
    run = open_run(imported(tmp_path / "dump", tmp_path / "a"))
    assert run.record(1, "rollout").batch["ground_truth"] == [None, None]
    assert np.isnan(run.record(1, "reward").batch["score"]).tolist() == [False, True]
    older = open_run(imported(tmp_path / "older", tmp_path / "b")).record(1, "rollout").header
    assert "ground_truth" not in older.fields
    assert "ground_truth" in older.info["imported"]["not_in_this_dump"]


# -- sample ids --


def test_ids_are_the_same_in_every_import_whatever_verl_s_order_and_random_ids(tmp_path: Path) -> None:
    write(tmp_path / "a", 1, with_queue(1))
    write(tmp_path / "b", 1, with_queue(1, order=(3, 2, 1, 0)))
    write(tmp_path / "c", 1, entries(1))  # the other trainer: no uids, in the order of generation
    outs = [imported(tmp_path / name, tmp_path / f"out-{i}") for i, name in enumerate("aabc")]
    contents = {content(out) for out in outs}
    assert len(contents) == 1
    ids = open_run(outs[0]).record(1, "rollout").sample_id
    assert sorted(i.rpartition("/")[2] for i in ids) == ["0", "0", "1", "1"]
    groups = open_run(outs[0]).record(1, "rollout").batch["group_id"]
    assert [i.rpartition("/")[0] for i in ids] == groups and len(set(groups)) == 2


def test_another_prompt_or_answer_is_another_sample(tmp_path: Path) -> None:
    for name, sample in (("a", ("q", "r", "1", 1.0)), ("b", ("q ", "r", "1", 1.0)), ("c", ("q", "r", "2", 1.0))):
        write(tmp_path / name, 1, entries(1, [sample]))
    ids = [open_run(imported(tmp_path / n, tmp_path / f"out-{n}")).record(1, "rollout").sample_id for n in "abc"]
    assert len(set(ids)) == 3


# -- reading them --


def test_diff_of_equal_dumps_is_equal_and_a_changed_word_is_found(tmp_path: Path, cli: Cli) -> None:
    write(tmp_path / "a", 1, with_queue(1))
    write(tmp_path / "b", 1, with_queue(1, order=(2, 3, 0, 1)))
    changed = with_queue(1)
    changed[3]["output"] = "fife"
    write(tmp_path / "c", 1, changed)
    for name in "abc":
        assert cli("import", "verl", tmp_path / name, "--out", tmp_path / f"out-{name}")[0] == 0
    code, text = cli("diff", tmp_path / "out-a", tmp_path / "out-b")
    assert code == 0 and "equal" in text and "not in this dump" in text
    code, text = cli("diff", tmp_path / "out-a", tmp_path / "out-c")
    assert code == 1 and "values differ" in text and "response" in text and "fife" in text


def test_inspect_shows_scores_and_says_what_is_not_in_the_dump(tmp_path: Path, cli: Cli) -> None:
    write(tmp_path / "dump", 1, entries(1))
    out = imported(tmp_path / "dump", tmp_path / "out")
    for words in ((out,), (out, "--step", 1), (out, "--step", 1, "--stage", "rollout")):
        code, text = cli("inspect", *words)
        assert code == 0 and "not in this dump: token ids as sampled, log-probs" in text
    code, text = cli("inspect", out, "--worst", 1)
    assert code == 1 and "nothing to show" in text and "not in this dump" in text
    assert "mean reward 0.562" in cli("inspect", out, "--step", 1)[1]
    sample = next(v.sample_id for v in open_run(out).samples(1) if v.response == "five")
    code, text = cli("inspect", out, "--sample", sample)
    assert code == 0 and "0.25 (the score; rewards are not recorded)" in text and "five" in text
    assert cli("inspect", out, "--find", "five")[0] == 0
    data = json.loads(cli("inspect", out, "--sample", sample, "--json")[1])
    assert data["tokens"] == [] and "not in this dump" in data["imported"][0]


def test_ids_of_texts_that_were_encoded_again_say_so_wherever_they_are_shown(
    tmp_path: Path, cli: Cli, demo_files: Path
) -> None:
    write(tmp_path / "dump", 1, entries(1, [("123", "45", "6", 1.0)]))
    plain = imported(tmp_path / "dump", tmp_path / "plain")
    out = imported(tmp_path / "dump", tmp_path / "out", tokenizer=demo_files / "model")
    record = open_run(out).record(1, "rollout")
    assert record.batch["response_ids"].lengths.tolist() == [2]
    assert record.header.info["imported"]["token_ids"].startswith("re-encoded text, not the ids that were sampled")
    assert "digest" in record.header.fingerprints["tokenizer"]
    for words in (("inspect", out), ("inspect", out, "--sample", record.sample_id[0]), ("diff", out, plain)):
        assert "re-encoded text, not the ids that were sampled" in cli(*words)[1]
    assert "re-encoded" not in cli("inspect", plain)[1]
    assert "response_ids" not in open_run(plain).record(1, "rollout").header.fields


# -- what is wrong with a dump --


def lines(*rows: object) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


GOOD = entries(1, SAMPLES[:1])[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (lines(GOOD, '{"input": ', GOOD), ["1.jsonl, line 2", "Expecting value"]),
        (lines(GOOD, [1]), ["1.jsonl, line 2", "a list and not a map"]),
        (lines({"prompt": "q", "response": "a"}), ["1.jsonl, line 1", "no input, output, score, step", "prompt"]),
        (lines(GOOD, GOOD | {"step": 2}), ["1.jsonl, line 2", "step 2, expected 1", "the name of the file"]),
        (lines(GOOD, {k: v for k, v in GOOD.items() if k != "gts"}), ["1.jsonl, line 2", "no key gts, unlike line 1"]),
        (lines(GOOD, GOOD | {"score": "0.5"}), ["1.jsonl, line 2", "score is '0.5'"]),
        (lines(GOOD, GOOD | {"score": True}), ["1.jsonl, line 2", "score is True"]),
        (lines(GOOD | {"score": 10**400}), ["1.jsonl, line 1", "beyond"]),
        (lines(GOOD | {"output": ["a"]}), ["1.jsonl, line 1", "output is a list"]),
        (lines(GOOD | {"step": "1"}), ["1.jsonl, line 1", "step is '1'"]),
        (lines('{"input":"q","input":"p","output":"a","score":1,"step":1}'), ["line 1", "'input' occurs twice"]),
        (lines("[" * 100_000), ["1.jsonl, line 1", "nested too deeply"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_file_and_line_and_nothing_is_written(
    text: str, said: list[str], tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "1.jsonl").write_text(text)
    with pytest.raises(DumpError) as error:
        imported(tmp_path / "dump", tmp_path / "out")
    assert all(part in str(error.value) for part in said), str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["dump"]
    code, shown = cli("import", "verl", tmp_path / "dump", "--out", tmp_path / "out")
    assert code == 2 and "Traceback" not in shown


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path: Path) -> None:
    path = write(tmp_path / "dump", 1, entries(1))
    path.write_bytes(path.read_bytes().replace(b"five", b"f\xffve"))
    with pytest.raises(DumpError, match=r"1.jsonl, line 4: not UTF-8 at byte \d+"):
        imported(tmp_path / "dump", tmp_path / "out")


def test_the_last_line_of_a_killed_writer_is_left_out_and_every_reader_says_so(tmp_path: Path, cli: Cli) -> None:
    whole = write(tmp_path / "whole", 1, entries(1))
    cut = tmp_path / "cut" / "1.jsonl"
    cut.parent.mkdir()
    cut.write_bytes(whole.read_bytes()[:-20])
    code, text = cli("import", "verl", cut.parent, "--out", tmp_path / "out")
    assert code == 0 and "line 4, the last one, was cut off and is left out; samples may be missing" in text
    assert len(open_run(tmp_path / "out").samples(1)) == 3
    out = imported(whole.parent, tmp_path / "out-whole")
    assert "samples may be missing" in cli("inspect", tmp_path / "out")[1]
    code, text = cli("diff", out, tmp_path / "out")
    assert code == 1 and "samples differ" in text and "run B: step 1:" in text and "samples may be missing" in text
    assert "may be missing" not in cli("inspect", out)[1]


def test_a_cut_line_that_is_the_only_one_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text(json.dumps(GOOD)[:-5])
    with pytest.raises(DumpError, match="line 1"):
        imported(tmp_path / "1.jsonl", tmp_path / "out")


def test_empty_files_are_counted_and_only_empty_files_are_an_error(tmp_path: Path, cli: Cli) -> None:
    write(tmp_path / "dump", 1, entries(1))
    write(tmp_path / "dump", 2, [])
    code, text = cli("import", "verl", tmp_path / "dump", "--out", tmp_path / "out")
    assert code == 0 and "2.jsonl is empty" in text and open_run(tmp_path / "out").steps() == [1]
    with pytest.raises(DumpError, match="nothing to import"):
        imported(tmp_path / "dump" / "2.jsonl", tmp_path / "none")


def test_two_files_of_one_step_are_an_error_that_names_both(tmp_path: Path) -> None:
    path = write(tmp_path / "dump", 1, entries(1))
    path.with_name("01.jsonl").write_bytes(path.read_bytes())
    with pytest.raises(DumpError, match=r"01\.jsonl and .*1\.jsonl are both of step 1"):
        imported(tmp_path / "dump", tmp_path / "out")


def test_files_of_other_names_are_left_out_and_counted(tmp_path: Path, cli: Cli) -> None:
    write(tmp_path / "dump", 1, entries(1))
    for name in ("notes.jsonl", "all.jsonl"):
        (tmp_path / "dump" / name).write_text("{}")
    code, text = cli("import", "verl", tmp_path / "dump", "--out", tmp_path / "out")
    assert code == 0 and "2 file(s) are not named {step}.jsonl" in text
    (tmp_path / "dump" / "1.jsonl").unlink()
    with pytest.raises(DumpError, match="holds no dump of verl: looked for"):
        imported(tmp_path / "dump", tmp_path / "none")


def test_a_file_of_any_name_has_the_step_of_its_lines(tmp_path: Path) -> None:
    write(tmp_path, 7, entries(7)).rename(tmp_path / "mine.jsonl")
    assert open_run(imported(tmp_path / "mine.jsonl", tmp_path / "out")).steps() == [7]
    with pytest.raises(DumpError, match="step 7, expected 3"):
        imported(tmp_path / "mine.jsonl", tmp_path / "none", step=3)


def test_lines_with_other_extra_keys_are_counted_and_keep_their_own(tmp_path: Path, cli: Cli) -> None:
    rows = entries(1, acc=[1, 2, 3, 4])
    del rows[2]["acc"]
    write(tmp_path / "dump", 1, rows)
    code, text = cli("import", "verl", tmp_path / "dump", "--out", tmp_path / "out")
    assert code == 0 and "1 of 4 lines have other extra keys than the rest (first: line 3, acc)" in text
    extras = [view.columns["reward_extra"] for view in open_run(tmp_path / "out").samples(1)]
    assert sorted(map(str, extras)) == ["{'acc': 1}", "{'acc': 2}", "{'acc': 4}", "{}"]


@pytest.mark.parametrize("inner", ["", "tape"])
def test_a_tape_is_never_overwritten(inner: str, tmp_path: Path) -> None:
    write(tmp_path / "dump", 1, entries(1))
    imported(tmp_path / "dump", tmp_path / "run" / inner)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    write(tmp_path / "dump", 2, entries(2))
    with pytest.raises(DumpError, match="holds a tape already, and nothing is overwritten"):
        imported(tmp_path / "dump", tmp_path / "run")
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_the_output_is_a_new_or_an_empty_folder(tmp_path: Path) -> None:
    write(tmp_path / "dump", 1, entries(1))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("mine")
    with pytest.raises(DumpError, match="not empty"):
        imported(tmp_path / "dump", tmp_path / "used")
    (tmp_path / "empty").mkdir()
    assert open_run(imported(tmp_path / "dump", tmp_path / "empty")).steps() == [1]


def test_what_cannot_be_read_or_found_is_an_error_of_ours(tmp_path: Path, cli: Cli) -> None:
    write(tmp_path / "dump", 1, entries(1))
    (tmp_path / "file").write_text("text")
    for words, said in (
        ((tmp_path / "absent",), "no such file or folder"),
        ((), "nothing to import"),
        ((tmp_path / "file",), "neither JSON Lines nor a pickle"),
        ((tmp_path / "dump", "--step", 1), "is a folder"),
        ((tmp_path / "dump", "--tokenizer", tmp_path), "tokenizer.json"),
        ((tmp_path / "dump", "--timeout", 0), "--timeout"),
    ):
        code, text = cli("import", "verl", *words, "--out", tmp_path / "out")
        assert code == 2 and said in text.replace("\n", " ")
    blocked = tmp_path / "file" / "out"
    code, text = cli("import", "verl", tmp_path / "dump", "--out", blocked)
    assert code == 2 and "Nothing was written" in text


# -- pickles --

# A package with the name and the pickled shape of verl's: what ``save_to_disk`` writes is this class's state.
PROTOCOL = """
import io, pickle
import torch

class DataProto:
    def __init__(self, batch, non_tensor_batch, meta_info):
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info

    def __len__(self):
        return len(next(iter(self.batch.values())))

    def __getstate__(self):
        buffer = io.BytesIO()
        torch.save(self.batch, buffer)
        return buffer.getvalue(), self.non_tensor_batch, self.meta_info

    def __setstate__(self, state):
        self.batch = torch.load(io.BytesIO(state[0]), weights_only=False)
        _, self.non_tensor_batch, self.meta_info = state

    def save_to_disk(self, path):
        with open(path, "wb") as file:
            pickle.dump(self, file)

    @staticmethod
    def load_from_disk(path):
        with open(path, "rb") as file:
            return pickle.load(file)
"""
MAKER = """
import json, os, pathlib, pickle, sys, time
import numpy as np, torch
from verl.protocol import DataProto

def objects(values):
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out

def batch():
    prompts = torch.tensor([[0, 0, 5, 6], [0, 0, 5, 6], [0, 9, 9, 9], [0, 9, 9, 9]])
    responses = torch.tensor([[1, 2, 3, 0, 0], [4, 4, 0, 0, 0], [1, 2, 3, 4, 5], [7, 0, 0, 0, 0]])
    held = (responses > 0).long()
    rm = torch.zeros(4, 5)
    rm[torch.arange(4), held.sum(1) - 1] = torch.tensor([1.0, 0.0, 0.5, 1.0])
    return {
        "prompts": prompts, "responses": responses, "response_mask": held, "rm_scores": rm,
        "attention_mask": torch.cat([(prompts > 0).long(), held], 1),
        "rollout_log_probs": -torch.arange(20.0).reshape(4, 5).bfloat16() / 8,
    }

def proto(**more):
    non = {"uid": objects(["x", "x", "y", "y"]), "acc": np.array([1.0, 0.0, 0.5, float("nan")]),
           "__num_turns__": np.array([2] * 4, dtype=np.int32), **more}
    tensors = batch()
    if "verl.__fake__" not in sys.argv:
        return DataProto.from_dict(tensors=tensors, non_tensors=non, meta_info={"reward_extra_keys": ["acc"]})
    return DataProto(tensors, non, {"reward_extra_keys": ["acc"], "picture": object()})

root = pathlib.Path(sys.argv[1])
for step in (1, 2):
    (root / "good" / str(step)).mkdir(parents=True)
    proto().save_to_disk(str(root / "good" / str(step) / "gen_batch.dp"))
    (root / "good" / str(step) / "meta.json").write_text(json.dumps({"global_steps": step}))
rows = {"raw_prompt": objects([[{"role": "user", "content": c}] for c in "aabb"]), "index": np.array([3, 3, 9, 9]),
        "data_source": objects(["s"] * 4), "reward_model": objects([{"ground_truth": g} for g in "1122"])}
proto(**rows).save_to_disk(str(root / "rows.dp"))

class Runs:
    def __init__(self, code):
        self.code = code
    def __reduce__(self):
        return exec, (self.code,)

def pickled(name, value):
    (root / name).write_bytes(pickle.dumps(value))

pickled("marks.dp", Runs(f"import os, pathlib; pathlib.Path({str(root / 'mark')!r}).write_text(str(os.getpid()))"))
pickled("map.dp", {"prompts": 1})
"""


@pytest.fixture(scope="module")
def pickles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder of pickles, and an interpreter with a package ``verl`` that writes and reads them."""
    root = tmp_path_factory.mktemp("pickles")
    package = root / "site" / "verl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.0.test"\n')
    (package / "protocol.py").write_text(PROTOCOL)
    python = root / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={root}/site exec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    subprocess.run([python, "-c", MAKER, root, "verl.__fake__"], check=True, timeout=120)
    return root, str(python)


def test_a_pickle_is_refused_and_not_opened_unless_it_is_trusted(
    pickles: tuple[Path, str], tmp_path: Path, cli: Cli
) -> None:
    root, python = pickles
    code, text = cli("import", "verl", root / "marks.dp", "--step", 1, "--python", python, "--out", tmp_path / "out")
    assert code == 2 and not (root / "mark").exists() and not (tmp_path / "out").exists()
    for part in ("runs whatever code it holds", "rollout_data_dir", "tape.mode=record", "--trust-pickle"):
        assert part in text


def test_a_trusted_pickle_runs_in_another_process_and_its_data_come_back(
    pickles: tuple[Path, str], tmp_path: Path, cli: Cli
) -> None:
    root, python = pickles
    words = ("--trust-pickle", "--python", python)
    assert cli("import", "verl", root / "marks.dp", "--step", 1, *words, "--out", tmp_path / "none")[0] == 2
    assert int((root / "mark").read_text()) != os.getpid() and not (tmp_path / "none").exists()
    code, text = cli("import", "verl", root / "good", *words, "--out", tmp_path / "out")
    assert code == 0 and "meta_info.picture was left out" in text
    assert "verl" not in sys.modules
    run = open_run(tmp_path / "out")
    assert run.steps() == [1, 2]
    rollout, reward = run.record(1, "rollout"), run.record(1, "reward")
    assert [r.tolist() for r in rollout.batch["prompt_ids"].rows()] == [[5, 6], [5, 6], [9, 9, 9], [9, 9, 9]]
    assert [r.tolist() for r in rollout.batch["response_ids"].rows()] == [[1, 2, 3], [4, 4], [1, 2, 3, 4, 5], [7]]
    assert rollout.batch["rollout_log_probs"].row(3).tolist() == [-15 / 8]
    assert reward.batch["score"].tolist() == [1.0, 0.0, 0.5, 1.0]
    assert reward.batch["reward_extra"][:3] == [{"acc": 1.0}, {"acc": 0.0}, {"acc": 0.5}]
    assert np.isnan(reward.batch["reward_extra"][3]["acc"])
    origin = rollout.header.info["imported"]
    assert origin["token_ids"] == "as sampled" and origin["path"]["uid"] == ["x", "x", "y", "y"]
    assert rollout.header.versions["verl"] == "0.0.test"
    groups = rollout.batch["group_id"]
    assert groups[0] == groups[1] != groups[2] and [i[-1] for i in rollout.sample_id] == list("0101")
    # Of log-probs whose temperature is not in the dump nothing is said.
    assert not rollout.header.meanings


def test_a_pickle_with_data_rows_has_the_ids_of_the_host(pickles: tuple[Path, str], tmp_path: Path) -> None:
    from crossrl.hosts.verl.prompts import samples

    root, python = pickles
    out = imported(root / "rows.dp", tmp_path / "out", step=4, trust_pickle=True, python=python)
    rows = [
        {"raw_prompt": [{"role": "user", "content": c}], "index": i, "data_source": "s",
         "reward_model": {"ground_truth": g}} for c, i, g in (("a", 3, "1"), ("b", 9, "2"))
    ]  # fmt: skip
    record = open_run(out).record(4, "rollout")
    assert record.sample_id == samples(rows, n=2, epoch=0).sample_id
    assert record.batch["ground_truth"] == ["1", "1", "2", "2"]


def runs(pid: str) -> bool:
    """Zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_child_that_hangs_is_killed_at_the_limit_with_what_it_started(
    pickles: tuple[Path, str], tmp_path: Path
) -> None:
    root, _ = pickles
    hangs = tmp_path / "hangs"
    hangs.write_text(f"#!/bin/sh\nsleep 600 &\necho $$ $! > {tmp_path}/pids\nwait\n")
    hangs.chmod(0o755)
    begin = time.monotonic()
    with pytest.raises(DumpError, match="was not done after 4 s and was killed"):
        imported(root / "map.dp", tmp_path / "out", step=1, trust_pickle=True, python=str(hangs), timeout_s=4)
    pids = (tmp_path / "pids").read_text().split()
    while any(map(runs, pids)):  # the kernel may take a moment on a busy machine
        assert time.monotonic() - begin < 60
        time.sleep(0.05)
    assert not (tmp_path / "out").exists()


def test_what_the_child_cannot_do_is_said_with_the_next_step(pickles: tuple[Path, str], tmp_path: Path) -> None:
    root, python = pickles
    for file, interpreter, said in (
        ("map.dp", python, "not a DataProto of verl"),
        ("map.dp", str(tmp_path / "absent"), "cannot be started"),
        ("map.dp", "/bin/false", "ended with 1"),
    ):
        with pytest.raises(DumpError, match=said):
            imported(root / file, tmp_path / "out", step=1, trust_pickle=True, python=interpreter)
    empty = tmp_path / "noverl"  # an interpreter in which verl is not there, whatever this one has
    empty.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    empty.chmod(0o755)
    with pytest.raises(DumpError, match="give an interpreter in which import verl works: --python PATH"):
        imported(root / "map.dp", tmp_path / "out", step=1, trust_pickle=True, python=str(empty))


def test_a_pickle_needs_its_step_and_archives_are_not_read(pickles: tuple[Path, str], tmp_path: Path) -> None:
    root, _ = pickles
    with pytest.raises(DumpError, match=r"does not tell its step.*--step 1"):
        imported(root / "map.dp", tmp_path / "out")
    with pytest.raises(DumpError, match=r"--step 5, but .* is of step 2"):
        imported(root / "good/2/gen_batch.dp", tmp_path / "out", step=5)
    (tmp_path / "tq_batch.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(DumpError, match="is not read"):
        imported(tmp_path / "tq_batch.pt", tmp_path / "out")
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "gen_batch.dp").write_bytes(b"\x80")
    (tmp_path / "3" / "meta.json").write_text("{}")
    with pytest.raises(DumpError, match=r"meta\.json does not say the step"):
        imported(tmp_path, tmp_path / "out")


def neutral(**changes: Any) -> Neutral:
    tensors = {
        "prompts": np.array([[0, 5]]), "responses": np.array([[7, 8, 0]]),
        "attention_mask": np.array([[0, 1, 1, 1, 0]]), **changes,
    }  # fmt: skip
    return Neutral(Path("x.dp"), "sha256:0", {k: v for k, v in tensors.items() if v is not None}, {}, {}, {}, 1, "0")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"responses": None}, "no responses"),
        ({"attention_mask": np.array([[0, 1, 1, 0, 1]])}, "has gaps"),
        ({"attention_mask": np.array([[1, 0, 1, 1, 0]])}, "on the other side"),
        ({"attention_mask": np.array([[0, 1, 1]])}, "width 3"),
        ({"prompts": np.array([[0.0, 5.0]])}, "want whole numbers"),
        ({"rollout_log_probs": np.zeros((1, 2), np.float32)}, r"rollout_log_probs has shape \(1, 2\)"),
    ],
)
def test_tensors_of_another_shape_are_refused(changes: dict[str, Any], said: str) -> None:
    assert proto_dump(neutral(), 1).rollout["response_ids"].row(0).tolist() == [7, 8]
    with pytest.raises(DumpError, match=said):
        proto_dump(neutral(**changes), 1)


def test_what_the_child_left_is_not_believed(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    def left(tensors: dict[str, np.ndarray], about: object) -> None:
        save_file(tensors, tmp_path / "0.safetensors")
        (tmp_path / "0.json").write_text(json.dumps(about))

    good = {"columns": {"uid": ["x"]}, "meta": {}, "left_out": {}, "samples": 1, "verl": "0"}
    left({"prompts": np.zeros((1, 2))}, good)
    assert _take(tmp_path, 0, Path("x"), "d").samples == 1
    for about in (good | {"columns": {"uid": ["x", "y"]}}, good | {"columns": 3}, {}, [], good | {"samples": 2}):
        left({"prompts": np.zeros((1, 2))}, about)
        with pytest.raises(DumpError, match=r"cannot be read|entries for"):
            _take(tmp_path, 0, Path("x"), "d")
    (tmp_path / "0.json").unlink()
    (tmp_path / "0.json").symlink_to("/etc/passwd")
    with pytest.raises(DumpError, match="something else than a file"):
        _take(tmp_path, 0, Path("x"), "d")


REAL = os.environ.get("CROSSRL_TEST_VERL", "")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not REAL, reason="CROSSRL_TEST_VERL is not set: an interpreter in which import verl works")
def test_a_data_proto_that_verl_saved_is_read(tmp_path: Path) -> None:
    maker = tmp_path / "maker.py"
    maker.write_text(MAKER)
    (tmp_path / "made").mkdir()
    subprocess.run([REAL, maker, tmp_path / "made"], check=True, timeout=280, stdout=subprocess.DEVNULL)
    out = imported(tmp_path / "made" / "good", tmp_path / "out", trust_pickle=True, python=REAL, timeout_s=280)
    record = open_run(out).record(2, "rollout")
    assert [r.tolist() for r in record.batch["response_ids"].rows()] == [[1, 2, 3], [4, 4], [1, 2, 3, 4, 5], [7]]
    assert record.header.versions["verl"][0].isdigit()
    assert open_run(out).record(2, "reward").batch["score"].tolist() == [1.0, 0.0, 0.5, 1.0]
