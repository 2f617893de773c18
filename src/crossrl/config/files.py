"""Config files: packaged ones by name, a user's own by folder or path, composed by Hydra (defaults lists)."""

from __future__ import annotations

import warnings
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from crossrl.config.errors import ConfigError

PACKAGED = Path(__file__).resolve().parent
# verl's own primary configs. What they set are verl's defaults; here they stand for ours.
VERL_NAMES = ("ppo_trainer", "ppo_megatron_trainer", "ppo_torchtitan_trainer", "ppo_veomni_trainer")


def packaged_names() -> list[str]:
    """Configs that come with the package, for ``--config-name``."""
    return sorted(p.stem for p in PACKAGED.glob("*.yaml"))


def read_file(config_name: str | None, config_path: str | None) -> tuple[DictConfig, str | None]:
    """The composed file, without defaults of ours, and a notice if it stands for something else.

    ``config_name``: a packaged name, a name in the folder ``config_path``, or a path to a YAML file.
    Raises ``ConfigError`` if there is no such file, or it cannot be read.
    """
    if config_name is None:
        if config_path is not None:
            raise ConfigError(f"--config-path {config_path} needs --config-name: the file in that folder to start from")
        return OmegaConf.create({}), None
    found = _find(config_name, config_path)
    if found is None:
        notice = (
            f"--config-name {config_name} is verl's own: it stands for the defaults here, the keys set on top count"
        )
        return OmegaConf.create({}), notice
    return _compose(found), None


def _find(config_name: str, config_path: str | None) -> Path | None:
    """The file; None for verl's own names where there is no file of that name."""
    stem = Path(config_name).name.removesuffix(".yaml").removesuffix(".yml")
    if config_path is not None:
        folder = Path(config_path).expanduser()
    elif config_name != stem and Path(config_name).expanduser().is_file():
        return Path(config_name).expanduser().resolve()
    else:
        folder = PACKAGED
    file = folder / f"{stem}.yaml"
    if file.is_file():
        return file.resolve()
    if stem in VERL_NAMES:
        return None
    there = sorted(p.stem for p in folder.glob("*.yaml")) if folder.is_dir() else []
    raise ConfigError(
        f"--config-name {config_name}: no file {file}; that folder has {', '.join(there) or 'no YAML files'}; "
        f"packaged names: {', '.join(packaged_names())}; a file of yours: --config-name path/to/x.yaml"
    )


def _compose(file: Path) -> DictConfig:
    # `defaults: [ppo_trainer, _self_]` in a user's file means our defaults; `[demo, _self_]` builds on a packaged one.
    bases: dict[str, object] = {f"{name}.yaml": {} for name in VERL_NAMES}
    bases |= {other.name: OmegaConf.load(other) for other in PACKAGED.glob("*.yaml")}
    bases.pop(file.name, None)
    repo = ConfigStore.instance().repo  # global to the process: put back as it was
    before = dict(repo)
    try:
        for name, node in bases.items():
            ConfigStore.instance().store(name=name, node=node)
        with warnings.catch_warnings(), initialize_config_dir(version_base="1.3", config_dir=str(file.parent)):
            warnings.filterwarnings("ignore", message=".*hydra.searchpath.*")  # verl's folder is not needed
            composed = compose(config_name=file.stem)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {error}") from error
    finally:
        repo.clear()
        repo.update(before)
    OmegaConf.set_struct(composed, False)
    return composed
