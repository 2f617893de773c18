"""What ``crossrl cross`` runs: two sides, the arms, the examinations, and the command of each."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from crossrl.config import load_config
from crossrl.config.resolved import flatten, to_yaml
from crossrl.config.root import RunConfig
from crossrl.cross.folder import PAIRS, Folder
from crossrl.files import dump_json, publish_text
from crossrl.sharing import may_differ

EXIT = "exit_code"  # written beside a job's log when it has ended

PAIR_SAVES_EVERY = 5  # steps

# An arm is there to be compared: it validates, shows and resumes nothing of its own accord.
ARM_KEYS = (
    "trainer.logger=[file]", "trainer.val_before_train=False", "trainer.val_only=False", "trainer.test_freq=-1",
    "trainer.log_val_generations=0", "trainer.rollout_data_dir=null", "trainer.validation_data_dir=null",
    "trainer.resume_mode=auto", "trainer.resume_from_path=null", "trainer.share_data=null",
    "trainer.share_data_keep=null", "actor_rollout_ref.rollout.skip_rollout=False", "tape.mode=off", "tape.dir=null",
    "tape.replay_from=null", "tape.steps=null", "tape.stages=[all]", "tape.keep=null", "tape.accept=[]",
)  # fmt: skip


class PlanError(ValueError):
    """The experiment cannot be run as asked; the message says what to change."""


class Runs(Protocol):
    """Of a side, what its jobs need to know. ``env``: variables of its processes; ``remote``: see ``cross.remote``."""

    @property
    def name(self) -> str: ...
    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def remote(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Side:
    """``config``: its resolved configuration, a file in the experiment's folder. ``python``, ``env``, ``remote``: see
    the keys ``cross.*``."""

    name: str
    config: Path
    settings: RunConfig

    @property
    def remote(self) -> str | None:
        return self.settings.cross.remote

    @property
    def env(self) -> Mapping[str, str]:
        return self.settings.cross.env

    def command(self, *words: str) -> list[str]:
        return [self.settings.cross.python or sys.executable, "-m", "crossrl", *words]

    def train(self, *overrides: str) -> list[str]:
        return self.command("train", "--config-name", str(self.config), *overrides)


@dataclass(frozen=True, slots=True)
class Job:
    """One process. ``run``: the folder with its metrics, None for an examination. ``result``: what must be there when
    it has ended well, and ``tape``: the records that it must be of. ``log``: where its output goes; its exit code is
    kept beside it. ``env``: further variables. ``fresh``: it does not go on where it was, so what is there goes first.
    ``fatal``: what it says when it has failed, though it may hang then; ``trouble``: what may mean that, or nothing."""

    name: str
    what: str
    side: Runs
    command: Sequence[str]
    log: Path
    run: Path | None = None
    steps: int | None = None
    result: Path | None = None
    tape: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    fresh: bool = False
    fatal: re.Pattern[bytes] | None = None
    trouble: re.Pattern[bytes] | None = None

    @property
    def exit_file(self) -> Path:
        return self.log.with_suffix(f".{EXIT}")

    def shell(self) -> str:
        """One line for a shell, as it is shown for a side that runs elsewhere."""
        words = [f"{k}={shlex.quote(v)}" for k, v in self.side.env.items()] + [shlex.join(self.command)]
        inner = f"cd {shlex.quote(str(Path.cwd()))} && {' '.join(words)} > {shlex.quote(str(self.log))} 2>&1"
        inner += f"; echo $? > {shlex.quote(str(self.exit_file))}"
        return f"{self.side.remote} {shlex.quote(inner)}"


@dataclass(frozen=True, slots=True)
class Plan:
    """``record``: steps of AA and BB that are recorded and examined. ``steps``: of each arm; None: the whole run.
    ``forbidden``: why halves cannot be exchanged, or ""."""

    folder: Folder
    a: Side
    b: Side
    record: int
    steps: int | None
    forbidden: str

    def alone(self, name: str, until: int | None) -> Job:
        """Arm AA, BB or BB2 up to step ``until`` (None: to its end); started again, it goes on where it was."""
        side, run = (self.a if name == "AA" else self.b), self.folder.arm(name)
        words = [f"trainer.default_local_dir={run}", *_stop(until)]
        if name != "BB2":
            words += ["tape.mode=record", "tape.state=True", f"tape.steps='1-{self.record}'"]
        what = f"{side.name} alone" if name != "BB2" else "B once more"
        # A log of its own, and with it an exit code: being done with the first steps is not being done with all.
        log = self._log(name if until is None else f"{name}-{until}")
        return Job(name, what, side, side.train(*words), log, run, until or self.planned)

    def pair(self, name: str) -> tuple[Job, Job]:
        """The two live runs of arm AB or BA: who infers, who trains."""
        sides = {"A": self.a, "B": self.b}
        infers, trains = sides[name[0]], sides[name[1]]
        share = [f"trainer.share_data_dir={self.folder.share(name)}", *_stop(self.steps)]
        jobs = []
        for side, role, half in ((infers, "ckpt", "infer"), (trains, "rollout", "train")):
            run = self.folder.root / "arms" / name / half
            # Entries are as large as checkpoints, and go when both sides have a checkpoint after them.
            every = side.settings.trainer.save_freq if side.settings.trainer.save_freq > 0 else PAIR_SAVES_EVERY
            keep = [f"trainer.save_freq={every}", "trainer.max_actor_ckpt_to_keep=1", "trainer.share_data_keep=0"]
            words = [f"trainer.default_local_dir={run}", f"trainer.share_data={role}", *share, *keep]
            what = f"{side.name} {'infers' if half == 'infer' else 'trains'}"
            jobs.append(Job(name, what, side, side.train(*words), self._log(f"{name}-{half}"), run, self.planned))
        return jobs[0], jobs[1]

    def examination(self, of: str, by: str) -> Job:
        side, out = (self.a if by == "A" else self.b), self.folder.examined(of, by)
        words = ["examine", str(self.folder.arm(of * 2)), "--config", str(side.config), "--of", of, "--by", by]
        words += ["--steps", f"1-{self.record}", "--out", str(out)]
        return Job(
            f"{of}_by_{by}", f"{by} examines {of}", side, side.command(*words), self._log(out.stem),
            result=out, tape=self.folder.arm(of * 2) / "tape",
        )  # fmt: skip

    @property
    def planned(self) -> int | None:
        return self.steps or self.b.settings.trainer.total_training_steps

    def _log(self, name: str) -> Path:
        return self.folder.root / "logs" / f"{name}.log"


def make_plan(
    root: Path, a: Sequence[str], b: Sequence[str], record: int, steps: int | None, configs: tuple[str, str]
) -> Plan:
    """Resolve both sides, write them to ``root/sides``, and see what can be exchanged.

    ``a``, ``b``: overrides of each side; ``configs``: the configuration of each (a name or a file). Raises
    ``ConfigError``, and ``PlanError`` when ``root`` holds an experiment with other settings.
    """
    if record < 1 or (steps is not None and steps < record):
        raise PlanError(f"--record-steps {record}, --steps {steps}: want at least 1, and no more recorded than run")
    root = root.expanduser().absolute()
    folder = Folder(root)
    settings = [load_config([*ARM_KEYS, *_threads(own, name), *own], name).config for own, name in zip((a, b), configs)]
    texts = [to_yaml(s) for s in settings]
    for side, text in zip("AB", texts, strict=True):
        path = folder.side(side)
        if path.is_file() and path.read_text(encoding="utf-8") != text:
            before, now = flatten(load_config((), str(path)).config), flatten(settings["AB".index(side)])
            keys = "; ".join(f"{k}: {before[k]!r:.60} there, {now[k]!r:.60} here" for k in now if before[k] != now[k])
            raise PlanError(
                f"{root} holds an experiment in which side {side} has other settings ({path}): {keys}. Choose another "
                "--out for a new experiment"
            )
    for side, text in zip("AB", texts, strict=True):
        publish_text(folder.side(side), text)
    sides = [Side(name, folder.side(name), s) for name, s in zip("AB", settings, strict=True)]
    publish_text(folder.experiment, dump_json({"record_steps": record, "steps": steps, "configs": list(configs)}))
    return Plan(folder, sides[0], sides[1], record, steps, forbidden(*settings))


def forbidden(a: RunConfig, b: RunConfig) -> str:
    """Why runs of ``a`` and ``b`` cannot exchange halves: the keys that both halves depend on and that differ."""
    mine, theirs = flatten(a), flatten(b)
    keys = [k for k in mine if mine[k] != theirs[k] and not may_differ(k)]
    if not keys:
        return ""
    lines = "; ".join(f"{k}: A {mine[k]!r:.80}, B {theirs[k]!r:.80}" for k in keys)
    return f"both halves of a run depend on {lines}: the arms {' and '.join(PAIRS)} are left out. Make them equal first"


def _threads(overrides: Sequence[str], config: str) -> list[str]:
    """Two processes run at once: each gets half of the cores, or their threads would spin against each other."""
    trainer: Any = load_config([*overrides], config).config.trainer
    if trainer.num_threads is not None or trainer.device == "cuda":
        return []
    return [f"trainer.num_threads={max(1, (os.cpu_count() or 2) // 2)}"]


def _stop(until: int | None) -> list[str]:
    return [] if until is None else [f"trainer.stop_after_steps={until}"]
