"""What ``crossrl inspect`` says about samples: a table of many, or one token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from crossrl.cli.recorded import TokenTexts, as_json, excerpt, prompt_text, value_text, visible
from crossrl.tape import RecordMissing, RunTape, SampleView, TapeError
from crossrl.tape.api import SAMPLER_COLUMN, Split, trainer_column
from crossrl.tape.gap import input_differences, meaning_verdict
from crossrl.tape.imported import notes

FACTS = (
    ("verifier", "reward_extra"), ("answer", "ground_truth"), ("finish", "finish_reason"),
    ("weights", "rollout_weight_version"), ("source", "data_source"), ("extra", "extra_info"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gap:
    """Sampler against trainer for one sample. ``column``: the trainer's log-probs, or None. ``difference``: trainer
    minus sampler in nat, one per response token, NaN where there is none; None when they cannot be subtracted, and
    ``note`` says why."""

    column: str | None
    difference: np.ndarray | None
    note: str

    @property
    def largest(self) -> float | None:
        if self.difference is None or not np.isfinite(self.difference).any():
            return None
        return float(np.nanmax(np.abs(self.difference)))


def mixed_up(tape: RunTape, step: int, split: Split) -> str:
    """What a stage of this step was given that the stages before it did not write; empty when all is well.

    Then samples were mixed up between two stages, and no difference of numbers says anything about a policy.
    """
    found = input_differences(tape, step, split)
    if not found:
        return ""
    first = found[0]
    return (
        f"inputs differ at step {step}: {first.stage} was given another {first.field} than the stage before it wrote "
        f"for {first.differing} of {first.total} samples, so the log-probs are not compared"
    )


def imported(tape: RunTape, step: int, split: Split) -> list[str]:
    """What must be said of this step's samples where they were imported from another program's dump."""
    return list(dict.fromkeys(note for _, record in tape.records(step, split) for note in notes(record.header)))


def gap_of(view: SampleView, mixed: str = "") -> Gap:
    """``mixed``: see ``mixed_up``."""
    sampler, column = view.columns.get(SAMPLER_COLUMN), trainer_column(view.columns, view.meanings)
    if sampler is None or column is None:
        missing = "trainer" if sampler is not None else "sampler"
        return Gap(column, None, f"no log-probs of the {missing} are recorded for this sample")
    if mixed:
        return Gap(column, None, mixed)
    if SAMPLER_COLUMN not in view.meanings or column not in view.meanings:
        return Gap(column, None, "a log-prob column does not say what it means, so the two are not compared")
    verdict, reason = meaning_verdict(view.meanings[SAMPLER_COLUMN], view.meanings[column])
    if verdict == "different meaning":
        return Gap(column, None, reason)
    difference = view.columns[column].astype(np.float64) - sampler.astype(np.float64)
    mask = view.columns.get("response_mask")
    return Gap(column, difference if mask is None else np.where(mask == 1, difference, np.nan), reason)


@dataclass(frozen=True, slots=True)
class Row:
    """``reward``: the score where rewards are not recorded; None without one, and ``status`` says why. ``gap``: largest
    difference of log-probs, nat."""

    step: int
    split: str
    sample_id: str
    prompt: str
    response: str
    reward: float | None
    status: str | None
    length: int | None
    gap: float | None
    note: str


def rows(tape: RunTape, steps: Sequence[int], split: Split, find: str | None = None) -> Iterator[Row]:
    """One per sample, in the order of the run. ``find``: only those with this text (any case) in prompt or response."""
    for step in steps:
        mixed = mixed_up(tape, step, split)
        for view in tape.samples(step, split):
            prompt, response = prompt_text(view.prompt), view.response or ""
            if find is not None and find.casefold() not in f"{prompt}\n{response}".casefold():
                continue
            ids, gap = view.columns.get("response_ids"), gap_of(view, mixed)
            reward = _number(view.columns.get("reward", view.columns.get("score")))
            yield Row(
                step, split, view.sample_id, prompt, response, reward, view.columns.get("reward_status"),
                None if ids is None else len(ids), gap.largest, gap.note,
            )  # fmt: skip


def worst(found: Sequence[Row], count: int) -> list[Row]:
    """Those in which sampler and trainer differ most, largest first."""
    return sorted((r for r in found if r.gap is not None), key=lambda r: -(r.gap or 0.0))[:count]


def show_rows(found: Sequence[Row], title: str) -> list[RenderableType]:
    prefix = _common([r.sample_id for r in found])
    several = len({r.step for r in found}) > 1
    table = Table(box=None, pad_edge=False, expand=False)
    if several:
        table.add_column("step", justify="right", no_wrap=True)
    table.add_column("sample", no_wrap=True)
    table.add_column("prompt", no_wrap=True, ratio=1)
    table.add_column("response", no_wrap=True, ratio=1)
    for name in ("reward", "tokens", "max gap"):
        table.add_column(name, justify="right", no_wrap=True)
    table.expand = True
    for r in found:
        table.add_row(
            *([str(r.step)] if several else []), r.sample_id.removeprefix(prefix), excerpt(r.prompt),
            excerpt(r.response), _reward(r), "" if r.length is None else str(r.length), _small(r.gap),
        )  # fmt: skip
    rewards = [r.reward for r in found if r.reward is not None]
    if rewards:
        title += f", mean reward {sum(rewards) / len(rewards):.3f}"
    parts: list[RenderableType] = [table, Text(), Text(title)]
    if prefix:
        parts.append(Text(f"sample ids begin with {prefix}", "dim"))
    return parts + [Text(f"gap: {note}", "yellow") for note in sorted({r.note for r in found if r.note})]


def _common(ids: Sequence[str]) -> str:
    """What all ids begin with, up to a dot; nothing for one id."""
    first, last = min(ids), max(ids)
    same = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), 0)
    return first[: first.rfind(".", 0, same) + 1]


def _reward(row: Row) -> Text:
    if row.reward is None:
        return Text(row.status or "-", "yellow")
    return Text(f"{row.reward:.3f}".removesuffix("000").removesuffix("."))


def _number(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _small(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def find_sample(tape: RunTape, text: str, steps: Sequence[int], split: Split) -> SampleView:
    """The sample with this id, or whose id ends with it after a dot or slash, at the first step that has it."""
    for step in steps:
        ids = _ids(tape, step, split)
        matches = [text] if text in ids else [i for i in ids if i.endswith((f".{text}", f"/{text}"))]
        if len(matches) > 1:
            some = ", ".join(matches[:4]) + (", ..." if len(matches) > 4 else "")
            raise TapeError(f"{len(matches)} samples of step {step} end with {text!r}: {some}. Give more of the id")
        if matches:
            return tape.sample(matches[0], step, split)
    which = "validation" if split == "val" else "training"
    raise RecordMissing(
        f"no recorded {which} sample of {_steps(steps)} has an id that is, or ends with, {text!r}. "
        f"crossrl inspect RUN --step N lists the samples of a step" + ("" if split == "val" else "; --val validation's")
    )


def _ids(tape: RunTape, step: int, split: Split) -> list[str]:
    calls = tape.calls(step, split)
    first = [at for stage, at in calls if stage == calls[0][0]]
    return [i for at in first for i in tape.record(step, calls[0][0], at.call, split).sample_id]


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One response token. ``text``: None without a tokenizer. Log-probs in nat; None where not computed."""

    position: int
    id: int
    text: str | None
    sampler: float | None
    trainer: float | None
    difference: float | None


