"""Scoring in killable children: one bad sample never stops or shifts the others, and nothing is left behind."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from crossrl.rewards import workers
from crossrl.rewards.protocol import RewardError
from crossrl.rewards.scorer import RewardSpec, ScoreItem, Scorer, status_counts

CUSTOM = """
import ctypes, os, random, re, subprocess, sys, time
import numpy as np

def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    what = solution_str
    if what == "spin":
        while True:
            pass
    if what == "regex":  # holds the interpreter's lock for ages
        re.match(r"(a+)+$", "a" * 60 + "b")
    if what == "sleep":
        time.sleep(1e9)
    if what == "exit":
        os._exit(3)
    if what == "sys.exit":
        sys.exit(0)
    if what == "forge":
        for fd in range(3, 100):
            try:
                os.write(fd, b"\\xff" * 100)
            except OSError:
                pass
        return 1.0
    if what == "segfault":
        ctypes.string_at(0)
    if what == "raise":
        raise ValueError("no \\N{GREEK SMALL LETTER PI} here")
    if what == "list":
        return [1.0, 2.0]
    if what == "string":
        return "1.0"
    if what == "none":
        return None
    if what == "nan":
        return float("nan")
    if what == "inf":
        return {"score": float("inf")}
    if what == "huge":
        return 10 ** 400
    if what == "no score":
        return {"acc": 1.0}
    if what == "numpy":
        return {"score": np.float32(0.5), "acc": np.bool_(True), "all": np.arange(2), "bad": float("nan"), "odd": b"x"}
    if what == "numpy array":
        return np.zeros(3)
    if what == "bool":
        return True
    if what == "print":
        print("garbage" * 10000)
        sys.stdout.write("\\x00\\x00\\x00\\x05hello")
        os.write(1, b"\\xff" * 1000)
        sys.stderr.write("more\\n")
        return 1.0
    if what == "stdin":
        return float(len(sys.stdin.read()))
    if what == "slow":
        time.sleep(0.4)
        return 1.0
    if what == "meet":  # ends only when so many samples are being scored at once
        open(f"{extra_info['folder']}/{os.getpid()}", "w").close()
        while len(os.listdir(extra_info["folder"])) < extra_info["count"]:
            time.sleep(0.01)
        return 1.0
    if what == "random":
        return random.random()
    if what == "grandchild":
        child = subprocess.Popen(["sleep", "1000"])
        open(extra_info["pid_file"], "w").write(str(child.pid))
        time.sleep(1e9)
    if what == "dict":
        extra_info.clear()
        return {"score": len(ground_truth), "acc": 1, "why": "\\u00fc", "nested": {"a": [1, None]}}
    return float(what == ground_truth) + bonus


async def compute_async(data_source, solution_str, ground_truth, extra_info):
    return 0.25


def stateful(data_source, solution_str, ground_truth, extra_info, seen=[]):
    seen.append(1)
    return len(seen)


def too_few(solution_str, ground_truth):
    return 0.0
