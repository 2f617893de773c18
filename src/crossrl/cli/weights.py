"""``crossrl weights``: do the rollout engines of a run hold the trainer's weights?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossrl.cross.weights import Holding

DESCRIPTION = """\
Start the trainer and the rollout engines as a run with these settings would, bring the weights to the engines as the
run would, and look whether they arrived: each tensor that an engine computes with against the trainer's, bit for bit,
and the log-probs of both on made-up tokens. Nothing is trained.
"""
EPILOG = """\
examples:
  crossrl weights check --config-name demo cluster.launcher=local
  crossrl weights check --checkpoint outputs/run/global_step_20 data.train_files=train.parquet \\
      actor_rollout_ref.model.path=/data/model actor_rollout_ref.rollout.name=vllm

exit codes: 0 every engine holds them; 1 one does not; 2 nothing was compared, or something is wrong with what was asked
(the message says what)."""
SHOWN = 12


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "weights",
        help="do the rollout engines hold the trainer's weights?",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    check = actions.add_parser(
        "check",
        help="bring them, and compare tensor by tensor",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("--config-name", metavar="NAME", help="a configuration to start from, as for crossrl train")
    check.add_argument("--config-path", metavar="DIR", help="where it is")
    check.add_argument("--checkpoint", metavar="DIR", type=Path, help="with its weights: .../global_step_N")
    check.add_argument("--json", action="store_true", help="print the result as JSON")
    check.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the run")
    return parser


def run(args: argparse.Namespace) -> int:
    from crossrl.assemble import tokenizer_of
    from crossrl.config import load_config
    from crossrl.cross.weights import check_engines, load_checkpoint
    from crossrl.placement import open_engines

    cfg = load_config(args.overrides, args.config_name, args.config_path).config
    engines = open_engines(cfg, tokenizer_of(cfg))
    try:
        step = (
            load_checkpoint(engines, args.checkpoint, cfg.actor_rollout_ref.model.trust_remote_code)
            if args.checkpoint
            else 0
        )
        brought = engines.carrier.bring()
        found = check_engines(engines)
    finally:
        engines.close()
    if args.json:
        print(json.dumps(_as_json(step, brought.facts(), found), indent=1))
    else:
        _show(step, brought.facts(), found)
    return 0 if all(each.right for each in found) else 1


def _as_json(step: int, facts: dict[str, Any], found: list[Holding]) -> dict[str, Any]:
    return {
        "step": step, "sync": facts,
        "engines": [
            {
                "engine": each.engine, "right": each.right, "equal": each.equal, "gap": each.gap, "limit": each.limit,
                "differences": [{"name": d.name, "what": d.what, "largest": d.largest} for d in each.differences],
            }
            for each in found
        ],
    }  # fmt: skip


def _show(step: int, facts: dict[str, Any], found: list[Holding]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    cast = f", cast from {facts['cast']}" if facts["cast"] else ""
    console.print(f"brought   {facts['tensors']} tensors of step {step}{cast}", soft_wrap=True)
    for each in found:
        colour, word = ("green", "holds them") if each.right else ("red", "does NOT hold them")
        console.print(f"{each.engine:9} [bold {colour}]{word}[/]: {each.equal} tensors equal bit for bit, "
                      f"{len(each.differences)} not", soft_wrap=True)  # fmt: skip
        verdict = "numerical noise" if each.gap <= each.limit else f"more than numerics explain ({each.limit:g})"
        console.print(f"{'':9} log-probs of engine and trainer differ by at most {each.gap:.1e} nat: {verdict}")
        for difference in each.differences[:SHOWN]:
            console.print(f"{'':9} [red]{difference}[/]", soft_wrap=True)
        if len(each.differences) > SHOWN:
            console.print(f"{'':9} and {len(each.differences) - SHOWN} more (--json has all)", style="dim")
