"""Checks across keys, before anything runs. Each problem shows the arithmetic and the nearest valid values."""

from __future__ import annotations

import re

from crossrl.config.algorithm import RolloutCorrectionConfig
from crossrl.config.ranges import check_values
from crossrl.config.resolved import flatten
from crossrl.config.rollout import ENGINES
from crossrl.config.root import RunConfig

# Estimators whose baseline is made from the other members of the group.
GROUP_BASELINE = ("grpo", "rloo", "reinforce_plus_plus_baseline")


def check(config: RunConfig) -> tuple[list[str], list[str]]:
    """Problems, any of which forbids the run, and warnings. Needs no file, model or device."""
    problems = check_values(flatten(config))
    if problems:
        return problems, []
    for part in (
        _required,
        _batches,
        _lengths,
        _estimator,
        _correction,
        _sampling,
        _validation,
        _engine,
        _processes,
        _sharing,
        _run,
    ):
        problems += part(config)
    return problems, _warnings(config)


def _required(c: RunConfig) -> list[str]:
    problems = []
    if not c.data.train_files:
        problems.append("data.train_files is not set: want a Parquet or JSON Lines file, or reasoning_gym:NAME")
    if not c.actor_rollout_ref.model.path:
        problems.append("actor_rollout_ref.model.path is not set: want the folder of a Hugging Face language model")
    return problems


def _batches(c: RunConfig) -> list[str]:
    batch, mini = c.data.train_batch_size, c.actor_rollout_ref.actor.ppo_mini_batch_size
    mini_key = "actor_rollout_ref.actor.ppo_mini_batch_size"
    problems = []
    if mini > batch:
        problems.append(
            f"{mini_key}={mini} prompts is more than data.train_batch_size={batch}: use {mini_key}={batch} "
            f"(one optimizer step per batch) or data.train_batch_size={mini}"
        )
    elif batch % mini:
        divisors = sorted((d for d in range(1, batch + 1) if batch % d == 0), key=lambda d: (abs(d - mini), d))[:2]
        below = batch - batch % mini
        problems.append(
            f"data.train_batch_size={batch} is not a multiple of {mini_key}={mini} "
            f"({batch} = {batch // mini} x {mini} + {batch % mini}): use {mini_key}={divisors[0]} or {divisors[1]}, "
            f"or data.train_batch_size={below} or {below + mini}"
        )
    gen = c.data.gen_batch_size
    if gen is not None and gen != batch and not c.algorithm.filter_groups.enable:
        problems.append(
            f"data.gen_batch_size={gen} has no effect without algorithm.filter_groups.enable=True: remove it, or set "
            f"it to data.train_batch_size={batch}"
        )
    return problems


def _lengths(c: RunConfig) -> list[str]:
    rollout, data, buffer = c.actor_rollout_ref.rollout, c.data, c.reward.overlong_buffer
    problems = []
    for name, mine, key, theirs in (
        ("prompt_length", rollout.prompt_length, "max_prompt_length", data.max_prompt_length),
        ("response_length", rollout.response_length, "max_response_length", data.max_response_length),
    ):
        if mine != theirs:
            problems.append(
                f"actor_rollout_ref.rollout.{name}={mine} but data.{key}={theirs}: they must be the same; "
                f"remove actor_rollout_ref.rollout.{name}"
            )
    if buffer.enable and not 1 <= buffer.len <= data.max_response_length:
        problems.append(
            f"reward.overlong_buffer.len={buffer.len}: want 1 to data.max_response_length={data.max_response_length}"
        )
    if buffer.enable and buffer.penalty_factor <= 0:
        problems.append(f"reward.overlong_buffer.penalty_factor={buffer.penalty_factor}: want a number above 0")
    return problems


def _estimator(c: RunConfig) -> list[str]:
    n, name, filtering = c.actor_rollout_ref.rollout.n, c.algorithm.adv_estimator, c.algorithm.filter_groups
    problems = []
    if name == "gae":
        problems.append(
            "algorithm.adv_estimator=gae needs a critic, which this version does not have: use grpo, rloo, "
            "reinforce_plus_plus, reinforce_plus_plus_baseline or remax"
        )
    if n == 1 and name in GROUP_BASELINE:
        problems.append(
            f"actor_rollout_ref.rollout.n=1 with algorithm.adv_estimator={name}: a group of one has no baseline, every "
            "advantage would be 0; use actor_rollout_ref.rollout.n=2 or more, or "
            "algorithm.adv_estimator=reinforce_plus_plus or remax"
        )
    if filtering.enable and n == 1:
        problems.append(
            "algorithm.filter_groups.enable=True with actor_rollout_ref.rollout.n=1: the members of a group of one "
            "cannot differ, so every group would be left out; use actor_rollout_ref.rollout.n=2 or more"
        )
    if filtering.enable and filtering.metric == "seq_final_reward" and c.algorithm.use_kl_in_reward:
        problems.append(
            "algorithm.filter_groups.metric=seq_final_reward is the reward after the KL penalty, which is not known "
            "when groups are filtered here: use algorithm.filter_groups.metric=reward"
        )
    return problems


