"""The parts of ``gpu.py``, each run by it in a process of its own: ``python gpu_parts.py PART SETTINGS OUT``.

A part writes a JSON object: figures, and under "wrong" what is not as it should be, in words. Settings with
``rehearse`` run it on the CPU, over shared memory, with tiny sizes: that tries this script, and measures nothing.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from cluster_step import SCORE
from gpu_pair import MIB, Device, Pair, weights

from crossrl.models.digest import combined, tensor_digests

SYNCS, FAILURES = 50, 3


def facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The machine's own rates, against which the others are read."""
    device, mib = Device(settings["rehearse"]), 8 if settings["rehearse"] else 2048
    a, b = (torch.zeros(mib * MIB, dtype=torch.uint8, device=device.name) for _ in range(2))
    piece, pageable = a[: 8 * MIB], torch.zeros(8 * MIB, dtype=torch.uint8)
    out: dict[str, Any] = {
        "torch": torch.__version__,
        "copy_gib_s": mib / 1024 / device.seconds(lambda: b.copy_(a)),
        "to_pageable_host_8mib_gib_s": 8 / 1024 / device.seconds(lambda: pageable.copy_(piece)),
        "wrong": [],
    }
    if device.cuda:
        asked = "name,driver_version,memory.total"
        said = subprocess.run(["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"],
                              capture_output=True, text=True, check=False)  # fmt: skip
        out |= {"cuda": torch.version.cuda, "device": torch.cuda.get_device_name(), "nvidia_smi": said.stdout.strip()}
    return out


def transfer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rates of the transfer, by size of the bucket, with and without digests; and of two plain copies: the limit."""
    sizes = (8, 64, 512) if not settings["rehearse"] else (1, 2)
    ways = {f"{mib} MiB": {"bucket_bytes": mib * MIB, "digest": False} for mib in sizes}
    ways[f"{sizes[1]} MiB, digests"] = {"bucket_bytes": sizes[1] * MIB, "digest": True}
    pair = Pair(settings, settings["gib"], ways)
    copies = [{name: torch.zeros_like(t) for name, t in pair.weights.items()} for _ in range(2)]

    def copy_twice() -> None:
        for source, out in ((pair.weights, copies[0]), (copies[0], copies[1])):
            for name, tensor in source.items():
                out[name].copy_(tensor)

    found: dict[str, list[float]] = {way: [] for way in ways}
    wrong = []
    try:
        pair.start()
        limit = pair.device.seconds(copy_twice)
        for number in range(6):
            for way in ways:
                seconds = pair.sync(way)
                found[way] += [seconds] if number else []
                if not number and pair.ask("digest") != combined(tensor_digests(pair.weights.items())):
                    wrong.append(f"{way}: the receiver holds something else than was sent")
    finally:
        pair.close()
    median = {way: statistics.median(s) for way, s in found.items()}
    return {
        "gib": pair.bytes / 2**30,
        "limit_s": limit,
        "seconds": found,
        "gib_s": {"limit": pair.bytes / 2**30 / limit} | {way: pair.bytes / 2**30 / s for way, s in median.items()},
        "of_limit": {way: limit / s for way, s in median.items()},
        "digests_cost_s": median[f"{sizes[1]} MiB, digests"] - median[f"{sizes[1]} MiB"],
        "wrong": wrong,
    }


def memory(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Both processes without a garbage collection: after 50 transfers, after refused ones, after a killed receiver."""
    gc.disable()
    bucket = 64 if not settings["rehearse"] else 1
    pair = Pair(settings, settings["gib"] / 4, {"ipc": {"bucket_bytes": bucket * MIB, "digest": False}})
    found: dict[str, Any] = {}

    def note(when: str, receiver: bool = True) -> None:
        pair.device.wait()
        found[when] = {"sender": pair.device.memory()} | ({"receiver": pair.ask("memory")} if receiver else {})

    try:
        pair.start()
        note("before")
        for number in range(SYNCS):
            pair.sync("ipc")
            if number in (0, 9, SYNCS - 1):
                note(f"after {number + 1}")
        pair.end()
        note("without receiver", False)
        for kind in ("refusing", "dying"):
            reasons = []
            for _ in range(1 if settings["rehearse"] else FAILURES):
                if pair.process is None or not pair.process.is_alive():
                    pair.start(kind)
                reasons.append(pair.fails("ipc"))
                if kind == "refusing":
                    pair.answer()
                else:
                    pair.process.join(20)
            pair.end()
            note(f"after {kind}", False)
            found[f"{kind}: last error"] = reasons[-1][:300] if all(reasons) else ""
    finally:
        pair.close()
    return {"mib": found, "wrong": list(grown(found, bucket))}


def grown(found: Mapping[str, Any], bucket: int) -> Iterator[str]:
    """What was not given back, in words. A transfer's own memory is two buckets, which PyTorch may keep cached."""
    first, last = found["after 1"], found[f"after {SYNCS}"]
    for side in ("sender", "receiver"):
        if last[side]["allocated"] > found["before"][side]["allocated"] + 1:
            yield f"{side}: {last[side]['allocated'] - found['before'][side]['allocated']:.0f} MiB still allocated"
        if last[side]["reserved"] > first[side]["reserved"] + 1:
            yield f"{side}: reserved memory has grown from the first transfer to the last"
    if last["sender"]["free"] < first["sender"]["free"] - 64:
        yield f"{first['sender']['free'] - last['sender']['free']:.0f} MiB fewer free on the device after {SYNCS}"
    alone = found["without receiver"]["sender"]["allocated"]
    for kind in ("refusing", "dying"):
        more = found[f"after {kind}"]["sender"]["allocated"] - alone
        if more > 1:
            yield f"{more:.0f} MiB more after transfers to {FAILURES} {kind} receivers (two buckets: {2 * bucket})"
        if not found[f"{kind}: last error"]:
            yield f"a transfer to a {kind} receiver succeeded"


