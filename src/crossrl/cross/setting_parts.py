"""Which settings differ between the two sides, and which part of a run each of them concerns."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from crossrl.assemble import Parts
from crossrl.config.resolved import flatten
from crossrl.config.root import RunConfig
from crossrl.cross.findings import Part, Setting
from crossrl.tape.compare import flatten as flat_map
from crossrl.tape.compare import same
from crossrl.tape.texts import tokenizer_digest
from crossrl.tape.values import normal
from crossrl.taping import model_config, template_of

# The first pattern that fits counts. () : cannot change a result beyond rounding. Several: it concerns all of these.
_BOTH: tuple[Part, ...] = ("inference", "training")
PARTS: tuple[tuple[str, tuple[Part, ...]], ...] = (
    ("data.max_response_length", ("inference", "training", "reward")),
    ("data.val_*", ()),
    ("data.gen_batch_size", ("data",)),
    ("data.*", ("data",)),
    ("actor_rollout_ref.model.path", _BOTH),
    ("actor_rollout_ref.model.tokenizer_path", ("data", "inference")),
    ("actor_rollout_ref.model.custom_chat_template", ("data",)),
    ("actor_rollout_ref.model.override_config.*attn_implementation", ()),
    ("actor_rollout_ref.model.override_config*", _BOTH),
    ("actor_rollout_ref.model.*", ()),
    ("actor_rollout_ref.rollout.val_kwargs.*", ()),
    ("actor_rollout_ref.rollout.temperature", _BOTH),
    ("actor_rollout_ref.rollout.n", ("data", "inference", "training")),
    ("actor_rollout_ref.rollout.prompt_length", ("data",)),
    ("actor_rollout_ref.rollout.response_length", ("inference",)),
    ("actor_rollout_ref.rollout.max_num_seqs", ()),
    ("actor_rollout_ref.rollout.own_weights", ("weight sync",)),
    ("actor_rollout_ref.rollout.dtype", ("inference", "weight sync")),
    ("actor_rollout_ref.rollout.skip_*", ("inference",)),
    ("actor_rollout_ref.rollout.*", ("inference",)),
    ("actor_rollout_ref.ref.*", ()),
    ("actor_rollout_ref.actor.strategy", ()),
    ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", ()),
    ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", ()),
    ("actor_rollout_ref.actor.use_dynamic_bsz", ()),
    ("actor_rollout_ref.actor.*", ("training",)),
    ("reward.num_workers", ()),
    ("reward.overlong_buffer.log", ()),
    ("reward.*", ("reward",)),
    ("algorithm.filter_groups.*", ("data",)),
    ("algorithm.*", ("training",)),
    ("trainer.seed", ("data", "inference", "training")),
    ("trainer.total_*", ("training", "data")),  # what the learning rate's schedule spans
    ("trainer.*", ()),
    # Facts of a tape, not keys.
    ("data set", ("data",)),
    ("tokenizer", ("data", "inference")),
    ("chat template", ("data",)),
    ("reward code", ("reward",)),
    ("model.*", _BOTH),
    ("initial weights", _BOTH),
    ("version of *", ()),
    ("*", ()),
)
# What a planted fault is called, where a side runs and where its tape lies: no setting of the run itself.
LEFT_OUT = ("cross.*", "tape.*", "trainer.default_local_dir", "trainer.experiment_name", "trainer.logger",
            "trainer.stop_after_steps", "trainer.*_data_dir", "trainer.share_data*", "trainer.resume_*")  # fmt: skip


def parts_of(key: str) -> tuple[Part, ...]:
    """The parts of a run that ``key`` concerns.

    >>> parts_of("actor_rollout_ref.actor.optim.lr"), parts_of("trainer.num_threads")
    (('training',), ())
    """
    return next(parts for pattern, parts in PARTS if fnmatchcase(key, pattern))


def settings_between(of: Mapping[str, Any], by: Mapping[str, Any], of_is_a: bool) -> tuple[Setting, ...]:
    """The entries of two flat maps that differ; those that concern a part come first."""
    found = []
    for key in [*of, *(k for k in by if k not in of)]:
        if any(fnmatchcase(key, pattern) for pattern in LEFT_OUT) or same(of.get(key), by.get(key)):
            continue
        parts = parts_of(key)
        pair = (of.get(key), by.get(key)) if of_is_a else (by.get(key), of.get(key))
        found.append(Setting(key, *pair, parts[0] if parts else None))
    return tuple(sorted(found, key=lambda s: s.part is None))


def flat_settings(cfg: RunConfig) -> dict[str, Any]:
    """Dotted key to value; entries of ``model.override_config`` are keys of their own."""
    return {k: v for k, v in flat_map(normal(flatten(cfg))).items() if v != {}}


def facts_here(parts: Parts, cfg: RunConfig) -> dict[str, Any]:
    """What this side's files are, by digest, and the model's architecture."""
    return {
        "data set": parts.train_data.digest,
        "tokenizer": tokenizer_digest(parts.tokenizer),
        "chat template": template_of(parts, cfg),
        "reward code": parts.scorer.digest,
        **flat_map({"model": normal(model_config(parts))}),
    }


def facts_recorded(fingerprints: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The same of the run on the tape, from the fingerprints of its records by stage; what was not recorded is left
    out."""
    rollout, reward = fingerprints.get("rollout", {}), fingerprints.get("reward", {})
    found = {
        "data set": rollout.get("data", {}).get("digest"),
        "tokenizer": rollout.get("tokenizer", {}).get("digest"),
        "chat template": rollout.get("chat_template", {}).get("digest"),
        "reward code": reward.get("reward", {}).get("code"),
    }
    config = next((f["model"]["config"] for f in fingerprints.values() if f.get("model", {}).get("config")), None)
    return {k: v for k, v in found.items() if v} | (flat_map({"model": config}) if config else {})
