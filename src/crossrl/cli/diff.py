"""``crossrl diff``: two recorded runs, up to the first difference."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

DESCRIPTION = """\
Walk two recorded runs in the order of their steps and stages to the first difference. At each record, what it is
comes before what it holds: samples, inputs, weight versions, what log-probs mean, token ids; and only then numbers,
since most mismatches are not numerical. Settings that differ are listed besides.
"""
EPILOG = """\
examples:
  crossrl diff outputs/a outputs/b                                   the first difference, bit for bit
  crossrl diff outputs/a outputs/b --tolerance rollout_log_probs=1e-5  let small numerical differences pass
  crossrl diff outputs/a outputs/b --json | jq .first                for programs

RUN is a run's folder (trainer.default_local_dir), or its tape. Record runs with: crossrl train ... tape.mode=record
look closer: crossrl inspect outputs/a --sample ID
exit codes: 0 equal, as far as both go; 1 something differs, or one run lacks records; 2 nothing was compared, or it
was refused (the message says why)."""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "diff",
        help="find the first difference of two recorded runs",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_a", metavar="RUN_A", type=Path, help="a recorded run's folder")
    parser.add_argument("run_b", metavar="RUN_B", type=Path, help="another one's")
    parser.add_argument(
        "--tolerance",
        action="append",
        default=[],
        type=tolerance,
        metavar="FIELD=X",
        help="absolute difference that passes (repeatable)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def tolerance(text: str) -> tuple[str, float]:
    """``FIELD=X`` of the command line. A field that is no field would let nothing pass, and say nothing."""
    import difflib

    from crossrl.schema import FIELDS

    field, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not field or not number >= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: want FIELD=NUMBER, such as rollout_log_probs=1e-5")
    if field not in FIELDS and not field.startswith("info."):
        near = difflib.get_close_matches(field, FIELDS, 1)
        raise argparse.ArgumentTypeError(f"{field!r} is no field" + (f"; did you mean {near[0]!r}?" if near else ""))
    return field, number


def run(args: argparse.Namespace) -> int:
    from crossrl.cli.recorded import find_run, show
    from crossrl.cli.show_diff import report
    from crossrl.tape import TapeError, diff_runs

    a, b = find_run(args.run_a), find_run(args.run_b)
    roots = a.tape.layout.root, b.tape.layout.root
    if roots[0].samefile(roots[1]):
        raise TapeError(f"{args.run_a} and {args.run_b} are the same run ({roots[0]}): there is nothing to compare")
    diff = diff_runs(*roots, dict(args.tolerance))
    if args.json:
        print(json.dumps(diff.to_json(), indent=1))
    else:
        show(*report(diff, a, b, dict(args.tolerance)))
    return diff.exit_code
