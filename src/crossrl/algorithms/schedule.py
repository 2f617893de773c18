"""Learning rate: a factor that is a pure function of the step, so that there is no state to resume."""

from __future__ import annotations

import math

from crossrl.algorithms.errors import AlgorithmError, need_choice

SCHEDULES = ("constant", "linear", "cosine")


def warmup_steps(lr_warmup_steps: int | None, lr_warmup_steps_ratio: float, total_steps: int) -> int:
    """Steps of warm-up, as in verl: ``lr_warmup_steps`` if above 0, else that share of the total, rounded down."""
    if lr_warmup_steps is not None and lr_warmup_steps > 0:
        return lr_warmup_steps
    return int(lr_warmup_steps_ratio * max(total_steps, 0))


def lr_factor(
    step: int,
    schedule: str,
    *,
    warmup: int = 0,
    total_steps: int = -1,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    zero_indexed: bool = True,
) -> float:
    """What the learning rate is multiplied by at ``step`` (0 for the first optimizer step), from 0 to 1.

    Warm-up rises linearly from 0 at index 0 to 1 at index ``warmup``; then the rate stays (``constant``), falls
    linearly to ``min_lr_ratio`` at index ``total_steps`` (``linear``), or follows
    (1 + m) / 2 + (1 - m) / 2 * cos(2 pi num_cycles p) for progress p from 0 to 1 (``cosine``). Beyond
    ``total_steps`` it keeps its last value.

    ``zero_indexed`` (key ``optim.zero_indexed_step``): True takes ``step`` as the index, as verl and transformers
    do; a run with warm-up then makes its first update with learning rate 0, which changes nothing. False takes
    ``step + 1``: the first update moves the weights, the last one of ``linear`` does not.
    """
    need_choice("optim.lr_scheduler_type", schedule, SCHEDULES)
    if step < 0 or warmup < 0 or not 0.0 <= min_lr_ratio <= 1.0:
        raise AlgorithmError(
            f"learning rate: want step >= 0, warm-up steps >= 0 and 0 <= optim.min_lr_ratio <= 1, "
            f"found {step}, {warmup} and {min_lr_ratio}"
        )
    if schedule != "constant" and total_steps < 1:
        raise AlgorithmError(
            f"optim.lr_scheduler_type={schedule} needs the number of training steps, found {total_steps}"
        )
    index = step if zero_indexed else step + 1
    if index < warmup:
        return index / warmup
    if schedule == "constant":
        return 1.0
    progress = min((index - warmup) / max(total_steps - warmup, 1), 1.0)
    if schedule == "linear":
        return min_lr_ratio + (1.0 - min_lr_ratio) * (1.0 - progress)
    wave = math.cos(2.0 * math.pi * num_cycles * progress)
    return max(min_lr_ratio, (1.0 + min_lr_ratio) / 2.0 + (1.0 - min_lr_ratio) / 2.0 * wave)
