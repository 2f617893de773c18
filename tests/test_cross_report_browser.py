"""The report in a real browser: it renders, nothing is reported as wrong, nothing is fetched, and it can be used."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser_for_tests import CHROMIUM, Page, browser
from report_cases import HOSTILE, Texts, write_experiment, write_json

from crossrl.cross.findings import Verdict
from crossrl.cross.folder import Folder
from crossrl.cross.report import write_report

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine (Debian and Ubuntu: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    return write_report(write_experiment(tmp_path_factory.mktemp("report") / "exp"))


@pytest.fixture
def opened(page, report) -> Page:
    """The report in the tab, as when somebody has just opened it."""
    page.problems.clear()
    page.requests.clear()
    page.open(report)
    return page


def curves(page: Page) -> list[str]:
    """The names of the curves that are drawn and visible."""
    return page.run("""[...document.querySelectorAll("#chart .legend .traces")]
        .filter((e) => getComputedStyle(e).opacity === "1").map((e) => e.querySelector(".legendtext").textContent)""")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 800, 400])
def test_it_renders_without_errors_requests_or_sideways_scrolling(page, report, width, dark, tmp_path):
    page.problems.clear()
    page.requests.clear()
    page.open(report, width, 900, dark)
    assert page.run("document.querySelectorAll('#chart .scatterlayer .trace').length") == 7  # two edges of the band
    assert page.problems == []
    assert page.requests == [report.as_uri()]
    assert page.run("document.documentElement.scrollWidth") <= width
    light = page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light != dark
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 50_000


def test_a_page_with_errors_and_requests_is_found(page, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<img src=missing.png><script>console.error('seen'); nothing.there</script>")
    page.problems.clear()
    page.requests.clear()
    page.open(bad)
    assert "seen" in page.problems and any("ReferenceError" in p for p in page.problems)
    assert page.requests == [bad.as_uri(), (tmp_path / "missing.png").as_uri()]


def test_choosing_another_metric_draws_its_curves_and_numbers(opened):
    assert opened.run("chart.dataset.metric") == "reward"
    opened.click("input[name=metric][value='2']")
    assert opened.run("chart.dataset.metric") == "entropy"
    assert opened.run("document.querySelector('#chart .ytitle').textContent") == "entropy (nat)"
    assert opened.run("document.getElementById('band-source').textContent").startswith("actor/entropy. Noise band: the")
    rows = opened.run("document.querySelector('#curve-numbers table').rows.length")
    first = opened.run("[...document.querySelector('#curve-numbers table').rows[1].cells].map((c) => c.textContent)")
    assert rows == 21 and first[:3] == ["1", "1.94", "1.95"]
    assert opened.problems == []


def test_a_click_on_a_name_hides_its_curve(opened):
    assert len(curves(opened)) == 6
    opened.run("document.getElementById('chart').scrollIntoView()")
    name = "BB2: B once more"
    x, y = opened.run(f"""(() => {{ const e = [...document.querySelectorAll("#chart .traces")]
        .find((e) => e.textContent.includes({name!r})).querySelector(".legendtoggle").getBoundingClientRect();
        return [e.x + e.width / 2, e.y + e.height / 2]; }})()""")
    for kind in ("mousePressed", "mouseReleased"):
        opened.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    # It waits for a second click before it acts on the first.
    opened.wait("document.querySelectorAll('#chart .scatterlayer .trace').length === 6")
    assert name not in curves(opened) and len(curves(opened)) == 5


def test_hovering_shows_the_values_of_all_arms_at_a_step(opened):
    opened.run("document.getElementById('chart').scrollIntoView()")
    x, y = opened.run("""(() => { const r = document.querySelector("#chart .nsewdrag").getBoundingClientRect();
        return [r.x + r.width / 2, r.y + r.height / 2]; })()""")
    opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    text = opened.wait("document.querySelector('#chart .hoverlayer').textContent")
    assert all(f"{arm} " in text for arm in ("AA", "BB", "AB", "BA"))


def test_choosing_a_cell_shows_its_finding(opened):
    shown = "document.getElementById('cell').innerText"
    assert "log-probs differ by more than rounding" in opened.run(shown), "the first difference is chosen at the start"
    opened.click("button[data-cell='B_by_A/update/2']")
    assert "update, step 2: tape of B, run again by A" in opened.run(shown)
    assert "noise: another order of summation" in opened.run(shown)
    pressed = "[...document.querySelectorAll('[aria-pressed=true]')].map((e) => e.dataset.cell)"
    assert opened.run(pressed) == ["B_by_A/update/2"]


def test_the_stage_table_can_be_walked_with_the_keyboard(opened):
    assert opened.run("document.querySelectorAll('button[tabindex=\"0\"]').length") == 1
    opened.run("document.querySelector('button[tabindex=\"0\"]').focus()")
    focus = "document.activeElement.dataset.cell"
    assert opened.run(focus) == "A_by_B/rollout/1"
    for key, cell in (
        ("ArrowRight", "A_by_B/rollout/2"), ("ArrowDown", "B_by_A/rollout/2"), ("ArrowDown", "A_by_B/reward/2"),
        ("ArrowLeft", "A_by_B/reward/1"), ("ArrowUp", "B_by_A/rollout/1"), ("ArrowLeft", "B_by_A/rollout/1"),
    ):  # fmt: skip
        opened.key(key)
        assert opened.run(focus) == cell
    assert "tape of B" in opened.run("document.getElementById('cell').innerText")


def test_tokens_can_be_coloured_by_either_gap(opened):
    colours = "[...document.querySelectorAll('.tokens')[0].children].map((e) => getComputedStyle(e).backgroundColor)"
    within = opened.run(colours)
    assert len(set(within)) == 1 and within[0] != "rgba(0, 0, 0, 0)"
    opened.click("input[name=colour][value=other]")
    between = opened.run(colours)
    assert between != within and between[2] == "rgba(0, 0, 0, 0)", "not compared where the texts differ"


# WCAG 2.2, 1.4.3: at least 4.5 for text. Transparent backgrounds take that of what lies below.
CONTRAST = """(() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const lum = (c) => { const f = c.slice(0, 3).map(linear);
    return .2126 * f[0] + .7152 * f[1] + .0722 * f[2]; };
  const below = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] === 1) return c; } return [255, 255, 255]; };
  const low = [];
  for (const e of document.querySelectorAll("main *, footer, footer *, header *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.closest("#chart, .unseen")) continue;
    const [a, b] = [lum(parse(getComputedStyle(e).color)), lum(below(e))];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) low.push(`${e.tagName}.${e.className} ${ratio.toFixed(2)} ${e.textContent.slice(0, 30)}`);
  }
  return low; })()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_has_enough_contrast(page, report, dark):
    page.open(report, dark=dark)
    assert page.run(CONTRAST) == []
    page.run("document.querySelector('h1').style.color = 'rgb(128, 128, 128)'")
    assert len(page.run(CONTRAST)) == 1, "too little of it is found"