"""


@pytest.fixture(scope="module")
def custom(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "my_reward.py"
    path.write_text(CUSTOM, encoding="utf-8")
    return str(path)


def item(i, response, truth="right", extra=None, source="anything"):
    return ScoreItem(f"s{i}", source, response, truth, extra or {})


def good(i):
    return item(i, "right")


def test_one_bad_sample_never_stops_or_shifts_the_others(custom):
    bad = {
        "exit": "crashed",
        "segfault": "crashed",
        "forge": "crashed",
        "sys.exit": "raised",
        "raise": "raised",
        "list": "wrong_count",
        "numpy array": "wrong_count",
        "string": "wrong_type",
        "none": "wrong_type",
        "no score": "wrong_type",
        "nan": "non_finite",
        "inf": "non_finite",
        "huge": "non_finite",
    }
    items, want = [], []
    for i, (response, status) in enumerate(bad.items()):
        items += [item(2 * i, response), item(2 * i + 1, "right" if i % 2 else "wrong")]
        want += [status, "ok"]
    with Scorer(RewardSpec(path=custom), num_workers=2, timeout_s=60) as scorer:
        scores = scorer.score(items)
        assert [s.status for s in scores] == want
        assert [s.sample_id for s in scores] == [i.sample_id for i in items]
        for i, score in enumerate(scores):
            assert score.value == float((i // 2) % 2) if i % 2 else math.isnan(score.value)
            assert (score.error is None) == (score.status == "ok")
        assert status_counts(scores) == {
            "ok": 13, "raised": 2, "crashed": 3, "timed_out": 0, "wrong_type": 3, "wrong_count": 2, "non_finite": 3
        }  # fmt: skip
        errors = {i.response: s.error for i, s in zip(items, scores, strict=True)}
        assert "ValueError: no π here (my_reward.py:" in errors["raise"]
        assert "exited with code 3" in errors["exit"]
        assert "SIGSEGV" in errors["segfault"]
        assert "sent what is no answer" in errors["forge"]
        assert "list of 2" in errors["list"]
        assert "3 numbers" in errors["numpy array"]
        assert "type str" in errors["string"]
        assert "['acc']" in errors["no score"]
        assert scorer.score([good(0)])[0].value == 1.0


def test_a_sample_that_never_ends_is_killed_and_is_the_only_one_lost(custom):
    items = [item(0, "spin"), good(1), item(2, "sleep"), good(3), item(4, "regex"), good(5)]
    with Scorer(RewardSpec(path=custom), num_workers=3, timeout_s=3) as scorer:
        scores = scorer.score(items)
    assert [s.status for s in scores] == ["timed_out", "ok"] * 3
    assert [s.value for s in scores[1::2]] == [1.0] * 3
    assert scores[4].error == "no score within 3 s; killed"
    assert status_counts(scores)["timed_out"] == 3


def test_numbers_of_all_kinds_and_dicts_are_scores(custom):
    with Scorer(RewardSpec(path=custom), num_workers=1, timeout_s=10) as scorer:
        scores = scorer.score([item(0, "numpy"), item(1, "bool"), item(2, "dict", "abc", {"keep": 1})])
    assert [s.value for s in scores] == [0.5, 1.0, 3.0]
    assert scores[0].extra == {"acc": True, "all": [0, 1], "bad": None, "odd": "b'x'"}
    assert scores[2].extra == {"acc": 1, "why": "ü", "nested": {"a": [1, None]}}


def test_output_of_user_code_and_its_reading_of_input_do_not_disturb(custom, capfd):
    with Scorer(RewardSpec(path=custom), num_workers=1, timeout_s=10) as scorer:
        scores = scorer.score([item(0, "print"), item(1, "stdin"), good(2)])
    assert [(s.status, s.value) for s in scores] == [("ok", 1.0), ("ok", 0.0), ("ok", 1.0)]
    out, err = capfd.readouterr()
    assert not out
    assert "garbage" in err


def test_slow_but_within_the_limit_is_ok(custom):
    with Scorer(RewardSpec(path=custom), num_workers=1, timeout_s=20) as scorer:
        assert [s.value for s in scorer.score([item(0, "slow"), item(1, "slow")])] == [1.0, 1.0]


def test_samples_are_scored_side_by_side(custom, tmp_path):
    together = [item(i, "meet", extra={"folder": str(tmp_path), "count": 3}) for i in range(3)]
    with Scorer(RewardSpec(path=custom), num_workers=3, timeout_s=60) as scorer:
        assert [s.value for s in scorer.score(together)] == [1.0] * 3


def test_scores_do_not_depend_on_the_number_of_workers(custom):
    items = [item(i, "random") for i in range(20)]
    values = []
    for count in (1, 3):
        with Scorer(RewardSpec(path=custom), num_workers=count, timeout_s=10) as scorer:
            values.append([s.value for s in scorer.score(items)])
            values.append([s.value for s in reversed(scorer.score(items[::-1]))])
    assert values[0] == values[1] == values[2] == values[3]
    assert len(set(values[0])) == 20


def test_async_functions_and_keyword_arguments(custom):
    with Scorer(RewardSpec(path=custom, name="compute_async"), num_workers=1, timeout_s=10) as scorer:
        assert scorer.score([good(0)])[0].value == 0.25
        plain = scorer.digest
    with Scorer(RewardSpec(path=custom, kwargs={"bonus": 2}), num_workers=1, timeout_s=10) as scorer:
        assert scorer.score([good(0)])[0].value == 3.0
        assert scorer.digest != plain


def test_builtin_verifiers_by_source_in_one_call():
    items = [
        item(0, "42", "42", source="exact"),
        item(1, "so 42", "42", source="numeric"),
        item(2, "$\\frac{84}{2}$", "42", source="math-verify"),
        item(3, "42", "blue", source="numeric"),
        item(4, "42", "42", source="openai/gsm8k"),
        item(5, "42", "42", source="numeric-only"),
    ]
    sources = ("exact", "numeric", "math-verify", "openai/gsm8k")
    with Scorer(RewardSpec(sources=sources), num_workers=2, timeout_s=20) as scorer:
        scores = scorer.score(items)
        assert [s.status for s in scores] == ["ok", "ok", "ok", "raised", "ok", "raised"]
        assert [s.value for s in scores[:3]] == [1.0, 1.0, 1.0]
        assert scores[4].value == 0.0
        assert scores[4].extra == {"flexible": 1.0}
        assert "was not among those at the start" in scores[5].error
        assert scorer.score([]) == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (RewardSpec(sources=("colour",)), "no verifier for data_source 'colour'"),
        (RewardSpec(path="/nowhere/r.py"), "there is no such file"),
        (RewardSpec(path="CUSTOM", name="missing"), "no such function; it has: compute_score, compute_async, stateful"),
        (RewardSpec(path="CUSTOM", name="too_few"), "cannot be called as too_few"),
        (RewardSpec(path="CUSTOM", kwargs={"colour": 1}), "cannot be called as .*colour"),
        (RewardSpec(path="BROKEN"), "cannot be imported: ZeroDivisionError.*broken.py:1"),
        (RewardSpec(path="LEAVES"), "cannot be imported: SystemExit"),
        (RewardSpec(path="DIES"), "exited with code 9, while it was loading"),
    ],
)
def test_a_reward_that_cannot_work_is_an_error_at_the_start(spec, message, custom, tmp_path):
    for name, code in (("broken", "1 / 0"), ("leaves", "raise SystemExit"), ("dies", "import os\nos._exit(9)")):
        (tmp_path / f"{name}.py").write_text(code)
    path = {"CUSTOM": custom}.get(spec.path, spec.path)
    if path in ("BROKEN", "LEAVES", "DIES"):
        path = str(tmp_path / f"{path.lower()}.py")
    with pytest.raises(RewardError, match=message):
        Scorer(RewardSpec(spec.sources, path, spec.name, spec.kwargs), num_workers=1, timeout_s=1)


def test_a_start_that_hangs_is_bounded(tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1e9)")
    monkeypatch.setattr(workers, "START_LIMIT_S", 0.5)
    with pytest.raises(RewardError, match=r"not ready within 0\.5 s"):
        Scorer(RewardSpec(path=str(tmp_path / "hangs.py")), num_workers=1, timeout_s=1)


def test_reward_code_that_changes_during_the_run_is_refused(tmp_path):
    file = tmp_path / "r.py"
    code = "import os\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    code += "    if solution_str == 'exit': os._exit(1)\n    return 1.0\n"
    file.write_text(code)
    with Scorer(RewardSpec(path=str(file)), num_workers=1, timeout_s=5) as scorer:
        before = scorer.digest
        file.write_text(code.replace("1.0", "2.0"))
        assert scorer.score([good(0)])[0].value == 1.0
        with pytest.raises(RewardError, match="has changed while the run uses it"):
            scorer.score([item(0, "exit"), good(1)])
    with Scorer(RewardSpec(path=str(file)), num_workers=1, timeout_s=5) as scorer:
        assert scorer.digest != before


def test_a_module_next_to_the_reward_file_can_be_imported_but_hides_nothing(tmp_path):
    (tmp_path / "my_helper.py").write_text("VALUE = 0.5")
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('shadowed')")
    (tmp_path / "r.py").write_text(
        "import colorsys\nfrom my_helper import VALUE\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return VALUE\n"
    )
    with Scorer(RewardSpec(path=str(tmp_path / "r.py")), num_workers=1, timeout_s=5) as scorer:
        assert scorer.score([good(0)])[0].value == 0.5


def test_duplicate_ids_and_bad_settings_are_refused(custom):
    with Scorer(RewardSpec(path=custom), num_workers=1, timeout_s=5) as scorer:
        with pytest.raises(RewardError, match="'s0' occurs twice"):
            scorer.score([good(0), good(0)])
        unsendable = scorer.score([item(0, "right", extra={"x": object()}), good(1)])
    assert [s.status for s in unsendable] == ["raised", "ok"]
    for count, limit in ((0, 1.0), (1, 0.0), (1, math.inf)):
        with pytest.raises(RewardError):
            Scorer(RewardSpec(path=custom), num_workers=count, timeout_s=limit)


def test_a_killed_sample_takes_its_own_processes_with_it(custom, tmp_path):
    pid_file = tmp_path / "pid"
    with Scorer(RewardSpec(path=custom), num_workers=1, timeout_s=0.7) as scorer:
        assert scorer.score([item(0, "grandchild", extra={"pid_file": str(pid_file)})])[0].status == "timed_out"
    assert _gone(int(pid_file.read_text()))


def test_close_leaves_no_children_zombies_or_descriptors(custom):
    before = set(Path("/proc/self/fd").iterdir())
    for _ in range(2):
        scorer = Scorer(RewardSpec(path=custom), num_workers=3, timeout_s=0.5)
        scorer.score([item(0, "slow"), item(1, "sleep"), item(2, "exit"), good(3)])
        pids = [w.process.pid for w in scorer._pool._workers]
        assert pids
        scorer.close()
        scorer.close()
        assert all(not Path(f"/proc/{pid}").exists() for pid in pids)
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_child_that_dies_between_calls_is_replaced(custom):
    with Scorer(RewardSpec(path=custom), num_workers=1, timeout_s=5) as scorer:
        assert scorer.score([good(0)])[0].value == 1.0
        for worker in scorer._pool._workers:
            os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
        assert [s.value for s in scorer.score([good(0), good(1)])] == [1.0, 1.0]


def test_a_scorer_made_in_a_thread_outlives_the_thread(custom):
    made = []
    thread = threading.Thread(target=lambda: made.append(Scorer(RewardSpec(path=custom), num_workers=1, timeout_s=5)))
    thread.start()
    thread.join()
    time.sleep(0.2)
    with made[0] as scorer:
        pid = scorer._pool._workers[0].process.pid
        assert scorer.score([good(0)])[0].value == 1.0
        assert scorer._pool._workers[0].process.pid == pid


# As in train.py: no __main__ guard, threads of PyTorch running.
PROGRAM = """
import os, sys, torch
from crossrl.rewards.scorer import RewardSpec, ScoreItem, Scorer
torch.mm(torch.ones(300, 300), torch.ones(300, 300))
scorer = Scorer(RewardSpec(path=sys.argv[1]), num_workers=2, timeout_s=600)
assert scorer.score([ScoreItem("a", "", "right", "right", {})])[0].value == 1.0
print(*[w.process.pid for w in scorer._pool._workers], flush=True)
if sys.argv[2] == "busy":
    scorer.score([ScoreItem("b", "", "regex", "", {}), ScoreItem("c", "", "spin", "", {})])
