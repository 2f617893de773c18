"""``actor_rollout_ref.actor``: the loss, the optimizer, and how a batch is cut up for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import II

from crossrl.config.fields import allowed

DTYPES = ("auto", "float32", "bfloat16")
_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_TYPES = (*_KL, *(f"{name}+" for name in _KL))


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019) and its learning-rate schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: int = -1
    """Training steps of linear warm-up from 0. -1: use lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: float = 0.0
    """Warm-up as a share of all training steps, 0 to 1."""
    total_training_steps: int = -1
    """Training steps that the schedule spans. -1: as many as the run makes."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the denominator of Adam. Not a key of verl's."""
    clip_grad: float = 1.0
    """Gradients are scaled down to this L2 norm."""
    lr_scheduler_type: str = field(default="constant", metadata=allowed("constant", "linear", "cosine"))
    """Learning rate after the warm-up."""
    min_lr_ratio: float = 0.0
    """Where linear and cosine end, as a share of lr."""
    zero_indexed_step: bool = True
    """True, as in verl: the first of several warm-up steps has learning rate 0. False: it already learns."""
    num_cycles: float = 0.5
    """Cosine cycles; 0.5 falls once from lr to the minimum."""


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    loss_mode: str = field(default="vanilla", metadata=allowed("vanilla", "gspo", "cispo"))
    """vanilla: PPO's clipped loss, per token. gspo: sequence-level ratio (arXiv 2507.18071). cispo: clipped weight,
    gradient for every token (arXiv 2506.13585)."""


@dataclass(frozen=True, slots=True)
class TrainDtypeConfig:
    """The part of verl's fsdp_config that has an effect here."""

    model_dtype: str = field(default="auto", metadata=allowed(*DTYPES))
    """Data type of the weights that the optimizer updates. auto: float32."""
    dtype: str = field(default="auto", metadata=allowed(*DTYPES))
    """Data type of forward and backward. auto: float32 on CPU, bfloat16 on a GPU."""
    reshard_after_forward: bool = True
    """On several processes: let go of a layer's gathered weights after its forward pass. False: faster, and each
    process holds weights and gradients of the whole model during a step."""


@dataclass(frozen=True, slots=True)
class ActorConfig:
    strategy: str = field(default="fsdp", metadata=allowed("fsdp", "fsdp2"))
    """Training engine. Both names mean PyTorch's FSDP2, and plain PyTorch on one process."""
    ppo_mini_batch_size: int = II("data.train_batch_size")
    """Prompts per optimizer step (each with its n responses); must divide data.train_batch_size."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Sequences per forward and backward pass. It bounds memory and does not change the gradient.
    null: as many as fit ppo_max_token_len_per_gpu."""
    use_dynamic_bsz: bool = False
    """Cut micro-batches by tokens even if ppo_micro_batch_size_per_gpu is set."""
    ppo_max_token_len_per_gpu: int = 4096
    """Tokens per micro-batch when it is cut by tokens; a longer sequence gets one of its own."""
    ppo_epochs: int = 1
    """Passes over each batch."""
    shuffle: bool = False
    """Draw a new order of the samples for each pass before cutting mini-batches."""
    data_loader_seed: int | None = None
    """Seed of that order. null: trainer.seed."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    clip_ratio: float = 0.2
    """Clip range of the probability ratio, used where clip_ratio_low or clip_ratio_high is null."""
    clip_ratio_low: float | None = None
    """Lower clip range: the ratio is clipped at 1 - clip_ratio_low. null: clip_ratio."""
    clip_ratio_high: float | None = None
    """Upper clip range: the ratio is clipped at 1 + clip_ratio_high (DAPO uses 0.28). null: clip_ratio."""
    clip_ratio_c: float = 3.0
    """Dual clip (arXiv 1912.09729): bounds the loss of tokens with negative advantage; greater than 1."""
    loss_agg_mode: str = field(
        default="token-mean",
        metadata=allowed(
            "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
        ),
    )
    """How token losses become one number, over the whole mini-batch whatever the micro-batches: mean or sum over
    tokens; mean over sequences of the sum, the mean, or the sum divided by loss_scale_factor (Dr.GRPO)."""
    loss_scale_factor: float | None = None
    """Divisor of seq-mean-token-sum-norm. null: data.max_response_length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL divergence to the reference model to the loss."""
    kl_loss_coef: float = 0.001
    """Weight of that term."""
    kl_loss_type: str = field(default="low_var_kl", metadata=allowed(*KL_TYPES))
    """Estimator of the divergence (Schulman 2020): kl = k1, abs, mse = k2, low_var_kl = k3. With a final + its
    gradient is that of k2, which is unbiased on-policy."""
    recompute_old_log_prob: str = field(default="auto", metadata=allowed("auto", "always"))
    """auto: skip the old_log_prob stage when a batch gets one optimizer step, because the old log-probs are then the
    current ones. Not a key of verl's."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: TrainDtypeConfig = field(default_factory=TrainDtypeConfig)
