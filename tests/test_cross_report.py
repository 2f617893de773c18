"""The report as a document: its order, escaping, offline promise, size, and what it says of what is missing."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_cases import HOSTILE, SAMPLE, Texts, write_experiment, write_json, write_metrics, write_run, write_tape

from crossrl.cli.main import main
from crossrl.cli.train_command import open_reporter
from crossrl.config import load_config
from crossrl.cross.examine import examine
from crossrl.cross.findings import Effect, Evidence, Examination, Finding, Gap, Verdict
from crossrl.cross.folder import Folder
from crossrl.cross.report import write_report
from crossrl.cross.report.markup import Html, data_script, tag
from crossrl.cross.report.pairs import differing, first_difference, gap_class, window
from crossrl.cross.report.summary import headline
from crossrl.cross.verdict import recompute
from crossrl.report import ReportError
from crossrl.trainer import Trainer

SECTIONS = ["verdict", "arms", "stages", "difference", "noise", "settings", "reproduce"]
VOID = {"meta", "input", "br"}


class Document(HTMLParser):
    """A page as a browser reads it. ``elements``: (name, attributes); ``text``: of all that is not script or style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scripts: dict[str, str] = {}
        self.text = ""
        self.unbalanced: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)
        if name == "script":
            self.scripts[f"{len(self.scripts)} {dict(attributes).get('id', '')}"] = ""

    def handle_endtag(self, name):
        if not self.open or self.open.pop() != name:
            self.unbalanced.append(name)

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[list(self.scripts)[-1]] += data
        elif not self.open or self.open[-1] != "style":
            self.text += data

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.elements]

    def data(self, name: str):
        return next(json.loads(text) for key, text in self.scripts.items() if key.endswith(f" {name}"))


def read(folder: Folder) -> Document:
    return Document(write_report(folder).read_text(encoding="utf-8"))


def strange(document: Document) -> list[str]:
    """Elements and attributes that the page's own code never makes."""
    found = [name for name in document.names if name in ("img", "iframe", "object", "link", "svg")]
    found += [
        key for _, attributes in document.elements for key in attributes if key.startswith("on") or key == "style"
    ]
    if len(document.scripts) > 4:
        found.append(f"{len(document.scripts)} scripts")
    return found + document.unbalanced


