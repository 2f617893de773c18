"""From the places that the command line names to a tape: the whole of ``crossrl import verl``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from crossrl.hosts.verl_dumps.dump import Dump
from crossrl.hosts.verl_dumps.errors import DumpError
from crossrl.hosts.verl_dumps.pickled import refuse, unpickle
from crossrl.hosts.verl_dumps.proto import proto_dump
from crossrl.hosts.verl_dumps.sources import Source, find_sources
from crossrl.hosts.verl_dumps.texts import text_dump
from crossrl.hosts.verl_dumps.tokens import Tokens
from crossrl.hosts.verl_dumps.write import Written, require_free, write_tape
from crossrl.tape.api import Split


@dataclass(frozen=True, slots=True)
class Options:
    """``step``: of a single file that does not tell it. ``python``: an interpreter that can import verl, for pickles.

    ``timeout_s``: limit of the process that opens pickles.
    """

    out: Path
    train: Path | None = None
    val: Path | None = None
    step: int | None = None
    tokenizer: Path | None = None
    trust_pickle: bool = False
    python: str = sys.executable
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Imported:
    """``steps``: by split. ``warnings``: what was harmless."""

    written: Written
    steps: dict[Split, list[int]]
    warnings: list[str]


def import_verl(options: Options) -> Imported:
    """Read the dumps and write the tape ``options.out``, all or nothing. Raises ``DumpError``."""
    try:
        return _import(options)
    except OSError as error:
        raise DumpError(f"{error}. Nothing was written to {options.out}") from error


def _import(options: Options) -> Imported:
    if options.train is None and options.val is None:
        raise DumpError("nothing to import: name a dump of training, or one of validation with --val")
    if not options.timeout_s > 0:
        raise DumpError(f"--timeout {options.timeout_s:g}: want seconds, above 0")
    if options.step is not None and options.step < 0:
        raise DumpError(f"--step {options.step}: want a number from 0")
    require_free(options.out)
    warnings: list[str] = []
    sources: list[tuple[Split, Source]] = []
    places: list[tuple[Split, Path | None]] = [("train", options.train), ("val", options.val)]
    for split, place in places:
        if place is not None:
            found, passed_over = find_sources(place, options.step)
            sources += [(split, source) for source in found]
            warnings += [f"{place}: {each}" for each in passed_over]
    pickles = [source.path for _, source in sources if source.form == "dp"]
    if pickles and not options.trust_pickle:
        raise refuse(pickles[0])
    tokens = Tokens(options.tokenizer) if options.tokenizer else None
    dumps = _read(options, sources, tokens, warnings)
    if not dumps:
        raise DumpError(f"{options.train or options.val}: all files are empty; there is nothing to import")
    written = write_tape(options.out, dumps)
    for _, dump in dumps:
        warnings += dump.warnings + ((f"{dump.path}: {dump.cut}; samples may be missing",) if dump.cut else ())
    steps: dict[Split, list[int]] = {}
    for split, dump in dumps:
        steps.setdefault(split, []).append(dump.step)
    return Imported(written, steps, [*warnings, *written.left_out])


def _read(
    options: Options, sources: list[tuple[Split, Source]], tokens: Tokens | None, warnings: list[str]
) -> list[tuple[Split, Dump]]:
    paths = [source.path for _, source in sources if source.form == "dp"]
    opened = iter(unpickle(paths, options.python, options.timeout_s) if paths else ())
    dumps: list[tuple[Split, Dump]] = []
    for split, source in sources:
        if source.form == "dp":
            assert source.step is not None
            dumps.append((split, proto_dump(next(opened), source.step, tokens)))
        elif (dump := text_dump(source.path, source.step, tokens)) is not None:
            dumps.append((split, dump))
        else:
            warnings.append(f"{source.path} is empty (a writer that was killed leaves such files); it was left out")
    return dumps
