"""``crossrl faults``: the catalogue of planted faults."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from crossrl.cross.faults import Fault, Harmless

DESCRIPTION = """\
Faults that can be planted in a run, to see whether the cross-examination finds them: the product's own proof, and a way
to learn what a fault looks like. Each changes one seam of one run, from the training step that you name on.
"""
EPILOG = """\
examples:
  crossrl faults list                                       all of them, by part of the run
  crossrl faults list sync inference.cache_kept             the faults of one part, and a single one
  crossrl faults list --json | jq '.faults[].name'          for programs
  crossrl train ... cross.plant=inference.stale_weights     plant one
  crossrl train ... cross.plant=reward.flipped@5            from step 5 on
  crossrl train ... 'cross.plant="reward.flipped,sync.permuted@3"'   several

exit codes: 0 done, 2 no such fault."""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "faults",
        help="faults that can be planted in a run",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    listing = actions.add_parser("list", help="all faults and harmless differences")
    listing.add_argument("names", nargs="*", metavar="NAME", help="a fault, or a part such as sync; default: all")
    listing.add_argument("--json", action="store_true", help="print the catalogue as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    from crossrl.cross.faults import select

    faults, harmless = select(args.names)
    if args.json:
        print(json.dumps(as_json(faults, harmless), indent=1))
        return 0
    from crossrl.cli.recorded import show

    show(*listing(faults, harmless))
    return 0


def as_json(faults: list[Fault], harmless: list[Harmless]) -> dict[str, Any]:
    return {
        "faults": [
            {
                "name": f.name, "part": f.part, "stage": f.stage, "symptom": f.symptom, "needs": list(f.needs),
                "first_step": f.first_step(), "harmless": f.harmless,
            }
            for f in faults
        ],
        "harmless": [{"name": h.name, "what": h.what, "overrides": list(h.overrides)} for h in harmless],
    }  # fmt: skip


def listing(faults: list[Fault], harmless: list[Harmless]) -> list[RenderableType]:
    """A table for each part, then the harmless differences."""
    from rich.table import Table
    from rich.text import Text

    def columns(*headers: str) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("", no_wrap=True)  # names are for copying
        for header in headers:
            table.add_column(header, overflow="fold")
        return table

    shown: list[RenderableType] = []
    for part in dict.fromkeys(f.part for f in faults):
        table = columns("first record", "what one sees")
        for f in (f for f in faults if f.part == part):
            note = f"\nneeds {' '.join(f.needs)}" if f.needs else ""
            note += "\nharmless: training sees nothing of it" if f.harmless else ""
            table.add_row(f.name, f"{f.stage}, step {f.first_step()}", Text.assemble(f.symptom, (note, "dim")))
        shown += [Text(part, "bold"), table, Text()]
    if harmless:
        table = columns("what differs", "overrides of one of the two runs")
        for h in harmless:
            table.add_row(h.name, h.what, " ".join(h.overrides))
        shown += [Text("harmless differences: the tool must blame nobody", "bold"), table, Text()]
    return [*shown, Text("plant one: crossrl train ... cross.plant=NAME, or NAME@STEP to act from that step on", "dim")]
