"""Runs a tiny training many times, kills it at chosen points, starts it again, and prints what came out as JSON.

A script of its own, because it forks: torch is imported once, and each run starts in a fraction of a second.

    python tests/resume_cases.py DEMO_FOLDER WORK_FOLDER
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from crossrl.config import load_config
from crossrl.report import MetricsFile, Reporter
from crossrl.trainer import Trainer

STEPS = 4
STAGES = ("rollout", "reward", "old_log_prob", "ref_log_prob", "advantage", "update", "checkpoint", "sync")


def overrides(demo: Path, folder: Path) -> list[str]:
    """Everything that has state is on: KL controller, several mini-batches in random order, two epochs of data."""
    return [
        f"data.train_files={demo}/train.parquet", "data.train_max_samples=9", "data.train_batch_size=4",
        "data.max_prompt_length=8", "data.max_response_length=5", f"actor_rollout_ref.model.path={demo}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=True", "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100",
        f"reward.custom_reward_function.path={demo}/sort_reward.py", "reward.num_workers=1", "trainer.total_epochs=2",
        "trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=1", "trainer.val_before_train=False",
        "trainer.num_threads=1", "trainer.device=cpu", f"trainer.default_local_dir={folder}",
    ]  # fmt: skip


class KillAt:
    """A stage that ends its process with SIGKILL before or after running, at one step."""

    def __init__(self, stage, when, step):
        self.stage, self.when, self.step = stage, when, step
        self.name, self.reads, self.writes = stage.name, stage.reads, stage.writes

    def __call__(self, batch, at):
        if at.step == self.step and self.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        out = self.stage(batch, at)
        if at.step == self.step and self.when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return out


def train(demo: Path, folder: Path, kill: tuple[str, str, int] | None = None) -> int:
    """One run in a forked child; returns its wait status. ``kill``: stage, before or after, step."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    code = 70
    try:
        with (folder.parent / f"{folder.name}.log").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            folder.mkdir(exist_ok=True)
            wrap = (lambda s: KillAt(s, *kill[1:]) if s.name == kill[0] else s) if kill else (lambda s: s)
            with Reporter(loggers=[MetricsFile(folder / "metrics.jsonl")]) as reporter:
                code = Trainer(load_config(overrides(demo, folder)), reporter, wrap).fit()
    finally:
        os._exit(code)


def outcome(folder: Path) -> dict[str, object]:
    """Digests of everything that the run ended with, and the steps that its metrics hold."""
    last = folder / f"global_step_{STEPS}"
    digest = {
        name: hashlib.sha256((last / name).read_bytes()).hexdigest()
        for name in ("model/model.safetensors", "optimizer.safetensors")
    }
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    state = json.loads((last / "state.json").read_text())
    rewards = [row["critic/rewards/mean"] for row in rows]
    return {
        "digest": digest, "loader": state["loader"], "advantage": state["advantage"], "engine": state["engine"],
        "steps": [row["step"] for row in rows], "rewards": rewards,
        "left": sorted(p.name for p in folder.glob(".*.tmp")),
        "checkpoints": sorted(p.name for p in folder.glob("global_step_*")),
    }  # fmt: skip


def random_kill(demo: Path, folder: Path, after_s: float) -> int:
    """Start a run and kill it from outside after ``after_s`` seconds, wherever it is then."""
    pid = os.fork()
    if pid == 0:
        status = train(demo, folder)
        os._exit(0 if status == 0 else 1)
    time.sleep(after_s)
    for child in _children(pid):
        os.kill(child, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def main() -> None:
    demo, work = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    start = time.perf_counter()
    results: dict[str, object] = {
        "straight_status": train(demo, work / "straight"),
        "straight": outcome(work / "straight"),
    }
    took = time.perf_counter() - start
    cases = {}
    for stage in STAGES:
        for when, step in (("before", 3), ("after", 4 if stage in ("checkpoint", "sync") else 3)):
            folder = work / f"{stage}-{when}"
            killed = train(demo, folder, (stage, when, step))
            again = train(demo, folder)
            cases[f"{stage}-{when}"] = {"killed": killed, "again": again, **outcome(folder)}
    for i in range(int(sys.argv[3]) if len(sys.argv) > 3 else 4):
        folder = work / f"random-{i}"
        random_kill(demo, folder, took * (i + 1) / 5)
        cases[f"random-{i}"] = {"killed": signal.SIGKILL, "again": train(demo, folder), **outcome(folder)}
    status = train(demo, work / "straight")
    results |= {"cases": cases, "nothing_to_do": status, "after_nothing": outcome(work / "straight")}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
