"""``crossrl train``: train a policy; ``python train.py`` is the same."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crossrl.assemble import Parts
    from crossrl.config import LoadedConfig
    from crossrl.report import Reporter

DESCRIPTION = """\
Train a policy with RL. Settings are Hydra overrides with verl's key names: a launch script written for verl's
GRPO starts here. Keys that mean nothing here are accepted and listed once; an unknown key is an error.
"""
EPILOG = """\
examples:
  crossrl train --config-name demo                      sort six digits; makes its own model and data
  crossrl train --config-name demo trainer.total_training_steps=40 actor_rollout_ref.rollout.n=8
  crossrl train data.train_files=train.parquet data.val_files=test.parquet \\
      actor_rollout_ref.model.path=smollm2 actor_rollout_ref.rollout.n=8 \\
      data.train_batch_size=16 data.max_response_length=64 actor_rollout_ref.actor.optim.lr=1e-6 \\
      trainer.test_freq=5 trainer.save_freq=5 trainer.default_local_dir=OUT

data: Parquet or JSON Lines with the columns prompt (chat messages or text), data_source, reward_model.ground_truth,
extra_info; or a reasoning-gym task: data.train_files='reasoning_gym:chain_sum?size=500&seed=1'.
rewards: by data_source (exact, numeric, math_verify, ...), or your own compute_score in
reward.custom_reward_function.path=FILE.py.

The run's folder (trainer.default_local_dir) gets metrics.jsonl, checkpoints and the resolved configuration. Started
again with the same folder, the run goes on from its last checkpoint.
All keys, with what they mean: crossrl train --keys, or only some: crossrl train --keys algorithm"""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="train a policy",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config-name", metavar="NAME", help="a configuration of the package, or of --config-path")
    parser.add_argument("--config-path", metavar="DIR", help="folder of your own configurations (YAML)")
    parser.add_argument(
        "--keys",
        metavar="PREFIX",
        nargs="?",
        const="",
        type=key_prefix,
        help="list all keys (or those below PREFIX), and stop",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as trainer.total_training_steps=40")
    return parser


def key_prefix(text: str) -> str:
    """``PREFIX`` of the command line. An empty list would look as if a key had no meaning."""
    if text:
        from crossrl.config.keys import groups, leaves, nearest_prefixes

        if not any(path.startswith(text) for path in leaves()):
            near = nearest_prefixes(text) or sorted(group for group in groups() if "." not in group)
            raise argparse.ArgumentTypeError(f"no key begins with {text!r}; nearest: {', '.join(near)}")
    return text


def run(args: argparse.Namespace) -> int:
    if args.keys is not None:
        from crossrl.config.describe import describe

        print(describe(args.keys))
        return 0
    return train(args.overrides, args.config_name, args.config_path)


def train(overrides: list[str], config_name: str | None = None, config_path: str | None = None) -> int:
    """Train as configured; returns the exit code: 0 when all planned steps are done."""
    from crossrl.config import load_config

    loaded = load_config(overrides, config_name, config_path)
    loaded, plant = planting(loaded)
    with open_reporter(loaded) as reporter:
        reporter.stage("loading PyTorch")
        import transformers

        transformers.utils.logging.disable_progress_bar()  # a bar per model file says nothing here
        if config_name == "demo" and config_path is None:
            prepare_demo(loaded, reporter)
        from crossrl.trainer import Trainer

        return Trainer(loaded, reporter, plant=plant).fit()


def planting(loaded: LoadedConfig) -> tuple[LoadedConfig, Callable[[Parts], None]]:
    """What puts the faults of ``cross.plant`` into the run, and the configuration with a warning that they are there.

    Raises ``FaultError``, before anything is loaded, for a fault that does not exist or would have no effect.
    """
    text = loaded.config.cross.plant
    if not text:
        return loaded, lambda parts: None
    from crossrl.cross import faults

    warning = faults.warning(faults.chosen(text, loaded.config))
    loaded = dataclasses.replace(loaded, warnings=(*loaded.warnings, warning))
    return loaded, functools.partial(faults.plant, text, cfg=loaded.config)


def open_reporter(loaded: LoadedConfig) -> Reporter:
    """The reporter that ``trainer.*`` asks for."""
    from crossrl.report import Reporter, RunName

    trainer = loaded.config.trainer
    folder = Path(trainer.default_local_dir)
    config = dataclasses.asdict(loaded.config)
    name = RunName(folder, trainer.project_name, trainer.experiment_name, config)
    return Reporter.open(
        trainer.logger, name, trainer.rollout_data_dir, trainer.validation_data_dir, trainer.log_val_generations
    )


def prepare_demo(loaded: LoadedConfig, reporter: Reporter) -> None:
    """Make the files that the demo's configuration names, or check them, unless it was told to use others."""
    from crossrl.demo.files import needs, prepare

    config = loaded.config
    paths = [
        config.actor_rollout_ref.model.path,
        *config.data.train_files,
        *config.data.val_files,
        config.reward.custom_reward_function.path,
    ]
    if needs(paths):
        prepare(reporter.message, progress=lambda done, total: reporter.stage("warming up the model", done, total))
