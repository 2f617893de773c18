"""An update that changes no weight although verl says that it trained: either it did not train, or the host looks at
other weights than those that train, and no comparison of them says anything."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

log = logging.getLogger("crossrl.tape")
GRAD_NORM, RATE = "actor/grad_norm", "actor/lr"


class Unseen:
    """Looks at each update of one run, and warns: whether the run is worth going on is not for a recorder to say.

    verl reports the learning rate of the update that comes next, so the first one that this process makes is not judged
    (in a warm-up it has rate 0), nor one whose gradient was zero or not finite, which verl skips.
    """

    def __init__(self) -> None:
        self._rate = 0.0

    def look(self, step: int, before: str, after: str, metrics: Mapping[str, float]) -> None:
        """``before``, ``after``: digests of the weights."""
        rate, norm = self._rate, metrics.get(GRAD_NORM, 0.0)
        self._rate = metrics.get(RATE, 0.0)
        if before != after or not (math.isfinite(norm) and norm > 0 and rate > 0):
            return
        log.warning(
            "tape: the update of step %d changed none of the weights that the host sees (%s), though verl reports a "
            "gradient of norm %.3g and a learning rate of %.3g. Either it trains other weights than those (an adapter, "
            "a copy), or its steps are lost (a rate too small for the data type, an optimizer that does not step). "
            "Compare two of verl's own checkpoints to see which", step, after[:12], norm, rate,
        )  # fmt: skip
