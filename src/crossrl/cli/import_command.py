"""``crossrl import``: dumps of other programs as a tape."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DESCRIPTION = """\
Make a tape from what verl itself has dumped, so that crossrl inspect and crossrl diff read it like a recorded run:

  JSON Lines   trainer.rollout_data_dir or trainer.validation_data_dir of verl: {step}.jsonl. Text and scores, without
               token ids and log-probs: what is not in the dump is not in the tape.
  pickles      {step}/gen_batch.dp of verl's rollout skip: token ids and log-probs. Only with --trust-pickle, since
               opening a pickle runs whatever code it holds; in a process of its own, under --python.

The tape says from which file, of which digest, each record is. Nothing is overwritten.
"""
EPILOG = """\
examples:
  crossrl import verl dumps/rollout --out outputs/theirs              training's samples of all steps
  crossrl import verl dumps/rollout --val dumps/val --out outputs/b   with validation's
  crossrl import verl dumps/rollout/3.jsonl --out outputs/step3       one file
  crossrl import verl dumps/rollout --tokenizer models/qwen --out DIR token ids too, but of texts that are encoded again
  crossrl import verl dump/exp_proj/GBS64_N8_in512_out1024 --trust-pickle --python /envs/verl/bin/python --out DIR
  crossrl inspect outputs/theirs --step 3, crossrl diff outputs/theirs outputs/b

To have everything (token ids, log-probs, advantages), record with the host instead: docs/how-to/use-with-verl.md
exit codes: 0 imported (warnings are on stderr); 2 refused, and nothing was written (the message says file and line)."""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "import",
        help="make a tape from verl's own dumps",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", choices=("verl",), help="whose dumps they are")
    parser.add_argument("dump", metavar="DUMP", type=Path, nargs="?", help="folder or file of training's dump")
    parser.add_argument("--val", metavar="DUMP", type=Path, help="folder or file of validation's dump")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder of the tape; a new one")
    parser.add_argument("--step", metavar="N", type=int, help="the step of a single file that does not tell it")
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        type=Path,
        help="folder with tokenizer.json: encode the texts of JSON Lines, or decode the token ids of pickles",
    )
    parser.add_argument(
        "--trust-pickle", action="store_true", help="open pickles, which can run anything: you know who wrote them"
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        default=sys.executable,
        help="interpreter that can import verl, for pickles (default: this one)",
    )
    parser.add_argument(
        "--timeout", metavar="S", type=float, default=600.0, help="seconds for opening pickles; default 600"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    from crossrl.hosts.verl_dumps.importer import Options, import_verl
    from crossrl.hosts.verl_dumps.write import count_lines
    from crossrl.report.texts import visible

    done = import_verl(
        Options(
            args.out.expanduser(),
            args.dump,
            args.val,
            args.step,
            args.tokenizer,
            args.trust_pickle,
            args.python,
            args.timeout,
        )
    )
    for warning in count_lines(done.warnings):
        print(f"warning: {visible(warning)}", file=sys.stderr)
    parts = [
        f"{len(steps)} step{'s' if len(steps) > 1 else ''} ({min(steps)} to {max(steps)}) of {name}"
        for name, steps in (("training", done.steps.get("train")), ("validation", done.steps.get("val")))
        if steps
    ]
    print(f"{args.out}: {' and '.join(parts)}, {done.written.samples} samples, {done.written.records} records")
    print(f"look into it: crossrl inspect {args.out}")
    return 0
