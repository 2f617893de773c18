"""A program in the place of verl, for tests of ``crossrl cross``: it takes Hydra's overrides, "trains" one number and
leaves what the host leaves. Its faults are given by the variable FAULTS, such as ``tokens@2,update@3``.

Its responses follow from the weights, its weights from the rewards, bit for bit; so what a fault does to the steps
after it is as in a real run. ``python tests/verl_runs.py trainer.default_local_dir=DIR ...``
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from crossrl.batch import Batch, Meaning, Ragged
from crossrl.tape.capture import capture
from crossrl.tape.header import Header
from crossrl.tape.publish import write_record
from crossrl.tape.record import Draft

IDS = tuple(f"d/0/{i}/0" for i in range(4))
INFERENCE = ("prompts", "tokens", "stale", "sync")
STEPS = 3


def simulate(folder: Path, infers: Mapping[str, int], trains: Mapping[str, int], alone: bool, steps: int = STEPS,
             start: int = 5, skip: tuple[str, ...] = (), digests: bool = True, torch: str = "2",
             dtype: str = "float32") -> Path:  # fmt: skip
    """``infers``, ``trains``: faults of each half, to the step from which on they act. ``sync`` acts only ``alone``."""
    weights = held = start
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in range(1, steps + 1):

        def acts(fault: str, step: int = step) -> bool:
            which = infers if fault in INFERENCE else trains
            return step >= which.get(fault, 99)

        stale = acts("stale") or (acts("sync") and alone)
        used, held = (held if stale else weights), weights
        prompts = [[i, step + 50 * acts("prompts")] for i in range(4)]
        tokens = [[(7 * used + 3 * i + step + j + acts("tokens")) % 97 for j in range(1 + i)] for i in range(4)]
        ids, given = Ragged.from_rows(tokens, np.int32), Ragged.from_rows(prompts, np.int32)
        score = np.array([sum(t) % 5 / 4 + acts("reward") * 0.5 for t in tokens])
        own = Ragged(-((ids.values * 0.01 + weights * 0.001) % 1).astype(np.float32), ids.lengths)
        sampler = Ragged(own.values - np.float32(0.1 * stale), ids.lengths)
        kinds = {
            "rollout_log_probs": Meaning(1.0, "none", "sampler", step - 1),
            "old_log_probs": Meaning(1.0, "none", "trainer", step - 1),
        }
        old = Ragged(own.values * (2 if acts("old") else 1), own.lengths)
        advantage = Ragged(old.values * np.float32(-1 if acts("sign") else 1), old.lengths)
        before, weights = weights, (weights * 3 + int(sum(score) * 8) + (11 if acts("update") else 0)) % 1009
        info = {"state": {"before": {"weights": f"{before:064d}"}, "after": {"weights": f"{weights:064d}"}},
                "metrics": {"actor/perf/seconds": time.time()}, "path/checkpoint": {"folder": str(folder)}}  # fmt: skip
        if not digests:
            del info["state"]
        text = [str(t) for t in tokens]
        extra = [{"score": float(s)} for s in score]
        records = {
            "rollout": Batch(IDS, {"prompt_ids": given, "response_ids": ids, "rollout_log_probs": sampler,
                                   "response": text, "verl": extra},
                             {"rollout_log_probs": kinds["rollout_log_probs"]}),
            "reward": Batch(IDS, {"reward": score}),
            "old_log_prob": Batch(IDS, {"old_log_probs": old}, {"old_log_probs": kinds["old_log_probs"]}),
            "advantage": Batch(IDS, {"advantages": advantage}),
            "update": Batch(IDS, {}, {}, info),
        }  # fmt: skip
        for stage in (s for s in records if s not in skip):
            header = Header(folder.name, stage, step, versions={"crossrl": "0", "torch": torch})
            write_record(folder / "tape" / f"step_{step:06d}" / f"{stage}.0", Draft(header, capture(records[stage])))
        lines.append(json.dumps({"step": step, "critic/rewards/mean": float(score.mean())}))
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "config.yaml").write_text(
        f"trainer: {{total_training_steps: {steps}}}\nactor_rollout_ref: {{rollout: {{dtype: {dtype}}}}}\n"
    )
    return folder


def faults(text: str) -> dict[str, int]:
    return {name: int(step) for name, step in (word.split("@") for word in text.split(",") if word)}


def main(words: list[str]) -> int:
    keys = dict(word.lstrip("+").split("=", 1) for word in words)
    run, mine = Path(keys["trainer.default_local_dir"]), os.environ.get("FAULTS", "")
    if "hang" in keys:  # as verl does when a part of it has failed: it says so, and stays, with a child
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        Path(keys["hang"]).write_text(str(child.pid))
        print(os.environ.get("LAST", "Error executing job with overrides: ['x=1']"), flush=True)
        time.sleep(600)
    if "handled" in keys:
        print("ray.exceptions.RayTaskError(ValueError): it broke, and is tried again", flush=True)
        time.sleep(1.5)
    if "forgotten" in keys:  # crossrl is not installed there: the keys mean nothing
        return 0
    steps, role = int(keys.get("trainer.total_training_steps", STEPS)), keys.get("trainer.share_data")
    if role is None:
        simulate(run, faults(mine), faults(mine), True, steps)
        return 0
    share = Path(keys["trainer.share_data_dir"])
    share.mkdir(parents=True, exist_ok=True)
    if role == "ckpt":
        simulate(run, faults(mine), {}, False, steps)
        (share / ".tmp").write_text(mine)
        (share / ".tmp").rename(share / "infers")
        return 0
    end = time.monotonic() + 60
    while not (share / "infers").exists():
        if time.monotonic() > end:
            return 1
        time.sleep(0.05)
    simulate(run, faults((share / "infers").read_text()), faults(mine), False, steps)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
