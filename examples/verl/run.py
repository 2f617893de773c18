"""CrossRL on real, unmodified verl 0.9.1, on a CPU: rollout skip, record, exchange of two live runs, which half is it.

    python examples/verl/run.py [record|skip|exchange|killed|untouched|all] [--trainer v0|v1|both] [--steps 3]
    python examples/verl/run.py faults --trainer v0       faults planted in one of two runs, found by crossrl cross

Needs verl and what docs/how-to/use-with-verl.md names. A run takes a minute or two on two cores, most of it to start.
Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_faults import FAULTS
from watched import HERE, Run, command, start, surroundings, wait

from crossrl.patching import child_environment, install
from crossrl.tape import RecordMissing, open_run

PARTS = ("record", "skip", "exchange", "killed", "untouched")
TRAINERS = {"v0": "trainer.use_v1=False", "v1": "trainer.use_v1=True"}
RECORD = "++tape.mode=record"
# Planted in A; the last one is a control.
EXPECTED = {
    "stale-weights": "inference", "rotary-base": "inference", "learning-rate": "training",
    "slow-answers": "no difference",
}  # fmt: skip


@dataclass(slots=True)
class Example:
    """``results``: what was checked, whether it held, and how it was seen."""

    work: Path
    trainer: str
    steps: int
    limit_s: float
    results: list[tuple[str, bool, str]] = field(default_factory=list)
    runs: dict[str, Run] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        return self.work / "data"

    def check(self, what: str, held: bool, seen: str) -> None:
        self.results.append((f"{self.trainer} {what}", held, seen))
        print(f"{'ok   ' if held else 'FAIL '} {self.trainer} {what}: {seen}", flush=True)

    def start(self, name: str, *overrides: str, **environment: str) -> Run:
        run = start(
            f"{self.trainer}-{name}", self.work, self.data, [TRAINERS[self.trainer], *overrides], environment,
            self.steps,
        )  # fmt: skip
        self.runs[name] = run
        return run

    def finish(self, *runs: Run, fails: bool = False) -> bool:
        """Wait for ``runs``; whether they ended as they should."""
        wait(runs, self.limit_s)
        for run in runs:
            if (run.code == 0) == fails:
                print("\n".join(run.log.splitlines()[-15:]), file=sys.stderr)
                self.check(f"{run.name} ends", False, run.why or f"exit code {run.code}, log {run.folder}/log.txt")
        return all((run.code == 0) != fails for run in runs)

    def alone(self) -> list[str]:
        """Digests of the weights after each step of a run by itself, recorded; it is made once."""
        if "record" not in self.runs:
            self.finish(self.start("record", RECORD, "trainer.val_before_train=True"))  # validation must not disturb
        return digests(self.runs["record"])

    # -- the parts ----------------------------------------------------------------------------------------------------

    def record(self) -> None:
        alone = self.alone()
        self.check("record: every step", len(alone) == self.steps, f"{len(alone)} of {self.steps} steps")
        if len(alone) != self.steps:
            return
        tape, count = open_run(self.runs["record"].folder / "out"), 0
        for step in tape.steps():
            for _, record in tape.records(step):
                record.check()
                count += 1
        stages = tape.stages(1)
        self.check("record: digests of all fields", count >= 4 * self.steps, f"{count} records: {', '.join(stages)}")
        befores = [tape.record(step, "update").header.info["state"]["before"]["weights"] for step in tape.steps()]
        self.check("record: no weights between updates", befores[1:] == alone[:-1], "after step i = before step i + 1")
        again = self.start("replay", "++tape.mode=replay", f"++tape.replay_from={tape.layout.root}")
        if self.finish(again):
            held = again.requests == 0 and equal(digests(again), alone)
            self.check(
                "record: replayed, it ends as it did", held, f"{again.requests} requests, {last(digests(again))}"
            )
        saved = saved_digest(self.runs["record"], self.steps)
        self.check("record: digest is of verl's own checkpoint", saved == alone[-1], f"{saved[:16]}")

    def skip(self) -> None:
        skip = [
            "++actor_rollout_ref.rollout.skip_rollout=True",
            f"++actor_rollout_ref.rollout.skip_dump_dir={self.work}/{self.trainer}-dump",
        ]
        subprocess.run(["rm", "-rf", f"{self.work}/{self.trainer}-dump"], check=True)
        first = self.start("skip-1", RECORD, *skip)
        if not self.finish(first):
            return
        second = self.start("skip-2", RECORD, *skip)
        if not self.finish(second):
            return
        want = 8 * self.steps
        self.check("skip: first run generates", first.requests == want, f"{first.requests} requests, {want} expected")
        self.check("skip: second run generates nothing", second.requests == 0, f"{second.requests} requests")
        self.check("skip: equal weights at every step", equal(digests(first), digests(second)), last(digests(second)))
        self.check("skip: equal to the run alone", equal(digests(second), self.alone()), last(self.alone()))
        other = self.start("skip-other", *skip, "actor_rollout_ref.rollout.temperature=0.7")
        if self.finish(other, fails=True):
            named = "rollout.temperature" in other.log and other.requests == 0
            self.check("skip: another temperature is refused", named, "names rollout.temperature; nothing generated")

    def pair(self, name: str) -> tuple[Path, list[Run]]:
        """Two runs that exchange: their folder, and the side that infers, the side that trains."""
        folder = self.work / f"{self.trainer}-{name}"
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        keys = [RECORD, f"++trainer.share_data_dir={folder}", "++trainer.share_data_timeout=300"]
        return folder, [self.start(f"{name}-{r}", *keys, f"++trainer.share_data={r}") for r in ("ckpt", "rollout")]

    def exchange(self) -> None:
        _, sides = self.pair("share")
        if not self.finish(*sides):
            return
        infers, trains = sides
        self.check("exchange: one side generates", infers.requests == 8 * self.steps, f"{infers.requests} requests")
        self.check("exchange: the other does not", trains.requests == 0, f"{trains.requests} requests")
        for side, what in ((infers, "infers"), (trains, "trains")):
            found = digests(side)
            self.check(f"exchange: side that {what} ends as the run alone", equal(found, self.alone()), last(found))

    def killed(self) -> None:
        """The side that trains is killed after its first checkpoint: the other must not wait for it."""
        folder, (infers, trains) = self.pair("kill")
        end = time.monotonic() + self.limit_s
        while not (folder / "ckpt_0").exists() and time.monotonic() < end and not trains.poll(self.limit_s):
            time.sleep(0.1)
        trains.end()
        began = time.monotonic()
        if self.finish(infers, fails=True):
            told = "died: its process is gone" in infers.log or "no sign of life" in infers.log
            self.check(
                "exchange: a side whose other side is killed ends", told, f"{time.monotonic() - began:.0f} s later"
            )

    def untouched(self) -> None:
        """Of the synchronous trainer alone: without the host the other trains in the order in which samples come."""
        if self.trainer != "v0":
            return
        before = package_digest()
        none = {"VERL_USE_EXTERNAL_MODULES": "verl_cpu", "VERL_USE_EXTERNAL_PLUGINS": "none"}
        for name, environment in (("absent", none), ("unasked", {}), ("disabled", {"CROSSRL_VERL": "0"})):
            if not self.finish(self.start(name, **environment)):
                return
        found = {name: saved_digest(self.runs[name], self.steps) for name in ("absent", "unasked", "disabled")}
        for name in ("unasked", "disabled"):
            held = found[name] == found["absent"] and not (self.runs[name].folder / "out" / "tape").exists()
            self.check(f"host {name}: as without it", held, f"verl's checkpoint {found[name][:16]}")
        after = package_digest()
        self.check("verl's files are as before", before == after, f"{after[1]} files, {after[0][:16]}")

    def faults(self) -> None:
        """``crossrl cross`` on a run with a fault and a healthy one: which half does it blame? B is run once."""
        install("verl_faults:PATCHES")
        known: Path | None = None
        for name, expected in EXPECTED.items():
            out = self.work / f"{self.trainer}-cross-{name}"
            subprocess.run(["rm", "-rf", str(out)], check=True)
            if known is not None:
                for part in ("arms/BB", "logs/BB.log", "logs/BB.exit_code"):
                    (out / part).parent.mkdir(parents=True, exist_ok=True)
                    subprocess.run(["cp", "-r", str(known / part), str(out / part)], check=True)
            began, found = time.monotonic(), self.crossed(out, name)
            where = f", {'/'.join(found['stages'])} of step {found['step']}" if found["stages"] else ""
            told = f"{found['conclusion']}{where}, {time.monotonic() - began:.0f} s"
            self.check(f"faults: {name}", found["conclusion"] == expected, told)
            known = known or out

    def crossed(self, out: Path, fault: str) -> dict[str, Any]:
        """The verdict."""
        words = shlex.join(command(self.data, out, self.steps, [TRAINERS[self.trainer]]))
        planted = {**child_environment(), FAULTS[fault]: "1"}
        a = " ".join([*(f"{name}={shlex.quote(value)}" for name, value in planted.items()), words])
        sides = ["--a-command", a, "--b-command", words]
        cross = [sys.executable, "-m", "crossrl", "cross", "--out", str(out), "--steps", str(self.steps), *sides]
        out.mkdir(parents=True, exist_ok=True)
        subprocess.run([*cross, "--timeout", str(self.limit_s)], env=surroundings(out), timeout=8 * self.limit_s)
        if not (out / "verdict.json").exists():
            return {"conclusion": "nothing", "stages": [], "step": None}
        return dict(json.loads((out / "verdict.json").read_text()))


def digests(run: Run) -> list[str]:
    """The weights after each recorded step; empty if there are none."""
    try:
        tape = open_run(run.folder / "out")
        return [tape.record(s, "update").header.info["state"]["after"]["weights"] for s in tape.steps()]
    except RecordMissing:
        return []


def equal(a: list[str], b: list[str]) -> bool:
    """A comparison of nothing is no comparison."""
    return bool(a) and a == b


def last(found: list[str]) -> str:
    return found[-1][:16] if found else "nothing recorded"


def saved_digest(run: Run, step: int) -> str:
    """Of the weights in verl's own checkpoint, which is a pickle that this very run has written."""
    import torch

    from crossrl.models.digest import combined, weights_digest

    path = run.folder / f"out/global_step_{step}/actor/model_world_size_1_rank_0.pt"
    state = torch.load(path, weights_only=False)
    whole = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state.items()}
    return combined({name: weights_digest([(name, value)]) for name, value in whole.items()})


def package_digest() -> tuple[str, int]:
    """Of every file of the installed verl, and their number."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    root, total = Path(spec.origin).parent, hashlib.sha256()
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.suffix != ".pyc")
    for path in files:
        total.update(f"{path.relative_to(root)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest(), len(files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=(*PARTS, "faults", "all"), default="all")
    parser.add_argument("--trainer", choices=(*TRAINERS, "both"), default="both", help="v0: synchronous; v1: default")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("outputs/verl-example"), help="folder for runs and data")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one run, then it is killed")
    args = parser.parse_args()
    work = args.work.absolute()
    if not (work / "data/train.parquet").exists():
        subprocess.run([sys.executable, str(HERE / "make_model.py"), str(work / "data")], check=True)
    results = []
    for trainer in TRAINERS if args.trainer == "both" else (args.trainer,):
        example = Example(work, trainer, args.steps, args.limit)
        for name in PARTS if args.part == "all" else (args.part,):
            part: Callable[[], None] = getattr(example, name)
            part()
        results += example.results
    print()
    for what, held, seen in results:
        print(f"{'ok' if held else 'FAIL':5}{what:62}{seen}")
    return 0 if results and all(held for _, held, _ in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
