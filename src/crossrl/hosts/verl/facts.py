"""What the stages of a verl run depend on: fingerprints for its records, and what both sides of an exchange share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossrl.files import file_digest
from crossrl.hosts.verl.errors import HostError
from crossrl.hosts.verl.sampling import sampling
from crossrl.hosts.verl.settings import Settings
from crossrl.tape.header import RECORD_VERSION
from crossrl.tape.texts import template_digest, tokenizer_digest

# How a model is loaded, not what model it is.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "attn_implementation",
                  "_attn_implementation", "use_cache")  # fmt: skip
# Differences that an entry of the other side may have: how it samples and computes; how it trains.
_OF_ENGINE = (
    "engine", "dtype", "top_*", "seed", "engine_kwargs*", "quantization*", "qat*", "mtp*", "logprobs_mode",
    "max_model_len", "agent.custom_async_server*",
)  # fmt: skip
IGNORE: Mapping[str, tuple[str, ...]] = {
    "rollout": ("order", *(f"rollout.{key}" for key in _OF_ENGINE)),
    "update": ("order", "actor.*", "model.*"),
}
# The same, of an entry that this run published itself before it was started again.
OWN: Mapping[str, tuple[str, ...]] = {"rollout": ("order",), "update": ("order",)}


class Facts:
    """Of one run. Digests of files and of the model's configuration are made once."""

    def __init__(self, trainer: Any, settings: Settings) -> None:
        self.config, self.tokenizer, self.settings = trainer.config, trainer.tokenizer, settings
        self.total_steps = int(trainer.total_training_steps)
        self._fixed = {
            "data": {"digest": self._files(), **self._take(self.config.data, (
                "train_batch_size", "gen_batch_size", "max_prompt_length", "max_response_length", "shuffle", "seed",
                "prompt_key", "train_max_samples",
            ))},
            "tokenizer": {"digest": tokenizer_digest(self.tokenizer)},
            "chat_template": {"digest": self._template()},
            "model": {"config": model_config(self.config, self.tokenizer)},
        }  # fmt: skip

    def of(self, stage: str, weights: str) -> dict[str, Any]:
        """The fingerprint of ``stage``; ``weights``: digest of the actor's."""
        config, arr = self.config, self.config.actor_rollout_ref
        model = {"model": self._fixed["model"]}
        if stage == "rollout":
            return {**self._fixed, "rollout": sampling(arr.rollout), "weights": weights}
        if stage == "reward":
            return {"reward": _plain(config.reward) if "reward" in config else {}, "code": self._reward_code()}
        if stage == "old_log_prob":
            return {**model, "temperature": arr.rollout.temperature, "weights": weights}
        if stage == "ref_log_prob":
            return {**model, "temperature": arr.rollout.temperature}
        if stage == "advantage":
            return {"algorithm": _plain(config.algorithm)}
        actor = self._take(arr.actor, (
            "strategy", "ppo_mini_batch_size", "ppo_epochs", "shuffle", "clip_ratio", "clip_ratio_low",
            "clip_ratio_high", "grad_clip", "entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type",
            "loss_agg_mode", "optim",
        ))  # fmt: skip
        return {**model, "actor": actor}

    def agreement(self) -> dict[str, Any]:
        """What the two sides of an exchange must have in common, besides the weights that they begin with."""
        trainer, arr = self.config.trainer, self.config.actor_rollout_ref
        return {
            "host": "verl", "trainer": "v1" if self.settings.v1 else "v0", "record_version": RECORD_VERSION,
            "total_steps": self.total_steps, "data": self._fixed["data"], "model": self._fixed["model"],
            "tokenizer": self._fixed["tokenizer"], "chat_template": self._fixed["chat_template"],
            "rollout": self._take(arr.rollout, ("n", "temperature", "response_length", "calculate_log_probs")),
            "rollout.agent": self._agent(),
            # Both must be able to load the other's checkpoint files, one for each process.
            "actor.strategy": arr.actor.strategy, "processes": trainer.nnodes * trainer.n_gpus_per_node,
        }  # fmt: skip

    def _take(self, part: Any, keys: tuple[str, ...]) -> dict[str, Any]:
        return {key: _plain(part.get(key)) for key in keys if key in part}

    def _agent(self) -> Any:
        return (self.config.actor_rollout_ref.rollout.get("agent") or {}).get("default_agent_loop")

    def _files(self) -> str:
        files = self.config.data.train_files
        names = [files] if isinstance(files, str) else list(files)
        total = hashlib.sha256()
        for name in names:  # a file that is not local (hdfs) is known by its name alone
            path = Path(str(name)).expanduser()
            total.update((file_digest(path) if path.is_file() else str(name)).encode())
        return total.hexdigest()

    def _template(self) -> str:
        arguments = _plain(self.config.data.get("apply_chat_template_kwargs")) or {}
        return template_digest(getattr(self.tokenizer, "chat_template", None) or "", arguments)

    def _reward_code(self) -> str | None:
        for part in (self.config.get("reward"), self.config):
            path = ((part or {}).get("custom_reward_function") or {}).get("path")
            if path and Path(path).is_file():
                return file_digest(Path(path))
        return None


def model_config(config: Any, tokenizer: Any = None) -> dict[str, Any]:
    """The model's architecture, from its folder, with what ``override_config`` changes in it.

    ``tokenizer``: verl's, which knows the local copy of a model that is somewhere else. Raises ``HostError``.
    """
    from transformers import AutoConfig

    model = config.actor_rollout_ref.model
    path = model.get("hf_config_path") or model.path
    if "://" in str(path):
        path = _local_copy(str(path), tokenizer)
    found = AutoConfig.from_pretrained(path, trust_remote_code=bool(model.get("trust_remote_code", False)))
    override = _plain(model.get("override_config")) or {}
    whole = {**found.to_dict(), **override}
    return {key: value for key, value in whole.items() if key not in _NOT_THE_MODEL}


def _local_copy(path: str, tokenizer: Any) -> str:
    """Where verl has put the model of ``path``; with it came its tokenizer."""
    found = Path(str(getattr(tokenizer, "name_or_path", "")))
    if not (found / "config.json").is_file():
        raise HostError(
            f"actor_rollout_ref.model.path={path}: verl's copy of its config.json is not found here "
            f"(the tokenizer is from {str(found)!r}). Copy the model to a local folder and give that"
        )
    return str(found)


def _plain(value: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
