"""What only a GPU can show, in one run of less than eight minutes on one GPU.

    python benchmarks/gpu.py --dry                      # anywhere: are the imports there, what would be done
    python benchmarks/gpu.py --rehearse                 # on a CPU: every part, tiny, over shared memory; no figures
    python benchmarks/gpu.py --out gpu.json             # on the GPU
    python benchmarks/gpu.py --parts transfer,memory --gib 2

**It has not been run on a GPU yet**, and neither has ``crossrl.sync.cuda_ipc``, which it measures: it was written where
there is none, and rehearsed on a CPU.

Each part is a process of its own with a time limit; what one part finds, or that it failed, is written at once, so that
no part loses the others. Exit code 0: all parts ran and found nothing wrong (a part that needs vLLM is skipped where it
is not installed). Memory needed on the device: four times ``--gib``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEEDED = ("torch", "transformers", "zmq", "xxhash", "numpy", "pyarrow", "hydra", "omegaconf", "rich", "crossrl")
TOTAL_S = 470.0


@dataclass(frozen=True, slots=True)
class Part:
    """``limit_s``: then it is ended. ``needs``: a package without which it is skipped."""

    name: str
    limit_s: float
    what: str
    needs: str = ""


PLAN = (
    Part("facts", 40, "the device, its copy rate, the rate at which 8 MiB come to the host"),
    Part("transfer", 90, "CUDA IPC between two processes, by bucket size, with and without digests, beside two copies"),
    Part("memory", 80, "memory of both processes after 50 transfers without garbage collection, and after failed ones"),
    Part("digests", 50, "hashing weights that lie on the device, beside the same on the host"),
    Part("train", 80, "four GRPO steps in bfloat16 with the engine hf"),
    Part("colocated", 130, "four GRPO steps with vLLM on the same device: sleep, wake, weight transfer", "vllm"),
)


def missing(names: tuple[str, ...]) -> list[str]:
    """Those that cannot be imported, and why."""
    out = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            out.append(f"{name} ({type(error).__name__}: {error})")
    return out


def run(part: Part, settings: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """What ``part`` found. Waits for: its process. Limit: ``limit_s``; then it and all that it started are ended."""
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        script = Path(__file__).with_name("gpu_parts.py")
        command = [sys.executable, str(script), part.name, json.dumps(settings), str(out)]
        started = time.monotonic()
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            why = "" if ended(process, limit_s) else f"took more than its {limit_s:.0f} s"
        finally:
            code = end_group(process)
        why = why or (f"ended with code {code}" if code else "")
        took = round(time.monotonic() - started, 1)
        if why or not out.exists():
            said = log.read_text(errors="replace")[-6000:]
            return {"state": "failed", "took_s": took, "why": why or "it wrote nothing", "log": said}
        found = json.loads(out.read_text())
        return {"state": "wrong" if found["wrong"] else "ok", "took_s": took, **found}


def ended(process: subprocess.Popen[Any], limit_s: float) -> bool:
    """Whether it ends by itself within ``limit_s``. It is not reaped, so that its number stays its own."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
        time.sleep(0.2)
    return False


def end_group(process: subprocess.Popen[Any]) -> int:
    """End it and all that it started: first so that they can clean up, then for good. Returns its exit code."""
    os.killpg(process.pid, signal.SIGTERM)
    ended(process, 5.0)
    os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ",".join(part.name for part in PLAN)
    parser.add_argument("--parts", default=names, help=f"default: {names}")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the synthetic weights (default: 4)")
    parser.add_argument(
        "--model", default="", help="Hugging Face folder to train; default: a small one with random weights"
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ".") / "gpu.json",
                        help="file for the results (default: gpu.json in $OUT, or here)")  # fmt: skip
    parser.add_argument("--total", type=float, default=TOTAL_S, help=f"seconds for all parts (default: {TOTAL_S:.0f})")
    parser.add_argument("--dry", action="store_true", help="check imports and arguments, print the plan, run nothing")
    parser.add_argument("--rehearse", action="store_true", help="run all parts on the CPU with tiny sizes")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    if unknown := sorted(set(args.parts) - {part.name for part in PLAN}):
        parser.error(f"--parts: unknown {', '.join(unknown)}; known: {names}")
    if args.model and not (Path(args.model) / "config.json").is_file():
        parser.error(f"--model: {args.model} has no config.json")
    if not 0.001 <= args.gib <= 64:
        parser.error(f"--gib {args.gib}: want 0.001 to 64")
    return args


def main() -> int:
    args = read_arguments()
    chosen = [part for part in PLAN if part.name in args.parts]
    for part in chosen:
        without = part.needs and importlib.util.find_spec(part.needs) is None
        print(
            f"{part.name:<10} at most {part.limit_s:>3.0f} s: {part.what}"
            + f" (skipped: no {part.needs})" * bool(without)
        )
    if lacking := missing(NEEDED):
        print(f"error: cannot import {'; '.join(lacking)}", file=sys.stderr)
        return 1
    import torch

    seen = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"PyTorch {torch.__version__} sees: {seen}; results go to {args.out}; {args.total:.0f} s in all at most")
    if args.dry:
        return 0
    if not torch.cuda.is_available() and not args.rehearse:
        print("error: there is no GPU here; --rehearse tries the script on a CPU", file=sys.stderr)
        return 1
    settings = {"gib": 0.004 if args.rehearse else args.gib, "model": args.model, "rehearse": args.rehearse}
    results: dict[str, Any] = {"rehearsal": args.rehearse, "device": seen, "torch": torch.__version__, "parts": {}}
    deadline = time.monotonic() + args.total
    for part in chosen:
        left = deadline - time.monotonic()
        if part.needs and importlib.util.find_spec(part.needs) is None:
            found: dict[str, Any] = {"state": "skipped", "why": f"{part.needs} is not installed"}
        elif left < 10:
            found = {"state": "failed", "why": f"no time was left of the {args.total:.0f} s (--total)"}
        else:
            found = run(part, settings, left if args.rehearse else min(part.limit_s, left))
        results["parts"][part.name] = found
        args.out.write_text(json.dumps(results, indent=1))
        print(f"\n== {part.name}: {found['state']}, {found.get('took_s', 0)} s\n{shown(found)}", flush=True)
    return 0 if all(r["state"] in ("ok", "skipped") for r in results["parts"].values()) else 1


def shown(found: dict[str, Any]) -> str:
    """For the console: short enough to survive if nothing else comes back from the machine."""
    steps = found.get("steps")
    if steps:
        keep = ("timing_s/", "perf/", "rollout_corr/", "training/rollout")
        found = {**found, "steps": {k: v for k, v in steps[-1].items() if k.startswith(keep)}}
        found["device_mib"] = found["device_mib"].get("highest")
    return json.dumps({k: v for k, v in found.items() if k not in ("state", "took_s")}, indent=1)[:6000]


if __name__ == "__main__":
    sys.exit(main())
