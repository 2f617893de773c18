"""``crossrl probe``: one recorded sample through two sides, module by module, to the first that differs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crossrl.cross.probe.dump import Opened, Way

USAGE = """\
crossrl probe RUN [--step N] [--sample ID]
       crossrl probe RUN RUN_B [--step N] [--sample ID] [--path train|rollout]
       crossrl probe dump RUN --step N --out DUMP [--config SIDE.yaml] [--path train|rollout]
       crossrl probe compare DUMP_A DUMP_B"""
DESCRIPTION = """\
When log-probs differ on the same tokens and the same weights, name the first module whose output differs. A recorded
sample goes through both sides' own forward pass, and the outputs of all modules are compared in the order in which
they ran, after making sure that tokens and weights are the same.

  probe RUN           sampler against trainer within one run: A is its rollout path, B its training path
  probe RUN RUN_B     two sides on one machine: tokens and weights of RUN, A in RUN's configuration, B in RUN_B's
  probe dump, then probe compare: the same in two steps, for sides in other interpreters or on other machines
"""
EPILOG = """\
examples:
  crossrl probe outputs/a --step 3                            does generation compute what training does?
  crossrl probe outputs/a outputs/b --step 3                  where does B's training path differ from A's?
  crossrl probe outputs/a outputs/b --step 3 --path rollout   the same for generation
  crossrl probe dump outputs/a --step 3 --out dump_a          on one machine;
  crossrl probe dump outputs/a --step 3 --out dump_b --config b.yaml   on the other, with a copy of the run;
  crossrl probe compare dump_a dump_b                         then on either

The weights are those before the step's update: of step 1 the model that the configuration names, later ones from the
tape (record with tape.state=True) or a checkpoint (trainer.save_freq).
exit codes: 0 no difference beyond rounding; 1 found; 2 nothing to compare, or it was refused (the message says why)."""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "probe",
        help="find the first module whose output differs between two sides",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="+", metavar="RUN", help="RUN | RUN RUN_B | dump RUN | compare DUMP_A DUMP_B")
    parser.add_argument("--step", type=int, default=1, metavar="N", help="the recorded step (default: 1)")
    parser.add_argument(
        "--sample", metavar="ID", help="its id or the end of it (default: the one with the largest gap)"
    )
    parser.add_argument("--path", choices=("train", "rollout"), help="the forward path (default: train)")
    parser.add_argument(
        "--config", type=Path, metavar="SIDE.yaml", help="dump: the side's configuration, not the run's"
    )
    parser.add_argument("--config-a", type=Path, metavar="A.yaml", help="the configuration of A, not that of RUN")
    parser.add_argument("--config-b", type=Path, metavar="B.yaml", help="the configuration of B, not that of RUN_B")
    parser.add_argument("--tokens", type=int, metavar="K", help="only the first K response tokens (default: all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="dump: where it goes; else: keep both dumps below DIR")
    parser.add_argument("--tolerance", type=float, metavar="X", help="relative difference of a module that passes")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    from crossrl.cross.probe.dump import read_dump

    check(args)
    words: list[str] = args.words
    if words[0] == "dump":
        return dump(args)
    if words[0] == "compare":
        return compare(args, *(read_dump(Path(word)) for word in words[1:]))
    return both(args)


def check(args: argparse.Namespace) -> None:
    """Refuse a combination that would leave something out silently."""
    from crossrl.cross.probe.dump import ProbeError

    words = args.words
    mode = words[0] if words[0] in ("dump", "compare") else "both"
    paths = len(words) - (mode != "both")
    if paths not in {"dump": (1,), "compare": (2,), "both": (1, 2)}[mode]:
        raise ProbeError(f"probe {' '.join(words)}: {paths} folders are named. Usage:\n{USAGE}")
    if mode == "dump" and args.out is None:
        raise ProbeError("probe dump: --out DUMP is missing, the folder that the dump is written to")
    if args.tokens is not None and args.tokens < 1:
        raise ProbeError(f"--tokens is {args.tokens}: want at least 1")
    if args.tolerance is not None and not args.tolerance >= 0:
        raise ProbeError(f"--tolerance is {args.tolerance}: want 0 or more")
    wrong = {
        "dump": ("config_a", "config_b", "tolerance", "json"),
        "compare": ("config_a", "config_b", "config", "path", "sample", "tokens", "out"),
        "both": ("config",) if len(words) > 1 or args.config_b else ("config", "path"),
    }[mode]
    for name in wrong:
        if getattr(args, name):
            raise ProbeError(f"--{name.replace('_', '-')} means nothing for probe {mode if mode != 'both' else 'RUN'}")


def dump(args: argparse.Namespace) -> int:
    from rich.console import Console

    from crossrl.cross.probe.side import Request, make_dump

    way: Way = args.path or "train"
    made = make_dump(Request(Path(args.words[1]), args.step, args.out, args.sample, args.config, way, args.tokens))
    size = sum(file.stat().st_size for file in args.out.iterdir())
    Console(highlight=False).print(
        f"{args.out}: sample {made.sample_id}, {len(made.prompt_ids)} + {len(made.response_ids)} tokens, "
        f"{len(made.calls)} modules, {size / 1e6:.1f} MB",
        soft_wrap=True,
    )
    return 0


def both(args: argparse.Namespace) -> int:
    """A and B on this machine, on the tokens and weights of the first run."""
    import tempfile

    from crossrl.cross.probe.side import Request
    from crossrl.cross.probe.sides import dump_sides

    runs = [Path(word) for word in args.words]
    alone = len(runs) == 1 and args.config_b is None
    way: Way = args.path or "train"
    ways: tuple[Way, Way] = ("rollout", "train") if alone else (way, way)
    configs = (args.config_a, args.config_b or (args.config_a if alone else runs[-1] / "config.yaml"))
    with tempfile.TemporaryDirectory(prefix="crossrl-probe-") as scratch:
        where = args.out or Path(scratch)
        requests = [
            Request(runs[0], args.step, where / name, args.sample, config, way, args.tokens)
            for name, config, way in zip("ab", configs, ways, strict=True)
        ]
        return compare(args, *dump_sides(requests, (args.config_a is not None, args.config_b is not None)))


def compare(args: argparse.Namespace, a: Opened, b: Opened) -> int:
    import json

    from crossrl.cli.show_probe import as_json, show
    from crossrl.cross.probe.compare import compare_dumps

    result = compare_dumps(a, b, args.tolerance)
    if args.json:
        print(json.dumps(as_json(result, a, b), ensure_ascii=False, indent=1))
    else:
        show(result, a, b)
    return result.exit_code
