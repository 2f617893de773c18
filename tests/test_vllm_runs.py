"""Training with vLLM in a process of its own: sampler and trainer agree step after step, unless a fault is planted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from engines_cases import vllm_python

from crossrl.demo import model, task
from crossrl.demo.files import SEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS, NOISE = 4, 1e-5  # nat; float32 on both sides
GAP = "training/rollout_log_probs_diff_max"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's task, with a model whose heads vLLM can have on a CPU (dimension 32), not warmed up."""
    folder = tmp_path_factory.mktemp("vllm")
    policy = model.make_model(SEED, heads=2)
    model.write_model(folder / "model", policy, model.make_tokenizer())
    problems, _, _ = task.problems(SEED, 64, 0, 0)
    task.write_parquet(folder / "train.parquet", problems, "train")
    return folder


def gaps(files: Path, folder: Path, *more: str) -> list[float]:
    """The largest sampler-trainer difference of each step, nat."""
    python = vllm_python()
    reward = Path(model.__file__).with_name("sort_reward.py")
    command = [
        python, "-m", "crossrl", "train", f"data.train_files={files}/train.parquet", "data.train_batch_size=8",
        "data.max_prompt_length=8", "data.max_response_length=8", f"actor_rollout_ref.model.path={files}/model",
        "actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.name=vllm", f"reward.custom_reward_function.path={reward}", "reward.num_workers=1",
        "trainer.val_before_train=False", "trainer.num_threads=1", "trainer.device=cpu",
        f"trainer.total_training_steps={STEPS}", f"trainer.default_local_dir={folder}", *more,
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        line["training/rollout_log_probs_diff_max"] for line in lines if "training/rollout_log_probs_diff_max" in line
    ]


@pytest.mark.long
def test_sampler_and_trainer_agree_to_numerical_noise_in_every_step(files: Path, tmp_path: Path) -> None:
    found = gaps(files, tmp_path / "good")
    assert len(found) == STEPS and max(found) < NOISE


def test_stale_weights_in_the_engine_show_as_a_gap_from_their_step_on(files: Path, tmp_path: Path) -> None:
    found = gaps(files, tmp_path / "stale", "cross.plant=inference.stale_weights@3")
    assert max(found[:2]) < NOISE and min(found[2:]) > 100 * NOISE
