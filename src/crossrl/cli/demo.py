"""``crossrl demo``: ``crossrl train --config-name demo`` with a curve, samples and what to try next."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = """\
Train a small policy to sort six digits, with GRPO, on this machine's CPU: about a minute on two cores. Everything
is an ordinary file: the model and data in data/demo, the run in outputs/demo (outputs/demo-2 the second time, ...).
"""
EPILOG = """\
examples:
  crossrl demo
  crossrl demo trainer.total_training_steps=40          a shorter run
  crossrl demo algorithm.adv_estimator=rloo             another way to advantages"""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="train a small policy here and see it learn",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings to vary, as for crossrl train")
    return parser


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from crossrl.cli.train_command import train
    from crossrl.config import load_config

    overrides = list(args.overrides)
    if not any(word.lstrip("+").startswith("trainer.default_local_dir=") for word in overrides):
        overrides.append(f"trainer.default_local_dir={free_folder(Path('outputs/demo'))}")
    console = Console(highlight=False)
    command = f"crossrl train --config-name demo {' '.join(overrides)}"
    console.print(f"{command}\n", style="bold", markup=False, soft_wrap=True)
    code = train(overrides, "demo")
    if code == 0:
        trainer = load_config(overrides, "demo").config.trainer
        show_result(console, Path(trainer.default_local_dir), Path(trainer.validation_data_dir or ""))
    return code


def free_folder(wanted: Path) -> Path:
    """``wanted``, or the first of ``wanted-2``, ``wanted-3``, ... that is not there: a run is never written over."""
    path, number = wanted, 1
    while path.exists():
        number += 1
        path = wanted.with_name(f"{wanted.name}-{number}")
    return path


def show_result(console: Console, folder: Path, validation: Path) -> None:
    """Samples before and after, the curve, and what to try next."""
    from crossrl.report.plots import learning_curve, terminal_curve

    metrics = folder / "metrics.jsonl"
    picture = learning_curve(metrics, folder / "learning_curve.png", "sorting six digits, GRPO")
    table = before_and_after(validation)
    if table is not None:
        console.print("\n", table)
    console.print(f"\n{terminal_curve(metrics, width=min(console.width, 100))}", markup=False)
    console.print(next_steps(folder, picture), markup=False, soft_wrap=True)


def before_and_after(validation: Path, rows: int = 6) -> Any:
    """A table of the same held-out prompts, answered before and after training; None without both files."""
    from rich.table import Table
    from rich.text import Text

    from crossrl.report.samples import read_samples

    steps = sorted((int(p.stem), p) for p in validation.glob("*.jsonl") if p.stem.isdigit())
    if len(steps) < 2:
        return None
    before, after = (read_samples(path) for _, path in (steps[0], steps[-1]))
    later = {row["input"]: row for row in after}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
    for title in ("held-out prompt", f"step {steps[0][0]}", f"step {steps[-1][0]}", "right answer"):
        table.add_column(title, no_wrap=True)
    # First what was answered wrongly before: the others show nothing.
    changed = sorted(before, key=lambda row: bool(row.get("acc")))
    for row in changed[:rows]:
        answers = [Text(r["output"], "green" if r.get("acc") else "red") for r in (row, later[row["input"]])]
        table.add_row(Text(row["input"]), *answers, Text(str(row["gts"])))
    return table


def next_steps(folder: Path, picture: Path) -> str:
    return f"""
plot      {picture}
metrics   {folder}/metrics.jsonl
samples   {folder}/validation/

what to try next:
  crossrl demo algorithm.adv_estimator=rloo actor_rollout_ref.rollout.n=4
  cp data/demo/sort_reward.py my_reward.py     # change it, then:
  crossrl demo reward.custom_reward_function.path=my_reward.py
  crossrl model smollm2 --out data/smollm2   # a real 135M model
  crossrl train --help                         # your own data and model"""
