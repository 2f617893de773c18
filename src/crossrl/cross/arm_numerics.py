"""What two recorded runs declare to be different and rounds otherwise: then unequal bits are no sign of a fault."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from crossrl.cross.arms import read_config
from crossrl.tape import open_run
from crossrl.tape.compare import same

# Of what a record says about its installation: cannot change a number.
SAME_NUMBERS = ("python", "platform", "crossrl", "ray")
# Settings that change the order of summation, the kernel or the data type, and not what is meant to be computed.
ROUNDING = (
    "actor_rollout_ref.rollout.name", "*dtype", "*attn_implementation", "*micro_batch*", "*use_remove_padding",
    "*rollout.max_num_*", "*parallel_size*", "*enforce_eager", "*use_dynamic_bsz", "*max_token_len*", "*.strategy",
    "*torch_compile*", "*fsdp_size", "*gradient_checkpointing*", "trainer.device", "trainer.nnodes",
    "trainer.n_gpus_per_node",
)  # fmt: skip
OF_MODEL = ("rollout", "old_log_prob", "ref_log_prob", "advantage", "update")


def declared(a: Path, b: Path, stage: str, step: int) -> list[str]:
    """Differences of A's run from B's that may round ``stage`` otherwise, such as ``torch: 2.12 against 2.13``."""
    if stage not in OF_MODEL:
        return []
    mine, theirs = (_versions(run, stage, step) for run in (a, b))
    names = sorted({*mine, *theirs}) if mine and theirs else ()
    found = {k: (mine.get(k), theirs.get(k)) for k in names if k not in SAME_NUMBERS}
    one, other = (read_config(run) or read_config(run.parent) for run in (a, b))
    if one and other:
        keys = [k for k in sorted({*one, *other}) if any(fnmatchcase(k, pattern) for pattern in ROUNDING)]
        found |= {key: (one.get(key), other.get(key)) for key in keys}
    return [f"{key}: {x} against {y}" for key, (x, y) in found.items() if not same(x, y)]


def _versions(run: Path, stage: str, step: int) -> Mapping[str, Any]:
    """Of the record of ``stage`` that is nearest to ``step``: installations do not change in a run. {} if none."""
    tape = open_run(run)
    for near in sorted(tape.steps(), key=lambda s: abs(s - step)):
        for name, at in tape.calls(near):
            if name == stage:
                return tape.record(near, stage, at.call).header.versions
    return {}