def fetched(document: Document) -> list[str]:
    """What a browser would ask the network for."""
    where = [a[key] or "" for _, a in document.elements for key in ("src", "href", "action", "data") if key in a]
    return [address for address in where if not address.startswith("#")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = write_experiment(tmp_path_factory.mktemp("whole") / "exp")
    return folder, read(folder)


def test_the_verdict_comes_first_and_the_parts_follow_in_order(whole):
    _, document = whole
    ids = [a["id"] for name, a in document.elements if name == "section"]
    assert ids == SECTIONS
    assert document.names.index("h1") < document.names.index("table")
    assert "Inference of A is at fault: stage rollout, since step 1" in document.text
    assert ("section", "verdict bad") in [(n, a.get("class")) for n, a in document.elements]
    links = [a["href"] for n, a in document.elements if n == "a"]
    assert {f"#{name}" for name in SECTIONS[1:]} <= set(links)


@pytest.mark.parametrize(
    ("verdict", "line", "tone"),
    [
        (Verdict("no difference", noise="small"), "No difference beyond noise", "good"),
        (Verdict("not distinguishable", todo=("run AB",)), "Cannot tell which part is at fault", "unsure"),
        (Verdict("several", "A", ("rollout", "update"), 2, ("inference", "training")),
         "Several parts of A are at fault (inference, training): stages rollout, update, since step 2", "bad"),
        (Verdict("data", "B"), "Data of B is at fault", "bad"),
        (Verdict("training", "A", step=3), "Training of A is at fault, since step 3", "bad"),
    ],
)  # fmt: skip
def test_the_first_line_and_its_colour_say_how_it_ended(tmp_path, verdict, line, tone):
    assert headline(verdict) == line
    write_json(Folder(tmp_path).verdict, verdict)
    document = read(Folder(tmp_path))
    assert document.elements[document.names.index("section")][1]["class"] == f"verdict {tone}"
    assert line in document.text and all(sentence in document.text for sentence in verdict.todo)


def test_nothing_in_the_data_becomes_markup(tmp_path):
    hostile = Texts(*[HOSTILE] * 4)
    document = read(write_experiment(tmp_path / "exp", hostile))
    assert strange(document) == []
    shown = HOSTILE.replace("\u202e", "\\u202e")  # what could turn the text around is made visible
    for kind, times in {"the evidence, the lists, the settings, the texts": 8}.items():
        assert document.text.count(shown) >= times, kind
    assert document.data("cells")["found"]["A_by_B/rollout/1"][0]["sentence"] == HOSTILE
    assert "\u202e" not in document.text


def test_markup_made_from_data_would_be_found():
    page = tag("body", Html(HOSTILE), data_script("cells", {"a": HOSTILE}))
    assert "img" in strange(Document(page))
    assert "onerror" in strange(Document(page))
    assert fetched(Document(page)) == ["x"]


def test_data_for_the_script_cannot_end_its_element():
    value = {"<!--<script>": [HOSTILE, "\u2028", 1.5, None]}
    script = data_script("x", value)
    assert script.count("<") == 2 and script[-9:] == "</script>"
    assert Document(script).data("x") == value
    with pytest.raises(ValueError, match="JSON compliant"):
        data_script("x", float("nan"))


def test_the_page_asks_the_network_for_nothing(whole):
    folder, document = whole
    assert fetched(document) == []
    policy = next(a["content"] for n, a in document.elements if n == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe-inline" not in policy.split(";")[1]
    style = re.search(r"<style>(.*?)</style>", folder.report.read_text(), re.DOTALL)[1]
    assert "url(" not in style and "@import" not in style
    own = [text for key, text in document.scripts.items() if "plotly" not in text[:400].lower()]
    assert len(own) == 3 and not any("http" in text for text in own)


def test_there_is_one_copy_of_plotly_and_none_where_nothing_is_drawn(whole, tmp_path):
    folder, document = whole
    assert sum(len(text) > 1_000_000 for text in document.scripts.values()) == 1
    assert folder.report.stat().st_size < 6_000_000
    write_json(Folder(tmp_path).verdict, Verdict("no difference"))
    assert write_report(Folder(tmp_path)).stat().st_size < 60_000


def test_every_arm_has_its_state_and_its_curves(whole):
    _, document = whole
    curves = document.data("curves")
    assert [m["name"] for m in curves["metrics"]] == [
        "reward", "sampler-trainer gap", "entropy", "gradient norm", "response length"
    ]  # fmt: skip
    reward = curves["metrics"][0]
    assert set(reward["points"]) == {"AA", "BB", "BB2", "AB", "BA"} and len(reward["points"]["AA"]["x"]) == 20
    assert reward["band"] == 0.05 and "verdict" in reward["source"]
    assert curves["metrics"][2]["band"] == pytest.approx(0.01) and "BB2" in curves["metrics"][2]["source"]
    assert "beyond noise: reward (from step 3)" in document.text
    checked = [a["value"] for n, a in document.elements if n == "input" and a["name"] == "metric" and "checked" in a]
    assert checked == ["0"]


def test_the_first_curve_to_be_seen_is_one_that_tells_something(tmp_path):
    folder = write_experiment(tmp_path)
    effects = (
        Effect("reward", "AA", "BB", 20, 0.0, -0.1, 0.1, 0.2, False),
        Effect("entropy", "AA", "BB", 20, 1.0, 0.9, 1.1, 0.2, True, 1),
        Effect("reward", "BA", "BB", 20, 0.0, 0.0, 0.0, 0.2, False),
        Effect("reward", "AB", "BB", 20, 0.0, float("-inf"), float("inf"), 0.2, False),
    )
    write_json(folder.verdict, Verdict("inference", "A", effects=effects))
    document = read(folder)
    checked = [a["value"] for n, a in document.elements if n == "input" and a["name"] == "metric" and "checked" in a]
    assert checked == ["2"] and document.data("curves")["metrics"][2]["name"] == "entropy"
    assert "the same as BB, bit for bit" in document.text and "too few steps to compare" in document.text


def test_without_verdict_and_repeat_no_noise_is_claimed(tmp_path):
    for name in ("AA", "BB"):
        write_metrics(Folder(tmp_path).arm(name), 0.0)
    reward = read(Folder(tmp_path)).data("curves")["metrics"][0]
    assert reward["band"] is None and reward["source"].startswith("none, because")


def test_a_run_that_stopped_early_is_said_to_have_failed(tmp_path):
    folder = write_experiment(tmp_path)
    run = folder.arm("AA")
    shutil.rmtree(run / "huggingface")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:7]))
    assert f"failed: {run} stopped after step 7 of 20" in read(folder).text


