"""``crossrl demo``: ``crossrl train --config-name demo`` with a curve, samples and what to try next."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from crossrl.cross.runner import Progress

DESCRIPTION = """\
Train a small policy to sort six digits, with GRPO, on this machine's CPU: about a minute on two cores. Then plant a
fault in a twin of the run, let the two examine each other, and see it found. Everything is an ordinary file: the model
and data in data/demo, the run in outputs/demo (outputs/demo-2 the second time, ...).
"""

FAULT, TWIN_STEPS = "inference.stale_weights", 3
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
        folder = Path(trainer.default_local_dir)
        picture = show_result(console, folder, Path(trainer.validation_data_dir or ""))
        page = cross_examine(console, folder / "cross", overrides)
        console.print(next_steps(folder, picture, page), markup=False, soft_wrap=True)
    return code


def free_folder(wanted: Path) -> Path:
    """``wanted``, or the first of ``wanted-2``, ``wanted-3``, ... that is not there: a run is never written over."""
    path, number = wanted, 1
    while path.exists():
        number += 1
        path = wanted.with_name(f"{wanted.name}-{number}")
    return path


def show_result(console: Console, folder: Path, validation: Path) -> Path:
    """Samples before and after, and the curve; returns the path of its picture."""
    from crossrl.report.plots import learning_curve, terminal_curve

    metrics = folder / "metrics.jsonl"
    picture = learning_curve(metrics, folder / "learning_curve.png", "sorting six digits, GRPO")
    table = before_and_after(validation)
    if table is not None:
        console.print("\n", table)
    console.print(f"\n{terminal_curve(metrics, width=min(console.width, 100))}", markup=False)
    return picture


def cross_examine(console: Console, folder: Path, overrides: list[str]) -> Path:
    """Side A is a twin of the demo with a fault in it, side B one without; returns the path of the report."""
    from crossrl.cli.main import main
    from crossrl.cli.show_verdict import report
    from crossrl.cross.arms import load_experiment
    from crossrl.cross.experiment import Runner
    from crossrl.cross.faults import FAULTS
    from crossrl.cross.plan import make_plan
    from crossrl.cross.report import write_report

    console.print(f"\nA fault is planted in a twin of this run: {FAULT}", style="bold")
    console.print(
        f"({FAULTS[FAULT].symptom}.)\nWhich part of it is at fault? Both run {TWIN_STEPS} steps, recorded, and each "
        "runs the stages of the other's record again."
    )
    both = [word for word in overrides if "trainer.default_local_dir=" not in word]
    plan = make_plan(folder, [*both, f"cross.plant={FAULT}"], both, TWIN_STEPS, TWIN_STEPS, ("demo", "demo"))
    with console.status("") as status:

        def show(lines: Sequence[Progress]) -> None:
            status.update(f"{lines[-1].job.what} ...")

        runner = Runner(plan, show, console.print, lambda early: None, 600.0, main)
        verdict = runner.run(quick=True)
    page = write_report(plan.folder)
    console.print()
    for part in report(verdict, load_experiment(plan.folder.root)):
        console.print(part)
    return page


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


def next_steps(folder: Path, picture: Path, page: Path) -> str:
    return f"""
plot      {picture}
metrics   {folder}/metrics.jsonl
samples   {folder}/validation/
report    {page}   (open it in a browser: the planted fault, located)

what to try next:
  crossrl demo algorithm.adv_estimator=rloo actor_rollout_ref.rollout.n=4
  cp data/demo/sort_reward.py my_reward.py     # change it, then:
  crossrl demo reward.custom_reward_function.path=my_reward.py
  crossrl model smollm2 --out data/smollm2   # a real 135M model
  crossrl train --help                         # your own data and model"""
