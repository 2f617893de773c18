"""Tokens per second of rollout engines, on the same requests, in one run.

    python benchmarks/rollout_engines.py --model data/smollm2 --vllm-python vllm-env/bin/python --trl-python PYTHON
    python benchmarks/rollout_engines.py --model data/smollm2 --ways hf,generate          # without vLLM and TRL

    hf          CrossRL's embedded engine
    generate    transformers' generate on one left-padded batch, without log-probs
    vllm        CrossRL's adapter of vLLM
    vllm-bare   vLLM's own LLM class: the same engine arguments, seeds and log-probs as the adapter's
    vllm-plain  the same without seeds and log-probs, which training needs: what these two cost
    trl         what TRL's GRPOTrainer does to generate (without vLLM), without log-probs

Every way has a process of its own, in which it loads the model once and does a short round that is not counted. Then
they take turns, forth and back, one at a time, so that a machine that slows down slows all of them. A round is: token
ids of all requests in, token ids of all responses out; each response is forced to its full length. float32 throughout;
prefix caches are emptied before each round, so that every way computes each prompt at least once.

The table has the best and the median round, and ratios within a round (median, lowest, highest). CPU seconds are a
better measure than seconds where other programs run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_engine_ways import WAYS

VLLM = ("vllm", "vllm-bare", "vllm-plain")
RATIOS = (("hf", "generate"), ("vllm", "vllm-bare"), ("vllm", "vllm-plain"), ("hf", "trl"), ("vllm", "trl"))


class Child:
    """The process of one way. It ends when its input does, so nothing is left if this process is killed."""

    def __init__(self, way: str, python: str, spec: Path, env: Mapping[str, str]) -> None:
        self.way, self.log = way, spec.with_name(f"{way}.log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, str(Path(__file__).with_name("rollout_engine_ways.py")), way, str(spec)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=dict(env), bufsize=0,
            )  # fmt: skip

    def answer(self, limit_s: float) -> Any:
        """Waits for: its next line. Unblocked by: its end. Limit: ``limit_s``."""
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], limit_s)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            why = f"ended with code {self.process.wait(30)}" if ready else f"did not answer for {limit_s:g} s"
            said = self.log.read_text(errors="replace").strip().splitlines()[-12:]
            raise RuntimeError("\n    ".join([f"{self.way} {why}; the end of what it wrote:", *said]))
        return json.loads(line)

    def round(self, tokens: int, number: int, limit_s: float) -> dict[str, float]:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended: ``answer`` says so
            self.process.stdin.write(f"{json.dumps([tokens, number])}\n".encode())
        return self.answer(limit_s)

    def end(self) -> None:
        """It has nothing to clean up, and a big model takes long to take down."""
        self.process.kill()
        self.process.wait()


def make_spec(args: argparse.Namespace) -> dict[str, Any]:
    """Requests of random tokens (speed does not depend on which), of lengths spread over ``prompt_tokens``."""
    import numpy as np

    config = json.loads((Path(args.model) / "config.json").read_text())
    eos = config["eos_token_id"]
    shortest, longest = args.prompt_tokens
    rng = np.random.default_rng(0)
    lengths = np.linspace(shortest, longest, args.prompts).round().astype(int)
    distinct = [rng.integers(config["vocab_size"] // 8, config["vocab_size"], k).tolist() for k in lengths]
    return {
        "model": str(Path(args.model).resolve()), "eos": eos[0] if isinstance(eos, list) else eos, "n": args.n,
        "new_tokens": args.new_tokens, "threads": args.threads, "prompts": [p for p in distinct for _ in range(args.n)],
    }  # fmt: skip


def start(args: argparse.Namespace, spec: Path, children: dict[str, Child], failed: dict[str, str]) -> None:
    """Start the ways, one after another: to ``children``, and why others have not to ``failed``."""
    from crossrl.engines.rollout.vllm_environment import vllm_environment

    own = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(args.threads)}
    for way in args.ways:
        print(f"starting {way} ...", file=sys.stderr, flush=True)
        python = args.vllm_python if way in VLLM else args.trl_python if way == "trl" else sys.executable
        env = own | vllm_environment(args.threads, own) if way in VLLM else own
        children[way] = Child(way, python, spec, env)
        try:
            children[way].answer(args.limit)
            children[way].round(min(4, args.new_tokens), 0, args.limit)
        except RuntimeError as error:
            children.pop(way).end()
            failed[way] = str(error)


def measure(args: argparse.Namespace, children: dict[str, Child], failed: dict[str, str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {way: [] for way in children}
    for number in range(1, args.rounds + 1):
        for way in list(children) if number % 2 else list(reversed(children)):
            try:
                found[way].append(children[way].round(args.new_tokens, number, args.limit))
            except RuntimeError as error:
                failed[way] = str(error)
                children.pop(way).end()
                del found[way]
                continue
            took = found[way][-1]["seconds"]
            print(f"round {number} of {args.rounds}: {way} {took:.1f} s", file=sys.stderr, flush=True)
    return found


def table(found: Mapping[str, Sequence[Any]], tokens: int) -> Iterator[str]:
    yield "| engine | tokens/s, best round | median | CPU s per 1000 tokens | peak memory |"
    yield "| --- | --- | --- | --- | --- |"
    for way, rounds in found.items():
        seconds = [r["seconds"] for r in rounds]
        cpu = statistics.median(r["cpu_seconds"] for r in rounds) / tokens * 1000
        peak = max(r["peak_gb"] for r in rounds)
        best, middle = tokens / min(seconds), tokens / statistics.median(seconds)
        yield f"| {way} | {best:.1f} | {middle:.1f} | {cpu:.2f} | {peak:.1f} GB |"
    yield ""
    yield "| tokens/s of | median of the rounds | lowest | highest | of the best rounds | by CPU seconds |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for a, b, each, best, cpu in ratios(found):
        middle = statistics.median(each)
        yield f"| {a} to {b} | {middle:.2f} | {min(each):.2f} | {max(each):.2f} | {best:.2f} | {cpu:.2f} |"


def ratios(found: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, str, list[float], float, float]]:
    """How many times as fast the first is as the second: in each round, of the best rounds, by CPU seconds."""
    for a, b in RATIOS:
        if a in found and b in found:
            ours, theirs = ([r["seconds"] for r in found[way]] for way in (a, b))
            cpu = [statistics.median(r["cpu_seconds"] for r in found[way]) for way in (b, a)]
            each = [y / x for x, y in zip(ours, theirs, strict=True)]
            yield a, b, each, min(theirs) / min(ours), cpu[0] / max(cpu[1], 1e-9)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="data/smollm2", help="made by: crossrl model smollm2 --out data/smollm2")
    sizes = {"prompts": 16, "n": 4, "new-tokens": 64, "rounds": 4, "threads": len(os.sched_getaffinity(0))}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--prompt-tokens", default="32-64", help="shortest and longest prompt (default: 32-64)")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"default: {','.join(WAYS)}")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that has vLLM and crossrl")
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter that has TRL (the extra `trl`)")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a start, or for one round")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    args.ways = args.ways.split(",")
    if unknown := [w for w in args.ways if w not in WAYS]:
        parser.error(f"--ways: unknown {', '.join(unknown)}; known: {', '.join(WAYS)}")
    if not (Path(args.model) / "config.json").is_file():
        parser.error(f"--model: {args.model} has no config.json; crossrl model smollm2 --out {args.model} makes one")
    for key in ("vllm_python", "trl_python"):
        if not shutil.which(getattr(args, key)):
            parser.error(f"--{key.replace('_', '-')}: {getattr(args, key)} is not a program")
    if any(getattr(args, name.replace("-", "_")) < 1 for name in sizes):
        parser.error(f"{', '.join(sizes)}: want at least 1 of each")
    shortest, _, longest = args.prompt_tokens.partition("-")
    if (
        not shortest.isdigit()
        or not (longest or shortest).isdigit()
        or not 0 < int(shortest) <= int(longest or shortest)
    ):
        parser.error(f"--prompt-tokens: {args.prompt_tokens!r}, want such as 32-64")
    args.prompt_tokens = int(shortest), int(longest or shortest)
    return args


def report(
    args: argparse.Namespace, spec: Mapping[str, Any], found: Mapping[str, Any], failed: Mapping[str, str]
) -> None:
    requests = len(spec["prompts"])
    print(
        f"{requests} requests ({args.prompts} prompts of {args.prompt_tokens[0]} to {args.prompt_tokens[1]} tokens x "
        f"{args.n}), {args.new_tokens} new tokens each, float32, {args.threads} threads, {os.cpu_count()} cores, "
        f"{args.rounds} rounds\n"
    )
    print("\n".join(table(found, requests * args.new_tokens)))
    for way, why in failed.items():
        print(f"\nnot measured: {way}: {why}")
    if args.json:
        facts = {k: v for k, v in vars(args).items() if k != "json"}
        args.json.write_text(json.dumps({**facts, "rounds": found, "failed": failed}, indent=1))


def main() -> int:
    args = read_arguments()
    spec = make_spec(args)
    children, failed = dict[str, Child](), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        file = Path(folder) / "spec.json"
        file.write_text(json.dumps(spec))
        try:
            start(args, file, children, failed)
            found = measure(args, children, failed)
        finally:
            for child in children.values():
                child.end()
    report(args, spec, found, failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
