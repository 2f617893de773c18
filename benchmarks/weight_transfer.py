"""Weights from one process to another: crossrl's transfer beside the limit, a queue of PyTorch's, and verl's own.

    python benchmarks/weight_transfer.py --model FOLDER                # a Hugging Face folder, in float32
    python benchmarks/weight_transfer.py --gib 1 --verl DIR1:DIR2      # a synthetic model; where verl's packages lie

One sender, one receiver, the same two processes for all ways; the ways take turns, so that a busy machine slows all of
them. A round begins with weights in the sender's memory and ends when the receiver has them in tensors of its own and
the sender knows it. Ways:

    limit          two plain copies of the same bytes within one process
    crossrl        shared memory, with digests: proof that all of it arrived
    crossrl-plain  the same without digests
    queue          each tensor through torch.multiprocessing.Queue
    verl           verl's BucketedWeightSender and BucketedWeightReceiver in shared-memory mode

verl's classes are imported as verl does it, or, where that asks for vLLM, from their file alone. Where there is no GPU,
the three calls that they make to one (synchronize, empty_cache, ipc_collect) do nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as mp

from crossrl.models.digest import combined, tensor_digests
from crossrl.sync.manifest import Manifest
from crossrl.sync.receiver import WeightReceiver
from crossrl.sync.sender import BUCKET_BYTES, WeightSender
from crossrl.sync.target import HeldTensors

WAYS = ("limit", "crossrl", "crossrl-plain", "queue", "verl")
LAYER = {"q": (1, 1), "k": (1, 4), "v": (1, 4), "o": (1, 1), "gate": (8 / 3, 1), "up": (8 / 3, 1), "down": (1, 3 / 8)}


def synthetic(gib: float) -> dict[str, torch.Tensor]:
    """Tensors as a decoder has them, float32, ``gib`` GiB in all; the embedding is the largest."""
    width, left = 2048 if gib >= 0.5 else 256, int(gib * 2**28)
    named = {"embed": torch.randn(left // 8 // width, width)}
    left -= named["embed"].numel()
    layer = 0
    while left > 0:
        shapes: list[tuple[str, tuple[int, ...]]] = [("norm", (width,))]
        shapes += [(n, (int(width * a), width)) for n, (a, _) in LAYER.items()]
        for name, shape in shapes:
            tensor = torch.randn(shape).reshape(-1)[: max(left, 0)]
            if tensor.numel():
                named[f"layers.{layer}.{name}"] = tensor
            left -= tensor.numel()
        layer += 1
    return named


def load(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    if not args.model:
        return synthetic(args.gib)
    from crossrl.models.loading import distinct_parameters, load_causal_lm

    return {name: p.detach() for name, p in distinct_parameters(load_causal_lm(args.model))}


def verl_module(path: str) -> ModuleType:
    """verl's module of bucketed transfers."""
    sys.path += [p for p in path.split(":") if p]
    name = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
    module = _import_or_load(name)
    if not torch.cuda.is_available():
        nothing = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
        module.get_torch_device, module.is_support_ipc = lambda: nothing, lambda: False  # type: ignore[attr-defined]
    return module


