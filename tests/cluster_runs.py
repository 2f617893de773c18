"""Runs of ``crossrl train`` over several processes, and what kills one of them in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STEPS = 4
LIMIT_S = 240
RAY = ["cluster.launcher=ray", "cluster.ray_init={num_cpus: 4, object_store_memory: 80000000}"]


def overrides(demo: Path, folder: Path) -> list[str]:
    return [
        f"data.train_files={demo}/train.parquet", "data.train_max_samples=16", "data.train_batch_size=4",
        "data.max_prompt_length=8", "data.max_response_length=5", f"actor_rollout_ref.model.path={demo}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.rollout.n=4",
        f"reward.custom_reward_function.path={demo}/sort_reward.py", "reward.num_workers=1",
        f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.val_before_train=False",
        "trainer.num_threads=1", "trainer.device=cpu", "tape.mode=record", f"trainer.default_local_dir={folder}",
    ]  # fmt: skip


@dataclass
class Ended:
    """``code``: of the command. ``lines``: what it printed. ``killed``: process ids that were ended on the way."""

    code: int
    lines: list[str]
    killed: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def train(demo: Path, folder: Path, more: Sequence[str], kill: Mapping[int, str] | None = None) -> Ended:
    """``kill``: after which step which worker, or "driver", gets SIGKILL."""
    command = [sys.executable, "-m", "crossrl", "train", *overrides(demo, folder), *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    watchdog = subprocess.Popen(["sh", "-c", f"sleep {LIMIT_S}; kill -9 {process.pid}"], start_new_session=True)
    ended = Ended(-1, [])
    try:
        assert process.stdout is not None
        for line in process.stdout:
            ended.lines.append(line.rstrip())
            step = re.match(r"step (\d+)/", line)
            if step and (who := (kill or {}).get(int(step[1]))):
                pid = process.pid if who == "driver" else process_of(folder, who)
                ended.killed.append(pid)
                os.kill(pid, signal.SIGKILL)
        ended.code = process.wait()
    finally:
        process.kill()
        process.wait()
        os.killpg(watchdog.pid, signal.SIGKILL)
        watchdog.wait()
    return ended


def process_of(folder: Path, worker: str) -> int:
    """The latest process of ``worker``: the first line of what it wrote says which."""
    return int(re.findall(r"process (\d+) on", (folder / "workers" / f"{worker}.log").read_text())[-1])


def digests(folder: Path) -> dict[str, str]:
    """Of weights and optimizer at the end."""
    manifest = json.loads((folder / f"global_step_{STEPS}" / "manifest.json").read_text())
    return {part: manifest[part] for part in ("weights", "optimizer")}