"""


@pytest.mark.parametrize("how", ["kill -9", "ctrl-c", "exit"])
def test_children_end_with_the_run_however_it_ends(how, custom):
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), custom, "idle" if how == "exit" else "busy"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    children = [int(pid) for pid in process.stdout.readline().split()]
    assert children
    if how != "exit":
        deadline = time.monotonic() + 30
        while len(children) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            children = _children_of(process.pid)
        assert len(children) == 2
        time.sleep(0.5)  # both are in their endless samples by now, one of them holding the interpreter's lock
        process.send_signal(signal.SIGKILL if how == "kill -9" else signal.SIGINT)
    process.wait(30)
    assert all(_gone(pid) for pid in children)


def _children_of(pid):
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def _gone(pid, within=5.0):
    """Whether the process has ended (or is a zombie that its new parent has yet to collect)."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_child_starts_fast_and_without_pytorch(custom, tmp_path):
    (tmp_path / "r.py").write_text(
        "import sys\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 0, 'heavy': [m for m in ('torch', 'transformers', 'pyarrow') if m in sys.modules]}\n"
    )
    start = time.monotonic()
    with Scorer(RewardSpec(path=str(tmp_path / "r.py")), num_workers=1, timeout_s=5) as scorer:
        elapsed = time.monotonic() - start
        assert scorer.score([good(0)])[0].extra["heavy"] == []
    assert elapsed < 5.0  # 0.2 s on an idle machine; the bound is for a busy one
