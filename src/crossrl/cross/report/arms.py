"""The 2x2 of {inference of A, B} x {training of A, B}: each arm's state, and all arms' curves over each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from crossrl.cross.arms import MEANING, Arm
from crossrl.cross.curves import METRICS, Curves, common_name
from crossrl.cross.effects import identical
from crossrl.cross.findings import Effect
from crossrl.cross.report.gather import Material
from crossrl.cross.report.markup import Html, data_script, number, section, table, tag

DRAWN = ("BB2", "BB", "AA", "AB", "BA")  # in this order: the repeat below what it repeats
UNITS = {"reward": "score", "gap": "", "entropy": "nat", "gradient norm": "", "response length": "tokens"}
TITLES = {"gap": "sampler-trainer gap"}


def arms_section(material: Material) -> Html:
    curves = curve_data(material)
    return section(
        "arms",
        "Four arms: who infers, who trains",
        tag(
            "p",
            "If the arm with the inference of A and the training of B (AB) goes wrong, A's inference is at fault; "
            "if it is the arm with the inference of B and the training of A (BA), A's training is.",
        ),
        matrix(material),
        _chooser(curves) if curves["metrics"] else tag("p", "No arm has metrics yet.", class_="absent"),
        data_script("curves", curves),
        _effects(material),
    )


def matrix(material: Material) -> Html:
    effects = material.verdict.effects if material.verdict else ()
    rows = [
        tag("tr", tag("th", f"inference of {i}", scope="row"), [_cell(material, i + t, effects) for t in "AB"])
        for i in "AB"
    ]
    head = tag("tr", tag("td"), [tag("th", f"training of {t}", scope="col") for t in "AB"])
    caption = tag("caption", "State of each arm, and where it leaves arm BB by more than noise")
    return tag("table", caption, tag("thead", head), tag("tbody", rows), class_="matrix")


def _cell(material: Material, name: str, effects: Sequence[Effect]) -> Html:
    mine = [e for e in effects if e.arm == name]
    beyond = [e for e in mine if e.beyond]
    if beyond:
        word = "beyond noise: " + ", ".join(
            dict.fromkeys(_title(e.metric) + (f" (from step {e.first_step})" if e.first_step else "") for e in beyond)
        )
    else:
        word = "the reference" if name == "BB" else _within(mine)
    arm = material.arms[name]
    odd = [f"{metric} is not a number from step {step} on" for metric, step in (arm.non_finite or {}).items()]
    odd += [f"nothing to learn from since step {arm.no_signal}"] if arm.no_signal is not None else []
    return tag(
        "td",
        tag("strong", tag("span", class_=f"key {name}", aria_hidden="true"), name),
        tag("span", _state(material.arms[name]), class_="state"),
        tag("span", word, class_="effect"),
        [tag("span", text, class_="effect") for text in odd],
        class_="beyond" if beyond or odd or arm.state == "failed" else None,
    )


def _within(effects: Sequence[Effect]) -> str:
    if not effects:
        return "not compared"
    if all(identical(e) for e in effects):
        return "the same as BB, bit for bit"
    bounded = [e for e in effects if math.isfinite(e.low) and math.isfinite(e.high)]
    return "within noise" if bounded else "too few steps to compare"


def _state(arm: Arm) -> str:
    steps = f"{arm.curves.last_step} steps" if arm.curves else "no metrics yet"
    return {"missing": "not run", "running": f"running, {steps} so far", "done": steps}.get(
        arm.state, f"failed: {arm.reason}"
    )


def _title(metric: str) -> str:
    return TITLES.get(metric, metric)


def curve_data(material: Material) -> dict[str, Any]:
    """``arms``: name to its label; ``metrics``: each with the arms' points and the noise band around BB."""
    effects = material.verdict.effects if material.verdict else ()
    curves = {name: c for name in DRAWN if (c := material.arms[name].curves) is not None}
    metrics = []
    for metric in dict.fromkeys([*METRICS, *(e.metric for e in effects)]):
        key = _key(metric, curves)
        points = {name: _points(c, key) for name, c in curves.items() if key is not None and c.finite(key)}
        if points:
            band, source = _band(points, [e for e in effects if e.metric == metric])
            metrics.append({
                "name": _title(metric), "unit": UNITS.get(metric, ""), "key": key, "points": points, "band": band,
                "source": source, "beyond": any(e.beyond for e in effects if e.metric == metric),
            })  # fmt: skip
    return {"arms": {name: f"{name}: {MEANING[name]}" for name in DRAWN}, "metrics": metrics}