def digests(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of weights on the device: brought to the host in pieces of 8 MiB and hashed there."""
    device = Device(settings["rehearse"])
    named = weights(settings["gib"] / 4, device.name)
    there = {name: t.cpu() for name, t in named.items()}
    gib = sum(t.nbytes for t in named.values()) / 2**30
    seconds = {
        "on the device": device.seconds(lambda: tensor_digests(named.items()), 3),
        "of host memory": device.seconds(lambda: tensor_digests(there.items()), 3),
        "bringing it to the host alone": device.seconds(lambda: [t.cpu() for t in named.values()], 3),
    }
    differ = tensor_digests(named.items()) != tensor_digests(there.items())
    return {"gib": gib, "seconds": seconds, "gib_s": {k: gib / s for k, s in seconds.items()},
            "wrong": ["digests on the device and on the host differ"] * differ}  # fmt: skip


def random_model(folder: Path, tiny: bool) -> Path:
    """A Llama with random weights and the demo's tokenizer; heads of 64, which every back end of vLLM takes."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from crossrl.demo.model import END, PAD, VOCABULARY, make_tokenizer

    end, pad, heads = VOCABULARY.index(END), VOCABULARY.index(PAD), 2 if tiny else 16
    config = LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=64 * heads, intermediate_size=160 * heads,
        num_hidden_layers=2 if tiny else 16, num_attention_heads=heads, num_key_value_heads=heads // 2,
        max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None, eos_token_id=end, pad_token_id=pad,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    return folder


def train(settings: Mapping[str, Any], more: Sequence[str] = ()) -> dict[str, Any]:
    """Four GRPO steps by ``crossrl train`` in bfloat16 (master weights float32) with the engine hf, or as ``more``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rehearse = settings["rehearse"]
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        folder = Path(name)
        model = Path(settings["model"]) if settings["model"] else random_model(folder / "model", rehearse)
        rows = [{"prompt": f"{7**i % 10**6:06d}", "data_source": "bench", "reward_model": {"ground_truth": "x"}}
                for i in range(64)]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
        (folder / "score.py").write_text(SCORE)
        command = [
            sys.executable, "-m", "crossrl", "train", f"data.train_files={folder}/train.parquet",
            f"data.train_batch_size={2 if rehearse else 16}", "data.max_prompt_length=64",
            f"data.max_response_length={4 if rehearse else 256}", f"actor_rollout_ref.model.path={model.resolve()}",
            "actor_rollout_ref.model.custom_chat_template='{{ messages[0].content }}'",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={2 if rehearse else 16}",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64", "actor_rollout_ref.actor.optim.lr=1e-5",
            "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.ignore_eos=True",
            f"reward.custom_reward_function.path={folder}/score.py", "reward.num_workers=1", "trainer.logger=[file]",
            "trainer.val_before_train=False", "trainer.save_freq=-1", "trainer.total_training_steps=4",
            f"trainer.device={'cpu' if rehearse else 'cuda'}", f"trainer.default_local_dir={folder}/run", *more,
        ]  # fmt: skip
        with UsedMemory(folder / "used.txt", not rehearse) as used:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{worker_logs(folder / 'run')}"
            raise RuntimeError(f"crossrl train ended with code {done.returncode}:\n{said}")
        steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {"steps": steps, "device_mib": used.summary(), "wrong": [] if len(steps) >= 4 else ["fewer than 4 steps"]}


def worker_logs(run: Path) -> str:
    """The ends of what the workers of a run wrote."""
    logs = sorted((run / "workers").glob("*.log"))
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def colocated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same with vLLM on the same device: asleep while the trainer works, awake for weights and generation."""
    return train(settings, ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.free_cache_engine=True",
                            "actor_rollout_ref.rollout.gpu_memory_utilization=0.3"])  # fmt: skip


class UsedMemory:
    """Memory in use on the device while a command runs, every half second, as nvidia-smi says."""

    def __init__(self, file: Path, on: bool) -> None:
        self.file, self.on = file, on
        self.values: list[float] = []

    def __enter__(self) -> UsedMemory:
        if self.on:
            asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "500"]
            with self.file.open("w") as out:
                self.process = subprocess.Popen(asked, stdout=out, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        if self.on:
            self.process.kill()
            self.process.wait()
            self.values = [float(v) for v in self.file.read_text().split() if v.isdigit()]

    def summary(self) -> dict[str, Any]:
        return {"highest": max(self.values), "every_half_second": self.values} if self.values else {}


PARTS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "facts": facts, "transfer": transfer, "memory": memory, "digests": digests, "train": train, "colocated": colocated,
}  # fmt: skip


if __name__ == "__main__":
    part, given, out = sys.argv[1:]
    Path(out).write_text(json.dumps(PARTS[part](json.loads(given))))
