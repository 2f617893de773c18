"""Which rank computes which samples: a function of the data alone."""

from __future__ import annotations

import numpy as np

from crossrl.batch import Ragged


def deal(prompts: Ragged, responses: Ragged, keep: np.ndarray, world: int) -> list[np.ndarray]:
    """int64 positions of the samples of each of ``world`` ranks, ascending; together they are all samples.

    Samples with the same prompt stay together, so that it is computed once. The largest groups are dealt first, each
    to the rank with the fewest tokens so far (the first such). ``keep``: bool ``[N]``, samples that are computed; the
    others count nothing.
    """
    members: dict[bytes, list[int]] = {}
    for i in range(len(prompts)):
        members.setdefault(prompts.row(i).tobytes(), []).append(i)
    sizes = []
    for group in members.values():
        computed = [i for i in group if keep[i] and responses.lengths[i]]
        tokens = sum(int(responses.lengths[i]) for i in computed)
        sizes.append(tokens + int(prompts.lengths[group[0]]) if computed else 0)
    load, dealt = [0] * world, [list[int]() for _ in range(world)]
    for size, group in sorted(zip(sizes, members.values()), key=lambda item: -item[0]):  # stable: in batch order
        rank = load.index(min(load))
        load[rank] += size
        dealt[rank] += group
    return [np.array(sorted(mine), dtype=np.int64) for mine in dealt]