def token_rows(view: SampleView, gap: Gap, texts: TokenTexts) -> list[TokenRow]:
    ids = view.columns.get("response_ids", np.zeros(0, np.int32)).tolist()
    columns = [
        view.columns.get(SAMPLER_COLUMN), view.columns[gap.column] if gap.column else None, gap.difference,
    ]  # fmt: skip
    values = [[None] * len(ids) if c is None else [_number(v) for v in c.tolist()] for c in columns]
    return [
        TokenRow(i, token, texts(token), *numbers) for i, (token, *numbers) in enumerate(zip(ids, *values, strict=True))
    ]


def worst_tokens(tokens: Sequence[TokenRow], count: int) -> list[TokenRow]:
    """Those at which sampler and trainer differ most, largest first; none where they are equal."""
    unequal = [t for t in tokens if t.difference]
    return sorted(unequal, key=lambda t: -abs(t.difference or 0.0))[:count]


def sample_json(
    view: SampleView, gap: Gap, texts: TokenTexts, count: int, imported: Sequence[str] = ()
) -> dict[str, Any]:
    tokens = token_rows(view, gap, texts)
    return as_json(
        {
            "sample_id": view.sample_id, "step": view.step, "split": view.split,
            "trainer_log_probs": gap.column, "note": gap.note or None, "imported": list(imported),
            "tokens": [asdict(t) for t in tokens],
            "worst_positions": [t.position for t in worst_tokens(tokens, count)],
            "meanings": {n: asdict(m) for n, m in view.meanings.items()}, "fields": view.columns,
        }
    )  # fmt: skip


