"""From a command line to one checked, resolved, typed configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from crossrl.config import files, grammar
from crossrl.config.errors import ConfigError
from crossrl.config.keys import at, default_tree, defaults, groups, is_verl_key, leaves, nearest, our_key, verl_groups
from crossrl.config.refusals import refuse, refuse_silent_gae
from crossrl.config.resolved import flatten
from crossrl.config.root import RunConfig
from crossrl.config.spellings import ALIASES, one_spelling, use_our_names
from crossrl.config.typed import build
from crossrl.config.validate import check

# verl keys that repeat another one: with another value they would ask for something else.
MUST_EQUAL = {
    "reward.reward_kwargs.max_resp_len": "data.max_response_length",
    "reward_model.reward_kwargs.max_resp_len": "data.max_response_length",
    "actor_rollout_ref.actor.rollout_n": "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.ref.rollout_n": "actor_rollout_ref.rollout.n",
}


# Keys of ours that mean something to this engine alone.
VLLM_ONLY = tuple(
    f"actor_rollout_ref.rollout.{name}"
    for name in (
        "tensor_model_parallel_size", "gpu_memory_utilization", "free_cache_engine", "enforce_eager",
        "enable_prefix_caching", "max_model_len", "engine_kwargs",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """``config``: resolved and checked. ``applied``: what the user set, under our names. ``no_effect``: keys and
    values that are valid and mean nothing here, or nothing to the chosen engine. ``warnings``: what the user should
    know before it runs."""

    config: RunConfig
    applied: tuple[tuple[str, Any], ...]
    no_effect: tuple[tuple[str, Any], ...]
    warnings: tuple[str, ...]


def load_config(
    overrides: Sequence[str] = (), config_name: str | None = None, config_path: str | None = None
) -> LoadedConfig:
    """Defaults, then the config file, then ``overrides`` (Hydra's grammar), resolved and checked.

    ``config_name``: see ``crossrl.config.files.read_file``. Raises ``ConfigError`` with all problems found.

    >>> loaded = load_config(["data.train_files=t.parquet", "actor_rollout_ref.model.path=m", "trainer.use_v1=True"])
    >>> loaded.config.actor_rollout_ref.rollout.name, loaded.no_effect
    ('hf', (('trainer.use_v1', True),))
    """
    file, notice = files.read_file(config_name, config_path)
    user = _user_tree(file, grammar.parse(overrides))
    _refuse_unknown(user)
    given, complete = _resolve(user)
    applied = use_our_names({path: v for path, v in given.items() if our_key(path) or path in ALIASES})
    no_effect = {path: v for path, v in given.items() if not (our_key(path) or path in ALIASES)}
    problems = refuse(no_effect) + refuse_silent_gae(given)
    warnings = [notice] if notice else []
    try:
        config = build({**complete, **{path: v for path, v in applied.items() if path in leaves()}})
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    wrong, more = check(config)
    problems += _unequal(no_effect, flatten(config)) + wrong
    if problems:
        raise ConfigError(problems)
    if config.actor_rollout_ref.rollout.name != "vllm":
        own = {path: v for path, v in applied.items() if path.startswith(VLLM_ONLY)}
        no_effect |= {path: v for path, v in own.items() if v != defaults().get(path)}  # a run's config.yaml has all
    listed = tuple((path, v) for path, v in no_effect.items() if path not in MUST_EQUAL)
    return LoadedConfig(config, tuple(applied.items()), listed, (*warnings, *more))


def _user_tree(file: DictConfig, overrides: Sequence[grammar.Override]) -> DictConfig:
    """What the user says, without our defaults; interpolations are not resolved yet."""
    try:
        grammar.apply(overrides, file)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    return file


def _refuse_unknown(user: DictConfig) -> None:
    """Raise ``ConfigError`` for keys that neither we nor verl have, and for groups used as keys."""
    problems = []
    tree = OmegaConf.to_container(user, resolve=False)
    assert isinstance(tree, dict)
    for path, value in _walk(tree, tree, ""):
        if path in groups() or (path in verl_groups() and value is not None):
            problems.append(f"{path}={value!r}: {path} is a group of keys; set the keys in it")
        elif not (our_key(path) or path in ALIASES or is_verl_key(path) or path in verl_groups()):
            near = nearest(path)
            hint = f"nearest: {', '.join(near)}" if near else "see `crossrl train --keys` for all of them"
            problems.append(f"unknown key {path}; {hint}")
    if problems:
        raise ConfigError(problems)


def _resolve(user: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the user set, by path; and a value for each key of ours, defaults included. Nothing is typed yet."""
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.merge(default_tree(), user), resolve=True)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if isinstance(error, InterpolationResolutionError) else ""
        raise ConfigError(f"{where}{str(error).splitlines()[0]}") from error
    unresolved = OmegaConf.to_container(user, resolve=False)
    given = dict(_walk(unresolved, tree, ""))
    return given, {path: one_spelling(path, at(tree, path)) for path in leaves()}


def _walk(node: Any, resolved: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Leaves of ``node`` with their values in ``resolved``; unset (???) and empty groups are left out."""
    for name, child in node.items():
        path = f"{prefix}{name}"
        value = resolved[name]
        if isinstance(value, dict) and (value or not our_key(path)):
            yield from _walk(child if isinstance(child, dict) else value, value, f"{path}.")
        elif value != "???":
            yield path, value


def _unequal(no_effect: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    return [
        f"{path}={no_effect[path]} but {other}={ours[other]}: they must be the same here; remove {path}"
        for path, other in MUST_EQUAL.items()
        if path in no_effect and no_effect[path] != ours[other]
    ]
