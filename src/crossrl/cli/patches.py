"""``crossrl patches``: changes of other people's packages, and whether they are live."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from crossrl.patching import Status

DESCRIPTION = """\
Patches are small, verified changes of other people's packages (engines, trainers). A patch is applied only to the
source that it was written for, when its target is imported, in every process. REF is module:NAME: a patch, or a tuple
of them, in a module that can be imported from here. Without REF: those that CrossRL brings, and of CROSSRL_PATCHES.
"""
EPILOG = """\
examples:
  crossrl patches list                                    which there are, and do they fit what is installed?
  crossrl patches check my_fixes:PATCHES                  import the targets in a spawned child: live there?
  crossrl patches fingerprint json.decoder:JSONDecoder.decode     for a patch that you write
  eval "$(crossrl patches env my_fixes:PATCHES)"          programs started from this shell have the patches

exit codes: 0 done, and for check all live; 1 check: one is not live; 2 nothing to check, or something is wrong with
what was asked (the message says what)."""

# Of `check`: what is as it should be. A package that is not there needs no patch.
_FINE = ("off", "not needed", "not installed")


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "patches",
        help="changes of other people's packages, and whether they are live",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    for name, what in (
        ("list", "all patches against what is installed; no target is imported"),
        ("check", "the same, and in a spawned child that imports the targets"),
    ):
        action = actions.add_parser(name, help=what, description=what)
        action.add_argument(
            "references", nargs="*", metavar="REF", help="module:NAME; default: ours and the environment's"
        )
        action.add_argument("--json", action="store_true", help="print as JSON")
    action = actions.add_parser("fingerprint", help="of a function as it is installed here, for a patch that you write")
    action.add_argument("target", metavar="TARGET", help="module:qualname")
    action = actions.add_parser("env", help="shell lines that carry patches into programs started afterwards")
    action.add_argument("references", nargs="+", metavar="REF", help="module:NAME")
    return parser


def run(args: argparse.Namespace) -> int:
    from crossrl.patching.listing import fingerprint_of, in_child, on_disk, reasons, references

    if "" not in sys.path:
        sys.path.insert(0, "")  # patches in this folder, as with `python -m`
    if args.action == "fingerprint":
        print(fingerprint_of(args.target))
        return 0
    if args.action == "env":
        return print_environment(args.references)
    names = references(args.references)
    here = on_disk(names)
    child = in_child(names) if args.action == "check" else None
    if args.json:
        why = reasons(names)
        answer = {"patches": [{**s.as_json(), "why": why[s.name]} for s in here]}
        if child is not None:
            answer["child"] = [s.as_json() for s in child]
        print(json.dumps(answer, ensure_ascii=False, indent=1))
    else:
        show_table(here, child, reasons(names))
    return 0 if child is None else exit_code(child)


def exit_code(child: list[Status]) -> int:
    """0: all live, or not wanted; 1: some are not; 2: there is nothing that could be."""
    if all(s.state in _FINE for s in child):
        return 2
    return 0 if all(s.live or s.state in _FINE for s in child) else 1


def print_environment(names: list[str]) -> int:
    import shlex

    from crossrl.patching import child_environment, install

    install(*names)
    for name, value in child_environment().items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def show_table(here: list[Status], child: list[Status] | None, why: dict[str, str]) -> None:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in ("patch", "target", "installed", "on disk", *(("in a child",) if child is not None else ())):
        table.add_column(header, overflow="fold")
    notes: list[RenderableType] = []
    for index, status in enumerate(here):
        both = [status, *([child[index]] if child is not None else [])]
        states = [
            Text("as expected" if s.state == "waiting" and s is status else s.state, style=_colour(s)) for s in both
        ]
        table.add_row(
            f"{status.name}{' (required)' if status.required else ''}", status.target, status.version or "-", *states
        )
        notes.append(Text(f"{status.name}: {why[status.name]}", style="dim"))
        notes += [Text(s.note) for s in both[-1:] if s.note]
    nothing = child is not None and exit_code(child) == 2
    last = [Text("nothing to check: none of these targets is there to be patched")] if nothing else []
    Console(highlight=False).print(Group(table, *notes, *last))


def _colour(status: Status) -> str:
    if status.live:
        return "green"
    return "red" if status.state in ("refused", "failed", "lost") or status.stale else ""
