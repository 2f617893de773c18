"""The documentation is true: its commands run or at least parse, links resolve, tables name what the code has."""

import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crossrl.cli.main import parse
from crossrl.config import load_config
from crossrl.config.errors import ConfigError
from crossrl.config.files import read_file
from crossrl.config.grammar import parse as parse_overrides
from crossrl.config.load import _refuse_unknown, _user_tree

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE_IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: Path, language: str = "bash") -> list[str]:
    return [body for found, body in BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


def runnable(page: Path) -> list[str]:
    return [block for block in blocks(page) if block.startswith("# tested\n")]


# Commands run


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which ``crossrl`` and ``python`` are those of this test run."""
    folder = tmp_path_factory.mktemp("bin")
    main = "-c 'import sys; from crossrl.cli.main import main; sys.exit(main())'"
    for name, words in (("crossrl", main), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def run_page(commands, demo_files, tmp_path):
    """``run_page(page)``: what the page's tested blocks print, run in order in a folder with the demo's files."""

    def run(page: Path) -> str:
        shutil.copytree(demo_files, tmp_path / "data" / "demo")
        script = "set -eo pipefail\n" + "\n".join(runnable(page))
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=commands, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if runnable(p)], ids=[i for p, i in zip(PAGES, PAGE_IDS) if runnable(p)]
)
def test_blocks_that_say_tested_run(run_page, page, tmp_path):
    printed = run_page(page)
    if page.name == "first-run.md":
        assert "resumed from outputs/first/global_step_3: step 3" in printed
        assert (tmp_path / "outputs/first/learning_curve.png").stat().st_size > 10_000
        _metrics_are_documented(tmp_path / "outputs/first/metrics.jsonl")
        _state_is_documented(tmp_path / "outputs/first/global_step_3/state.json")
    if page.name == "rollout-skip.md":
        assert printed.count("rollout skip: stored in") == 3
        assert printed.count("rollout skip: loaded from") == 2
    if page.name == "find-a-bad-step.md":
        assert re.search(r"update +2 .*bit-equal", printed)


def _metrics_are_documented(metrics: Path) -> None:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    names = {name for row in rows for name in row} - {"step", "non_finite"}
    assert {"critic/score/mean", "val-core/sort_digits/acc/mean@1", "timing_s/step"} <= names
    assert not undocumented(names)


def _state_is_documented(state: Path) -> None:
    page = (ROOT / "docs/reference/checkpoint.md").read_text()
    assert not [key for key in json.loads(state.read_text()) if f"| `{key}` |" not in page]


# Metrics


def documented_metrics() -> list[re.Pattern[str]]:
    """The first column of the tables in metrics.md: ``{a,b}`` is either, ``<x>`` is anything."""
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    patterns = []
    for name in re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE):
        text = re.escape(name).replace(r"\{", "(").replace(r"\}", ")").replace(",", "|")
        patterns.append(re.compile(re.sub(r"<\w+>", "[^/]+", text)))
    return patterns


def undocumented(names: set[str]) -> list[str]:
    patterns = documented_metrics()
    return sorted(name for name in names if not any(p.fullmatch(name) for p in patterns))


def test_a_metric_that_is_not_documented_is_found():
    assert undocumented({"actor/lr", "actor/new", "val-core/my/acc/pass@4", "critic/score/median"}) == [
        "actor/new", "critic/score/median",
    ]  # fmt: skip


def test_every_metric_name_in_the_code_is_documented():
    """Whole names in string literals; those that are put together at run time are covered by a run."""
    prefixes = "critic|actor|advantage|response_length|prompt_length|rollout|sampler|training|rollout_corr|val-aux|perf"
    literal = re.compile(rf'(?<!_spread\()"((?:{prefixes})/[\w.%/-]+)"')
    sources = [p for p in (ROOT / "src").rglob("*.py") if not {"report", "cli", "hosts"} & set(p.parts)]
    names = {name for path in sources for name in literal.findall(path.read_text())}
    assert len(names) > 30
    assert not undocumented(names)


# Commands parse


def statements(block: str) -> Iterator[list[str]]:
    """The words of each ``crossrl ...`` and ``python train.py ...`` in a shell block; here-documents are left out."""
    block = re.sub(r"<<'(\w+)'.*?^\1$", "", block, flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["crossrl"]:
            yield words[1:]
        elif words[:2] == ["python", "train.py"]:
            yield ["train", *words[2:]]


def check(words: list[str]) -> None:
    """Raise unless the command line parses and its settings are known; a complete one is loaded and checked."""
    complete = not any("..." in w or "$" in w for w in words)
    args = parse([w for w in words if w != "..."])
    overrides = getattr(args, "overrides", None)
    if not overrides or getattr(args, "keys", None) is not None:
        return
    name = "demo" if words[0] == "demo" else getattr(args, "config_name", None)
    if words[0] == "verify" or not complete or getattr(args, "config_path", None):
        _refuse_unknown(_user_tree(read_file(None, None)[0], parse_overrides(overrides)))
    else:
        load_config(overrides, name)


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_command_parses(page):
    for block in blocks(page):
        for words in statements(block):
            check(words)


def test_the_pages_have_commands_to_check():
    assert sum(len(list(statements(block))) for page in PAGES for block in blocks(page)) > 25


@pytest.mark.parametrize(
    "line",
    ["crossrl trian", "crossrl train --nmae x", "crossrl verify RUN --stge update", "crossrl train ... trainer.sede=1",
     "python train.py trainer.seed=1", "crossrl verify RUN trainer.sede=1", "crossrl demo data.train_batch_size=7"],
)  # fmt: skip
def test_a_command_that_would_fail_is_found(line, capsys):
    (words,) = statements(f"{line}\n")
    with pytest.raises((SystemExit, ConfigError)):
        check(words)


def test_here_documents_are_not_commands():
    assert list(statements("cat <<'EOF'\ncrossrl nothing\nEOF\ncrossrl demo \\\n  a=1  # b\n")) == [["demo", "a=1"]]


# Links


def anchors(page: Path) -> set[str]:
    """Of the headings, as they are made from Markdown on common hosts."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_links_resolve(page):
    assert not broken_links(page, page.read_text(encoding="utf-8"))


def test_a_broken_link_is_found():
    page = ROOT / "docs" / "index.md"
    text = "[a](no.md) [b](reference/rewards.md#no) [c](reference/rewards.md#verifiers) [d](https://example.org)"
    assert broken_links(page, text) == ["no.md", "reference/rewards.md#no"]


def test_every_page_is_linked_from_the_index():
    linked = set(re.findall(r"\]\(([^)#\s]+)", (ROOT / "docs/index.md").read_text()))
    there = {str(p.relative_to(ROOT / "docs")) for p in PAGES if p.parent.parent == ROOT / "docs"}
    assert there <= linked


# Tables


def generator():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current():
    for path, text in generator().pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python docs/generate.py"


def section(page: str, row: str) -> str:
    """The table row whose first cell is ``row``."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return next(line for line in text.splitlines() if line.startswith(f"| `{row}` |"))


def test_the_table_of_stages_names_all_that_they_read_and_write():
    from crossrl.algorithms.correction import CorrectionConfig
    from crossrl.algorithms.kl import KLController
    from crossrl.stages.advantage import Advantage, AdvantageConfig
    from crossrl.stages.base import ORDER
    from crossrl.stages.checkpoint import Checkpoint
    from crossrl.stages.log_probs import OldFromRollout, OldLogProb, RefLogProb
    from crossrl.stages.reward import Reward
    from crossrl.stages.rollout import Rollout
    from crossrl.stages.sync import Sync
    from crossrl.stages.update import Update

    all_of_advantage = [
        Advantage(AdvantageConfig(name, 4, kl_kind="kl", correction=CorrectionConfig("token"), mask_truncated=True),
                  KLController())
        for name in ("grpo", "remax")
    ]  # fmt: skip
    stages = [Rollout, Reward, OldLogProb, OldFromRollout, RefLogProb, *all_of_advantage, Checkpoint, Sync]
    assert {s.name for s in stages} | {Update.name} == set(ORDER)
    for stage in stages:
        row = section("reference/stages.md", stage.name)
        assert not [f for f in (*stage.reads, *stage.writes) if f"`{f}`" not in row]
    assert "`log_probs`" in section("reference/stages.md", "update")


def test_statuses_and_verifiers_are_documented():
    from crossrl.rewards.protocol import STATUSES
    from crossrl.rewards.verifiers import BY_SOURCE

    page = (ROOT / "docs/reference/rewards.md").read_text()
    assert not [name for name in (*STATUSES, *BY_SOURCE) if f"`{name}`" not in page]


def test_commands_and_their_options_are_documented():
    import argparse

    from crossrl.cli.main import COMMANDS

    page = (ROOT / "docs/reference/cli.md").read_text()
    subparsers = argparse.ArgumentParser().add_subparsers()
    for name in COMMANDS:
        parser = importlib.import_module(f"crossrl.cli.{name}").add_parser(subparsers)
        options = [o for action in parser._actions for o in action.option_strings if o not in ("-h", "--help")]
        assert not [o for o in options if f"`{o}" not in page]
    assert all(f"| `crossrl {name}" in page for name in subparsers.choices)


def literals(message: str) -> list[str]:
    """What is fixed in a quoted message: placeholders are words in capitals, and numbers in file names."""
    return [
        part for part in re.split(r"\b(?:DIR|PATH|PATTERN|REASON|N|K|KEY|OLD|NEW)\b|\.\.\.", message) if part.strip()
    ]


def missing_literals(messages: list[str]) -> list[str]:
    """Parts of ``messages`` that no source file holds."""
    text = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "src/crossrl").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", text)  # a message over several lines of code
    parts = [part.strip(" :;,()") for message in messages for part in literals(message)]
    return [part for part in parts if part and part.removeprefix("rollout skip: ") not in joined]


@pytest.mark.parametrize("page", ["how-to/rollout-skip.md", "how-to/resume.md"])
def test_quoted_messages_are_those_of_the_program(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    tables = re.findall(r"^\| (?:line|message) \| meaning.*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    messages = [m for table in tables for m in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)]
    assert len(messages) >= 5
    assert not missing_literals(messages)


def test_a_message_that_the_program_does_not_have_is_found():
    assert missing_literals(["rollout skip: stored in PATH", "rollout skip: hung on PATH"]) == ["rollout skip: hung on"]