def _key(metric: str, curves: Mapping[str, Curves]) -> str | None:
    """One name for all arms, so that like is drawn over like; if no name is common to them, that of the reference."""
    named = {name: key for name, c in curves.items() if (key := c.named(metric)) is not None}
    having = [curves[name] for name in named]
    return (common_name(metric, having) if having else None) or named.get("BB") or next(iter(named.values()), None)


def _points(curves: Curves, key: str) -> dict[str, list[Any]]:
    values = dict(sorted(curves.finite(key).items()))
    return {"x": list(values), "y": list(values.values())}


def _band(points: Mapping[str, dict[str, list[Any]]], effects: Sequence[Effect]) -> tuple[float | None, str]:
    """Half the width of the noise around BB, and where it comes from; None when nothing says how large it is."""
    stated = [e.noise for e in effects if math.isfinite(e.noise)]
    if "BB" in points and stated:
        return max(stated), "the verdict's noise floor, per step"
    repeat = largest_difference(points)
    if repeat is not None:
        return repeat, "the largest difference between BB and its repeat BB2"
    return None, "none, because neither a verdict nor a repeat of B (arm BB2) says how large the noise is"


def largest_difference(points: Mapping[str, dict[str, list[Any]]]) -> float | None:
    """Between BB and BB2, over the steps that both have; None without any."""
    if "BB" not in points or "BB2" not in points:
        return None
    again = dict(zip(points["BB2"]["x"], points["BB2"]["y"]))
    return max((abs(y - again[x]) for x, y in zip(points["BB"]["x"], points["BB"]["y"]) if x in again), default=None)


def _chooser(curves: dict[str, Any]) -> Html:
    # The first curve to be seen is one that tells something.
    first = next((i for i, metric in enumerate(curves["metrics"]) if metric["beyond"]), 0)
    choices = [
        tag(
            "label",
            tag("input", type="radio", name="metric", value=i, checked=i == first),
            tag("span", metric["name"]),
        )
        for i, metric in enumerate(curves["metrics"])
    ]
    return tag(
        "div",
        tag("fieldset", tag("legend", "Curve of"), choices, class_="tabs"),
        tag("div", id="chart", role="group", aria_label="Curves of all arms; their numbers are in the table below"),
        tag("p", id="band-source", class_="note"),
        tag("details", tag("summary", "The numbers of this curve"),
            tag("div", id="curve-numbers", class_="scroll tall", tabindex=0, role="region", aria_label="numbers")),
        tag("noscript", tag("p", "The curves need JavaScript; everything else on this page does not.")),
    )  # fmt: skip


def _effects(material: Material) -> Html | None:
    effects = material.verdict.effects if material.verdict else ()
    if not effects:
        return None
    rows = [
        [
            _title(e.metric), e.arm, e.against, str(e.steps), number(e.mean),
            f"{number(e.low)} to {number(e.high)}", number(e.noise),
            tag("strong", "beyond noise") if e.beyond else _within([e]),
            "–" if e.first_step is None else str(e.first_step),
        ]
        for e in effects
    ]  # fmt: skip
    head = ("metric", "arm", "against", "steps", "difference", "95 % interval", "noise", "judged", "from step")
    return tag(
        "details",
        tag("summary", f"Effects in numbers ({sum(e.beyond for e in effects)} of {len(effects)} beyond noise)"),
        table("Mean difference of each arm's metric", head, rows, "numbers"),
    )
