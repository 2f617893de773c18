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

    from crossrl.cross.command_runs import CommandRunner
    from crossrl.cross.experiment import Runner
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

Two runs of verl, with their own commands, as in a shell with variables in front; CrossRL is installed with each:
  crossrl cross --out outputs/cross --steps 3 \\
    --a-command 'HIP_VISIBLE_DEVICES=0 /opt/other/bin/python -m verl.trainer.main_ppo KEY=VALUE ...' \\
    --b-command 'python -m verl.trainer.main_ppo KEY=VALUE ...'
What is recorded, exchanged and kept where is added to them. One runs at a time, and both in a pair; instead of stages
on equal inputs the records of the arms are compared, which needs runs that repeat bit for bit.

exit codes: 0 no difference beyond noise, 1 a fault is located, 2 cannot tell (the last lines say what to run)."""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "cross",
        help="find out which part of a run is at fault",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--a", metavar="A.yaml", help="configuration of the side that goes wrong")
    parser.add_argument("--b", metavar="B.yaml", help="configuration of the healthy side")
    parser.add_argument("--a-command", metavar="COMMAND", help="or: verl's command of the side that goes wrong")
    parser.add_argument("--b-command", metavar="COMMAND", help="verl's command of the healthy side")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder of the experiment")
    for side in "ab":
        parser.add_argument(
            f"--set-{side}", metavar="KEY=VALUE", action="append", default=[], help=f"setting of side {side.upper()}"
        )
    parser.add_argument("--steps", metavar="N", type=int, help="steps of each arm; default: the whole run")
    parser.add_argument("--record-steps", metavar="K", type=int, help="steps to examine stage by stage (3)")
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
    from crossrl.cross.findings import to_json
    from crossrl.cross.folder import Folder
    from crossrl.cross.report import write_report

    make = runner_of(args)
    console = Console(stderr=True, highlight=False)
    with Live(console) as view:
        verdict = make(
            view,
            lambda text: console.print(text, markup=False, soft_wrap=True),
            lambda found: console.print(f"so far, from the recorded steps: {headline(found)}", style="bold"),
            args.timeout,
        ).run(args.quick)
    folder = Folder(args.out.expanduser().absolute())
    page = write_report(folder)
    if args.json:
        print(json.dumps(to_json(verdict), ensure_ascii=False, indent=1))
    else:
        print_parts(*report(verdict, load_experiment(folder.root)))
    console.print(f"\nreport  {page}", markup=False, soft_wrap=True)
    return verdict.exit_code


def runner_of(args: argparse.Namespace) -> Callable[..., Runner | CommandRunner]:
    """What makes the runner of the experiment that is asked for. Raises ``PlanError``, ``ConfigError``."""
    from functools import partial

    from crossrl.cross.plan import PlanError

    configs, commands = (args.a, args.b), (args.a_command, args.b_command)
    if None not in commands and configs == (None, None):
        from crossrl.cross.command_runs import CommandRunner
        from crossrl.cross.commands import make_command_plan

        own = [*args.overrides, *args.set_a, *args.set_b]
        if own or args.record_steps is not None:
            what = own[0] if own else "--record-steps"
            raise PlanError(f"{what}: with --a-command and --b-command settings stand in these, and all steps are kept")
        return partial(CommandRunner, make_command_plan(args.out, commands, args.steps))
    if None in configs or commands != (None, None):
        raise PlanError("want --a A.yaml --b B.yaml, or --a-command COMMAND --b-command COMMAND: both sides alike")
    from crossrl.cross.experiment import Runner
    from crossrl.cross.plan import make_plan

    both = list(args.overrides)
    if "demo" in configs:
        make_demo_files()
    names = config_of("--a", args.a), config_of("--b", args.b)
    record = 3 if args.record_steps is None else args.record_steps
    return partial(
        Runner, make_plan(args.out, [*both, *args.set_a], [*both, *args.set_b], record, args.steps, names)
    )  # fmt: skip


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
