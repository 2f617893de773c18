"""What the tape costs: recording on against off in one run, and a large rollout record against other ways to store it.

    python benchmarks/tape.py --model DIR [--prompts 8 --n 8 --new-tokens 32 --pairs 5]          the SmolLM2 step
    python benchmarks/tape.py --gib 1 [--max-tokens 8192 --rounds 3 --dir DIR --verl-python P]   bandwidth
    (give both for both)

The step: one run in which every second step is recorded; on the others the stages run as without a tape, digests of the
weights included. A recorded step waits for the disk at its end, which a real run does not: the writer works behind it.
What recording adds is also timed directly, since it is smaller than the noise of a step.

Bandwidth: one rollout record, ragged, responses of 1 to the maximum of tokens. The same fields and number types,
padded, go through torch.save and through verl's DataProto (with --verl-python, an interpreter in which ``import verl``
works). Every writer flushes to the disk; every load ends with each number read once. "Cold": the file is not in the
page cache. In the same run the machine's own limits are measured: memory copy, SHA-256, file write and read. Needs
about six times --gib of memory and twice of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rollout_stores import drop_cache, timed, tree_size

GB = 1e9
CHUNK = 8 << 20


def table(*rows: tuple[str, ...]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


# Recording on against off


class Timed:
    """A stage, or a digest function. ``seconds``: that its calls have taken so far."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.seconds = inner, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *args: Any) -> Any:
        start = time.perf_counter()
        out = self.inner(*args)
        self.seconds += time.perf_counter() - start
        return out


class EverySecond:
    """A taped stage that is recorded at even steps, and runs as without a tape at odd ones.

    ``added``: per step and kind, the seconds that recording took.
    """

    def __init__(self, taped: Any, added: dict[int, dict[str, float]], flush: Callable[[], None]) -> None:
        self.name, self.reads, self.writes = taped.name, taped.reads, taped.writes
        self.taped, self.plain, self.added, self.flush = taped, taped.inner, added, flush
        taped.inner = self.inner = Timed(taped.inner)
        self.digest = Timed(self.plain.digest) if getattr(self.plain, "digest", None) else None

    def __call__(self, batch: Any, at: Any) -> Any:
        record = at.step % 2 == 0
        if self.digest:
            self.plain.digest = self.digest if record else None
        if not record:
            return self.plain(batch.only(self.plain.reads), at)
        before = self.inner.seconds, self.digest.seconds if self.digest else 0.0
        seconds, out = timed(lambda: self.taped(batch, at))
        added = self.added[at.step]
        added["capture"] += seconds - (self.inner.seconds - before[0])
        added["digests"] += self.digest.seconds - before[1] if self.digest else 0.0
        if self.name == "sync":  # the last stage of a step
            added["disk"] += timed(self.flush)[0]
        return out


def step_overrides(args: argparse.Namespace, folder: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from step_vs_trl import prompts

    from crossrl.models.loading import load_tokenizer

    texts = prompts(load_tokenizer(args.model), args.prompts, args.prompt_tokens)
    rows = [{"prompt": t, "data_source": "bench", "reward_model": {"ground_truth": "x"}} for t in texts]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return (sum(solution_str.encode()) % 97) / 97.0\n"
    )
    return [
        f"data.train_files={folder}/train.parquet", f"data.train_batch_size={args.prompts}",
        f"data.max_prompt_length={args.prompt_tokens}", f"data.max_response_length={args.new_tokens}",
        f"actor_rollout_ref.model.path={args.model}", "actor_rollout_ref.actor.optim.lr=1e-6",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={args.micro}",
        f"actor_rollout_ref.rollout.n={args.n}", "actor_rollout_ref.rollout.ignore_eos=True",
        "actor_rollout_ref.model.custom_chat_template='{{ messages[0].content }}'",
        f"reward.custom_reward_function.path={folder}/score.py", "trainer.logger=[]", "tape.mode=record",
        f"trainer.total_training_steps={2 + 2 * args.pairs}", f"trainer.default_local_dir={folder}/run",
    ]  # fmt: skip


