"""How far two honest installations may be apart: what their rounding explains, and nothing more.

A difference is noise only where a *declared* difference (another number of threads, micro-batch size, attention kernel,
data type, package version) can cause it, and only up to the sizes below. With nothing declared the class is ``exact``,
and one unequal bit is a difference. The class is decided for each kind of work by itself, so that inference declared to
be in bfloat16 does not excuse another reward, advantage or update.

What the sizes below were measured on, in float32 on a CPU, side A packed, with micro-batches by tokens:

- the demo (a Llama of 108 thousand parameters), 4 steps of 4 prompts x 4 responses, two optimizer steps each. Side B,
  one change at a time and all at once: 2 threads; micro-batches of 1 and 3 samples, or of 16 tokens; 3 sequences
  decoded at once; the model's own padded forward pass, with sdpa and with eager attention; gradient checkpointing.
  Threads, sequences decoded at once and checkpointing changed no bit.
- SmolLM2-135M, 1 step of 2 prompts x 4 responses of 24 tokens; side B padded, micro-batches of 1, 3 sequences at once.

                                        demo       135M     allowed
    log-probs, nat: largest             1.2e-6     2.3e-5   2e-4
    log-probs, nat: mean                1.7e-7     4.5e-6   2e-5
    Adam's moments, relative            2.2e-6     2.4e-5   1e-3
    change of a weight, relative        1.1e-4     2.4e-4   0.02
    gradient norm, relative             1.1e-7     3.8e-6   1e-4 (135M: of a norm of about 1)
    loss                                2.9e-8     1.9e-7   1e-5

Weights in bfloat16 on one side alone (``model_dtype``) are no rounding: small updates are lost, which no limit covers.

Inference in bfloat16, training in float32: log-probs differ by up to 0.0089 nat, 0.0025 in the mean (demo), and 0.099
and 0.026 (135M); allowed are 0.6 and 0.1. Nothing else differs by a bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from crossrl import settings
from crossrl.config.resolved import flatten
from crossrl.config.root import RunConfig
from crossrl.tape.versions import DETERMINISTIC

Kind = Literal["exact", "float32", "bfloat16"]
KINDS: tuple[Kind, ...] = ("exact", "float32", "bfloat16")

# Keys that change the order of summation, or the kernel, and not what is computed.
_ARR = "actor_rollout_ref"
TRAINING_KEYS = (
    f"{_ARR}.actor.ppo_micro_batch_size_per_gpu",
    f"{_ARR}.actor.use_dynamic_bsz",
    f"{_ARR}.actor.ppo_max_token_len_per_gpu",
    f"{_ARR}.model.enable_gradient_checkpointing",
    f"{_ARR}.ref.log_prob_micro_batch_size_per_gpu",
    f"{_ARR}.ref.log_prob_use_dynamic_bsz",
    f"{_ARR}.ref.log_prob_max_token_len_per_gpu",
)
INFERENCE_KEYS = (f"{_ARR}.rollout.name", f"{_ARR}.rollout.max_num_seqs")
BOTH_KEYS = (
    "trainer.device",
    f"{_ARR}.model.use_remove_padding",
    f"{_ARR}.model.override_config.attn_implementation",
    f"{_ARR}.model.override_config._attn_implementation",
)
STAGE_WORK = {
    "rollout": "inference", "old_log_prob": "training", "ref_log_prob": "training", "update": "training",
    "reward": "host", "advantage": "host", "data": "host", "checkpoint": "host", "sync": "host",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limit:
    """What rounding explains of a difference: the largest over all values, and the mean of their sizes."""

    largest: float
    mean: float

    def explains(self, largest: float, mean: float) -> bool:
        """NaN and infinity are never explained."""
        return largest <= self.largest and mean <= self.mean


# nat. bfloat16 has 8 bits where float32 has 24.
LOG_PROBS = {"float32": Limit(2e-4, 2e-5), "bfloat16": Limit(0.6, 0.1)}
# Share of tokens at which a sampled token may flip, because the drawn number lies between the two cumulative sums: a
# constant, and so much for each entry of the vocabulary, since each is a boundary that moves a little. Measured:
# float32, vocabulary of 13, 0 of 1600 tokens; of 49 152, 1 of 192. bfloat16, 0 of 397 and 8 of 27.
FLIPS = {"float32": (1e-4, 1e-7), "bfloat16": (0.03, 1e-5)}
# Of Adam's moments, relative to the tensor's own norm: they are sums of gradients and their squares.
MOMENTS = {"float32": 1e-3, "bfloat16": 0.2}
# Of a tensor's change, relative. Adam divides a gradient by its own size, so where a gradient is nothing but rounding
# its sign, and the whole step of that entry, is noise.
CHANGE = {"float32": 0.02, "bfloat16": 0.5}
GRAD_NORM = {"float32": 1e-4, "bfloat16": 0.1}  # relative
LOSS = {"float32": 1e-5, "bfloat16": 0.02}  # absolute: a policy-gradient loss is a difference that is nearly zero
# One rounding of a weight, relative; and how many times larger than its effect on an update a difference may be: a sum
# of many terms is rounded many times. Measured at a step without any signal: 0.15 to 1.2 times.
ROUNDING = {"float32": 2.0**-23, "bfloat16": 2.0**-8}
SENSITIVITY = 8.0
# How many times B's difference from itself the sides' may be and still be B's own noise. B's is one draw, not a bound:
# of two draws of one normal number one is 8 times the other in 8 % of cases, but than all of 3 steps in 0.2 %.
FLOOR = 8.0
# Advantages and importance weights are float32 results of NumPy; other versions or processors may round otherwise.
HOST = Limit(2e-6, 2e-6)


@dataclass(frozen=True, slots=True)
class Numerics:
    """The class of each kind of work. ``host``: what NumPy and Python compute (rewards, advantages). ``score``: for
    tokens that the recorded side's sampler drew and the examiner's trainer scores: two ways to compute one number,
    never exact. ``because``: the settings that say so, such as ``trainer.num_threads: 1 against 2``."""

    inference: Kind
    training: Kind
    host: Kind
    score: Kind
    because: tuple[str, ...] = ()

    def of(self, stage: str) -> Kind:
        kind: Kind = getattr(self, STAGE_WORK[stage])
        return kind

    @property
    def loosest(self) -> Kind:
        return loosest(self.inference, self.training, self.host)


def loosest(*kinds: Kind) -> Kind:
    return max(kinds, key=KINDS.index)


def numerics_of(
    of: RunConfig,
    by: RunConfig,
    recorded: Mapping[str, str],
    here: Mapping[str, str],
    threads: tuple[int | None, int | None] = (None, None),
) -> Numerics:
    """Decided by the two sides' configurations, by the versions in the tape's headers (``recorded``) and those of this
    installation (``here``), and by the numbers of threads (None: not known, taken to be equal)."""
    a, b = _flat(of), _flat(by)
    because: list[str] = []

    def unequal(keys: tuple[str, ...]) -> bool:
        found = [k for k in keys if a.get(k) != b.get(k)]
        because.extend(f"{k}: {a.get(k)} against {b.get(k)}" for k in found)
        return bool(found)

    def differ(what: str, one: object, two: object) -> bool:
        if one != two:
            because.append(f"{what}: {one} against {two}")
        return one != two

    # Another version of this package may round otherwise too, but then that is what one wants to see.
    versions = [differ(k, recorded[k], here.get(k)) for k in sorted(recorded) if k != "crossrl"]
    both = unequal(BOTH_KEYS) | any(versions)
    both |= None not in threads and differ("threads", *threads)
    if any(v.get("device", "").startswith("cuda") and v.get(DETERMINISTIC) != "True" for v in (recorded, here)):
        because.append("a CUDA device without torch.use_deterministic_algorithms: its sums have no fixed order")
        both = True
    drawn, trained = ([f(c) for c in (of, by)] for f in (settings.rollout_dtype, training_dtype))
    inference = _kind(unequal(INFERENCE_KEYS) | differ("data type of inference", *drawn) | both, *drawn)
    training = _kind(unequal(TRAINING_KEYS) | differ("data type of training", *trained) | both, *trained)
    score = _kind(True, drawn[0], trained[1])
    return Numerics(inference, training, "float32" if any(versions) else "exact", score, tuple(because))


def unseen(numerics: Numerics) -> tuple[str, ...]:
    """What stays below the limits and so passes, in words, for each kind of work that is not exact."""

    def log_probs(kind: Kind) -> str:
        return f"{LOG_PROBS[kind].largest:g} nat ({LOG_PROBS[kind].mean:g} in the mean)"

    out = []
    if (kind := numerics.inference) != "exact":
        out.append(
            f"inference ({kind}): log-probs of the sampler off by {log_probs(kind)}, or by {log_probs(numerics.score)} "
            "from the trainer's where the tokens can be scored by it"
        )
    if (kind := numerics.training) != "exact":
        out.append(
            f"training ({kind}): log-probs of the trainer off by {log_probs(kind)}, the change of a tensor by "
            f"{CHANGE[kind]:.0%}, a moment of the optimizer by {MOMENTS[kind]:.1%}"
        )
    if numerics.host != "exact":
        out.append(f"rewards and advantages off by {HOST.largest:g}")
    return tuple(out)


def training_dtype(cfg: RunConfig) -> str:
    """In which forward and backward are computed: on an accelerator bfloat16, unless float32 is asked for."""
    wanted = cfg.actor_rollout_ref.actor.fsdp_config.dtype
    accelerated = cfg.trainer.device == "cuda" or (cfg.trainer.device == "auto" and torch.cuda.is_available())
    return "bfloat16" if accelerated and wanted in ("auto", "bfloat16") else settings.train_dtype(cfg)


def _kind(differs: bool, *dtypes: str) -> Kind:
    if not differs:
        return "exact"
    return "bfloat16" if "bfloat16" in dtypes else "float32"


def _flat(cfg: RunConfig) -> dict[str, Any]:
    """Dotted keys to values, those of ``model.override_config`` too."""
    flat = flatten(cfg)
    override = flat.pop(f"{_ARR}.model.override_config", None) or {}
    return {**flat, **{f"{_ARR}.model.override_config.{k}": v for k, v in override.items()}}
