"""``algorithm``: from rewards to advantages."""

from __future__ import annotations

from dataclasses import dataclass, field

from crossrl.config.actor import KL_TYPES
from crossrl.config.fields import allowed


@dataclass(frozen=True, slots=True)
class KLControlConfig:
    type: str = field(default="fixed", metadata=allowed("fixed", "adaptive"))
    """adaptive: move kl_coef towards target_kl (Ziegler et al. 2019)."""
    kl_coef: float = 0.001
    """Weight of the KL penalty in the reward, at the start."""
    horizon: int = 10000
    """Samples over which the adaptive controller moves."""
    target_kl: float = 0.1
    """Nat per response token that the adaptive controller aims at."""


@dataclass(frozen=True, slots=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling (arXiv 2503.14476): groups without any difference are replaced by new ones."""

    enable: bool = False
    """Keep generating until train_batch_size prompts have groups whose members differ."""
    metric: str = "reward"
    """What must differ: reward (also spelled score, seq_reward, seq_final_reward), or a number that the verifier
    returns, such as acc."""
    max_num_gen_batches: int = 10
    """Calls of generation per step, at most. 0: until the data of the epoch are used up."""


@dataclass(frozen=True, slots=True)
class RolloutCorrectionConfig:
    """Importance sampling between the sampler's and the trainer's distribution."""

    rollout_is: str | None = field(default=None, metadata=allowed("token", "sequence"))
    """Truncated importance weights per token or per sequence. null: none."""
    rollout_is_threshold: str = "2.0"
    """One number: weights are cut off at it. "lower_upper", such as "0.5_5.0": weights outside are set to 0 (IcePop).
    In a YAML file two numbers need quotes."""
    rollout_rs: str | None = None
    """Rejection, by the log ratio of the two distributions: token_k1 (also spelled token) leaves out tokens whose ratio
    is outside rollout_rs_threshold, seq_sum_k1 (also spelled sequence) whole responses by the ratio of the response;
    further token_k2, token_k3, seq_sum_, seq_mean_ and seq_max_ forms, and several with commas. null: none."""
    rollout_rs_threshold: str | None = None
    """For k1 "lower_upper", such as "0.5_2.0", or one number u for 1/u to u; for k2 and k3 an upper limit in nat. One
    for all, or one for each with commas."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    bypass_mode: bool = False
    """Take the sampler's log-probs for the old ones and skip the old_log_prob stage."""


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    adv_estimator: str = field(
        default="grpo",
        metadata=allowed("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "gae"),
    )
    """grpo (arXiv 2402.03300), rloo (2402.14740), reinforce_plus_plus and its baseline form (2501.03262), remax
    (2310.10505). gae needs a critic, which this version does not have."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide a group's advantages by its standard deviation; False is Dr.GRPO (arXiv 2503.20783)."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """Lambda of gae; no effect on the other estimators."""
    mask_truncated: bool = False
    """Leave responses that were cut off at the maximum length out of the loss (DAPO's overlong filtering, arXiv
    2503.14476, section 3.4). Not a key of verl's."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence to the reference model from the reward, token by token."""
    kl_penalty: str = field(default="kl", metadata=allowed(*KL_TYPES))
    """Estimator of that divergence: kl = k1, abs, mse = k2, low_var_kl = k3."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
