"""Tiny recorded runs for the tests of cross-examination, and faults of a few lines each to plant in them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from crossrl.batch import Batch, Ragged
from crossrl.config import load_config
from crossrl.cross.examine import examine
from crossrl.report import Reporter
from crossrl.trainer import Trainer

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


class Quiet(Reporter):
    def message(self, message):
        pass

    warn = message

    def start(self, *args, **kwargs):
        pass


class Runs:
    """``record(name, *overrides)``: a run's folder, made once per name. ``examine(name, *overrides)``: by these."""

    def __init__(self, files: Path, folder: Path) -> None:
        self.files, self.folder = files, folder

    def load(self, name, *overrides):
        base = [
            f"data.train_files={self.files}/train.parquet", "data.train_max_samples=12", "data.train_batch_size=4",
            "data.max_prompt_length=8", "data.max_response_length=6", f"{ACTOR}.ppo_mini_batch_size=2",
            f"{MODEL}.path={self.files}/model", f"{ACTOR}.optim.lr=1e-3", f"{ROLLOUT}.n=4", f"{ACTOR}.use_kl_loss=True",
            f"reward.custom_reward_function.path={self.files}/sort_reward.py", "reward.num_workers=1",
            "trainer.num_threads=1", "trainer.device=cpu", f"trainer.default_local_dir={self.folder / name}",
            "trainer.project_name=p", "trainer.experiment_name=e", "trainer.logger=[]",
            "trainer.total_training_steps=2",
        ]  # fmt: skip
        return load_config([*base, *overrides])

    def record(self, name, *overrides, plant=lambda parts: None, wrap=lambda stage: stage):
        if not (self.folder / name).exists():
            with Quiet() as reporter:
                loaded = self.load(name, "tape.mode=record", "tape.state=True", *overrides)
                assert Trainer(loaded, reporter, wrap, plant=plant).fit() == 0
        return self.folder / name

    def examine(self, name, *overrides, of="A", by="B", steps=None, plant=lambda parts: None):
        return examine(self.folder / name, self.load("examiner", *overrides), of, by, steps, Quiet(), plant)


def differing(examined):
    """Stage and first step of everything that differs."""
    first = {}
    for finding in examined.findings:
        if finding.judged == "differs":
            first.setdefault(finding.stage, finding.step)
    return first


def of_stage(examined, stage, judged=None):
    return [f for f in examined.findings if f.stage == stage and judged in (None, f.judged)]


class Changed:
    """A stage whose output, or input, is changed from step ``start`` on."""

    def __init__(self, stage, output=None, given=None, start=1):
        self.stage, self.output, self.given, self.start = stage, output, given, start
        self.name, self.reads, self.writes = stage.name, stage.reads, stage.writes

    def __call__(self, batch, at):
        if at.step < self.start:
            return self.stage(batch, at)
        out = self.stage(self.given(batch) if self.given else batch, at)
        return self.output(out) if self.output else out


def column(batch, **columns):
    return Batch(batch.sample_id, {**batch.columns, **columns}, batch.meanings, batch.info)


def mapped(batch, name, change):
    """``change`` of a column's flat values."""
    old = batch[name]
    values = change((old.values if isinstance(old, Ragged) else old).copy())
    return column(batch, **{name: Ragged(values, old.lengths) if isinstance(old, Ragged) else values})


def in_stage(name, output=None, given=None, start=1):
    """To plant: ``Changed`` around one stage, below the tape."""

    def plant(parts):
        parts.stages[name] = Changed(parts.stages[name], output, given, start)

    return plant


def sampling(say_so=False, **changes):
    """To plant: sample otherwise than asked for; ``say_so``: the record states it."""

    def plant(parts):
        generate = parts.engine.generate

        def other(prompts, seeds, wanted, progress=None):
            out = generate(prompts, seeds, dataclasses.replace(wanted, **changes), progress)
            if say_so:
                return out
            meaning = dataclasses.replace(out.meaning, temperature=wanted.temperature, truncation=wanted.truncation)
            return dataclasses.replace(out, meaning=meaning)

        parts.engine.generate = other

    return plant


def skip_sync(step):
    """To plant: the sync after ``step`` does nothing; the engine needs weights of its own to be behind then."""

    def plant(parts):
        stage = parts.stages["sync"]

        class Skipping:
            name, reads, writes = stage.name, stage.reads, stage.writes

            def __call__(self, batch, at):
                return Batch(batch.sample_id, {}, {}, {}) if at.step == step else stage(batch, at)

        parts.stages["sync"] = parts.sync = Skipping()

    return plant


def next_group(batch):
    """Each response with the prompt of the group after it."""
    order = np.roll(np.arange(len(batch)), -4)
    return column(batch, prompt_ids=batch.ragged("prompt_ids").take(order))


def lr_times_ten(parts):
    lr = parts.update.lr
    parts.update.lr = lambda step: 10 * lr(step)


def other_order(parts):
    parts.loader.seed += 1


def stale_weights(parts):
    """Each rollout with the weights of one version before; needs ``rollout.own_weights``."""
    engine, kept = parts.engine, []
    generate = engine.generate

    def other(*args):
        weights = dict(engine.held())
        now = {n: w.clone() for n, w in weights.items()}
        for name, weight in weights.items():
            weight.copy_((kept[-1] if kept else now)[name])
        try:
            return generate(*args)
        finally:
            for name, weight in weights.items():
                weight.copy_(now[name])
            kept.append(now)

    engine.generate = other
