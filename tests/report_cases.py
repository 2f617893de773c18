"""Experiments' folders for the tests of the report, made by hand: metrics, small tapes, examinations, a verdict."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from crossrl.batch import Batch, Meaning, Ragged
from crossrl.cross.findings import Effect, Evidence, Examination, Finding, Gap, Setting, Side, Verdict, to_json
from crossrl.cross.folder import Folder
from crossrl.tape.capture import capture
from crossrl.tape.header import Header
from crossrl.tape.record import Draft, write_record

# What would happen if any of the page's data became markup or script.
HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">\' " & <!-- \u202e'
STAGES = ("data", "rollout", "reward", "old_log_prob", "advantage", "update", "sync")
SAMPLE = "ab12.e0.r7.n0"
STEPS = 20


@dataclass(frozen=True)
class Texts:
    """What ends up on the page from data; all of it may be hostile."""

    sentence: str = "28 of 321 log-probs differ by more than rounding explains"
    word: str = "seven"
    sample: str = SAMPLE
    value: str = "plain"


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(value)))


def write_metrics(run: Path, shift: float) -> None:
    run.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "step": s, "critic/score/mean": s / STEPS + shift, "actor/entropy": 2 - s / STEPS - shift,
            "training/rollout_probs_diff_mean": abs(shift) / 10, "actor/grad_norm": 1 + shift,
            "response_length/mean": 5.0,
        }
        for s in range(1, STEPS + 1)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(run: Path, top_p: float, model: Path, shift: float = 0.0) -> None:
    """Metrics, and the configuration of a run that has ended."""
    write_metrics(run, shift)
    (run / "huggingface").mkdir()
    config = {
        "trainer": {"total_training_steps": STEPS, "seed": 1},
        "actor_rollout_ref": {"model": {"path": str(model)}, "rollout": {"top_p": top_p}},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def write_model(folder: Path, words: list[str]) -> Path:
    """A tokenizer with a token for each word."""
    from tokenizers import Tokenizer, models

    folder.mkdir(parents=True, exist_ok=True)
    Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0])).save(
        str(folder / "tokenizer.json")
    )
    return folder


def write_tape(run: Path, rows: list[list[int]], sample: str, prompt: str, gap: float = 0.0) -> None:
    """One step: rollout and old_log_prob of samples ``sample``, and further ones after it."""
    ids = tuple(sample if i == 0 else f"other{i}" for i in range(len(rows)))
    tokens = Ragged.from_rows(rows, np.int32)
    sampler = np.linspace(-0.1, -3.0, len(tokens.values), dtype=np.float32)
    rollout = Batch(
        ids,
        {
            "prompt": [[{"role": "user", "content": prompt}]] * len(ids),
            "response_ids": tokens,
            "response": [f"text {i}" for i in range(len(ids))],
            "rollout_log_probs": Ragged(sampler, tokens.lengths),
        },
        {"rollout_log_probs": Meaning(1.0, "none", "sampler", 0)},
    )
    trainer = Batch(
        ids,
        {"old_log_probs": Ragged(sampler + np.float32(gap), tokens.lengths)},
        {"old_log_probs": Meaning(1.0, "none", "trainer", 0)},
    )
    versions = {"crossrl": "0.1.0", "torch": "2.13.0"}
    for stage, batch in (("rollout", rollout), ("old_log_prob", trainer)):
        header = Header("run", stage, 1, versions=versions)
        write_record(run / "tape" / "step_000001" / f"{stage}.0", Draft(header, capture(batch)))


def examination(of: Side, by: Side, texts: Texts, faulty: bool) -> Examination:
    """Three steps; side A's rollout differs at each when ``faulty``, and the update is within noise."""
    findings = []
    for step in (1, 2, 3):
        for stage in STAGES:
            judged, sentence = "equal", f"step {step}: {stage} is the same, bit for bit"
            gaps: tuple[Gap, ...] = ()
            if stage == "rollout" and faulty:
                judged, sentence = "differs", texts.sentence
                gaps = (
                    Gap("rollout_log_probs", "values", 28, 321, texts.sample, 1, -1.25, -1.5, (texts.sample,), 0.25,
                        0.01, 1e-5, "nat"),
                )  # fmt: skip
            if stage == "update":
                judged, sentence = "noise", "another order of summation"
            findings.append(Finding(of, by, stage, step, judged, sentence, gaps=gaps, hint=texts.value))  # type: ignore[arg-type]
    settings = (Setting("actor_rollout_ref.rollout.top_p", 0.8, texts.value, "inference"), Setting("x", texts.value, 2))
    return Examination(of, by, (1, 2, 3), "float32", (texts.value,), tuple(findings), settings)


def verdict(texts: Texts, examined: Examination) -> Verdict:
    effects = (
        Effect("reward", "AA", "BB", 18, -0.4, -0.5, -0.3, 0.05, True, 3),
        Effect("reward", "BA", "BB", 20, 0.0, -0.01, 0.01, 0.05, False),
    )
    gaps = next(f.gaps for f in examined.findings if f.gaps)
    return Verdict(
        "inference", "A", ("rollout",), 1, ("inference",), gaps, (Evidence("stages", texts.sentence),), effects,
        examined.settings, f"noise: {texts.value}", (texts.value,), (texts.value,), (texts.value,),
    )  # fmt: skip


def write_experiment(root: Path, texts: Texts = Texts()) -> Folder:
    """Everything there is: five arms, two tapes, two examinations, verdict, experiment.json, both sides."""
    folder = Folder(root)
    model = write_model(root / "model", ["one", "two", texts.word, "four"])
    for name, shift in (("AA", -0.4), ("BB", 0.0), ("BB2", 0.01), ("AB", -0.3), ("BA", 0.0)):
        for run in folder.runs(name):
            write_run(run, 0.8 if name[0] == "A" else 1.0, model, shift)
    write_tape(folder.arm("AA"), [[0, 1, 2, 3], [1, 1]], texts.sample, texts.value, gap=0.2)
    write_tape(folder.arm("BB"), [[0, 1, 3, 3, 0], [1, 1]], texts.sample, texts.value)
    a, b = examination("A", "B", texts, True), examination("B", "A", texts, False)
    write_json(folder.examined("A", "B"), a)
    write_json(folder.examined("B", "A"), b)
    write_json(folder.verdict, verdict(texts, a))
    write_json(folder.experiment, {"a": texts.value, "repeat": True})
    for side in "AB":
        folder.side(side).parent.mkdir(exist_ok=True)
        folder.side(side).write_text((folder.arm(side * 2) / "config.yaml").read_text())
    return folder