def test_each_stage_of_each_step_is_a_cell_with_its_finding(whole):
    _, document = whole
    cells = document.data("cells")["found"]
    assert len(cells) == 2 * 3 * 7
    buttons = {a["data-cell"]: a for n, a in document.elements if n == "button"}
    assert set(buttons) == set(cells)
    assert buttons["A_by_B/rollout/1"]["aria-label"] == "rollout, step 1, A by B: differs"
    assert buttons["B_by_A/rollout/1"]["aria-label"] == "rollout, step 1, B by A: equal"
    finding = cells["A_by_B/rollout/1"][0]
    assert finding["gaps"][0][:6] == [
        "rollout_log_probs", "values", "28 of 321", f"{SAMPLE}, position 1", "-1.25", "-1.5"
    ]  # fmt: skip


def test_a_cell_shows_the_worst_of_several_calls_and_tells_of_all(tmp_path):
    findings = tuple(
        Finding("A", "B", "rollout", 1, judged, f"call {i}", call=i)
        for i, judged in enumerate(("equal", "differs", "not judged"))
    )
    write_json(Folder(tmp_path).examined("A", "B"), Examination("A", "B", (1,), "exact", (), findings))
    document = read(Folder(tmp_path))
    button = next(a for n, a in document.elements if n == "button")
    assert button["aria-label"].endswith(": differs")
    assert [f["sentence"] for f in document.data("cells")["found"]["A_by_B/rollout/1"]] == [
        "call 0",
        "call 1",
        "call 2",
    ]


def test_the_two_texts_have_their_differing_tokens_marked_and_their_gaps_coloured(whole):
    folder, _ = whole
    page = folder.report.read_text()
    a, b = re.findall(r'<div class="tokens".*?</div>', page, re.DOTALL)
    assert re.findall(r"<mark[^>]*>(.*?)</mark>", a) == ["seven"]
    assert re.findall(r"<mark[^>]*>(.*?)</mark>", b) == ["four", "one"]
    assert re.findall(r'data-own="(\d)"', a) == ["5"] * 4, "the trainer of A is 0.2 nat off everywhere"
    assert re.findall(r'data-own="(\d)"', b) == ["0"] * 5
    assert len(re.findall(r"data-other=", a)) == 2, "up to the first token that differs"
    here = re.search(r'<span class="here"[^>]*title="([^"]*)"', a)
    assert here and "rollout_log_probs: recorded -1.25, found -1.5" in here[1]
    assert 'class="here"' not in b


