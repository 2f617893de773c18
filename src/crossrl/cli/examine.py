"""``crossrl examine``: the tape of one side's run, stage by stage, by the other side's installation."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crossrl.cross.findings import Examination

DESCRIPTION = """\
Run each recorded stage of RUN again with another configuration and this installation, on the inputs and the weights
that the run had, and say of each whether it is equal, differs by rounding, or differs. Each stage is judged by its own
work, so a fault is found where it is made, mostly at its first step and long before a curve bends.
"""
EPILOG = """\
examples:
  crossrl examine outputs/a --config b.yaml --of A --by B                 the run that went wrong, by the healthy side
  crossrl examine outputs/b --config a.yaml --of B --by A --steps 1-3     the other way round
  crossrl examine outputs/a --config outputs/a/config.yaml --of A --by A  a run by itself: all equal, or its records
                                                                          contradict each other

record a run first: crossrl train ... tape.mode=record tape.state=True
exit codes: 0 nothing differs beyond rounding; 1 something differs; 2 nothing was compared, or it was refused."""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "examine",
        help="judge a run's tape by another configuration, stage by stage",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="the run's folder: config.yaml and tape/")
    parser.add_argument("--config", required=True, metavar="FILE", help="the examiner's configuration, a YAML file")
    parser.add_argument("--of", choices=("A", "B"), default="A", help="which side RUN is (default: A)")
    parser.add_argument("--by", choices=("A", "B"), default="B", help="which side the configuration is (default: B)")
    parser.add_argument("--steps", metavar="RANGE", help="only these steps, such as 1-3,10")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the examination as JSON")
    parser.add_argument("--all", action="store_true", help="show what is equal, too")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="more settings of the examiner")
    return parser


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from crossrl.cli.train_command import planting
    from crossrl.config import load_config
    from crossrl.cross.examine import examine
    from crossrl.cross.findings import to_json
    from crossrl.files import publish_text
    from crossrl.report import Reporter
    from crossrl.report.console import open_display
    from crossrl.tape.session import step_range

    loaded, plant = planting(load_config(args.overrides, args.config))
    with Reporter(open_display(Console(stderr=True, highlight=False), steps=False)) as reporter:
        for warning in loaded.warnings:
            reporter.warn(warning)
        examined = examine(args.run_folder, loaded, args.of, args.by, step_range(args.steps), reporter, plant)
        reporter.close()
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        publish_text(args.out, json.dumps(to_json(examined), ensure_ascii=False, indent=1))
    show(examined, args.all)
    return 1 if any(f.judged == "differs" and not f.harmless for f in examined.findings) else 0


def show(examined: Examination, everything: bool = False) -> None:
    """A table of stages, then each finding that is not plainly equal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    colours = {"equal": "green", "noise": "cyan", "differs": "bold red", "not judged": "yellow"}
    table = Table("stage", "calls", *colours, "first at", box=None, pad_edge=False)
    for stage in dict.fromkeys(f.stage for f in examined.findings):
        mine = [f for f in examined.findings if f.stage == stage]
        counts = [sum(f.judged == judged for f in mine) for judged in colours]
        first = next((f"step {f.step}" for f in mine if f.judged == "differs"), "")
        cells = [Text(str(n) if n else "", style) for n, style in zip(counts, colours.values(), strict=True)]
        table.add_row(stage, str(len(mine)), *cells, first)
    because = f", because of {'; '.join(examined.because)}" if examined.because else ""
    console.print(Text(f"tape of {examined.of}, examined by {examined.by}; numerics: {examined.numerics}{because}"))
    console.print(table)
    for finding in examined.findings:
        if finding.judged == "equal" and not everything:
            continue
        harmless = " (harmless)" if finding.harmless else ""
        label = f"step {finding.step}, {finding.stage} {finding.judged}{harmless}: "
        hint = f". Hint: {finding.hint}" if finding.hint else ""
        console.print(Text.assemble((label, colours[finding.judged]), finding.sentence + hint), soft_wrap=True)
    for setting in examined.settings:
        part = setting.part or "no result"
        console.print(Text(f"setting {setting.key}: A {setting.a}, B {setting.b} ({part})", "dim"), soft_wrap=True)
    for text in examined.unseen:
        console.print(Text(f"smaller than noise, so not to be seen: {text}", "dim"), soft_wrap=True)
    console.print(Text(f"{len(examined.findings)} findings in {examined.seconds:.1f} s", "dim"))