@pytest.mark.parametrize("width", [1400, 800])
def test_hostile_and_long_data_neither_run_nor_break_the_page(page, tmp_path, width):
    long = "averyveryverylongword" * 60
    for name, texts in (("hostile", Texts(*[HOSTILE] * 4)), ("long", Texts(*[long] * 4))):
        page.problems.clear()
        page.requests.clear()
        report = write_report(write_experiment(tmp_path / name, texts))
        page.open(report, width)
        assert page.run("window.hacked") is None
        assert page.run("document.images.length") == 0
        assert page.problems == [] and page.requests == [report.as_uri()]
        assert page.run("document.documentElement.scrollWidth") <= width
        assert texts.sentence[:20] in page.run("document.getElementById('cell').innerText")


def test_even_markup_that_got_in_could_not_run(page, tmp_path):
    """The second lock: the page's policy allows its own scripts only."""
    report = write_report(write_experiment(tmp_path / "exp"))
    report.write_text(report.read_text().replace("<main>", f"<main>{HOSTILE}"))
    page.problems.clear()
    page.open(report)
    assert page.run("window.hacked") is None
    assert any("Content Security Policy" in p for p in page.problems)


def test_a_page_with_next_to_nothing_on_it_works_too(page, tmp_path):
    write_json(Folder(tmp_path).verdict, Verdict("no difference"))
    page.problems.clear()
    page.open(write_report(Folder(tmp_path)))
    assert page.problems == []
    assert page.run("document.querySelector('h1').textContent") == "No difference beyond noise"