def test_a_long_response_is_shown_around_the_difference(tmp_path):
    folder = write_experiment(tmp_path)
    for name, last in (("AA", 2), ("BB", 3)):
        shutil.rmtree(folder.arm(name) / "tape")
        write_tape(folder.arm(name), [[0] * 9000 + [last]], SAMPLE, "prompt " * 5000)
    gaps = (Gap("rollout_log_probs", "values", 1, 9001, SAMPLE, 9000, -1.0, -2.0),)
    finding = Finding("A", "B", "rollout", 1, "differs", "the last token", gaps=gaps)
    write_json(folder.examined("A", "B"), Examination("A", "B", (1,), "exact", (), (finding,)))
    document = read(folder)
    assert "9001 tokens, tokens 8601 to 9000 shown" in document.text
    assert folder.report.stat().st_size < 6_000_000


def test_a_sample_that_one_side_does_not_have_is_explained(tmp_path):
    folder = write_experiment(tmp_path)
    shutil.rmtree(folder.arm("BB") / "tape")
    write_tape(folder.arm("BB"), [[0, 1]], "another", "p")
    assert "B has no such sample at step 1: its data, seed, order or batch size is another" in read(folder).text


def test_without_the_tokenizer_ids_are_shown(tmp_path):
    folder = write_experiment(tmp_path)
    shutil.rmtree(tmp_path / "model")
    document = read(folder)
    assert "cannot be loaded" in document.text and "ids only" in document.text
    assert re.search(r"<mark[^>]*>2 </mark>", folder.report.read_text())


def test_a_difference_in_all_samples_is_shown_at_the_first_that_reads_differently(tmp_path):
    folder = write_experiment(tmp_path)
    gaps = (Gap("rollout_log_probs", "meaning", recorded={"temperature": 1.0}, found={"temperature": 0.5}),)
    finding = Finding("A", "B", "rollout", 1, "differs", "means something else", gaps=gaps)
    write_json(folder.examined("A", "B"), Examination("A", "B", (1,), "exact", (), (finding,)))
    document = read(folder)
    assert f"Sample {SAMPLE}, step 1" in document.text and '{"temperature": 1.0}' in document.text


def test_a_damaged_record_does_not_keep_the_rest_from_being_shown(tmp_path):
    folder = write_experiment(tmp_path)
    record = folder.arm("BB") / "tape/step_000001/rollout.0/tensors.safetensors"
    record.write_bytes(record.read_bytes()[:-1] + b"!")
    document = read(folder)
    assert "the records of B cannot be read" in document.text and "Response of A" in document.text


def test_settings_are_grouped_by_part_and_harmless_ones_folded(whole):
    page = whole[0].report.read_text()
    settings = page[page.index('<section id="settings"') : page.index('<section id="reproduce"')]
    assert "actor_rollout_ref.rollout.top_p" in settings.split("<details>")[0]
    assert "1 that change no result beyond rounding" in settings.split("<details>")[1]


def test_settings_come_from_the_configurations_when_nothing_was_examined(tmp_path):
    for name, top_p in (("AA", 0.8), ("BB", 1.0)):
        write_run(Folder(tmp_path).arm(name), top_p, tmp_path)
    text = read(Folder(tmp_path)).text
    assert "Settings that concern inference" in text and "actor_rollout_ref.rollout.top_p" in text


def test_how_to_reproduce_names_commands_folders_seeds_and_versions(whole):
    folder, document = whole
    text = document.text[document.text.index("How to reproduce", 500) :]
    for part in (
        f"crossrl cross --a {folder.side('A')} --b {folder.side('B')} --out NEW_FOLDER",
        f"crossrl verdict {folder.root}", f"crossrl verify {folder.arm('AA')}", "trainer.seed",
        "2.13.0", str(folder.arm("BB")),
    ):  # fmt: skip
        assert part in text


def test_the_noise_floor_is_stated(whole):
    _, document = whole
    assert "noise: plain" in document.text and "B against its repeat" in document.text and "float32" in document.text


