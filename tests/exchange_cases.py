"""Runs pairs of tiny trainings that exchange halves, and disturbs them; prints what came out as JSON.

A script of its own, because it forks: torch is imported once, and each run starts in a fraction of a second.

    python tests/exchange_cases.py DEMO_FOLDER WORK_FOLDER RANDOM_KILLS
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from resume_cases import KillAt

from crossrl.config import load_config
from crossrl.report import MetricsFile, Reporter
from crossrl.tape.errors import TapeError
from crossrl.trainer import Trainer

STEPS = 4
LIMIT_S = 60.0  # of everything that must end by itself


def overrides(demo: Path, folder: Path, share: Path | None, role: str | None, *more: str) -> list[str]:
    """Everything that has state is on, as in ``resume_cases``; both sides of a pair have the same."""
    base = [
        f"data.train_files={demo}/train.parquet", "data.train_max_samples=9", "data.train_batch_size=4",
        "data.max_prompt_length=8", "data.max_response_length=5", f"actor_rollout_ref.model.path={demo}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=True", "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100", "actor_rollout_ref.rollout.n=4",
        f"reward.custom_reward_function.path={demo}/sort_reward.py", "reward.num_workers=1", "trainer.total_epochs=2",
        "trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=1", "trainer.val_before_train=False",
        "trainer.num_threads=1", "trainer.device=cpu", f"trainer.default_local_dir={folder}",
    ]  # fmt: skip
    shared = [f"++trainer.share_data={role}", f"++trainer.share_data_dir={share}"] if role else []
    return [*base, *shared, *more]


class Lines(Reporter):
    """Writes what a person would see to the side's log."""

    def message(self, message):
        print(message, flush=True)

    warn = message


def start(demo: Path, folder: Path, share: Path | None, role: str | None, *more: str, kill=None) -> int:
    """Fork one side; returns its process id. Exit codes: the run's, or 2 with the error's text in FOLDER.error."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        with folder.with_name(f"{folder.name}.log").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            wrap = (lambda s: KillAt(s, *kill[1:]) if s.name == kill[0] else s) if kill else (lambda s: s)
            with Lines(loggers=[MetricsFile(folder / "metrics.jsonl")]) as reporter:
                code = Trainer(load_config(overrides(demo, folder, share, role, *more)), reporter, wrap).fit()
    except TapeError as error:
        folder.with_name(f"{folder.name}.error").write_text(str(error))
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end(pid: int, limit_s: float = LIMIT_S) -> int | str:
    """The exit code of a side, negative for a signal; "hangs" (and it is killed) when it outlasts the limit."""
    stop = time.monotonic() + limit_s
    while time.monotonic() < stop:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


def outcome(folder: Path) -> dict[str, object]:
    """Digests of everything that a side ended with, and its curve."""
    last = folder / f"global_step_{STEPS}"
    names = ("model/model.safetensors", "optimizer.safetensors")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    same = ("critic/rewards/mean", "actor/loss", "actor/grad_norm", "response_length/mean")
    state = json.loads((last / "state.json").read_text())
    return {
        "digest": {n: hashlib.sha256((last / n).read_bytes()).hexdigest() for n in names},
        "curve": [[row["step"], *(row[k] for k in same)] for row in rows],
        "loader": state["loader"], "engine": state["engine"],
    }  # fmt: skip


def pair(demo: Path, work: Path, name: str, order=("ckpt", "rollout"), more=(), kill=None, delay_s=0.0) -> dict:
    """Start both sides; returns their exit codes. ``kill``: role, stage, before or after, step."""
    pids = {}
    for role in order:
        hook = kill[1:] if kill and kill[0] == role else None
        pids[role] = start(demo, work / f"{name}-{role}", work / f"{name}-share", role, *more, kill=hook)
        time.sleep(delay_s)
    return {role: end(pid) for role, pid in pids.items()}


def ends(work: Path, name: str) -> dict:
    return {role: outcome(work / f"{name}-{role}") for role in ("ckpt", "rollout")}


def error(work: Path, name: str, role: str) -> str:
    path = work / f"{name}-{role}.error"
    return path.read_text() if path.exists() else ""


def killed(demo: Path, work: Path, name: str, role: str, after_s: float) -> dict:
    """Kill one side from outside after so long; see how the other ends; start both again."""
    other = {"ckpt": "rollout", "rollout": "ckpt"}[role]
    pids = {r: start(demo, work / f"{name}-{r}", work / f"{name}-share", r) for r in ("ckpt", "rollout")}
    time.sleep(after_s)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[role], signal.SIGKILL)
    begin = time.monotonic()
    first = {role: end(pids[role]), other: end(pids[other])}
    took = time.monotonic() - begin
    reason = error(work, name, other)
    again = pair(demo, work, name, order=(other, role))
    return {"role": role, "first": first, "took_s": took, "reason": reason, "again": again, **ends(work, name)}


def main() -> None:
    demo, work, kills = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    results: dict[str, object] = {"alone": end(start(demo, work / "alone", None, None)), "kills": []}
    results["straight"] = outcome(work / "alone")
    began = time.monotonic()
    results["pair"] = {"codes": pair(demo, work, "pair"), **ends(work, "pair")}
    length_s = time.monotonic() - began
    late = pair(demo, work, "late", order=("rollout", "ckpt"), delay_s=1.5)
    results["late"] = {"codes": late, **ends(work, "late")}
    draw = random.Random(7)
    for i in range(kills):
        role = ("ckpt", "rollout")[i % 2]
        found = killed(demo, work, f"kill{i}", role, draw.uniform(0.02, 1.05) * length_s)
        results["kills"].append(found)
        print(i, found["first"], f"{found['took_s']:.1f}", found["reason"][:150], found["again"], file=sys.stderr)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
