"""``crossrl verify``: run a recorded run's stages again, here, on their recorded inputs, and compare."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from crossrl.cli.diff import tolerance

if TYPE_CHECKING:
    from crossrl.verify import Verified

DESCRIPTION = """\
Run each recorded stage of RUN again on its recorded inputs, with what is installed here, and compare. On an unchanged
installation every stage, the update included, is equal bit for bit; otherwise the first difference is named: stage,
step, field, sample, token, both values, how large and how widespread.
"""
EPILOG = """\
examples:
  crossrl verify outputs/demo                                     everything that was recorded
  crossrl verify outputs/demo --steps 1-10 --stage update         some steps, one stage
  crossrl verify outputs/demo --tolerance rollout_log_probs=1e-5  let small numerical differences pass
  crossrl verify RUN actor_rollout_ref.model.path=/data/model     the model lies elsewhere on this machine

record a run first: crossrl train ... tape.mode=record
exit codes: 0 equal; 1 something differs; 2 nothing was compared, or it was refused (the message says why)."""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verify",
        help="run a recorded run's stages again and compare",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="the run's folder (trainer.default_local_dir)")
    parser.add_argument("--stage", action="append", default=[], metavar="NAME", help="only this stage (repeatable)")
    parser.add_argument("--steps", metavar="RANGE", help="only these steps, such as 1-10,20")
    parser.add_argument(
        "--tolerance",
        action="append",
        default=[],
        type=tolerance,
        metavar="FIELD=X",
        help="absolute difference that passes (repeatable)",
    )
    parser.add_argument("--all", action="store_true", help="go on after the first step that differs")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings that differ here, such as paths")
    return parser


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from crossrl.report import Reporter
    from crossrl.report.console import open_display
    from crossrl.tape.session import step_range
    from crossrl.verify import Request, verify

    request = Request(
        args.run_folder,
        tuple(name for names in args.stage for name in names.split(",")),
        step_range(args.steps),
        dict(args.tolerance),
        tuple(args.overrides),
        args.all,
    )
    with Reporter(open_display(Console(stderr=True, highlight=False), steps=False)) as reporter:
        result = verify(request, reporter)
        reporter.close()
    if args.json:
        print(json.dumps(as_json(result), ensure_ascii=False, indent=1))
    else:
        show(result)
    return 1 if result.first else 0


def show(result: Verified) -> None:
    from rich.console import Console
    from rich.table import Table

    from crossrl.stages.base import ORDER

    table = Table("stage", "calls", "fields", "result", box=None, pad_edge=False)
    for stage in ORDER:
        calls = [c for c in result.comparisons if c.stage == stage]
        if not calls:
            continue
        bad = [c for c in calls if c.differences]
        steps = sorted({c.at.step for c in bad})
        verdict = f"[red]differs in {len(bad)}, first at step {steps[0]}" if bad else "[green]bit-equal"
        table.add_row(stage, str(len(calls)), str(sum(c.fields for c in calls)), verdict)
    console = Console(highlight=False)
    console.print(table)
    if result.first is None:
        steps = sorted({c.at.step for c in result.comparisons})
        console.print(f"[bold green]equal[/]: {len(result.comparisons)} calls in {len(steps)} steps")
        return
    console.print("[bold red]first difference[/]: " + result.first.line(), soft_wrap=True)
    if result.stopped is not None:
        console.print(f"stopped after step {result.stopped}; --all goes on", style="dim")


def as_json(result: Verified) -> dict[str, object]:
    return {
        "equal": result.first is None,
        "first": result.first.as_json() if result.first else None,
        "stopped_after_step": result.stopped,
        "calls": [
            {
                "stage": c.stage, "step": c.at.step, "call": c.at.call, "split": c.at.split, "fields": c.fields,
                "differences": [d.as_json() for d in c.differences],
            }
            for c in result.comparisons
        ],
    }  # fmt: skip
