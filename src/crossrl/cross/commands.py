"""What ``crossrl cross`` runs of two sides that are commands of verl: the arms, each with the host's keys added."""

from __future__ import annotations

import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crossrl.cross.folder import Folder
from crossrl.cross.plan import Job, PlanError
from crossrl.cross.watch import MARK
from crossrl.files import dump_json, publish_text, read_json

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
OURS = re.compile(r"\+{0,2}(tape\.|trainer\.share_data|actor_rollout_ref\.rollout\.skip_rollout)")
# An arm is there to be compared: it validates, saves, shows and resumes nothing of its own accord.
ARM_KEYS = (
    "trainer.logger=[console]", "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1",
    "trainer.resume_mode=disable", "++trainer.val_only=False", "++trainer.rollout_data_dir=null",
    "++trainer.validation_data_dir=null", "++tape.mode=record",
)  # fmt: skip
# verl hangs when one of its processes has failed. The first is Hydra's last word; the others are also seen in the logs
# of runs that went on, where somebody has caught the error.
FATAL = re.compile(rb"Error executing job with overrides")
TROUBLE = re.compile(rb"RayTaskError|ray\.exceptions\.|The actor died")


@dataclass(frozen=True, slots=True)
class CommandSide:
    """``words``: a program that takes Hydra's overrides as its last arguments. ``env``: variables in front of it."""

    name: str
    words: tuple[str, ...]
    env: Mapping[str, str]

    @property
    def remote(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class CommandPlan:
    """``steps``: of each arm; None: as long as the commands say."""

    folder: Folder
    a: CommandSide
    b: CommandSide
    steps: int | None

    def alone(self, name: str) -> Job:
        """Arm AA, BB or BB2."""
        side = self.a if name == "AA" else self.b
        what = "B once more" if name == "BB2" else f"{side.name} alone"
        return self._job(name, what, side, self.folder.arm(name), name)

    def pair(self, name: str) -> tuple[Job, Job]:
        """The two live runs of arm AB or BA: who infers, who trains."""
        jobs = []
        for letter, half, role in zip(name, ("infer", "train"), ("ckpt", "rollout"), strict=True):
            side, run = self.a if letter == "A" else self.b, self.folder.root / "arms" / name / half
            words = [f"++trainer.share_data={role}", f"++trainer.share_data_dir={self.folder.share(name)}"]
            jobs.append(self._job(name, f"{side.name} {half}s", side, run, f"{name}-{half}", words))
        return jobs[0], jobs[1]

    def _job(self, arm: str, what: str, side: CommandSide, run: Path, log: str, more: Sequence[str] = ()) -> Job:
        steps = [] if self.steps is None else [f"++trainer.total_training_steps={self.steps}"]
        keys = [*ARM_KEYS, *steps, f"trainer.default_local_dir={run}", *more]
        mark = secrets.token_hex(4)
        # Two runs of Ray on one machine: each in a folder of its own. Sockets lie in it, so its name is short.
        ray = {} if "RAY_ADDRESS" in {**os.environ, **side.env} else {"RAY_TMPDIR": f"/tmp/cr{mark}"}
        return Job(
            arm, what, side, [*side.words, *keys], self.folder.root / "logs" / f"{log}.log", run, self.steps,
            env={MARK: mark, **ray}, fresh=True, fatal=FATAL, trouble=TROUBLE,
        )  # fmt: skip


def make_command_plan(root: Path, commands: tuple[str, str], steps: int | None) -> CommandPlan:
    """``commands``: of A and B, as for a shell (variables in front of the program, quotes; nothing else of a shell).

    Raises ``PlanError``, also when ``root`` holds an experiment with other commands.
    """
    if steps is not None and steps < 1:
        raise PlanError(f"--steps {steps}: want at least 1")
    folder = Folder(root.expanduser().absolute())
    sides = [_side(name, text) for name, text in zip("AB", commands, strict=True)]
    body = {"steps": steps, "commands": list(commands)}
    before = read_json(folder.experiment) if folder.experiment.is_file() else body
    if before != body:
        raise PlanError(
            f"{folder.root} holds an experiment with other commands or steps ({folder.experiment}). Choose another "
            "--out for a new experiment"
        )
    publish_text(folder.experiment, dump_json(body))
    return CommandPlan(folder, sides[0], sides[1], steps)


def _side(name: str, text: str) -> CommandSide:
    option = f"--{name.lower()}-command"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise PlanError(f"{option}: {error}: {text!r:.120}") from None
    count = next((i for i, word in enumerate(words) if not VARIABLE.match(word)), len(words))
    env = dict(word.split("=", 1) for word in words[:count])
    if not words[count:]:
        raise PlanError(f"{option} {text!r:.120}: want a program, such as 'python -m verl.trainer.main_ppo KEY=VALUE'")
    own = [word for word in words[count:] if OURS.match(word)]
    if own:
        raise PlanError(f"{option} has {own[0]}: leave it out, crossrl cross sets what it records and exchanges")
    return CommandSide(name, tuple(words[count:]), env)
