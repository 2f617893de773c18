"""What to run to find out more, as literal commands."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from crossrl.cross.arms import Arm, Experiment
from crossrl.cross.folder import PAIRS, Folder
from crossrl.files import read_json


@dataclass(frozen=True, slots=True)
class NextSteps:
    """``root``: the experiment's folder, None for runs that were named one by one. ``a``, ``b``: a configuration of
    each side as a command-line word, or None where none is known."""

    root: Path | None = None
    a: str | None = None
    b: str | None = None
    named: dict[str, Path] = field(default_factory=dict)
    commands: tuple[str, str] | None = None
    """Of the sides, where they are commands of verl, which have no stages that could be examined."""
    command_steps: int | None = None

    def whole(self) -> str:
        """The whole experiment; ``crossrl cross`` does what is missing in the folder and keeps the rest."""
        return self._cross("")

    def arm(self, name: str) -> tuple[str, ...]:
        """How to get one arm: for runs launched by hand, the two commands of a pair."""
        if self.root is not None and (self.commands or (self.a and self.b)):
            return (self.whole(),)
        if name not in PAIRS:
            return (self._train(name[0], f"trainer.default_local_dir=outputs/{name}"),)
        infers, trains = name[0], name[1]
        folder = f"outputs/{name}"
        share = f"++trainer.share_data_dir={folder}/share"
        return (
            self._train(infers, f"++trainer.share_data=ckpt {share} trainer.default_local_dir={folder}/infer"),
            self._train(trains, f"++trainer.share_data=rollout {share} trainer.default_local_dir={folder}/train"),
        )

    def longer(self, steps: int) -> tuple[str, ...]:
        """All arms with ``steps`` steps, in a new folder: what is done in the old one is shorter."""
        return (f"{self._cross(f'-{steps}-steps')} --steps {steps}",)

    def examine_to(self, step: int) -> tuple[str, ...]:
        """Record and examine all steps up to ``step``, in a new folder."""
        return (f"{self._cross(f'-to-step-{step}')} --quick --record-steps {step}",)

    def again(self, *arms: str) -> str:
        """The verdict once more, with ``arms`` that were made by ``arm``."""
        words = [str(self.root)] if self.root else []
        for name, path in self.named.items():
            words += [f"--{name.lower()}", str(path)]
        if not (self.root and (self.commands or (self.a and self.b))):
            words += [word for name in arms for word in (f"--{name.lower()}", f"outputs/{name}")]
        return f"crossrl verdict {shlex.join(words)}" if words else "crossrl verdict DIR"

    def examine(self) -> tuple[str, ...]:
        """Examinations of both tapes, which are recorded first where runs were launched by hand."""
        if self.commands:
            return (self.whole(),)
        words = "tape.mode=record tape.state=True trainer.stop_after_steps=3"
        root, runs = self.root or Path("outputs/cross"), []
        commands = []
        for side in ("A", "B"):
            runs.append(self.root / "arms" / (side * 2) if self.root else Path(f"outputs/{side * 2}"))
            if self.root is None:
                commands.append(self._train(side, f"{words} trainer.default_local_dir={runs[-1]}"))
        for of, by, run, config in (("A", "B", runs[0], self.b), ("B", "A", runs[1], self.a)):
            out = shlex.quote(str(root / "examined" / f"{of}_by_{by}.json"))
            known = config or f"{by}.yaml"
            commands.append(f"crossrl examine {shlex.quote(str(run))} --config {known} --of {of} --by {by} --out {out}")
        return (*commands, f"crossrl verdict {shlex.quote(str(root))}")

    def _cross(self, suffix: str) -> str:
        out = shlex.quote(f"{self.root or 'outputs/cross'}{suffix}")
        if self.commands:
            a, b = map(shlex.quote, self.commands)
            steps = f" --steps {self.command_steps}" if self.command_steps and not suffix else ""
            return f"crossrl cross --a-command {a} --b-command {b} --out {out}{steps}"
        return f"crossrl cross --a {self.a or 'A.yaml'} --b {self.b or 'B.yaml'} --out {out}"

    def _train(self, side: str, words: str) -> str:
        config = self.a if side == "A" else self.b
        what = f"--config-name {config}" if config else "KEY=VALUE ..."
        return f"crossrl train {what} {words}" + ("" if config else f"   # settings of {side}")


def next_steps(experiment: Experiment) -> NextSteps:
    """With the configurations that lie in the experiment's folder or in the runs of A and of B alone."""
    known: dict[str, str | None] = {}
    for side in ("A", "B"):
        files = [experiment.folder.side(side)] if experiment.folder else []
        arm = experiment.arms.get(side * 2)
        files += [run / "config.yaml" for run in (arm.runs if isinstance(arm, Arm) else ())]
        known[side] = next((shlex.quote(str(f)) for f in files if f.is_file()), None)
    own = experiment.folder.root if experiment.folder else None
    named = {n: a.runs[0] for n, a in experiment.arms.items() if a.runs and not _inside(a.runs[0], own)}
    return NextSteps(own, known["A"], known["B"], named, *commands_of(experiment.folder))


def commands_of(folder: Folder | None) -> tuple[tuple[str, str] | None, int | None]:
    """Of an experiment whose sides are commands of verl: these, and the steps of each arm."""
    if folder is None or not folder.experiment.is_file():
        return None, None
    body = read_json(folder.experiment)
    found = body.get("commands") if isinstance(body, dict) else None
    return ((str(found[0]), str(found[1])), body.get("steps")) if found else (None, None)


def _inside(path: Path, root: Path | None) -> bool:
    return root is not None and path.is_relative_to(root)