def test_long_evidence_is_folded_so_that_all_of_it_is_in_sight(tmp_path):
    long = "reason " * 100
    write_json(
        Folder(tmp_path).verdict, Verdict("data", evidence=(Evidence("stages", long), Evidence("curves", "short")))
    )
    page = write_report(Folder(tmp_path)).read_text()
    folded, plain = re.findall(r"<li>.*?</li>", page, re.DOTALL)[:2]
    assert "<details>" in folded and long in folded and "<details>" not in plain


def test_examinations_by_the_own_installation_are_folded(tmp_path):
    folder = write_experiment(tmp_path)
    finding = Finding("B", "B", "reward", 2, "equal", "")
    write_json(folder.examined("B", "B"), Examination("B", "B", (2,), "exact", (), (finding,)))
    document = read(folder)
    assert document.data("cells")["found"]["B_by_B/reward/2"][0]["sentence"] == "equal bit for bit"
    assert "The same by each side's own installation" in document.text


def test_the_page_opens_with_the_finding_that_the_verdict_is_about(tmp_path):
    """Not with an earlier one that is harmless, nor with the other side's."""

    def found(of, by, stage, step, **more):
        return Finding(of, by, stage, step, "differs", f"{of} {stage} {step}", **more)

    folder = Folder(tmp_path)
    a = (found("A", "B", "reward", 1, harmless=True), found("A", "B", "update", 3))
    write_json(folder.examined("A", "B"), Examination("A", "B", (1, 2, 3), "exact", (), a))
    write_json(folder.examined("B", "A"), Examination("B", "A", (2,), "exact", (), (found("B", "A", "update", 2),)))
    opening = r'class="sign differs first"[^>]*data-cell="([^"]*)"'
    assert re.findall(opening, write_report(folder).read_text()) == ["B_by_A/update/2"], "the first that matters"
    write_json(folder.verdict, Verdict("training", "A", ("update",), 3))
    assert re.findall(opening, write_report(folder).read_text()) == ["A_by_B/update/3"]
    assert "A update 3" in read(folder).text.split("First difference")[-1]


@pytest.mark.slow
def test_a_report_of_two_real_runs_shows_what_was_really_found(demo_files, tmp_path):
    """Recorded, examined and judged by the real parts, side A with another temperature."""
    folder = Folder(tmp_path)
    loaded = {}
    for side, temperature in (("A", 1.3), ("B", 1.0)):
        run = folder.arm(side * 2)
        loaded[side] = load_config([
            f"data.train_files={demo_files}/train.parquet", "data.train_max_samples=8", "data.train_batch_size=4",
            "data.max_prompt_length=8", "data.max_response_length=5", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            f"actor_rollout_ref.model.path={demo_files}/model", "actor_rollout_ref.rollout.n=4",
            f"reward.custom_reward_function.path={demo_files}/sort_reward.py", "reward.num_workers=1",
            f"trainer.default_local_dir={run}", "trainer.num_threads=1", "trainer.device=cpu", "trainer.logger=[file]",
            "tape.mode=record", "tape.state=True", f"actor_rollout_ref.rollout.temperature={temperature}",
        ])  # fmt: skip
        with open_reporter(loaded[side]) as reporter:
            assert Trainer(loaded[side], reporter).fit() == 0
    for of, by in (("A", "B"), ("B", "A")):
        write_json(folder.examined(of, by), examine(folder.arm(of * 2), loaded[by], of, by))
    recompute(folder.root)
    document = read(folder)
    assert strange(document) == []
    assert "actor_rollout_ref.rollout.temperature" in document.text
    assert "Response of A" in document.text and "Response of B" in document.text
    buttons = {a["data-cell"]: a["aria-label"] for n, a in document.elements if n == "button"}
    assert buttons["A_by_B/rollout/1"].endswith("differs") and buttons["A_by_B/data/1"].endswith("equal")
    assert len(document.data("curves")["metrics"]) == 5
    assert "curves of arm AB" in document.text.split("Missing from this page")[1]


