"""``crossrl faults``: the catalogue of planted faults."""

from __future__ import annotations

import argparse
import json
from itertools import chain
from pathlib import Path
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
  crossrl faults bench sync                                 are these found, and where? (all: some minutes; some of them
                                                            also while the other run has a harmless difference)
  crossrl train ... 'cross.plant="reward.flipped,sync.permuted@3"'   several

exit codes: 0 done; 1 bench: a fault was missed, or something harmless was blamed; 2 no such fault."""


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
    bench = actions.add_parser("bench", help="plant each in one of two equal runs: is it found, and where?")
    bench.add_argument("names", nargs="*", metavar="NAME", help="as for list; default: all")
    bench.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds for each harmless difference (5)")
    bench.add_argument("--out", type=Path, metavar="DIR", help="folder for the runs; default: a temporary one")
    bench.add_argument("--markdown", type=Path, metavar="FILE", help="write the result as tables, too")
    return parser


def run(args: argparse.Namespace) -> int:
    from crossrl.cross.faults import select

    faults, harmless = select(args.names)
    if args.action == "bench":
        return bench(args, faults, harmless)
    if args.json:
        print(json.dumps(as_json(faults, harmless), indent=1))
        return 0
    from crossrl.cli.recorded import show

    show(*listing(faults, harmless))
    return 0


def bench(args: argparse.Namespace, faults: list[Fault], harmless: list[Harmless]) -> int:
    """0: all are found where they are and nothing harmless is blamed; 1: not so."""
    import contextlib
    import tempfile

    import transformers
    from rich.console import Console

    from crossrl.cross.bench import Outcome, as_markdown, run_faults, run_harmless, run_mixed, small
    from crossrl.demo.files import FOLDER, prepare
    from crossrl.files import publish_text

    transformers.utils.logging.disable_progress_bar()
    console = Console(highlight=False)
    outcomes: list[Outcome] = []
    with contextlib.ExitStack() as stack:
        out = args.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crossrl-bench-")))
        prepare(console.print)
        setup = small(FOLDER.absolute(), out.absolute())
        seeds = range(1, args.seeds + 1)
        runs = chain(run_faults(setup, faults), run_harmless(setup, harmless, seeds), run_mixed(setup, faults))
        for each in runs:
            outcomes.append(each)
            since = f", step {each.verdict.step}" if each.verdict.step else ""
            want = "" if each.good else f"   expected: {each.expected or 'no difference'}"
            want = "   below the noise" if each.below else want
            colour = "green" if each.good else "bold red"
            other = f", B {each.other}" if each.other else ""
            line = f"{each.name + other:32} seed {each.seed}  [{colour}]{each.verdict.conclusion}{since}[/]{want}"
            console.print(line, soft_wrap=True)
    text = as_markdown(outcomes)
    if args.markdown:
        publish_text(args.markdown, text)
    bad = sum(not o.good for o in outcomes)
    console.print(f"{len(outcomes)} comparisons, {bad} not as expected")
    return 1 if bad else 0


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
