"""The configuration of a run: typed dataclasses under verl's key names, read with Hydra's override grammar.

Start with ``load_config``; the keys are in one file per component (``data``, ``actor``, ``rollout``, ...).
"""

from crossrl.config.describe import describe
from crossrl.config.errors import ConfigError
from crossrl.config.load import LoadedConfig, load_config
from crossrl.config.resolved import digest, flatten, to_yaml
from crossrl.config.root import RunConfig

__all__ = ["ConfigError", "LoadedConfig", "RunConfig", "describe", "digest", "flatten", "load_config", "to_yaml"]