def _correction(c: RunConfig) -> list[str]:
    correction, key = c.algorithm.rollout_correction, "algorithm.rollout_correction"
    problems = []
    corrected = correction.rollout_is or correction.rollout_rs
    if corrected:
        problems += _correction_values(correction)
    if correction.bypass_mode and corrected:
        problems.append(
            f"{key}.bypass_mode=True takes the sampler's log-probs for the old ones, so every importance weight is 1: "
            f"remove {key}.rollout_is and rollout_rs, or bypass_mode"
        )
    return problems


def _correction_values(correction: RolloutCorrectionConfig) -> list[str]:
    # Only here: brings PyTorch in, and the grammar of thresholds belongs to the algorithm.
    from crossrl.algorithms.correction import CorrectionConfig
    from crossrl.algorithms.errors import AlgorithmError

    try:
        CorrectionConfig(
            correction.rollout_is,
            correction.rollout_is_threshold,
            correction.rollout_is_batch_normalize,
            correction.rollout_rs,
            correction.rollout_rs_threshold,
        )
    except AlgorithmError as error:
        return [f"algorithm.{error}"]
    return []


def _sampling(c: RunConfig) -> list[str]:
    val, problems = c.actor_rollout_ref.rollout.val_kwargs, []
    if not c.actor_rollout_ref.rollout.do_sample:
        problems.append(
            "actor_rollout_ref.rollout.do_sample=False: greedy responses of a group are all the same, there is nothing "
            "to learn from; remove it"
        )
    if val.n > 1 and (not val.do_sample or val.temperature == 0):
        problems.append(
            f"actor_rollout_ref.rollout.val_kwargs.n={val.n} greedy responses are {val.n} times the same: add "
            "actor_rollout_ref.rollout.val_kwargs.do_sample=True and "
            "actor_rollout_ref.rollout.val_kwargs.temperature=1.0, or use n=1"
        )
    if val.do_sample and val.temperature == 0:
        problems.append(
            "actor_rollout_ref.rollout.val_kwargs.do_sample=True with temperature=0: set a temperature above 0, or "
            "do_sample=False"
        )
    return problems


def _validation(c: RunConfig) -> list[str]:
    if c.data.val_files:
        return []
    return [
        f"{key} validates, but data.val_files is empty: set data.val_files, or remove it"
        for key, on in (
            (f"trainer.test_freq={c.trainer.test_freq}", c.trainer.test_freq > 0),
            ("trainer.val_only=True", c.trainer.val_only),
        )
        if on
    ]


def _engine(c: RunConfig) -> list[str]:
    rollout, key = c.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    problems = []
    if rollout.name not in ("hf", "vllm"):
        problems.append(
            f"{key}.name={rollout.name} is not available in this version: add {key}.name=hf, the embedded engine, or "
            f"{key}.name=vllm"
        )
    known = {*ENGINES, "trtllm"}  # the last one is verl's
    if set(rollout.engine_kwargs) - known:
        odd = sorted(set(rollout.engine_kwargs) - known)[0]
        problems.append(f"{key}.engine_kwargs.{odd}: want the name of an engine first, as in {key}.engine_kwargs.vllm")
    if rollout.name == "vllm" and c.actor_rollout_ref.model.override_config:
        odd = ", ".join(c.actor_rollout_ref.model.override_config)
        problems.append(
            f"actor_rollout_ref.model.override_config ({odd}) with {key}.name=vllm: vLLM reads the model folder, so it "
            "would be another model than the trainer's. Write the changes into the folder's config.json"
        )
    needed = c.data.max_prompt_length + c.data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < needed:
        problems.append(
            f"{key}.max_model_len={rollout.max_model_len} is less than data.max_prompt_length="
            f"{c.data.max_prompt_length} + data.max_response_length={c.data.max_response_length} = {needed}: use "
            f"{key}.max_model_len={needed}, or remove it"
        )
    return problems


def _processes(c: RunConfig) -> list[str]:
    rollout, t = c.actor_rollout_ref.rollout, c.trainer
    spread = rollout.tensor_model_parallel_size if rollout.name == "vllm" else 1
    total = t.nnodes * t.n_gpus_per_node
    problems = []
    if rollout.replicas is None and total % spread and spread > 1:
        sizes = [n for n in range(1, total + 1) if total % n == 0]
        problems.append(
            f"trainer.nnodes={t.nnodes} x trainer.n_gpus_per_node={t.n_gpus_per_node} = {total} processes are not a "
            f"multiple of actor_rollout_ref.rollout.tensor_model_parallel_size={spread}: use one of "
            f"{', '.join(map(str, sizes))}, or say how many engines there are with actor_rollout_ref.rollout.replicas"
        )
    if t.nnodes > 1 and c.cluster.launcher == "local":
        problems.append(f"trainer.nnodes={t.nnodes} with cluster.launcher=local: several machines need Ray; remove it")
    return problems