def _import_or_load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, ValueError):  # the packages around it ask for vLLM
        for loaded in [n for n in sys.modules if n.startswith("verl.workers.rollout")]:
            del sys.modules[loaded]
        root = Path(importlib.import_module("verl").__file__ or "").parent
        spec = importlib.util.spec_from_file_location(name, root.parent / f"{name.replace('.', '/')}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        around = ModuleType("verl.workers.rollout.utils")  # from which the sender takes this one function

        async def ensure_async_iterator(weights: Any) -> Any:
            for pair in weights:
                yield pair

        around.ensure_async_iterator = ensure_async_iterator  # type: ignore[attr-defined]
        for package in ("verl.workers", "verl.workers.rollout"):
            sys.modules.setdefault(package, ModuleType(package))
        sys.modules[around.__name__] = around
        return module


# The receiver's process


def receive(args: argparse.Namespace, addresses: dict[str, str], pipe: Any, queue: Any) -> None:
    """Do what ``pipe`` asks for: receive by a way, or say what is held."""
    held = {name: torch.zeros_like(tensor) for name, tensor in load(args).items()}
    target = HeldTensors(held)
    ours = {w: WeightReceiver(a, "engine", target) for w, a in addresses.items() if w.startswith("crossrl")}
    verl = verl_module(args.verl) if "verl" in args.ways else None

    def from_queue() -> None:
        while (pair := queue.get(timeout=60)) is not None:
            held[pair[0]].copy_(pair[1])

    def from_verl() -> None:
        assert verl
        receiver = verl.BucketedWeightReceiver(addresses["verl"], torch.device("cpu"), use_shm=True)
        receiver.receive_weights(lambda named, last: [held[n].copy_(t) for n, t in named])

    by_way: dict[str, Callable[[], Any]] = {"queue": from_queue, "verl": from_verl}
    by_way |= {way: receiver.receive for way, receiver in ours.items()}
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        if asked == "digest":
            pipe.send(combined(tensor_digests(held.items())))
        else:
            by_way[asked]()
            pipe.send("done")
    for receiver in ours.values():
        receiver.close()


# The sender's process


class Sending:
    """All ways of sending ``weights``."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.weights = args, load(args)
        self.manifest = Manifest.of(self.weights.items())
        self.folder = tempfile.TemporaryDirectory(prefix="crossrl-bench-")
        context = mp.get_context("spawn")
        self.queue = context.Queue()
        self.senders = {
            way: WeightSender(["engine"], bucket_bytes=args.bucket << 20, digest=way == "crossrl")
            for way in args.ways
            if way.startswith("crossrl")
        }
        addresses = {way: s.address for way, s in self.senders.items()} | {"verl": f"ipc://{self.folder.name}/verl"}
        self.verl_address, self.verl = addresses["verl"], verl_module(args.verl) if "verl" in args.ways else None
        self.pipe, other = context.Pipe()
        self.child = context.Process(target=receive, args=(args, addresses, other, self.queue), daemon=True)
        self.child.start()
        self._answer("ready")
        self.version = 0
        self.copies: list[dict[str, torch.Tensor]] = []
        if "limit" in args.ways:
            self.copies = [{n: torch.zeros_like(t) for n, t in self.weights.items()} for _ in range(2)]

    def round(self, way: str, check: bool) -> float:
        """Seconds. ``check``: afterwards, the receiver must hold what was sent."""
        self.version += 1
        for tensor in self.weights.values():
            tensor.view(-1)[:1] = self.version
        if way != "limit":
            self.pipe.send(way)
            time.sleep(0.2)  # it is waiting then
        start = time.perf_counter()
        if way == "limit":
            for source, out in ((self.weights, self.copies[0]), (self.copies[0], self.copies[1])):
                for name, tensor in source.items():
                    out[name].copy_(tensor)
        else:
            getattr(self, f"_{way.split('-')[0]}")(way)
            self._answer("done")
        seconds = time.perf_counter() - start
        if check and way != "limit":
            self.pipe.send("digest")
            self._answer(combined(tensor_digests(self.weights.items())))
        return seconds

    def _crossrl(self, way: str) -> None:
        changed = True if way == "crossrl" else None
        self.senders[way].send(self.version, self.manifest, self.weights.items(), changed=changed)

    def _queue(self, way: str) -> None:
        for pair in self.weights.items():
            self.queue.put((pair[0], pair[1].clone()))  # what is put becomes shared memory: not the weights themselves
        self.queue.put(None)

    def _verl(self, way: str) -> None:
        assert self.verl
        sender = self.verl.BucketedWeightSender(self.verl_address, self.args.verl_bucket, use_shm=True)
        asyncio.run(sender.async_send_weights(iter(self.weights.items())))

    def _answer(self, want: str) -> None:
        if not self.pipe.poll(300):
            raise SystemExit("the receiver did not answer for 300 s")
        if (found := self.pipe.recv()) != want:
            raise SystemExit(f"the receiver holds {found}, {want} was sent")

    def close(self) -> None:
        self.pipe.send(None)
        self.child.join(20)
        for sender in self.senders.values():
            sender.close()
        self.folder.cleanup()


def table(seconds: dict[str, list[float]], size: int) -> Iterator[str]:
    median = {way: statistics.median(s) for way, s in seconds.items()}
    yield f"{'way':<14} {'median s':>9} {'best s':>8} {'GiB/s':>7} {'of limit':>9} {'x verl':>7}"
    for way, s in seconds.items():
        of_limit = f"{median['limit'] / median[way]:.0%}" if "limit" in median else "-"
        times_verl = f"{median['verl'] / median[way]:.2f}" if "verl" in median else "-"
        rate = size / 2**30 / median[way]
        yield f"{way:<14} {median[way]:>9.3f} {min(s):>8.3f} {rate:>7.2f} {of_limit:>9} {times_verl:>7}"
    if {"crossrl", "crossrl-plain"} <= median.keys():
        cost = median["crossrl"] - median["crossrl-plain"]
        yield f"digests cost {cost:.3f} s, {cost / median['crossrl']:.0%} of a transfer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="Hugging Face folder; else a synthetic model")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the synthetic model")
    parser.add_argument("--rounds", type=int, default=7, help="per way, after one that is not counted")
    parser.add_argument("--bucket", type=int, default=BUCKET_BYTES >> 20, help="MiB, of crossrl")
    parser.add_argument("--verl-bucket", type=int, default=512, help="MiB, of verl (its default)")
    parser.add_argument("--verl", default="", help="folders with verl and what it imports, joined by ':'")
    parser.add_argument("--ways", default=",".join(WAYS), type=lambda text: text.split(","))
    parser.add_argument("--out", type=Path, help="write all figures here, as JSON")
    args = parser.parse_args()
    sending = Sending(args)
    size = sum(t.nbytes for t in sending.weights.values())
    threads, cores = torch.get_num_threads(), os.cpu_count()
    print(f"{len(sending.weights)} tensors, {size / 2**30:.3f} GiB; {cores} cores, {threads} threads of PyTorch")
    seconds: dict[str, list[float]] = {way: [] for way in args.ways}
    try:
        for number in range(args.rounds + 1):
            for way in args.ways:
                took = sending.round(way, check=number == 0)
                seconds[way] += [took] if number else []
    finally:
        sending.close()
    print("\n".join(table(seconds, size)))
    if args.out:
        facts = {"bytes": size, "tensors": len(sending.weights), "cores": cores, "threads": threads}
        args.out.write_text(json.dumps({**facts, **vars(args), "out": None, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
