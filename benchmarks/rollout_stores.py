"""Ways to store a rollout: the tape's record, torch.save, verl's DataProto; each writes, loads and reads it once.

Run by ``benchmarks/tape.py``, each way in a process of its own (``python rollout_stores.py WAY GIB MAX_TOKENS DIR``):
the memory of one does not press on the next, and verl's process needs verl and no crossrl.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FLAT = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs")


def make_columns(gib: float, max_tokens: int) -> dict[str, Any]:
    """The columns of a rollout of about ``gib`` GiB: flat values by name, lengths of prompts and responses, texts."""
    rng, letters = np.random.default_rng(0), random.Random(0)
    words = "".join(letters.choices("etaoin shrdlu", k=1 << 20))
    sample_bytes = 256 * 4 + (max_tokens + 1) / 2 * (4 + 1 + 4 + 4) + 700
    count = max(2, int(gib * 2**30 / sample_bytes))
    prompts = rng.integers(1, 513, count)
    responses = rng.permutation(np.linspace(1, max_tokens, count).astype(np.int64))
    starts = rng.integers(0, len(words) - 4 * max_tokens if len(words) > 4 * max_tokens else 1, count)
    total = int(responses.sum())
    return {
        "lengths": {"prompt": prompts, "response": responses},
        "flat": {
            "prompt_ids": ("prompt", rng.integers(0, 49152, int(prompts.sum()), np.int32)),
            "response_ids": ("response", rng.integers(0, 49152, total, np.int32)),
            "response_mask": ("response", np.ones(total, np.uint8)),
            "rollout_log_probs": ("response", -rng.random(total, np.float32)),
        },
        "texts": {
            "response": [words[s : s + 4 * n] for s, n in zip(starts.tolist(), responses.tolist(), strict=True)],
            "prompt": [[{"role": "user", "content": words[s : s + 256]}] for s in starts.tolist()],
            "ground_truth": [str(s) for s in starts.tolist()],
            "data_source": ["bench"] * count,
            "finish_reason": ["stop"] * count,
        },
        "sample_id": tuple(f"0123456789ab.e0.r{i // 8}.n{i % 8}" for i in range(count)),
    }


def padded(columns: dict[str, Any]) -> dict[str, Any]:
    """The same as right-padded torch tensors ``[N, longest]``."""
    import torch

    out = {}
    for name, (side, flat) in columns["flat"].items():
        lengths = columns["lengths"][side]
        array = np.zeros((len(lengths), int(lengths.max())), flat.dtype)
        array[np.arange(array.shape[1]) < lengths[:, None]] = flat
        out[name] = torch.from_numpy(array)
    return out


def flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def drop_cache(path: Path) -> None:
    """Put the files below ``path`` out of the page cache (they must be on the disk)."""
    for each in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        with each.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def tree_size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    out = action()
    return time.perf_counter() - start, out


class Way:
    """One way to store the data. ``write`` flushes to the disk; ``load`` may map; ``use`` reads every value once."""

    name = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def write(self) -> None:
        raise NotImplementedError

    def load(self) -> Any:
        raise NotImplementedError

    def use(self, loaded: Any) -> tuple[int, int]:
        """Sum of response ids, characters of responses: the same for all ways."""
        raise NotImplementedError

    def round(self, expected: tuple[int, int]) -> None:
        self.remove()
        self.seconds["write"].append(timed(self.write)[0])
        for state in ("warm", "cold"):
            if state == "cold":
                drop_cache(self.path)
            opened, loaded = timed(self.load)
            used, found = timed(lambda loaded=loaded: self.use(loaded))
            if found != expected:
                raise SystemExit(f"{self.name}: loaded {found}, stored {expected}")
            self.seconds[f"open {state}"].append(opened)
            self.seconds[state].append(opened + used)
            del loaded  # what is mapped stays in the page cache
            gc.collect()

    def remove(self) -> None:
        if self.path.is_dir():
            shutil.rmtree(self.path)
        self.path.unlink(missing_ok=True)

    def result(self) -> dict[str, Any]:
        size = self.path.stat().st_size if self.path.is_file() else tree_size(self.path)
        return {"bytes": size} | {k: v[-1] for k, v in self.seconds.items()}


class RecordWay(Way):
    name = "crossrl record (ragged, every digest checked)"

    def __init__(self, path: Path, columns: dict[str, Any]) -> None:
        from crossrl.batch import Batch, Meaning, Ragged

        super().__init__(path)
        data = {n: Ragged(flat, columns["lengths"][side]) for n, (side, flat) in columns["flat"].items()}
        meanings = {"rollout_log_probs": Meaning(1.0, "none", "hf", 0)}
        self.batch = Batch(columns["sample_id"], {**data, **columns["texts"]}, meanings)

    def write(self) -> None:
        from crossrl.tape.capture import capture
        from crossrl.tape.header import Header
        from crossrl.tape.publish import Draft, write_record

        seconds, snapshot = timed(lambda: capture(self.batch))
        self.seconds["capture"].append(seconds)
        write_record(self.path, Draft(Header("bench", "rollout", 1), snapshot))

    def load(self) -> Any:
        from crossrl.tape import read_record

        return read_record(self.path)

    def use(self, loaded: Any) -> tuple[int, int]:
        import torch

        batch = loaded.batch  # checks the digest of every column
        sums = {n: int(torch.from_numpy(batch[n].values).sum()) for n in FLAT}
        return sums["response_ids"], sum(map(len, batch["response"]))


class TorchWay(Way):
    name = "torch.save (padded)"
    mapped = False

    def __init__(self, path: Path, tensors: dict[str, Any], texts: dict[str, Any]) -> None:
        super().__init__(path)
        self.data = {**tensors, **texts}

    def write(self) -> None:
        import torch

        torch.save(self.data, self.path)
        flush(self.path)

    def load(self) -> Any:
        import torch

        return torch.load(self.path, weights_only=True, mmap=self.mapped)

    def use(self, loaded: Any) -> tuple[int, int]:
        sums = {n: int(loaded[n].sum()) for n in FLAT}
        return sums["response_ids"], sum(map(len, loaded["response"]))


class MappedTorchWay(TorchWay):
    name = "torch.save, torch.load(mmap=True) (padded)"
    mapped = True


class VerlWay(Way):
    name = "verl DataProto.save_to_disk, load_from_disk (padded)"

    def __init__(self, path: Path, tensors: dict[str, Any], texts: dict[str, Any]) -> None:
        from verl import DataProto

        super().__init__(path)
        objects = {n: np.fromiter(column, dtype=object, count=len(column)) for n, column in texts.items()}
        self.data = DataProto.from_dict(tensors=tensors, non_tensors=objects)

    def write(self) -> None:
        self.data.save_to_disk(self.path)
        flush(self.path)

    def load(self) -> Any:
        from verl import DataProto

        return DataProto.load_from_disk(self.path)

    def use(self, loaded: Any) -> tuple[int, int]:
        sums = {n: int(loaded.batch[n].sum()) for n in FLAT}
        return sums["response_ids"], sum(map(len, loaded.non_tensor_batch["response"]))


def open_way(way: str, path: Path, columns: dict[str, Any]) -> Way:
    if way == "record":
        return RecordWay(path, columns)
    padded_way: Any = {"torch": TorchWay, "torch-mmap": MappedTorchWay, "verl": VerlWay}[way]
    return padded_way(path, padded(columns), columns["texts"])


def measure(way: str, gib: float, max_tokens: int, folder: Path) -> dict[str, Any]:
    for size in (0.001, gib):  # a small one first: imports and first calls are not what is measured
        columns = make_columns(size, max_tokens)
        flat, texts = columns["flat"], columns["texts"]
        expected = int(flat["response_ids"][1].sum(dtype=np.float64)), sum(map(len, texts["response"]))
        try:
            chosen = open_way(way, folder / f"bench-{way}", columns)
        except ImportError as error:
            return {"skipped": f"{sys.executable}: {error}"}
        del columns, flat, texts
        chosen.round(expected)
    result = {"name": chosen.name, **chosen.result()}
    chosen.remove()
    return result


if __name__ == "__main__":
    print("RESULT " + json.dumps(measure(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))))