def _sharing(c: RunConfig) -> list[str]:
    t, problems = c.trainer, []
    if t.share_data is None:
        return []
    if c.actor_rollout_ref.rollout.skip_rollout:
        problems.append(
            f"trainer.share_data={t.share_data} with actor_rollout_ref.rollout.skip_rollout=True: both say where "
            "responses come from. Leave one out"
        )
    if c.tape.mode in ("replay", "verify"):
        problems.append(
            f"trainer.share_data={t.share_data} with tape.mode={c.tape.mode}: both say where the output of a stage "
            "comes from. Use tape.mode=record or off"
        )
    if t.val_only:
        problems.append(f"trainer.share_data={t.share_data} with trainer.val_only=True: there is nothing to share")
    if t.share_data_keep is not None and t.save_freq <= 0:
        problems.append(
            f"trainer.share_data_keep={t.share_data_keep} needs trainer.save_freq: an entry is removed once both runs "
            "have a checkpoint after it, so without checkpoints none ever is"
        )
    return problems


def _run(c: RunConfig) -> list[str]:
    t, problems = c.trainer, []
    if t.resume_mode == "resume_path" and not t.resume_from_path:
        problems.append("trainer.resume_mode=resume_path needs trainer.resume_from_path: the checkpoint folder")
    if t.resume_mode != "resume_path" and t.resume_from_path:
        problems.append(
            f"trainer.resume_from_path={t.resume_from_path} has no effect with trainer.resume_mode={t.resume_mode}: "
            "add trainer.resume_mode=resume_path"
        )
    if c.tape.steps is not None and not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", c.tape.steps):
        problems.append(f"tape.steps={c.tape.steps}: want step numbers and ranges such as 1-10,20")
    return problems


def _warnings(c: RunConfig) -> list[str]:
    actor, rollout, algorithm = c.actor_rollout_ref.actor, c.actor_rollout_ref.rollout, c.algorithm
    found = []
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        found.append("the KL divergence counts twice: in the loss (use_kl_loss) and in the reward (use_kl_in_reward)")
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        found.append("actor_rollout_ref.actor.kl_loss_coef=0: the KL divergence is measured but not part of the loss")
    if algorithm.gamma != 1 and algorithm.adv_estimator != "reinforce_plus_plus":
        found.append(f"algorithm.gamma={algorithm.gamma} has no effect with adv_estimator={algorithm.adv_estimator}")
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        found.append(
            f"loss_scale_factor={actor.loss_scale_factor} has no effect with loss_agg_mode={actor.loss_agg_mode}"
        )
    truncated = rollout.top_p < 1 or rollout.top_k > 0
    if truncated and (algorithm.rollout_correction.rollout_is or algorithm.rollout_correction.rollout_rs):
        found.append(
            f"top_p={rollout.top_p}, top_k={rollout.top_k}: the sampler's log-probs are those of a truncated "
            "distribution, so importance weights against training's are not ratios of the same thing"
        )
    if rollout.val_kwargs.temperature > 0 and not rollout.val_kwargs.do_sample:
        found.append("validation is greedy: val_kwargs.temperature has no effect while val_kwargs.do_sample=False")
    if actor.fsdp_config.model_dtype == "bfloat16" and actor.optim.lr < 1e-4:
        found.append(
            f"fsdp_config.model_dtype=bfloat16 with optim.lr={actor.optim.lr}: most updates are smaller than the "
            "spacing of bfloat16 numbers and are lost; use model_dtype=float32 (dtype=bfloat16 for speed on a GPU)"
        )
    return found + _slow_dtypes(c)


def _slow_dtypes(c: RunConfig) -> list[str]:
    asked = {
        "actor_rollout_ref.actor.fsdp_config.dtype": c.actor_rollout_ref.actor.fsdp_config.dtype,
        "actor_rollout_ref.actor.fsdp_config.model_dtype": c.actor_rollout_ref.actor.fsdp_config.model_dtype,
    }
    keys = [key for key, dtype in asked.items() if dtype == "bfloat16"]
    if not keys or not _runs_on_cpu(c.trainer.device):
        return []
    return [
        f"{key}=bfloat16 on a CPU: without bfloat16 instructions (AVX2) it was measured 6 times slower forward and 17 "
        f"times backward than float32, the default; add {key}=float32"
        for key in keys
    ]


def _runs_on_cpu(device: str) -> bool:
    if device == "auto":
        import torch  # only here: takes a second, and most configs do not get here

        return not torch.cuda.is_available()
    return device == "cpu"
