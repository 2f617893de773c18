"""``crossrl verdict``: which part of a run is at fault, from what an experiment has found so far."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

DESCRIPTION = """\
Say which part of run A is at fault, compared with the healthy run B: inference, reward, training, weight sync, data or
several; since which step; and on what evidence. Read are the examinations of the tapes and the curves of the four arms
(inference of A or B) x (training of A or B), as far as they are there. What is missing is named, with the command that
makes it. A difference that noise explains is nobody's fault.
"""
EPILOG = """\
examples:
  crossrl verdict outputs/cross                           of an experiment by crossrl cross
  crossrl verdict --aa outputs/a --bb outputs/b           runs that you launched yourself
  crossrl verdict --aa a.jsonl --bb b.jsonl --ab ab.jsonl --ba ba.jsonl
                                                          metrics of verl, or of anything that writes JSON Lines or CSV
  crossrl verdict outputs/cross --bb2 outputs/b_again     a repeat of B says how large the noise is
  crossrl verdict outputs/cross --json | jq .conclusion   for programs

RUN is a run's folder or a file of metrics. The first letter of an arm is the side that infers, the second the one that
trains. A pair is made by two runs that share a folder:
  crossrl train SETTINGS_OF_A... ++trainer.share_data=ckpt    ++trainer.share_data_dir=DIR    A infers      } arm AB
  crossrl train SETTINGS_OF_B... ++trainer.share_data=rollout ++trainer.share_data_dir=DIR    B trains (RUN) }
exit codes: 0 no difference beyond noise; 1 a fault is located; 2 it cannot be told (the text says what to run), or
there is nothing to compare."""
ARMS = {
    "aa": "run A alone, the one that goes wrong",
    "bb": "run B alone, the healthy one",
    "ab": "inference of A, training of B",
    "ba": "inference of B, training of A",
    "bb2": "run B once more",
}


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verdict",
        help="which part of a run is at fault",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", help="the experiment's folder")
    for name, meaning in ARMS.items():
        parser.add_argument(f"--{name}", metavar="RUN", type=Path, help=meaning)
    parser.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="compare this metric too (repeatable)"
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    from crossrl.cli.recorded import show
    from crossrl.cli.show_verdict import report
    from crossrl.cross.findings import to_json
    from crossrl.cross.verdict import recompute

    named = {name.upper(): path for name in ARMS if (path := getattr(args, name)) is not None}
    verdict, experiment = recompute(args.folder, named, args.metric)
    if args.json:
        print(json.dumps(to_json(verdict), ensure_ascii=False, indent=1))
    else:
        show(*report(verdict, experiment))
    return verdict.exit_code
