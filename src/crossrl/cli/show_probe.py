"""What ``crossrl probe`` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from crossrl.cross.findings import to_json
from crossrl.cross.probe.compare import Compared
from crossrl.cross.probe.dump import Opened
from crossrl.cross.probe.rows import Row

AROUND = 5  # modules shown before and after the one that is named
WORST = 5  # tokens shown


def show(result: Compared, a: Opened, b: Opened) -> None:
    console = Console(highlight=False)
    for name, opened in (("A", a), ("B", b)):
        console.print(Text(f"{name}: {side_text(opened)}"), soft_wrap=True)
    dump = a.dump
    size = f"{len(dump.prompt_ids)} + {len(dump.response_ids)} tokens"
    console.print(Text(f"sample {dump.sample_id}, step {dump.step}: {size}, the same"), soft_wrap=True)
    console.print(Text(f"weights: {weights_text(result, a)}"), soft_wrap=True)
    if result.judged.judgement != "equal":
        console.print(module_table(result))
    good = result.exit_code == 0
    console.print(
        Text.assemble(
            ("" if good else f"{title(result)}: ", "bold red"), (result.judged.sentence, "green" if good else "")
        ),
        soft_wrap=True,
    )
    for line in details(result, a, b):
        console.print(Text(line), soft_wrap=True)
    if result.worst.gap > 0:
        console.print(token_table(result, a))
    for note in result.notes:
        console.print(Text.assemble(("note: ", "yellow"), note), soft_wrap=True)


def title(result: Compared) -> str:
    """What the sentence is about.

    >>> TITLES["module"]
    'first module that differs'
    """
    return TITLES[result.judged.judgement]


TITLES = {
    "module": "first module that differs", "weights": "weights", "tokens": "inputs", "drift": "beyond rounding",
    "log-probs": "after the model",
}  # fmt: skip


def side_text(opened: Opened) -> str:
    d = opened.dump
    way = {"train": "training path", "rollout": "rollout path"}[d.way]
    numbers = d.dtype + (f", computed in {d.autocast}" if d.autocast else "")
    versions = ", ".join(f"{name} {d.versions[name]}" for name in ("torch", "transformers") if name in d.versions)
    planted = f", planted: {d.planted}" if d.planted else ""
    return f"{d.side}: {way} ({'packed' if d.packed else 'plain'}), {numbers}, {d.device}, {versions}{planted}"


def weights_text(result: Compared, a: Opened) -> str:
    if result.gaps:
        return f"{len(result.gaps)} of {len(a.dump.parameters)} parameters differ, first {result.gaps[0].name}"
    cast = "" if result.numerics.name == "float32" else " (in bfloat16, where the sides' types differ)"
    return f"the same, {len(a.dump.parameters)} parameters{cast}; from {a.dump.weights_from}"


def module_table(result: Compared) -> Table:
    """The modules around the one that is named, or the first ones."""
    at = result.judged.at or 0
    table = Table("", Column("module", no_wrap=True), "class", "inputs", "outputs", "tokens", box=None, pad_edge=False)
    table.columns[1].min_width = max(len(row.module) for row in result.rows[max(0, at - AROUND) : at + AROUND + 1])
    for row in result.rows[max(0, at - AROUND) : at + AROUND + 1]:
        here = row.order == result.judged.at
        table.add_row(
            ">" if here else "", Text(row.module + (f" [{row.occurrence}]" if row.occurrence else "")), Text(row.kind),
            size_text(row.given), size_text(row.returned), str(len(row.positions) or ""),
            style="bold red" if here else "",
        )  # fmt: skip
    return table


def size_text(value: float | None) -> str:
    """
    >>> size_text(None), size_text(0.0), size_text(0.0123)
    ('', 'equal', '1.2e-02')
    """
    if value is None:
        return ""
    return "equal" if value == 0.0 else "bits" if value < 1e-30 else f"{value:.1e}"


def details(result: Compared, a: Opened, b: Opened) -> list[str]:
    lines = []
    row = result.rows[result.judged.at] if result.judged.at is not None else None
    if row is not None and row.positions:
        lines.append(f"at {place_text(row, a)}")
    if row is not None:
        lines += stats_text(row, a, b)
    if result.first_bits and result.first_bits != result.judged.module:
        lines.append(
            f"not equal bit for bit since {result.first_bits}, within what {result.numerics.name} rounding explains"
        )
    if result.worst.gap > 0:
        lines.append(f"log-probs: largest gap {result.worst.gap:.2e} nat, at response token {result.worst.position}")
    return lines


def place_text(row: Row, a: Opened) -> str:
    """Where in the sample the outputs of a row differ."""
    prompt = len(a.dump.prompt_ids)

    def name(position: int | None) -> str:
        if position is None:
            return "?"
        return f"prompt token {position}" if position < prompt else f"response token {position - prompt}"

    total = prompt + len(a.dump.response_ids) - 1
    return f"{len(row.positions)} of {total} input tokens, first {name(row.positions[0])}, most at {name(row.worst)}"


def stats_text(row: Row, a: Opened, b: Opened) -> list[str]:
    """Mean, deviation and norm of the tensor that differs: a factor between the sides, or an offset, shows here."""
    lines = []
    for name, opened in (("A", a), ("B", b)):
        call = next(c for c in opened.dump.calls if (c.module, c.occurrence) == (row.module, row.occurrence))
        seen = next((s for s in call.outputs if s.label == row.output), None)
        if seen is not None and row.returned:
            shape = " x ".join(map(str, (seen.rows, *seen.shape)))
            lines.append(
                f"{name}: output {shape} {seen.dtype}, mean {seen.mean:.6g}, std {seen.std:.6g}, norm {seen.norm:.6g}"
            )
    return lines


def token_table(result: Compared, a: Opened) -> Table:
    """The response tokens with the largest gaps, and what the tape has for them."""
    recorded = a.dump.recorded
    table = Table(
        "response token", "id", "log-prob A", "B", "gap", *(f"taped {n}" for n in recorded), box=None, pad_edge=False
    )
    for token in sorted(result.tokens, key=lambda t: -t.gap)[:WORST]:
        taped = [values[token.position] for values in recorded.values()]
        table.add_row(
            str(token.position), str(token.token), f"{token.a:.6f}", f"{token.b:.6f}", f"{token.gap:.1e}",
            *("" if value is None else f"{value:.6f}" for value in taped),
        )  # fmt: skip
    return table


def as_json(result: Compared, a: Opened, b: Opened) -> dict[str, Any]:
    """Everything but the token ids, which are in the dumps."""

    def side(opened: Opened) -> dict[str, Any]:
        body: dict[str, Any] = to_json(opened.dump)
        for name in ("prompt_ids", "response_ids", "calls", "parameters", "buffers", "recorded"):
            del body[name]
        return body

    judged = result.judged
    return {
        "judgement": judged.judgement, "module": judged.module, "sentence": judged.sentence, "at": judged.at,
        "first_not_bit_equal": result.first_bits, "numerics": to_json(result.numerics), "a": side(a), "b": side(b),
        "largest_log_prob_gap": to_json(result.worst.gap), "weights": to_json(result.gaps),
        "buffers": to_json(result.buffers), "rows": to_json(result.rows), "tokens": to_json(result.tokens),
        "notes": list(result.notes),
    }  # fmt: skip