def show_sample(
    view: SampleView, gap: Gap, texts: TokenTexts, count: int, imported: Sequence[str] = ()
) -> list[RenderableType]:
    """``imported``: see there."""
    tokens = token_rows(view, gap, texts)
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    split = " (validation)" if view.split == "val" else ""
    facts.add_row("sample", Text.assemble((view.sample_id, "bold"), f"  step {view.step}{split}"))
    if "reward" in view.columns or "score" in view.columns:
        facts.add_row("reward", Text(_reward_text(view)))
    for name, key in FACTS:
        value = view.columns.get(key)
        if value not in (None, {}, ""):
            facts.add_row(name, Text(value_text(value)))
    if gap.largest is not None and gap.difference is not None:
        mean = float(np.nanmean(np.abs(gap.difference)))
        facts.add_row("gap", f"at most {_small(gap.largest)} nat, mean {_small(mean)} (rollout against {gap.column})")
    parts: list[RenderableType] = [facts]
    for title, text in (("prompt", prompt_text(view.prompt)), ("response", view.response)):
        if text is not None:
            parts += [Text(), Text(title, "dim"), Text(visible(text, lines=True) or "(empty)")]
    if tokens:
        parts += [Text(), _token_table(view, gap, tokens, count)]
    said = [*imported, gap.note, texts.note if tokens else None]
    if gap.column == "log_probs":
        said.append("trainer: its log-probs when the update first computed them (old_log_probs are not recorded)")
    return parts + [Text(visible(note), "yellow") for note in said if note]


def _reward_text(view: SampleView) -> str:
    reward, score, status = (view.columns.get(n) for n in ("reward", "score", "reward_status"))
    if "reward" not in view.columns:
        return f"{'none' if _number(score) is None else f'{score:.6g}'} (the score; rewards are not recorded)"
    text = "none" if _number(reward) is None else f"{reward:.6g}"
    if score != reward and _number(score) is not None:
        text += f", before shaping {score:.6g}"
    return text if status in (None, "ok") else f"{text} ({status})"


def _token_table(view: SampleView, gap: Gap, tokens: Sequence[TokenRow], count: int) -> RenderableType:
    ranks = {t.position: rank for rank, t in enumerate(worst_tokens(tokens, count), 1)}
    extra = [(n, k) for n, k in (("reference", "ref_log_probs"), ("advantage", "advantages")) if k in view.columns]
    table = Table(box=None, pad_edge=False)
    for name in ("token", "id"):
        table.add_column(name, justify="right")
    table.add_column("text", no_wrap=True, max_width=24, overflow="ellipsis")
    for name in ("sampler", "trainer", "difference", "", *(n for n, _ in extra)):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for t in tokens:
        rank = ranks.get(t.position)
        more = [f"{float(view.columns[k][t.position]):.4f}" for _, k in extra]
        numbers = [f"{v:.6f}" if v is not None else "-" for v in (t.sampler, t.trainer)]
        difference = "-" if t.difference is None else "0" if t.difference == 0 else f"{t.difference:+.1e}"
        table.add_row(
            str(t.position), str(t.id), Text("" if t.text is None else repr(t.text)), *numbers, difference,
            f"← {rank}" if rank else "", *more, style="bold yellow" if rank else "",
        )  # fmt: skip
    return table
