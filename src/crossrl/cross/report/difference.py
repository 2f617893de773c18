"""The first difference: its sample's prompt, the two responses side by side, and the log-probs token by token."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crossrl.batch import BatchError
from crossrl.cross.findings import Finding, Gap
from crossrl.cross.next_steps import commands_of
from crossrl.cross.report.first import first_finding
from crossrl.cross.report.gather import SIDES, Material
from crossrl.cross.report.markup import Child, Html, command, number, section, table, tag
from crossrl.cross.report.pairs import CLASSES, Token, first_difference, gap_class, tokens, window
from crossrl.cross.report.stages import sentence
from crossrl.cross.report.summary import gap_table
from crossrl.report.texts import TokenTexts, prompt_text
from crossrl.tape.api import RunTape, SampleView
from crossrl.tape.errors import RecordMissing, TapeError


@dataclass(frozen=True, slots=True)
class Seen:
    """The sample in one side's run. ``view``: None when it cannot be shown, and ``note`` says why."""

    side: str
    view: SampleView | None
    texts: TokenTexts | None
    note: str


def difference_section(material: Material) -> Html:
    title = "First difference"
    finding = first_finding(material)
    if finding is None:
        gaps = material.verdict.gaps if material.verdict else ()
        told = gap_table("What the verdict names", gaps) if gaps else None
        return section("difference", title, tag("p", _none(material), class_="absent"), told)
    by = f"run again by {finding.by}" if finding.by else "its own records against each other"
    call = f", call {finding.call}" if finding.call else ""
    body: list[Child] = [
        tag("p", tag("strong", f"Stage {finding.stage}, step {finding.step}{call}"),
            f" of the tape of {finding.of}, {by}: ", sentence(finding)),
        tag("p", tag("strong", "Hint: "), finding.hint) if finding.hint else None,
        gap_table("What differs", finding.gaps) if finding.gaps else None,
    ]  # fmt: skip
    gap = next((g for g in finding.gaps if g.sample_id), None) or _any_sample(material, finding)
    if gap is None:
        body.append(tag("p", "It is not at one sample, so there are no texts to compare.", class_="note"))
    else:
        body += _sample(material, finding, gap)
    return section("difference", title, body)


def _any_sample(material: Material, finding: Finding) -> Gap | None:
    """For a difference that is in all samples (a meaning, a setting): the first sample that reads differently."""
    if finding.part not in ("inference", "data"):
        return None
    try:
        a, b = (material.tapes[side * 2].record(finding.step, "rollout").only(["response_ids"]) for side in SIDES)
    except (KeyError, TapeError, BatchError):
        return None
    where = {sample: b.ragged("response_ids").row(i) for i, sample in enumerate(b.sample_id)}
    for i, sample in enumerate(a.sample_id):
        ids = a.ragged("response_ids").row(i).tolist()
        if sample in where and first_difference(ids, where[sample].tolist()) is not None:
            return Gap("response_ids", "texts", sample_id=sample)
    return None


def _none(material: Material) -> str:
    if commands_of(material.folder)[0]:
        return "Of the arms' records: see the evidence, and crossrl diff below it."
    if not material.examined:
        return "Unknown until a tape was examined: see “Missing from this page”."
    return "None: no stage differs by more than noise in what was examined."


def _sample(material: Material, finding: Finding, gap: Gap) -> list[Child]:
    sample = gap.sample_id or ""
    seen = [look(material, side, finding.step, sample) for side in SIDES]
    first = _first_position(seen, gap)
    prompts = [_prompt(s) for s in seen if s.view is not None]
    pages = [
        _response(one, other, gap if one.side == finding.of else None, first) for one, other in zip(seen, seen[::-1])
    ]
    notes = list(dict.fromkeys(s.texts.note for s in seen if s.texts is not None and s.texts.note))
    shown = any(s.view is not None for s in seen)
    return [
        tag("h3", "Sample ", tag("code", sample), f", step {finding.step}"),
        tag("div", _merge(prompts), class_="prompt") if prompts else None,
        [tag("p", note, class_="note") for note in notes],
        _colours() if shown else None,
        tag("div", [page for page, _ in pages], class_="pair"),
        [rows for _, rows in pages],
        command(*_inspect(material, finding.step, sample)) if shown else None,
    ]


def _inspect(material: Material, step: int, sample: str) -> list[str]:
    runs = [material.folder.arm(name) for name in ("AA", "BB") if name in material.tapes]
    return [f"crossrl inspect {shlex.quote(str(run))} --step {step} --sample {shlex.quote(sample)}" for run in runs]


def look(material: Material, side: str, step: int, sample: str) -> Seen:
    """Sample ``sample`` of ``step`` in the run of ``side`` alone."""
    tape = material.tapes.get(side * 2)
    if tape is None:
        return Seen(side, None, None, f"arm {side * 2} has no records, so there is no text of {side}")
    try:
        return Seen(side, tape.sample(sample, step), _texts(material, side, tape, step), "")
    except RecordMissing:
        note = f"{side} has no such sample at step {step}: its data, seed, order or batch size is another"
        return Seen(side, None, None, note)
    except TapeError as error:
        return Seen(side, None, None, f"the records of {side} cannot be read: {error}")


def _texts(material: Material, side: str, tape: RunTape, step: int) -> TokenTexts:
    model = "actor_rollout_ref.model"
    path = material.sides[side].get(f"{model}.tokenizer_path") or material.sides[side].get(f"{model}.path")
    calls = [at.call for stage, at in tape.calls(step) if stage == "rollout"]
    made_with = tape.record(step, "rollout", calls[0]).header.fingerprints if calls else {}
    return TokenTexts(Path(path).expanduser() if path else None, made_with.get("tokenizer", {}).get("digest"))


