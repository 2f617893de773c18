"""verl keys that we cannot honour and that change the result: anything but a harmless value is an error.

Everything else that is valid in verl and has no effect here (placement, offloading, kernels, profilers, the inside
of inference servers) is accepted and listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """``key``: a path, in which ``*`` stands for anything. ``harmless``: values with which nothing is lost."""

    key: str
    harmless: tuple[Any, ...]
    why: str


_NO_LORA = "LoRA is not available in this version: all weights are trained"
_NO_CRITIC = "there is no critic in this version: use algorithm.adv_estimator=grpo, rloo, reinforce_plus_plus or remax"
_NO_TURNS = "multi-turn rollouts and tools are not available in this version"
_NO_REWARD_MODEL = "reward models are not available in this version: score with reward.custom_reward_function.path"
_SCHEDULE = "set actor_rollout_ref.actor.optim.lr_scheduler_type, min_lr_ratio and lr_warmup_steps instead"
_DATASET = "own data set classes are not available in this version: write the rows to Parquet or JSON Lines"
_SKIP = "use actor_rollout_ref.rollout.skip_rollout=True and actor_rollout_ref.rollout.skip_dump_dir=DIR instead"
_MANAGERS = (None, "naive", "dapo", "prime", "remote", "rate_limited")
_ALL = ["model", "optimizer", "extra"]
_ACTOR, _MODEL, _ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))

REFUSALS: tuple[Refusal, ...] = (
    Refusal(f"{_MODEL}.lora_rank", (None, 0), _NO_LORA),
    Refusal(f"{_MODEL}.lora.rank", (None, 0), _NO_LORA),
    Refusal(f"{_MODEL}.lora_adapter_path", (None,), _NO_LORA),
    Refusal(f"{_MODEL}.lora.adapter_path", (None,), _NO_LORA),
    Refusal(f"{_MODEL}.external_lib", (None,), "models from another package are not available in this version"),
    Refusal(f"{_MODEL}.hf_config_path", (None,), "the model's config is read from actor_rollout_ref.model.path"),
    Refusal(f"{_MODEL}.mtp.enable*", (None, False), "multi-token prediction is not available in this version"),
    Refusal(f"{_ACTOR}.freeze_vision_tower", (None, False), "freezing weights is not available in this version"),
    Refusal(f"{_ACTOR}.load_weight", (None, True), "a policy always starts from the weights of its folder"),
    Refusal(
        f"{_ACTOR}.checkpoint.load_contents",
        (None, _ALL, [*_ALL, "hf_model"]),
        "a resumed run takes everything from its checkpoint; to start from the weights alone, set "
        "actor_rollout_ref.model.path to the model folder of the checkpoint",
    ),
    Refusal(
        f"{_ACTOR}.policy_loss.rollout_correction.*",
        (None,),
        "set algorithm.rollout_correction, which verl copies here",
    ),
    Refusal(f"{_ACTOR}.use_rollout_log_probs", (None, False), "set algorithm.rollout_correction.bypass_mode=True"),
    Refusal(f"{_ACTOR}.*qat.enable", (None, False), "training with quantised weights is not available in this version"),
    Refusal(f"{_ACTOR}.*router_replay.mode", (None, "disabled"), "router replay is not available in this version"),
    Refusal(f"{_ACTOR}.optim.optimizer", (None, "AdamW", "adamw", "adam", "_AdamW"), "the optimizer is AdamW"),
    Refusal(f"{_ACTOR}.optim.optimizer_impl", (None, "torch.optim"), "the optimizer is AdamW of torch.optim"),
    Refusal(f"{_ACTOR}.optim.name", (None, "AdamW"), "the optimizer is AdamW"),
    Refusal(
        f"{_ACTOR}.optim.override_optimizer_config*",
        (None, {}),
        "set betas, eps and weight_decay under actor_rollout_ref.actor.optim",
    ),
    Refusal(f"{_ACTOR}.optim.weight_decay_incr_style", (None, "constant"), "weight decay is constant"),
    Refusal(f"{_ACTOR}.optim.lr_decay_steps", (None,), "set actor_rollout_ref.actor.optim.total_training_steps"),
    Refusal(f"{_ACTOR}.optim.lr_warmup_init", (None, 0), "the warm-up starts from 0"),
    Refusal(f"{_ACTOR}.optim.lr_start", (None, 0), "the warm-up starts from 0"),
    Refusal(f"{_ACTOR}.optim.lr_decay_ratio", (None, 1), _SCHEDULE),
    Refusal(f"{_ACTOR}.optim.min_lr", (None, 0), _SCHEDULE),
    Refusal(f"{_ACTOR}.optim.lr_min", (None, 0), _SCHEDULE),
    Refusal(f"{_ACTOR}.optim.min_lr_factor", (None, 0), _SCHEDULE),
    Refusal(f"{_ACTOR}.optim.decay_type", (None,), _SCHEDULE),
    Refusal("actor_rollout_ref.ref.model.path", (None,), "the reference is the policy at the start of the run"),
    Refusal(f"{_ROLLOUT}.multi_turn.enable", (None, False), _NO_TURNS),
    Refusal(f"{_ROLLOUT}.multi_turn.*_path", (None,), _NO_TURNS),
    Refusal(f"{_ROLLOUT}.agent.default_agent_loop", (None, "single_turn_agent"), _NO_TURNS),
    Refusal(f"{_ROLLOUT}.agent.agent_loop_*", (None,), _NO_TURNS),
    Refusal(f"{_ROLLOUT}.over_sample_rate", (None, 0), "every response is generated to its end"),
    Refusal(f"{_ROLLOUT}.repetition_penalty", (None, 1), "a repetition penalty is not available in this version"),
    Refusal(f"{_ROLLOUT}.quantization", (None,), "sampling with quantised weights is not available in this version"),
    Refusal(
        f"{_ROLLOUT}.logprobs_mode",
        (None, "processed_logprobs"),
        "log-probs are those of the distribution that was sampled from",
    ),
    Refusal(
        f"{_ROLLOUT}.enable_rollout_routing_replay", (None, False), "router replay is not available in this version"
    ),
    Refusal(f"{_ROLLOUT}.skip.enable", (None, False), _SKIP),
    Refusal("skip.*.enable", (None, False), _SKIP),
    Refusal("algorithm.use_pf_ppo", (None, False), "PF-PPO is not available in this version"),
    Refusal(
        "algorithm.rollout_correction.loss_type",
        (None, "ppo_clip"),
        "bypass mode uses the loss of actor_rollout_ref.actor.policy_loss.loss_mode",
    ),
    Refusal("reward.reward_model.enable", (None, False), _NO_REWARD_MODEL),
    Refusal("reward_model.enable", (None, False), _NO_REWARD_MODEL),
    Refusal("reward_model.model.path", (None,), _NO_REWARD_MODEL),
    Refusal("reward.reward_manager.name", _MANAGERS, "write it as reward.custom_reward_function.path"),
    Refusal("reward.reward_manager.source", (None, "register"), "write it as reward.custom_reward_function.path"),
    Refusal("reward.reward_manager.module.path", (None,), "write it as reward.custom_reward_function.path"),
    Refusal("reward_model.reward_manager", _MANAGERS, "write it as reward.custom_reward_function.path"),
    Refusal("reward_model.reward_loop_*", (None, "register"), "write it as reward.custom_reward_function.path"),
    Refusal("*custom_reward_function.reward_kwargs.*", (None,), "bind the arguments in the Python file itself"),
    Refusal("reward.reward_kwargs.overlong_buffer_cfg.*", (None,), "want enable, len, penalty_factor or log there"),
    Refusal(
        "reward_model.reward_kwargs.overlong_buffer_cfg.*", (None,), "want enable, len, penalty_factor or log there"
    ),
    Refusal("*sandbox_fusion.url", (None,), "a code sandbox is not available in this version"),
    Refusal("data.custom_cls.path", (None,), _DATASET),
    Refusal("data.datagen.path", (None,), _DATASET),
    Refusal("data.sampler.class_path", (None,), "own samplers are not available in this version"),
    Refusal("data.*tool*_path", (None,), _NO_TURNS),
    Refusal("critic.enable", (None, False), _NO_CRITIC),
    Refusal("distillation.enabled", (None, False), "distillation is not available in this version"),
    Refusal("trainer.v1.trainer_mode", (None, "sync"), "every step trains on responses of the current weights"),
    Refusal("trainer.checkpoint_callback_class", (None,), "callbacks are not available in this version"),
)


def refuse(given: Mapping[str, Any]) -> list[str]:
    """What is wrong with the verl keys in ``given`` (dotted path to value), one message each."""
    problems = []
    for path, value in given.items():
        rule = next((r for r in REFUSALS if fnmatchcase(path, r.key)), None)
        if rule is None or any(_same(value, ok) for ok in rule.harmless):
            continue
        harmless = ", ".join(_show(ok) for ok in rule.harmless)
        problems.append(
            f"{path}={_show(value)} would change the result and cannot be honoured: {rule.why} ({harmless} is fine)"
        )
    return problems


def refuse_silent_gae(given: Mapping[str, Any]) -> list[str]:
    """A script that sets up a critic and names no estimator means gae, verl's default; ours is grpo."""
    critic = [path for path in given if path.startswith("critic.")]
    if critic and "algorithm.adv_estimator" not in given:
        return [f"{critic[0]} sets up a critic and algorithm.adv_estimator is not set, which means gae: {_NO_CRITIC}"]
    return []


def _same(value: Any, harmless: Any) -> bool:
    if isinstance(value, list) and isinstance(harmless, list):  # contents, in any order
        return set(map(str, value)) == set(harmless)
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


def _show(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)
