"""One side of an exchange of two live runs, from the keys ``trainer.share_data*``: what both must have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from crossrl.assemble import Parts
from crossrl.config.resolved import flatten
from crossrl.config.root import RunConfig
from crossrl.tape.compare import flatten as flat
from crossrl.tape.exchange import Exchange
from crossrl.tape.header import RECORD_VERSION

# Keys that may differ between the two sides, and why. All others must be equal.
MAY_DIFFER: dict[str, str] = {
    "trainer.default_local_dir": "each run has its own folder",
    "trainer.project_name": "a name",
    "trainer.experiment_name": "a name",
    "trainer.logger": "where metrics go",
    "trainer.log_val_generations": "what is shown",
    "trainer.*_data_dir": "where samples go",
    "trainer.device": "where a side computes",
    "trainer.num_threads": "where a side computes",
    "trainer.nnodes": "where a side computes",
    "trainer.n_gpus_per_node": "where a side computes",
    "cluster.*": "where a side computes",
    "trainer.save_freq": "each run has its own checkpoints",
    "trainer.max_actor_ckpt_to_keep": "each run has its own checkpoints",
    "trainer.resume_*": "each run has its own checkpoints",
    "trainer.test_freq": "each run validates for itself",
    "trainer.val_*": "each run validates for itself",
    "data.val_*": "each run validates for itself",
    "trainer.share_data*": "the roles differ, and the folder may have another path on another machine",
    "tape.*": "each run has its own tape",
    "cross.*": "which side this is",
    "data.train_files": "compared by content (data.digest)",
    "actor_rollout_ref.model.path": "compared by content (model.*, weights)",
    "actor_rollout_ref.model.tokenizer_path": "compared by content (tokenizer, chat_template)",
    "actor_rollout_ref.model.custom_chat_template": "compared by content (chat_template)",
    "actor_rollout_ref.model.override_config*": "compared by what it makes of the model (model.*)",
    "actor_rollout_ref.model.*": "how a side computes",
    "actor_rollout_ref.rollout.name": "the inference that is examined",
    "actor_rollout_ref.rollout.dtype": "the inference that is examined",
    "actor_rollout_ref.rollout.own_weights": "the inference that is examined",
    "actor_rollout_ref.rollout.max_*": "the inference that is examined",
    "actor_rollout_ref.rollout.replicas": "where a side computes",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "where a side computes",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "where a side computes",
    "actor_rollout_ref.rollout.free_cache_engine": "where a side computes",
    "actor_rollout_ref.rollout.enforce_eager": "the inference that is examined",
    "actor_rollout_ref.rollout.enable_prefix_caching": "the inference that is examined",
    "actor_rollout_ref.rollout.engine_kwargs*": "the inference that is examined",
    "actor_rollout_ref.rollout.top_*": "the inference that is examined",
    "actor_rollout_ref.rollout.val_kwargs.*": "each run validates for itself",
    "actor_rollout_ref.rollout.skip_*": "where responses are kept",
    "actor_rollout_ref.actor.*": "the training that is examined",
    "actor_rollout_ref.ref.*": "the training that is examined",
    "algorithm.*": "the training that is examined",
    "reward.*": "the side that trains scores",
}
# Stronger than the table above: both halves depend on these.
MUST_AGREE = ("algorithm.filter_groups.*", "actor_rollout_ref.actor.fsdp_config.model_dtype")
# How the attention of a model is computed, not what model it is.
_NOT_THE_MODEL = ("attn_implementation", "_attn_implementation", "use_cache", "torch_dtype", "dtype")

# Differences that a record of the other side may have: (rollout) how it sampled, (update) how it trained.
IGNORE: dict[str, tuple[str, ...]] = {
    "rollout": ("rollout.engine", "rollout.dtype", "rollout.own_weights", "rollout.top_p", "rollout.top_k", "model.*"),
    "update": (
        "objective.*", "plan.*", "optim.*", "model.*", "reads.advantages", "reads.loss_mask", "reads.old_log_probs",
        "reads.ref_log_probs", "reads.is_weights",
    ),
}  # fmt: skip

# The same of a record that this run itself published before it was started again: what it read of its own stages, which
# on an accelerator, or with a verifier that is not quite repeatable, may differ in the last bits.
OWN: dict[str, tuple[str, ...]] = {
    "rollout": (),
    "update": tuple(key for key in IGNORE["update"] if key.startswith("reads.")),
}


def open_exchange(
    cfg: RunConfig, parts: Parts, home: Path, facts: Mapping[str, Any], show: Callable[[str], None]
) -> Exchange | None:
    """This run's side as ``trainer.share_data`` says, not registered yet; None if it shares nothing.

    ``facts``: digests of data, tokenizer and template, and the model's configuration.
    """
    trainer = cfg.trainer
    if trainer.share_data is None:
        return None
    return Exchange(
        Path(trainer.share_data_dir),
        trainer.share_data,  # type: ignore[arg-type]  # one of two, checked with the config
        home,
        agreement(cfg, parts, facts),
        lambda: parts.trainer.digests("weights")["weights"],
        trainer.share_data_timeout,
        trainer.share_data_heartbeat,
        trainer.share_data_keep,
        show,
    )


def agreement(cfg: RunConfig, parts: Parts, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the other side must have too: keys of the configuration, and facts."""
    keys = {key: value for key, value in flatten(cfg).items() if not may_differ(key)}
    known = {k: v for k, v in flat(facts).items() if k.split(".")[-1] not in _NOT_THE_MODEL}
    if cfg.algorithm.filter_groups.enable:  # then rewards decide what is generated
        keys["reward.code"] = parts.scorer.digest
    return {
        **keys, **known, "total_steps": parts.total_steps,
        "rollout.fields": list(parts.stages["rollout"].writes), "record_version": RECORD_VERSION,
    }  # fmt: skip


def may_differ(key: str) -> bool:
    """Whether the two sides may have different values of configuration key ``key``."""
    return not any(fnmatchcase(key, p) for p in MUST_AGREE) and any(fnmatchcase(key, p) for p in MAY_DIFFER)