def _first_position(seen: Sequence[Seen], gap: Gap) -> int | None:
    """Where the interest lies: the examiner's position, or the first token that differs between the two texts."""
    if gap.position is not None:
        return gap.position
    ids = [[t[1] for t in s.view.tokens()] for s in seen if s.view is not None]
    return first_difference(*ids) if len(ids) == 2 else None


def _prompt(seen: Seen) -> tuple[str, str]:
    assert seen.view is not None
    text = prompt_text(seen.view.prompt)
    if not text and seen.texts is not None:
        ids = seen.view.columns.get("prompt_ids", ())
        text = " ".join(f"{int(i)}" if (t := seen.texts(int(i))) is None else t for i in ids)
    return seen.side, text or "the prompt was not recorded"


def _merge(prompts: Sequence[tuple[str, str]]) -> list[list[Html]]:
    """One prompt for both sides, or one each when they differ."""
    if len(prompts) == 2 and prompts[0][1] == prompts[1][1]:
        prompts = [("both sides", prompts[0][1])]
    several = len(prompts) > 1
    return [
        [
            tag("h4", f"Prompt of {side}" + (" (another one than the other side's)" if several else "")),
            tag("pre", text, class_="text", tabindex=0),
        ]
        for side, text in prompts
    ]


def _response(seen: Seen, other: Seen, gap: Gap | None, first: int | None) -> tuple[Html, Html | None]:
    """The response as coloured tokens, and the table of its numbers."""
    title = f"Response of {seen.side}"
    if seen.view is None or seen.texts is None:
        return tag("div", tag("h4", title), tag("p", seen.note, class_="absent"), class_="half"), None
    count = len(seen.view.tokens())
    shown = window(count, first)
    listed = tokens(seen.view, other.view, shown, seen.texts)
    part = f", tokens {shown.start} to {shown.stop - 1} shown" if len(shown) < count else ""
    facts = [f"{count} tokens{part}"]
    if seen.view.reward is not None:
        facts.append(f"reward {number(seen.view.reward)}")
    if "rollout_weight_version" in seen.view.columns:
        facts.append(f"weights of version {seen.view.columns['rollout_weight_version']}")
    spans = [_span(t, gap) for t in listed]
    text = tag("div", spans or "(no token)", class_="tokens", tabindex=0, role="group", aria_label=title)
    return tag("div", tag("h4", title), tag("p", ", ".join(facts), class_="note"), text, class_="half"), _rows(
        title, listed
    )


def _span(token: Token, gap: Gap | None) -> Html:
    marked = gap is not None and gap.position == token.position
    classes = [name for name, on in (("differs", token.differs), ("here", marked)) if on]
    return tag(
        "mark" if token.differs else "span",
        _text(token),
        class_=" ".join(classes) or None,
        data_own=gap_class(token.own_gap),
        data_other=gap_class(token.other_gap),
        title=_title(token, gap if marked else None),
    )


def _text(token: Token) -> str:
    if token.text is None:
        return f"{token.id} "
    return token.text.replace("\n", "⏎\n") or f"⟨{token.id}⟩"


def _title(token: Token, gap: Gap | None) -> str:
    lines = [f"token {token.position}, id {token.id}"]
    if gap is not None:
        lines.append(f"{gap.field}: recorded {number(gap.recorded)}, found {number(gap.found)}")
    for name, value in (
        ("sampler", token.sampler), ("trainer", token.trainer), ("trainer - sampler", token.own_gap),
        ("sampler of the other side", token.other), ("this side - other side", token.other_gap),
    ):  # fmt: skip
        if value is not None:
            lines.append(f"{name}: {number(value)} nat")
    return "\n".join(lines)


def _rows(title: str, listed: Sequence[Token]) -> Html:
    head = ("position", "id", "token", "sampler", "trainer", "trainer − sampler", "other side's sampler", "differs")
    rows = [
        [
            str(t.position), str(t.id), tag("code", "–" if t.text is None else repr(t.text)[1:-1]), number(t.sampler),
            number(t.trainer), number(t.own_gap), number(t.other), "yes" if t.differs else "",
        ]
        for t in listed
    ]  # fmt: skip
    caption = "Log-probs in nat; – where not computed, or where the tokens before differ"
    return tag("details", tag("summary", f"{title}, token by token"), table(caption, head, rows, "numbers"))


def _colours() -> Html:
    """What the tokens' colours show, and what they mean."""
    choices = (("own", "trainer − sampler, within each run"), ("other", "A − B, where the tokens before are the same"))
    radios = [
        tag("label", tag("input", type="radio", name="colour", value=value, checked=value == "own"), tag("span", text))
        for value, text in choices
    ]
    ends = ["0", *(f"≤ {end:g}" for end in CLASSES[1:]), f"> {CLASSES[-1]:g}"]
    scale = [tag("li", tag("span", end, data_own=i, data_other=i)) for i, end in enumerate(ends)]
    return tag(
        "div",
        tag("fieldset", tag("legend", "Colour by the gap of log-probs"), radios, class_="tabs"),
        tag("ul", scale, tag("li", tag("mark", "differs", class_="differs"), " not in the other text"),
            tag("li", tag("span", "here", class_="here"), " where the examiner found it"), class_="legend scale",
            aria_label="classes of the gap, nat"),
        class_="colours",
    )  # fmt: skip
