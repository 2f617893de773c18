"""One GRPO step in one process and in several: where the time goes, and what the processes themselves cost.

    python benchmarks/cluster_step.py                                    # the demo's model, made afresh
    python benchmarks/cluster_step.py --model data/smollm2 --prompts 4 --n 4 --new-tokens 32 --threads 2

Each variant is a ``crossrl train`` of its own; the variants take turns, forth and back. The first step of each run is
not counted (it warms up); times are those of ``metrics.jsonl``.

    one        training and the engine hf in one process
    child      the engine hf in a child process: what a process and a weight transfer cost
    ray        the same by Ray: 1 train rank and 1 replica of the engine hf
    ray-vllm   Ray: 1 train rank and 1 replica on vLLM (where vLLM is installed: run this script with its interpreter)
    ray-2x2    Ray: 2 train ranks and 2 replicas of the engine hf

The same prompts, samples per prompt, response lengths (forced) and mini-batches for all. Rewards differ within each
group, so that every sample has a gradient. Each process gets ``--threads`` threads; with ``ray-2x2`` half of them each.
The overhead of a variant is the time of a step beyond that of ``one``: for ``child`` and ``ray``, which compute exactly
the same, all of it is due to the processes; the others also compute differently.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RAY = ["cluster.launcher=ray", "cluster.ray_init={num_cpus: 4, object_store_memory: 200000000}"]
VARIANTS = {
    "one": ["trainer.n_gpus_per_node=1"],
    "child": ["cluster.launcher=local"],
    "ray": RAY,
    "ray-vllm": [*RAY, "actor_rollout_ref.rollout.name=vllm"],
    "ray-2x2": [*RAY, "trainer.n_gpus_per_node=2"],
}
SCORE = """\
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return (sum(solution_str.encode()) % 97) / 97.0
"""
Steps = list[dict[str, float]]  # seconds by stage, of each counted step


def make_data(args: argparse.Namespace, folder: Path) -> list[str]:
    """Data and reward below ``folder``; the settings that all variants share."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    model = Path(args.model) if args.model else folder / "demo" / "model"
    if not args.model:
        from transformers.utils import logging

        from crossrl.demo.files import make

        logging.disable_progress_bar()
        make(folder / "demo", warm_up_batches=2)
    count, digits = args.prompts * (args.steps + 1), args.prompt_tokens
    problems = [f"{7**i % 10**digits:0{digits}d}" for i in range(count)]  # a token for each digit, or one for several
    rows = [{"prompt": p, "data_source": "bench", "reward_model": {"ground_truth": "x"}} for p in problems]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "score.py").write_text(SCORE)
    return [
        f"data.train_files={folder}/train.parquet", f"data.train_batch_size={args.prompts}", "data.shuffle=False",
        f"data.max_prompt_length={2 * digits}", f"data.max_response_length={args.new_tokens}",
        f"actor_rollout_ref.model.path={model.resolve()}", "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.model.custom_chat_template='{{ messages[0].content }}'",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}", "actor_rollout_ref.actor.use_kl_loss=False",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={max(1, args.prompts * args.n // 2)}",
        f"actor_rollout_ref.rollout.n={args.n}", "actor_rollout_ref.rollout.ignore_eos=True",
        f"reward.custom_reward_function.path={folder}/score.py", "reward.num_workers=1", "trainer.device=cpu",
        "trainer.logger=[file]", "trainer.val_before_train=False", "trainer.save_freq=-1",
        f"trainer.total_training_steps={args.steps + 1}",
    ]  # fmt: skip


def run(args: argparse.Namespace, variant: str, shared: Sequence[str], folder: Path) -> tuple[Steps, float]:
    """Seconds by stage of each counted step, and of the whole command. Raises ``RuntimeError``.

    Waits for: the command. Limit: ``args.limit``, then it and what it started get SIGTERM, and later SIGKILL.
    """
    threads = max(1, args.threads // 2) if variant == "ray-2x2" else args.threads
    command = [
        sys.executable, "-m", "crossrl", "train", *shared, *VARIANTS[variant], f"trainer.num_threads={threads}",
        f"trainer.default_local_dir={folder}",
    ]  # fmt: skip
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "COLUMNS": "200"}
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=args.limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            said, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        said += f"\nstopped: it took more than {args.limit:g} s (--limit)"
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    seconds = time.perf_counter() - start
    if process.returncode:
        lines = said.strip().splitlines()[-12:]
        raise RuntimeError("\n    ".join([f"crossrl train ended with code {process.returncode}:", *lines]))
    return read_steps(folder / "metrics.jsonl", args), seconds


