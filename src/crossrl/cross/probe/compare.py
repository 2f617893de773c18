"""Two dumps of one sample: identity first (tokens, weights), then module by module in the order of execution."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from crossrl.cross.probe.dump import Opened, ProbeError
from crossrl.cross.probe.hooks import TOKENS
from crossrl.cross.probe.judge import Judged, WeightGap, judge, weight_gaps
from crossrl.cross.probe.rows import BFLOAT16, FLOAT32, Numerics, Row, rows_of


@dataclass(frozen=True, slots=True)
class Token:
    """A response token's log-probs (nat) on both sides."""

    position: int
    token: int
    a: float
    b: float

    @property
    def gap(self) -> float:
        gap = abs(self.a - self.b)
        return float("inf") if gap != gap else gap


@dataclass(frozen=True, slots=True)
class Compared:
    """``rows``: all modules that both have, in order. ``first_bits``: the first that is not equal bit for bit.
    ``gaps``: of parameters, ``buffers``: of tables that a model computes when it is made. ``tokens``: every response
    token."""

    judged: Judged
    numerics: Numerics
    rows: tuple[Row, ...]
    first_bits: str | None
    gaps: tuple[WeightGap, ...]
    buffers: tuple[WeightGap, ...]
    tokens: tuple[Token, ...]
    notes: tuple[str, ...]

    @property
    def worst(self) -> Token:
        return max(self.tokens, key=lambda t: t.gap)

    @property
    def exit_code(self) -> int:
        """0 no difference beyond rounding, 1 found."""
        return 0 if self.judged.judgement in ("equal", "rounding") else 1


def compare_dumps(a: Opened, b: Opened, limit: float | None = None) -> Compared:
    """``limit``: the relative difference of a module that passes; None: what the data types explain.

    Raises ``ProbeError`` when the dumps are of other tokens, or have no module in common.
    """
    same_tokens(a, b)
    numerics = BFLOAT16 if _is_half(a) or _is_half(b) else FLOAT32
    if limit is not None:
        numerics = Numerics(numerics.name, limit, numerics.jump, numerics.share, numerics.nats)
    rows = tuple(rows_of(a, b, numerics))
    if not any(row.returned is not None for row in rows if row.module != TOKENS):
        raise ProbeError(f"{a.path} and {b.path} have no module in common: they are of different architectures")
    gaps = tuple(weight_gaps(a.dump.parameters, b.dump.parameters))
    buffers = tuple(weight_gaps(a.dump.buffers, b.dump.buffers))
    pairs = zip(a.dump.response_ids, a.log_probs.tolist(), b.log_probs.tolist(), strict=True)
    tokens = tuple(Token(i, *pair) for i, pair in enumerate(pairs))
    judged = judge(rows, gaps, buffers, numerics)
    largest = max(t.gap for t in tokens)
    if judged.judgement in ("equal", "rounding") and largest > numerics.nats:
        sentence = (
            f"all modules agree, and log-probs differ by up to {largest:.1e} nat: look at what follows the head "
            f"(temperature {a.dump.temperature} in A, {b.dump.temperature} in B)"
        )
        judged = Judged("log-probs", sentence)
    first = next((r.module for r in rows if (r.given or 0.0) > 0.0 or (r.returned or 0.0) > 0.0), None)
    return Compared(judged, numerics, rows, first, gaps, buffers, tokens, tuple(_notes(a, b, numerics)))


def same_tokens(a: Opened, b: Opened) -> None:
    """Raise ``ProbeError`` naming the first token that differs."""
    for name in ("prompt_ids", "response_ids"):
        one, two = getattr(a.dump, name), getattr(b.dump, name)
        if one == two:
            continue
        at = next((i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))
        raise ProbeError(
            f"the dumps are of other tokens: {name} differ from position {at} on ({len(one)} and {len(two)} tokens; "
            f"samples {a.dump.sample_id} and {b.dump.sample_id}). Make both from the same run and sample: --sample ID"
        )


def _notes(a: Opened, b: Opened, numerics: Numerics) -> list[str]:
    notes = []
    for side, opened in (("A", a), ("B", b)):
        missing = int(np.isnan(opened.log_probs).sum())
        if missing:
            notes.append(f"{side}: {missing} of {len(opened.log_probs)} response tokens have no log-prob")
        if Path(opened.dump.side) != Path(opened.dump.run) / "config.yaml":
            continue  # what the run recorded is not this side's
        recorded = opened.dump.recorded.get(opened.dump.way) or []
        known = [(x, y) for x, y in zip(recorded, opened.log_probs.tolist(), strict=False) if x is not None]
        apart = max((abs(x - y) for x, y in known), default=0.0)
        if apart > numerics.nats:
            column = "sampler" if opened.dump.way == "rollout" else "trainer"
            notes.append(
                f"{side}: the {column}'s log-probs on the tape differ by up to {apart:.1e} nat from those computed "
                "now: this side is not as it was in that run, or something after its head changed them (truncation)"
            )
    if a.dump.temperature != b.dump.temperature:
        notes.append(f"temperature {a.dump.temperature} and {b.dump.temperature}: the log-probs do not mean the same")
    one, two = ({(c.module, c.occurrence) for c in opened.dump.calls} for opened in (a, b))
    if one ^ two:
        notes.append(f"{len(one ^ two)} calls of modules are in one dump only (first: {min(one ^ two)[0]})")
    hidden = sorted({c.module for c in a.dump.calls if c.apart and not c.outputs})
    if hidden:
        notes.append(f"not compared, as they return no row per token: {', '.join(hidden[:3])} ({len(hidden)} modules)")
    return notes


def _is_half(opened: Opened) -> bool:
    return opened.dump.dtype != "float32" or opened.dump.autocast is not None
