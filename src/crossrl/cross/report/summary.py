"""The top of the page: the verdict in one line, the evidence, what to do next, and what the page lacks."""

from __future__ import annotations

from crossrl.cross.findings import Gap, Verdict
from crossrl.cross.report.gather import Material, Missing
from crossrl.cross.report.markup import Html, command, number, section, table, tag

LONG = 300  # characters of a piece of evidence; more is folded, so that all of it is in sight
TONE = {0: "good", 1: "bad", 2: "unsure"}


def headline(verdict: Verdict) -> str:
    """
    >>> headline(Verdict("weight sync", "A", ("sync",), 2))
    'Weight sync of A is at fault: stage sync, since step 2'
    """
    if verdict.conclusion == "no difference":
        return "No difference beyond noise"
    if verdict.conclusion == "not distinguishable":
        return "Cannot tell which part is at fault"
    whose = f" of {verdict.side}" if verdict.side else ""
    if verdict.conclusion == "several":
        what = f"Several parts{whose} are at fault" + (f" ({', '.join(verdict.parts)})" if verdict.parts else "")
    else:
        what = f"{verdict.conclusion.capitalize()}{whose} is at fault"
    where = f": stage{'s' if len(verdict.stages) > 1 else ''} {', '.join(verdict.stages)}" if verdict.stages else ""
    since = f", since step {verdict.step}" if verdict.step is not None else ""
    return what + where + since


def summary(material: Material) -> Html:
    verdict = material.verdict
    if verdict is None:
        text = "What was found so far is below. The verdict over it is made by this command:"
        return tag(
            "section",
            tag("h1", "No verdict yet"),
            tag("p", text),
            command(f"crossrl verdict {material.folder.root}"),
            id="verdict",
            class_="verdict unsure",
        )
    return tag(
        "section",
        tag("h1", headline(verdict)),
        _where(verdict),
        tag("h2", "Evidence") if verdict.evidence else None,
        tag("ul", [_evidence(e.source, e.sentence) for e in verdict.evidence], class_="evidence"),
        _first(verdict.gaps),
        _sentences("What follows from it", verdict.consequences),
        _sentences("What to do next", tuple(t for t in verdict.todo if not t.startswith("crossrl report "))),
        _sentences("Notes", verdict.notes),
        id="verdict",
        class_=f"verdict {TONE[verdict.exit_code]}",
    )


def _where(verdict: Verdict) -> Html:
    facts: list[tuple[str, str]] = [("conclusion", verdict.conclusion)]
    if verdict.side:
        facts.append(("side", verdict.side))
    if verdict.stages:
        facts.append(("stage" if len(verdict.stages) == 1 else "stages", ", ".join(verdict.stages)))
    if verdict.step is not None:
        facts.append(("since step", str(verdict.step)))
    alike = [part for part in verdict.parts if part != verdict.conclusion]
    if alike and verdict.conclusion not in ("several", "no difference"):
        facts.append(("would look the same", ", ".join(alike)))
    facts.append(("exit code", str(verdict.exit_code)))
    return tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts], class_="facts")


def _evidence(source: str, sentence: str) -> Html:
    label = tag("span", source, class_="source")
    if len(sentence) <= LONG:
        return tag("li", label, " ", sentence)
    cut = sentence[:LONG].rsplit(" ", 1)[0]
    return tag("li", tag("details", tag("summary", label, " ", cut, " …"), tag("p", sentence)))


def _sentences(title: str, sentences: tuple[str, ...]) -> list[Html]:
    if not sentences:
        return []
    items = [tag("li", tag("code", s) if s.startswith("crossrl ") else s) for s in sentences]
    return [tag("h2", title), tag("ul", items)]


def _first(gaps: tuple[Gap, ...]) -> Html | None:
    """The verdict's first gap in a sentence; the table of all is in the section on the first difference."""
    if not gaps:
        return None
    gap = gaps[0]
    at = [f"sample {gap.sample_id}"] if gap.sample_id else []
    at += [f"position {gap.position}"] if gap.position is not None else []
    values = f": recorded {number(gap.recorded)}, found {number(gap.found)}" if gap.recorded is not None else ""
    link = tag("a", "First difference", href="#difference")
    return tag("p", link, f": {gap.field}", [f", {word}" for word in at], values, ".")


GAP_HEAD = ("field", "what differs", "values", "first at", "recorded", "found", "largest", "mean", "noise allows")


def gap_table(caption: str, gaps: tuple[Gap, ...]) -> Html:
    return table(caption, GAP_HEAD, [gap_row(gap) for gap in gaps], "numbers gaps")


def gap_row(gap: Gap) -> list[str]:
    """Texts in the order of ``GAP_HEAD``."""
    first = [gap.sample_id] if gap.sample_id else []
    first += [f"position {gap.position}"] if gap.position is not None else []
    unit = f" {gap.unit}" if gap.unit else ""
    return [
        gap.field,
        gap.kind,
        f"{gap.differing} of {gap.total}" if gap.total else "–",
        ", ".join(first) or "–",
        number(gap.recorded),
        number(gap.found),
        number(gap.largest) + (unit if gap.largest is not None else ""),
        number(gap.mean) + (unit if gap.mean is not None else ""),
        "only equal bits" if gap.allowed is None else number(gap.allowed) + unit,
    ]


def lacking(missing: tuple[Missing, ...]) -> Html | None:
    """What is not on the page, and the command that would give it; commands that several need are said once."""
    if not missing:
        return None
    by_command: dict[str, list[str]] = {}
    for each in missing:
        by_command.setdefault(each.command, []).append(each.what)
    items = [[tag("ul", [tag("li", what) for what in whats]), command(line)] for line, whats in by_command.items()]
    return section("missing", "Missing from this page", items)
