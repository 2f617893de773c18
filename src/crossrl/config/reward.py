"""``reward``: how responses are scored."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CustomRewardFunctionConfig:
    path: str | None = None
    """Python file with a function `compute_score(data_source, solution_str, ground_truth, extra_info)` that returns
    a number, or a dict with the number under "score". null: verifiers by data source."""
    name: str = "compute_score"
    """Name of the function in that file."""


@dataclass(frozen=True, slots=True)
class OverlongBufferConfig:
    """DAPO's soft punishment of long responses (arXiv 2503.14476, section 3.4)."""

    enable: bool = False
    """Punish responses that end within the last `len` tokens before the maximum."""
    len: int = 0
    """Tokens over which the punishment grows from 0 to penalty_factor; at most data.max_response_length."""
    penalty_factor: float = 1.0
    """Reward taken off at the maximum length."""
    log: bool = False
    """Add the punishment to what the verifier returned, as overlong_reward, and whether there is any, as overlong:
    their means are then among the metrics."""


@dataclass(frozen=True, slots=True)
class RewardConfig:
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    num_workers: int | None = None
    """Processes that score. null: chosen from the number of cores."""
    timeout_s: float = 30.0
    """Seconds after which the scoring of one sample is killed and counted as timed out. Not a key of verl's."""
