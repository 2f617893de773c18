"""``crossrl report``: a cross-examination as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """\
Write DIR/report.html from what lies in DIR, the folder of a cross-examination: the verdict first, then the four arms
and their curves, every stage of every step, the first difference with both texts side by side, the noise floor, what
differs in the configuration, and how to reproduce it. The page is one file that works offline.
"""
EPILOG = """\
examples:
  crossrl report outputs/cross                   writes outputs/cross/report.html
  crossrl report outputs/cross --out bug.html    another file, to attach to a bug report

What is not there yet (an arm, an examination, the verdict) is named on the page, with the command that makes it; so the
page can be written while the arms still run. crossrl cross writes it at its end.
exit codes: 0 written; 2 nothing to report on, or a file is damaged (the message says which)."""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report",
        help="a cross-examination as one HTML page",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="the experiment's folder (crossrl cross --out DIR)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to write the page (DIR/report.html)")
    return parser


def run(args: argparse.Namespace) -> int:
    from crossrl.cross.folder import Folder
    from crossrl.cross.report import write_report
    from crossrl.report.texts import size_text

    path = write_report(Folder(args.folder.expanduser()), args.out)
    print(f"{path} ({size_text(path.stat().st_size)})")
    return 0
