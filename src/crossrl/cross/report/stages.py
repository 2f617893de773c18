"""The table of stages and steps: each recorded call, run again by the other side's installation, and judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crossrl.cross.findings import Examination, Finding
from crossrl.cross.next_steps import commands_of
from crossrl.cross.report.first import first_finding
from crossrl.cross.report.gather import Material
from crossrl.cross.report.markup import Html, data_script, section, tag
from crossrl.cross.report.summary import GAP_HEAD, gap_row
from crossrl.tape.api import stage_rank

# The worst first: what a cell with several findings shows. One sign each, so that no colour is needed to tell.
SIGNS = {"differs": "≠", "not judged": "?", "noise": "≈", "equal": "="}
WORDS = {
    "differs": "differs by more than noise",
    "not judged": "not judged: could not be run or compared",
    "noise": "noise: differs by no more than rounding explains",
    "equal": "equal bit for bit",
}


def stages_section(material: Material) -> Html:
    title = "Stage by stage"
    if not material.examined:
        text = "No tape was examined yet."
        if commands_of(material.folder)[0]:
            text = "Runs of verl are not examined by stages: the records of the arms are compared, see the evidence."
        return section("stages", title, tag("p", text, class_="absent"))
    cells: dict[str, Any] = {}
    first = first_finding(material)
    other = {name: e for name, e in material.examined.items() if e.of != e.by}
    own = {name: e for name, e in material.examined.items() if e.of == e.by}
    return section(
        "stages",
        title,
        tag(
            "p",
            "Each recorded call of a stage was run again on its recorded inputs, by the installation of the other "
            "side (“A by B”: the tape of A, run again by B). Choose a cell to see what was found.",
        ),
        _legend(),
        _grid(other, cells, first) if other else None,
        tag("details", tag("summary", "The same by each side's own installation"), _grid(own, cells, first))
        if own
        else None,
        tag("div", tag("p", "Choose a cell."), id="cell", aria_live="polite", class_="cell"),
        data_script("cells", {"head": GAP_HEAD, "found": cells}),
    )


def _legend() -> Html:
    items = [
        tag("li", tag("span", sign, class_=f"sign {_class(judged)}", aria_hidden="true"), f" {WORDS[judged]}")
        for judged, sign in SIGNS.items()
    ]
    harmless = tag("span", SIGNS["differs"], class_="sign differs harmless", aria_hidden="true")
    return tag("ul", items, tag("li", harmless, " differs, but training sees no difference"), class_="legend")


def _class(judged: str) -> str:
    return judged.replace(" ", "-")


def _grid(examined: Mapping[str, Examination], cells: dict[str, Any], first: Finding | None) -> Html:
    found = [f for e in examined.values() for f in e.findings]
    steps = sorted({f.step for f in found} | {s for e in examined.values() for s in e.steps})
    stages = sorted({f.stage for f in found}, key=lambda s: (s != "data", stage_rank(s)))
    head = tag("tr", tag("th", "stage", scope="col"), tag("th", "tape", scope="col"),
               [tag("th", s, scope="col") for s in steps])  # fmt: skip
    bodies = []
    for stage in stages:
        rows: list[Html] = []
        for name, examination in examined.items():
            mine = [f for f in examination.findings if f.stage == stage]
            title = tag("th", stage, scope="rowgroup", rowspan=len(examined)) if not rows else None
            of, by = name.split("_by_")
            tds = [_cell(name, stage, step, [f for f in mine if f.step == step], cells, first) for step in steps]
            rows.append(tag("tr", title, tag("th", f"{of} by {by}", scope="row"), tds))
        bodies.append(tag("tbody", rows))
    caption = tag("caption", "Stages over steps")
    grid = tag("table", caption, tag("thead", head), bodies, class_="stages")
    return tag("div", grid, class_="scroll", tabindex=0, role="region", aria_label="stages and steps")


def worst(findings: Sequence[Finding]) -> Finding:
    return min(findings, key=lambda f: (list(SIGNS).index(f.judged), f.harmless))


def _cell(
    name: str, stage: str, step: int, findings: list[Finding], cells: dict[str, Any], first: Finding | None
) -> Html:
    if not findings:
        return tag("td", tag("span", "not examined", class_="unseen"), data_step=step)
    shown = worst(findings)
    key = f"{name}/{stage}/{step}"
    cells[key] = [_detail(f) for f in findings]
    word = shown.judged + (", harmless" if shown.harmless else "")
    where = f"{stage}, step {step}, {name.replace('_', ' ')}: {word}"
    classes = (
        ("sign", True), (_class(shown.judged), True), ("harmless", shown.harmless),
        ("first", any(f is first for f in findings)),
    )  # fmt: skip
    button = tag(
        "button",
        SIGNS[shown.judged],
        type="button",
        tabindex=-1,
        class_=" ".join(word for word, on in classes if on),
        data_cell=key,
        aria_label=where,
        aria_pressed="false",
        title=None if shown.judged == "equal" else f"{where}. {sentence(shown)}",
    )
    return tag("td", button, data_step=step)


def sentence(finding: Finding) -> str:
    """What was found, without the step, which stands beside it."""
    return finding.sentence.removeprefix(f"step {finding.step}: ") or WORDS[finding.judged]


def _detail(finding: Finding) -> dict[str, Any]:
    """What the page's script shows of a finding; values that are the default are left out."""
    call = f", call {finding.call}" if finding.call else ""
    by = f"run again by {finding.by}" if finding.by else "its own records against each other"
    detail: dict[str, Any] = {
        "title": f"{finding.stage}, step {finding.step}{call}: tape of {finding.of}, {by}",
        "judged": finding.judged + (", harmless: training sees no difference" if finding.harmless else ""),
        "kind": _class(finding.judged),
        "sentence": sentence(finding),
    }
    if finding.hint:
        detail["hint"] = finding.hint
    if finding.gaps:
        detail["gaps"] = [gap_row(gap) for gap in finding.gaps]
        samples = dict.fromkeys(sample for gap in finding.gaps for sample in gap.samples)
        if samples:
            detail["samples"] = ", ".join(samples)
    return detail