# Missing pieces


def test_what_is_missing_is_named_with_the_command_that_makes_it(tmp_path):
    write_metrics(Folder(tmp_path).arm("BB"), 0.0)
    text = read(Folder(tmp_path)).text
    for part in (
        "No verdict yet", "the verdict (verdict.json)", f"crossrl verdict {tmp_path}", "examined/A_by_B.json",
        "curves of arm AB", "the records of arm AA", f"crossrl cross --a A.yaml --b B.yaml --out {tmp_path}",
        "tape.mode=record",
    ):  # fmt: skip
        assert part in text, part
    assert "curves of arm BB" not in text


def test_a_whole_experiment_lacks_nothing(whole):
    assert "Missing from this page" not in whole[1].text


@pytest.mark.parametrize("part", ["verdict.json", "examined", "arms/AA", "arms/BB", "arms", "experiment.json", "sides"])
def test_the_page_can_be_made_without_any_one_part(tmp_path, part):
    folder = write_experiment(tmp_path)
    path = tmp_path / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    document = read(folder)
    assert strange(document) == []
    assert ("No verdict yet" if part == "verdict.json" else "Inference of A is at fault") in document.text
    assert ("Missing from this page" in document.text) == (part not in ("experiment.json", "sides"))


def test_a_folder_with_nothing_is_an_error(tmp_path, capsys):
    (tmp_path / "arms/AA").mkdir(parents=True)
    with pytest.raises(ReportError, match="nothing to report on"):
        write_report(Folder(tmp_path))
    assert not Folder(tmp_path).report.exists()
    assert main(["report", str(tmp_path / "no")]) == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("verdict.json", "{", "verdict.json cannot be read"),
        ("verdict.json", '{"conclusion": "data", "more": 1}', "crossrl verdict"),
        ("examined/A_by_B.json", "[]", "examined/A_by_B.json"),
        ("experiment.json", "[]", "want a JSON object"),
        ("arms/BB/metrics.jsonl", "oops\n", "line 1"),
    ],
)
def test_a_damaged_file_is_named_and_no_page_is_written(tmp_path, name, content, message, capsys):
    folder = write_experiment(tmp_path)
    (tmp_path / name).write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not folder.report.exists()


def test_the_command_prints_the_path_and_the_size(tmp_path, capsys):
    write_json(Folder(tmp_path).verdict, Verdict("no difference", evidence=(Evidence("stages", "all equal"),)))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "sub/page.html")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{tmp_path}/sub/page.html (") and printed.endswith(" kB)\n")
    assert "all equal" in (tmp_path / "sub/page.html").read_text()


def test_a_page_that_cannot_be_written_says_so(tmp_path):
    write_json(Folder(tmp_path).verdict, Verdict("no difference"))
    with pytest.raises(ReportError, match="cannot write"):
        write_report(Folder(tmp_path), Path("/proc/no/page.html"))


# Tokens


def test_differing_tokens_are_those_outside_the_common_blocks():
    assert differing([1, 2, 3], [1, 9, 2, 3]) == (set(), {1})
    assert differing([1, 2], [3, 4]) == ({0, 1}, {0, 1})
    assert first_difference([1, 2, 3], [1, 5]) == 1
    assert first_difference([1], [1, 2]) == 1 and first_difference([1], [1]) is None


def test_gaps_are_put_into_classes_by_their_size():
    assert [gap_class(g) for g in (0.0, 1e-7, -1e-5, 0.005, -0.05, 0.5, -7.0)] == [0, 1, 2, 3, 4, 5, 6]
    assert gap_class(None) is None and gap_class(float("nan")) is None


def test_the_window_holds_the_interesting_token():
    assert window(50, None) == range(50)
    for at in (0, 99, 2000, 4999):
        assert at in window(5000, at) and len(window(5000, at)) == 400