def measure_step(args: argparse.Namespace, folder: Path) -> str:
    from crossrl.config import load_config
    from crossrl.report import Reporter
    from crossrl.tape.taped import Taped
    from crossrl.trainer import Trainer

    seconds: dict[int, float] = {}
    added: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    class Collect(Reporter):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            seconds[step] = metrics["timing_s/step"]
            print(f"  step {step}: {seconds[step]:.2f} s, recording {'off' if step % 2 else 'on'}", file=sys.stderr)

    def wrap(stage: Any) -> Any:
        return EverySecond(stage, added, lambda: trainer.tape.tape.flush()) if isinstance(stage, Taped) else stage

    with Collect() as reporter:
        trainer = Trainer(load_config(step_overrides(args, folder)), reporter, wrap)
        if code := trainer.fit():
            raise SystemExit(f"the run ended with exit code {code}")
    kept = [s for s in seconds if s > 2]  # the first of each kind is warm-up
    on, off = ([seconds[s] for s in kept if s % 2 == rest] for rest in (0, 1))
    recorded = [s for s in kept if s % 2 == 0]
    parts = {kind: statistics.median(added[s][kind] for s in recorded) for kind in ("digests", "capture", "disk")}
    size = statistics.median(tree_size(folder / "run" / "tape" / f"step_{s:06d}") for s in recorded)
    base, taped, direct = statistics.median(off), statistics.median(on), sum(parts.values())
    names = {
        "digests": "digests of weights and optimizer, before and after",
        "capture": "copying, hashing and handing over what stages read and wrote",
        "disk": "waiting for the disk at the end of the step",
    }
    return (
        f"### Recording on against off: {args.prompts} prompts x {args.n}, {args.new_tokens} new tokens, "
        f"{args.pairs} steps of each, alternating\n\n"
        + table(
            ("", "s per step (median)", "range", "share"),
            ("recording off", f"{base:.3f}", _range(off), ""),
            ("recording on", f"{taped:.3f}", _range(on), f"{taped / base - 1:+.2%}"),
            ("added by recording, timed directly", f"{direct:.3f}", "", f"{direct / base:.2%}"),
            *((f"of which {names[kind]}", f"{s:.4f}", "", f"{s / base:.2%}") for kind, s in parts.items()),
        )
        + f"\n{size / 1e6:.2f} MB on disk a step.\n"
    )


