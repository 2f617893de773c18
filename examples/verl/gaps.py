"""How far the sampler's log-probs and the trainer's are apart in a recorded run."""

from __future__ import annotations

import numpy as np
from watched import Run

from crossrl.tape import RecordMissing, open_run


def spreads(run: Run) -> list[float]:
    """Of each step: the standard deviation, over its tokens, of trainer's minus sampler's log-prob, nat.

    Not their mean: the tiny model's head has rows without a token, which the sampler leaves out and the trainer does
    not, so that all its log-probs are lower by about the same. Empty if nothing was recorded.
    """
    try:
        tape = open_run(run.folder / "out")
        pairs = [(tape.record(s, "rollout"), tape.record(s, "old_log_prob")) for s in tape.steps()]
    except RecordMissing:
        return []
    found = []
    for sampler, trainer in pairs:
        theirs = dict(zip(sampler.sample_id, sampler.batch.ragged("rollout_log_probs").rows(), strict=True))
        ours = dict(zip(trainer.sample_id, trainer.batch.ragged("old_log_probs").rows(), strict=True))
        found.append(float(np.std(np.concatenate([ours[i] - theirs[i] for i in ours]))))
    return found


def shown(values: list[float]) -> str:
    return ", ".join(f"{value:.2g}" for value in values) + " nat"
