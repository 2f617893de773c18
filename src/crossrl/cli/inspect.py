"""``crossrl inspect``: what is in a recorded run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from crossrl.cli.recorded import Recorded
    from crossrl.tape.api import Split

DESCRIPTION = """\
Look into a recorded run. Without options: its steps, stages, sizes and digests, and whether it is a valid reproduction.
With options: the samples of a step, one sample token by token with the sampler's and the trainer's log-probs side by
side, or one record of a stage.
"""
EPILOG = """\
examples:
  crossrl inspect outputs/demo                             what is recorded; two equal runs have equal digests
  crossrl inspect outputs/demo --step 3                    the samples of step 3
  crossrl inspect outputs/demo --step 3 --worst 5          those in which sampler and trainer differ most
  crossrl inspect outputs/demo --find 'answer is'          samples of all steps with this text
  crossrl inspect outputs/demo --sample r1449.n0           one sample, by its id or by the end of its id
  crossrl inspect outputs/demo --step 0 --val              validation's samples
  crossrl inspect outputs/demo --stage update              one stage over the steps
  crossrl inspect outputs/demo --stage rollout --step 3    one record: fields, inputs, settings it depends on

RUN is a run's folder (trainer.default_local_dir), or its tape. Record a run with: crossrl train ... tape.mode=record
In Python: from crossrl.tape import open_run; open_run('outputs/demo').sample(ID).worst()
exit codes: 0 shown; 1 no sample is as asked; 2 nothing is recorded there, or a record is damaged (the message says)."""

WORST_TOKENS = 5


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "inspect",
        help="look into a recorded run: steps, records, samples, tokens",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--step", type=int, metavar="N", help="only this step")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stage", metavar="NAME", help="this stage's records; with --step, one in full")
    what.add_argument("--sample", metavar="ID", help="this sample, token by token")
    what.add_argument("--find", metavar="TEXT", help="samples with this text in prompt or response")
    parser.add_argument(
        "--worst",
        type=_count,
        metavar="K",
        help=f"the K samples (with --sample: tokens; {WORST_TOKENS}) where sampler and trainer differ most",
    )
    parser.add_argument("--val", action="store_true", help="validation's samples, not training's")
    parser.add_argument("--json", action="store_true", help="print as JSON, whole texts and all tokens")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: want a number from 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    from crossrl.cli.recorded import find_run, show
    from crossrl.tape import RecordMissing

    recorded = find_run(args.run_folder)
    steps = recorded.tape.steps()
    if args.step is not None and args.step not in steps:
        raise RecordMissing(f"{recorded.tape.layout.root} has no step {args.step}; recorded: {steps[0]} to {steps[-1]}")
    chosen = steps if args.step is None else [args.step]
    if args.sample is not None:
        code, data, parts = _sample(args, recorded, chosen)
    elif args.stage is not None and args.step is not None:
        code, data, parts = _record(args, recorded)
    elif args.find is not None or args.worst is not None or args.step is not None:
        code, data, parts = _samples(args, recorded, chosen)
    else:
        code, data, parts = _overview(args, recorded)
    if args.json:
        print(json.dumps(data, indent=1))
    else:
        show(*parts)
    return code


def _split(args: argparse.Namespace) -> Split:
    return "val" if args.val else "train"


def _overview(args: argparse.Namespace, recorded: Recorded) -> tuple[int, Any, list[RenderableType]]:
    from crossrl.cli.show_run import overview, show_overview, show_stage

    found = overview(recorded.tape, [args.stage] if args.stage else [])
    parts = show_stage(found) if args.stage else show_overview(found)
    return (2 if found.damaged else 0), found.json(), parts


def _record(args: argparse.Namespace, recorded: Recorded) -> tuple[int, Any, list[RenderableType]]:
    from rich.text import Text

    from crossrl.cli.show_run import record_json, show_record

    split = _split(args)
    calls = [at.call for stage, at in recorded.tape.calls(args.step, split) if stage == args.stage]
    data: list[Any] = []
    parts: list[RenderableType] = []
    for call in calls or [0]:  # call 0 of nothing: the tape says what there is
        record = recorded.tape.record(args.step, args.stage, call, split)
        record.check()
        data.append(record_json(record))
        parts += [*([Text()] if parts else []), *show_record(record)]
    return 0, data, parts


def _samples(args: argparse.Namespace, recorded: Recorded, steps: list[int]) -> tuple[int, Any, list[RenderableType]]:
    from dataclasses import asdict

    from rich.text import Text

    from crossrl.cli.recorded import as_json, visible
    from crossrl.cli.show_samples import imported, rows, show_rows, worst

    found = list(rows(recorded.tape, steps, _split(args), args.find))
    title = f"{len(found)} samples" + (f" with {args.find!r}" if args.find is not None else "")
    if args.worst is not None:
        total, found = len(found), worst(found, args.worst)
        title = f"the {len(found)} of {total} samples in which sampler and trainer differ most"
    said = dict.fromkeys(note for step in steps for note in imported(recorded.tape, step, _split(args)))
    notes = [Text(visible(note), "yellow") for note in said]
    if not found:
        apart = "" if args.val else " (validation's samples are apart: --val)"
        return 1, [], [Text(f"{title}: nothing to show{apart}"), *notes]
    return 0, as_json([asdict(r) for r in found]), [*show_rows(found, title), *notes]


def _sample(args: argparse.Namespace, recorded: Recorded, steps: list[int]) -> tuple[int, Any, list[RenderableType]]:
    from crossrl.cli.show_samples import find_sample, gap_of, imported, mixed_up, sample_json, show_sample

    view = find_sample(recorded.tape, args.sample, steps, _split(args))
    texts = recorded.token_texts(view.step, _split(args))
    gap, count = gap_of(view, mixed_up(recorded.tape, view.step, _split(args))), args.worst or WORST_TOKENS
    notes = imported(recorded.tape, view.step, _split(args))
    return 0, sample_json(view, gap, texts, count, notes), show_sample(view, gap, texts, count, notes)