def _range(values: list[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


# Bandwidth


def child(way: str, python: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("rollout_stores.py")
    command = [python, str(script), way, str(args.gib), str(args.max_tokens), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    result = next((line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if done.returncode or result is None:
        return {"skipped": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return json.loads(result)


def measure_limits(nbytes: int, folder: Path) -> dict[str, float]:
    """GB/s of this machine: copy in memory, SHA-256 on all cores, write with flush, read warm and cold."""
    import hashlib
    from concurrent.futures import ThreadPoolExecutor

    source, target = np.random.default_rng(1).bytes(nbytes), np.zeros(nbytes, np.uint8)
    view, array = memoryview(source), np.frombuffer(source, np.uint8)
    chunks = [view[i : i + CHUNK] for i in range(0, nbytes, CHUNK)]
    file = folder / "limits.bin"

    def write() -> None:
        with file.open("wb") as out:
            for chunk in chunks:
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())

    def read() -> None:
        with file.open("rb", buffering=0) as inp:
            rest = memoryview(target)
            while len(rest) and (got := inp.readinto(rest[: 4 * CHUNK])):
                rest = rest[got:]

    def hash_all() -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda c: hashlib.sha256(c).digest(), chunks))

    np.copyto(target, array)  # its pages exist from here on
    found = {"memory copy": timed(lambda: np.copyto(target, array))[0], "SHA-256, all cores": timed(hash_all)[0]}
    found["file write, flushed"] = timed(write)[0]
    found["file read, warm"] = timed(read)[0]
    drop_cache(file)
    found["file read, cold"] = timed(read)[0]
    file.unlink()
    return {name: nbytes / seconds / GB for name, seconds in found.items()}


def measure_bandwidth(args: argparse.Namespace, folder: Path) -> str:
    ways = {"record": sys.executable, "torch": sys.executable, "torch-mmap": sys.executable}
    if args.verl_python:
        ways["verl"] = args.verl_python
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    limits: list[dict[str, float]] = []
    for round_ in range(args.rounds):
        limits.append(measure_limits(int(args.gib * 2**30), folder))
        for way in list(ways)[:: -1 if round_ % 2 else 1]:
            print(f"  round {round_ + 1} of {args.rounds}: {way} ...", file=sys.stderr, flush=True)
            results[way].append(child(way, ways[way], args, folder))
    skipped = {way: r[0]["skipped"] for way, r in results.items() if "skipped" in r[0]}
    if not args.verl_python:
        skipped["verl"] = "no --verl-python"
    rows = {
        way: {k: r[0][k] if k == "name" else statistics.median(x[k] for x in r) for k in r[0]}
        for way, r in results.items()
        if way not in skipped
    }
    if "record" not in rows:
        raise SystemExit(f"the record could not be measured: {skipped['record']}")
    return _bandwidth_report(args, rows, skipped, limits)


def _bandwidth_report(
    args: argparse.Namespace,
    rows: dict[str, dict[str, Any]],
    skipped: dict[str, str],
    limits: list[dict[str, float]],
) -> str:
    record = rows["record"]
    size = record["bytes"]

    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        times = [f"{row[k]:.3f} s ({row[k] / record[k]:.1f} x)" for k in ("write", "open warm", "warm", "cold")]
        return (row["name"], *times, f"{row['bytes'] / 1e6:.1f} MB ({row['bytes'] / size:.2f} x)")

    text = (
        f"### One rollout record of {size / 2**30:.2f} GiB: responses of 1 to {args.max_tokens} tokens, median of "
        f"{args.rounds} rounds\n\n"
        + table(
            ("", "write, flushed", "open", "load, all read, warm", "the same, cold", "on disk"),
            *(cells(row) for row in sorted(rows.values(), key=lambda r: r["warm"])),
        )
        + f"\nThe record: written at {size / record['write'] / GB:.2f} GB/s ({record['capture']:.3f} s of it are "
        f"the copy that a step waits for), loaded with all digests checked at {size / record['warm'] / GB:.2f} GB/s "
        f"warm, {size / record['cold'] / GB:.2f} GB/s cold.\n\n"
    )
    names = list(limits[0])
    text += table(
        ("this machine", "GB/s"), *((n, f"{statistics.median(limit[n] for limit in limits):.2f}") for n in names)
    )
    return text + "".join(f"\nNot measured: {way}: {why}\n" for way, why in skipped.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder (crossrl model smollm2 --out DIR): measure the step")
    for name, value in {"prompts": 8, "n": 8, "prompt-tokens": 46, "new-tokens": 32, "micro": 16, "pairs": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--gib", type=float, help="size of the record: measure bandwidth")
    parser.add_argument("--max-tokens", type=int, default=8192, help="longest response of the record")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--verl-python", help="interpreter in which `import verl` works")
    parser.add_argument("--dir", help="where to write (default: a temporary folder)")
    args = parser.parse_args()
    if args.model is None and args.gib is None:
        parser.error("give --model for the step, --gib for bandwidth, or both")
    with tempfile.TemporaryDirectory(prefix="bench-tape-", dir=args.dir) as folder:
        if args.model is not None:
            os.environ["HF_HUB_OFFLINE"] = "1"
            print(measure_step(args, Path(folder)))
        if args.gib is not None:
            print(measure_bandwidth(args, Path(folder)))


if __name__ == "__main__":
    main()
