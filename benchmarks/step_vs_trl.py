"""One GRPO step, CrossRL against TRL's GRPOTrainer: the same model, prompts, group size, lengths and dtype.

    python benchmarks/step_vs_trl.py [--model data/smollm2 --prompts 8 --n 8 --new-tokens 32 --rounds 3]

Each side runs in its own process (so that peak memory is its own), one side at a time, alternating; a process does one
warm-up step and then ``--steps`` timed ones. Responses are forced to full length and rewards are made to differ
within each group, so that both sides compute every token. TRL's settings are the fastest for a CPU that it offers:
float32 and no gradient checkpointing (its defaults, bfloat16 and checkpointing, are several times slower here).

In the same run the machine's own limits are measured: a float32 GEMM, and reading memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEXT = "the sum of two small numbers is easy to write down when one knows how to count on fingers"


def reward_of(text: str) -> float:
    """Any deterministic function of the text that differs between samples."""
    return (sum(text.encode()) % 97) / 97.0


def prompts(tokenizer: Any, count: int, tokens: int) -> list[str]:
    """Plain-text prompts of exactly ``tokens`` tokens each, all different."""
    out = []
    for i in range(count):
        ids = tokenizer(" ".join([str(i), *[TEXT] * 20]), add_special_tokens=False)["input_ids"][:tokens]
        text = tokenizer.decode(ids)
        again = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(again) != tokens:
            raise SystemExit(f"prompt {i} re-encodes to {len(again)} tokens, wanted {tokens}")
        out.append(text)
    return out


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measure_limits() -> dict[str, float]:
    import torch

    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    x = torch.randn(64_000_000)
    gemm, read = [], []
    for _ in range(5):
        start = time.perf_counter()
        a @ b
        gemm.append(2 * 2048**3 / (time.perf_counter() - start) / 1e9)
        start = time.perf_counter()
        x.sum()
        read.append(x.numel() * 4 / (time.perf_counter() - start) / 1e9)
    return {"gemm_gflops": max(gemm), "read_gb_s": max(read)}


def run_crossrl(args: argparse.Namespace) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from crossrl.config import load_config
    from crossrl.models.loading import load_tokenizer
    from crossrl.report import Reporter
    from crossrl.trainer import Trainer

    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    texts = prompts(load_tokenizer(args.model), args.prompts, args.prompt_tokens)
    rows = [{"prompt": t, "data_source": "bench", "reward_model": {"ground_truth": "x"}} for t in texts]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return (sum(solution_str.encode()) % 97) / 97.0\n"
    )
    overrides = [
        f"data.train_files={folder}/train.parquet", f"data.train_batch_size={args.prompts}",
        f"data.max_prompt_length={args.prompt_tokens}", f"data.max_response_length={args.new_tokens}",
        "data.shuffle=False", f"actor_rollout_ref.model.path={args.model}", "actor_rollout_ref.actor.optim.lr=1e-6",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={args.micro}",
        f"actor_rollout_ref.rollout.n={args.n}", "actor_rollout_ref.rollout.ignore_eos=True",
        "actor_rollout_ref.model.custom_chat_template='{{ messages[0].content }}'",
        f"reward.custom_reward_function.path={folder}/score.py", "trainer.logger=[]",
        f"trainer.total_training_steps={args.steps + 1}", f"trainer.default_local_dir={folder}/run",
    ]  # fmt: skip
    taken: list[dict[str, float]] = []

    class Collect(Reporter):
        def step(self, step: int, metrics: Any) -> None:
            taken.append({k: v for k, v in metrics.items() if k.startswith(("timing_s/", "perf/", "prompt_len"))})

    with Collect() as reporter:
        code = Trainer(load_config(overrides), reporter).fit()
    if code:
        raise SystemExit(f"CrossRL ended with exit code {code}")
    timed = taken[1:]
    if timed[0]["prompt_length/mean"] != args.prompt_tokens:
        raise SystemExit(f"prompts had {timed[0]['prompt_length/mean']} tokens, wanted {args.prompt_tokens}")
    return {
        "step": [t["timing_s/step"] for t in timed],
        "generation": [t["timing_s/gen"] for t in timed],
        "training": [t["timing_s/update_actor"] for t in timed],
        "peak_gb": peak_gb(),
    }


def run_trl(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    texts = prompts(tokenizer, args.prompts, args.prompt_tokens)
    spans: dict[str, list[float]] = {"step": [], "generation": []}

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, *a: Any, **k: Any) -> Any:
            start = time.perf_counter()
            out = super()._generate_and_score_completions(*a, **k)
            spans["generation"].append(time.perf_counter() - start)
            lengths = out["completion_mask"].sum(1)
            if int(lengths.min()) != args.new_tokens:
                raise SystemExit(f"TRL generated {lengths.tolist()} tokens, wanted {args.new_tokens} each")
            return out

    class Clock(__import__("transformers").TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *a: Any, **k: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *a: Any, **k: Any) -> None:
            spans["step"].append(time.perf_counter() - self.start)

    samples = args.prompts * args.n
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="bench-"), per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=samples // args.micro, num_generations=args.n, max_steps=args.steps + 1,
        max_completion_length=args.new_tokens, learning_rate=1e-6, beta=0.0, temperature=1.0, bf16=False, fp16=False,
        gradient_checkpointing=False, use_cpu=True, report_to=[], save_strategy="no", logging_steps=10_000,
        generation_kwargs={"min_new_tokens": args.new_tokens}, loss_type="dapo", shuffle_dataset=False,
        disable_tqdm=True, mask_truncated_completions=False,
    )  # fmt: skip
    trainer = Timed(
        model=model,
        reward_funcs=[lambda completions, **k: [reward_of(c) for c in completions]],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": t} for t in texts] * (args.steps + 2)),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    step, generation = spans["step"][1:], spans["generation"][1:]
    return {
        "step": step,
        "generation": generation,
        "training": [a - b for a, b in zip(step, generation)],
        "peak_gb": peak_gb(),
    }


def child(side: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [args.trl_python if side == "trl" else sys.executable, __file__, "--side", side]
    for name in ("model", "prompts", "n", "prompt_tokens", "new_tokens", "steps", "micro"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{side} failed ({done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def report(results: dict[str, list[dict[str, Any]]], limits: dict[str, float], args: argparse.Namespace) -> str:
    def mid(side: str, span: str) -> float:
        return statistics.median(v for r in results[side] for v in r[span])

    samples, parameters = args.prompts * args.n, results["crossrl"][0]["parameters"]
    spans = ("generation", "training", "step")
    peak = {side: max(r["peak_gb"] for r in runs) for side, runs in results.items()}
    rows = [["", *spans, "response tokens/s", "peak memory"], ["---"] * 6]
    for side in ("trl", "crossrl"):
        rate = samples * args.new_tokens / mid(side, "step")
        rows.append([side, *(f"{mid(side, s):.1f} s" for s in spans), f"{rate:.0f}", f"{peak[side]:.1f} GB"])
    ratio = [f"{mid('trl', s) / mid('crossrl', s):.1f} x" for s in spans]
    rows.append(["ratio", *ratio, ratio[-1], f"{peak['crossrl'] / peak['trl']:.2f}"])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return table + "\n\n" + share_of_limits(mid, limits, samples, parameters, args)


def share_of_limits(
    mid: Callable[[str, str], float],
    limits: dict[str, float],
    samples: int,
    parameters: int,
    args: argparse.Namespace,
) -> str:
    """How far CrossRL's generation and training are from what the machine could do at its GEMM and memory rates."""
    flop = limits["gemm_gflops"] * 1e9
    reading = parameters * 4 / (limits["read_gb_s"] * 1e9) * args.new_tokens
    arithmetic = 2 * parameters * samples * args.new_tokens / flop
    tokens = args.prompts * args.prompt_tokens + samples * (args.new_tokens - 1)
    training = 6 * parameters * tokens / flop
    padded = 6 * parameters * samples * (args.prompt_tokens + args.new_tokens) / flop
    return (
        f"Machine in the same run: GEMM {limits['gemm_gflops']:.0f} GFLOP/s, reading {limits['read_gb_s']:.0f} GB/s.\n"
        f"Generation: reading the weights once per token step would take {reading:.1f} s, the arithmetic at the GEMM "
        f"rate {arithmetic:.1f} s; measured {mid('crossrl', 'generation'):.1f} s.\n"
        f"Training: 6 x parameters x tokens at the GEMM rate takes {training:.1f} s for the {tokens} tokens that are "
        f"computed (each prompt once), {padded:.1f} s for all of them; measured {mid('crossrl', 'training'):.1f} s.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="data/smollm2", help="made by: crossrl model smollm2 --out data/smollm2")
    sizes = {"prompts": 8, "n": 8, "prompt-tokens": 46, "new-tokens": 32, "steps": 2, "micro": 16, "rounds": 2}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter that has TRL (the extra `trl`)")
    parser.add_argument("--side", choices=["crossrl", "trl", "both"], default="both")
    args = parser.parse_args()
    if args.side != "both":
        os.environ["HF_HUB_OFFLINE"] = "1"
        result = run_crossrl(args) if args.side == "crossrl" else run_trl(args)
        from transformers import AutoModelForCausalLM

        result["parameters"] = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(args.model).parameters())
        print("RESULT " + json.dumps(result))
        return
    results: dict[str, list[dict[str, Any]]] = {"crossrl": [], "trl": []}
    limits = measure_limits()
    for round_ in range(args.rounds):
        for side in ("crossrl", "trl") if round_ % 2 == 0 else ("trl", "crossrl"):
            print(f"round {round_ + 1} of {args.rounds}: {side} ...", file=sys.stderr, flush=True)
            results[side].append(child(side, args))
            print(f"  {[round(s, 1) for s in results[side][-1]['step']]} s a step", file=sys.stderr, flush=True)
        limits = {k: max(v, limits[k]) for k, v in measure_limits().items()}
    print(report(results, limits, args))


if __name__ == "__main__":
    main()