def read_steps(file: Path, args: argparse.Namespace) -> Steps:
    """All but the first. Raises ``RuntimeError`` unless all are there and generated what was asked for."""
    found = [row for row in map(json.loads, file.read_text().splitlines()) if "timing_s/step" in row]
    if len(found) != args.steps + 1:
        raise RuntimeError(f"{file} has {len(found)} steps, want {args.steps + 1}")
    wrong = {row["response_length/mean"] for row in found} - {float(args.new_tokens)}
    if wrong:
        raise RuntimeError(f"responses had {sorted(wrong)} tokens, want {args.new_tokens}")
    return [{k.removeprefix("timing_s/"): v for k, v in row.items() if k.startswith("timing_s/")} for row in found[1:]]


def table(found: Mapping[str, Sequence[Steps]], whole: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Medians over all counted steps of all rounds."""
    every: dict[str, Steps] = {
        variant: [step for steps in rounds for step in steps] for variant, rounds in found.items()
    }
    names = list(dict.fromkeys(name for steps in every.values() for step in steps for name in step))
    stages = [name for name in names if name != "step"]
    yield f"| variant | {' | '.join(stages)} | step | lowest to highest | beyond `one` | ratio | whole command |"
    yield f"|{' --- |' * (len(stages) + 6)}"
    for variant, steps in every.items():
        cells = [f"{middle(steps, stage):.3f}" if any(stage in s for s in steps) else "" for stage in stages]
        each, step = [s["step"] for s in steps], middle(steps, "step")
        beyond, ratio = "", ""
        if variant != "one" and "one" in every:
            base = middle(every["one"], "step")
            beyond, ratio = f"{step - base:+.3f} s", f"{step / base:.2f}"
        cells += [f"{step:.3f} s", f"{min(each):.3f} to {max(each):.3f}", beyond, ratio]
        yield f"| {variant} | {' | '.join(cells)} | {statistics.median(whole[variant]):.1f} s |"


def middle(steps: Steps, stage: str) -> float:
    return statistics.median(step[stage] for step in steps if stage in step)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="Hugging Face folder; default: the demo's model")
    sizes = {"prompts": 8, "n": 4, "prompt-tokens": 6, "new-tokens": 8, "steps": 3, "rounds": 2, "threads": 1}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    default = [v for v in VARIANTS if v != "ray-vllm" or importlib.util.find_spec("vllm")]
    parser.add_argument("--variants", default=",".join(default), help=f"default here: {','.join(default)}")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one run of a variant")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    args.variants = args.variants.split(",")
    if unknown := [v for v in args.variants if v not in VARIANTS]:
        parser.error(f"--variants: unknown {', '.join(unknown)}; known: {', '.join(VARIANTS)}")
    if any(getattr(args, name.replace("-", "_")) < 1 for name in sizes):
        parser.error(f"{', '.join(sizes)}: want at least 1 of each")
    if "ray-2x2" in args.variants and args.prompts % 2:
        parser.error(f"--prompts {args.prompts}: want an even number for ray-2x2")
    if "ray-vllm" in args.variants and not args.model:
        print("the demo's model is too narrow for vLLM (heads of 16): ray-vllm is left out", file=sys.stderr)
        args.variants.remove("ray-vllm")
    return args


def main() -> int:
    args = read_arguments()
    found: dict[str, list[Steps]] = {}
    whole: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        shared = make_data(args, Path(folder))
        for number in range(args.rounds):
            for variant in [v for v in args.variants[:: -1 if number % 2 else 1] if v not in failed]:
                try:
                    steps, seconds = run(args, variant, shared, Path(folder) / f"{variant}-{number}")
                except RuntimeError as error:
                    failed[variant] = str(error)
                    continue
                found.setdefault(variant, []).append(steps)
                whole.setdefault(variant, []).append(seconds)
                each = ", ".join(f"{s['step']:.2f}" for s in steps)
                print(f"round {number + 1} of {args.rounds}: {variant}: {each} s a step", file=sys.stderr, flush=True)
    print(
        f"{args.model or 'the demo model'}, {args.prompts} prompts x {args.n} responses of {args.new_tokens} tokens, "
        f"{args.threads} threads, {os.cpu_count()} cores; median seconds of {args.rounds} x {args.steps} steps\n"
    )
    in_order: dict[str, Any] = {v: found[v] for v in args.variants if v in found}
    print("\n".join(table(in_order, whole)))
    for variant, why in failed.items():
        print(f"\nnot measured: {variant}: {why}")
    if args.json:
        facts = {k: v for k, v in vars(args).items() if k != "json"}
        args.json.write_text(json.dumps({**facts, "steps": in_order, "whole": whole, "failed": failed}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
