"""``crossrl cross``: run the whole cross-examination of two sides, and say which part of a run is at fault."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from rich.table import Table

    from crossrl.cross.runner import Progress

DESCRIPTION = """\
Side A goes wrong, side B is healthy: which part of A is at fault, since which step, where? Both sides run alone, with
their first steps recorded; each stage of each record is run again by the other side; then the halves are swapped live:
A infers for B's training, and B for A's. The verdict says what all of it shows. Done parts are kept: started again
with the same --out, the experiment goes on.
"""
EPILOG = """\
A.yaml and B.yaml are configurations as for crossrl train --config-name (such as the config.yaml in a run's folder).
A side that needs another installation or another machine says so in its own:
  cross: {python: /opt/other/bin/python, env: {OMP_NUM_THREADS: "4"}}     another interpreter here
  cross: {remote: ssh gpu7}      its commands are printed to be run there; DIR must have the same path on both machines

examples:
  crossrl cross --a A.yaml --b B.yaml --out outputs/cross
  crossrl cross --a A.yaml --b B.yaml --out outputs/cross --quick        records and examines 3 steps, no more
  crossrl cross --a A.yaml --b B.yaml --out outputs/cross --steps 100    arms of 100 steps, schedules as planned
  crossrl cross --a demo --b demo --out outputs/cross --steps 20 --set-a cross.plant=training.lr_times_ten

exit codes: 0 no difference beyond noise, 1 a fault is located, 2 cannot tell (the last lines say what to run)."""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "cross",
        help="find out which part of a run is at fault",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--a", metavar="A.yaml", required=True, help="configuration of the side that goes wrong")
    parser.add_argument("--b", metavar="B.yaml", required=True, help="configuration of the healthy side")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder of the experiment")
    for side in "ab":
        parser.add_argument(
            f"--set-{side}", metavar="KEY=VALUE", action="append", default=[], help=f"setting of side {side.upper()}"
        )
    parser.add_argument("--steps", metavar="N", type=int, help="steps of each arm; default: the whole run")
    parser.add_argument("--record-steps", metavar="K", type=int, default=3, help="steps to examine stage by stage (3)")
    parser.add_argument("--quick", action="store_true", help="only record and examine; no arms")
    parser.add_argument("--timeout", metavar="S", type=float, default=86400.0, help="limit of each part, in s (a day)")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of both sides")
    return parser


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from crossrl.cli.recorded import show as print_parts
    from crossrl.cli.show_verdict import headline, report
    from crossrl.cross.arms import load_experiment
    from crossrl.cross.experiment import Runner
    from crossrl.cross.findings import to_json
    from crossrl.cross.plan import make_plan
    from crossrl.cross.report import write_report

    both = list(args.overrides)
    if "demo" in (args.a, args.b):
        make_demo_files()
    plan = make_plan(
        args.out,
        [*both, *args.set_a],
        [*both, *args.set_b],
        args.record_steps,
        args.steps,
        (config_of("--a", args.a), config_of("--b", args.b)),
    )
    console = Console(stderr=True, highlight=False)
    with Live(console) as view:
        runner = Runner(
            plan, view, lambda text: console.print(text, markup=False, soft_wrap=True),
            lambda found: console.print(f"so far, from the recorded steps: {headline(found)}", style="bold"),
            args.timeout,
        )  # fmt: skip
        verdict = runner.run(args.quick)
    page = write_report(plan.folder)
    if args.json:
        print(json.dumps(to_json(verdict), ensure_ascii=False, indent=1))
    else:
        print_parts(*report(verdict, load_experiment(plan.folder.root)))
    console.print(f"\nreport  {page}", markup=False, soft_wrap=True)
    return verdict.exit_code


def config_of(option: str, word: str) -> str:
    """A file, the folder of a run, or the name of a configuration of the package."""
    from crossrl.config.errors import ConfigError

    path = Path(word).expanduser()
    if path.is_dir():
        path = path / "config.yaml"
    if path.is_file():
        return str(path)
    if path.suffix or "/" in word:
        raise ConfigError([f"{option} {word}: no such file or folder. Want a configuration (YAML), or a run's folder"])
    return word


def make_demo_files() -> None:
    """The sides' own processes are given a file, and do not know that it was the demo's configuration."""
    from crossrl.cli.train_command import open_reporter, prepare_demo
    from crossrl.config import load_config

    loaded = load_config(["trainer.logger=[]"], "demo")
    with open_reporter(loaded) as reporter:
        prepare_demo(loaded, reporter)


class Live:
    """A table of all jobs that is drawn anew while they run; on a pipe, a line when the state of one changes."""

    def __init__(self, console: Console) -> None:
        from rich import live

        self.console = console
        self.live = live.Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None
        self.said: dict[str, str] = {}

    def __enter__(self) -> Callable[[Sequence[Progress]], None]:
        if self.live:
            self.live.start()
        return self.draw

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def draw(self, lines: Sequence[Progress]) -> None:
        if self.live:
            self.live.update(table(lines))
            return
        for line in lines:
            key, text = str(line.job.log) + str(line.job.steps), f"{line.job.what}: {line.state}"
            if self.said.get(key) != text:
                self.said[key] = text
                why = f" ({line.detail})" if line.state == "failed" else ""
                self.console.print(f"{text}{why}", markup=False, soft_wrap=True)


def table(lines: Sequence[Progress]) -> Table:
    from rich.table import Table
    from rich.text import Text

    colour = {"running": "cyan", "done": "green", "failed": "bold red", "waiting": "dim"}
    out = Table("arm", "what", "state", "step", "time", "", box=None, pad_edge=False, header_style="bold")
    for line in lines:
        steps = "" if line.step is None else f"{line.step}" + (f"/{line.job.steps}" if line.job.steps else "")
        out.add_row(
            line.job.name, line.job.what, Text(line.state, colour[line.state]), steps,
            f"{line.seconds:.0f} s" if line.began else "", Text(line.detail, overflow="ellipsis", no_wrap=True),
        )  # fmt: skip
    return out
