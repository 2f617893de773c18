"""The page as one file: parts, style, script and, where there are curves, one copy of plotly.js."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from crossrl.cross.folder import Folder
from crossrl.cross.report.arms import arms_section
from crossrl.cross.report.difference import difference_section
from crossrl.cross.report.facts import noise_section, reproduce_section, settings_section, written_by
from crossrl.cross.report.gather import Material, gather
from crossrl.cross.report.markup import Html, join, tag
from crossrl.cross.report.stages import stages_section
from crossrl.cross.report.summary import headline, lacking, summary
from crossrl.files import publish_text
from crossrl.report.metrics_file import ReportError

LINKS = (
    ("arms", "four arms"), ("stages", "stage by stage"), ("difference", "first difference"), ("noise", "noise floor"),
    ("settings", "configuration"), ("reproduce", "how to reproduce"),
)  # fmt: skip


def write_report(folder: Folder, out: Path | None = None) -> Path:
    """Write one HTML file that needs no network, to ``out`` or ``folder.report``, and return its path.

    Parts of the experiment that are not there are named on the page, with the command that makes them. Raises
    ``ReportError`` when there is nothing to report on, a file is damaged, or the page cannot be written.
    """
    path, text = out or folder.report, page(gather(folder))
    try:
        publish_text(path, text)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}. --out FILE writes the page elsewhere") from error
    return path


def page(material: Material) -> str:
    """The document."""
    arms = arms_section(material)
    scripts = [_plotly()] if 'id="chart"' in arms else []
    scripts.append(_own("page.js"))
    title = headline(material.verdict) if material.verdict else "No verdict yet"
    kicker = tag("span", "CrossRL cross-examination of ", tag("code", material.folder.root.name or "/"))
    rest = (stages_section, difference_section, noise_section, settings_section, reproduce_section)
    body = tag(
        "body",
        tag("header", kicker, _links()),
        tag("main", summary(material), lacking(material.missing), arms, [part(material) for part in rest]),
        tag("footer", _footer(material)),
        [Html(f"<script>{script}</script>") for script in scripts],
        data_colour="own",
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} - CrossRL"),
        Html(f"<style>{_own('page.css')}</style>"),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _own(name: str) -> str:
    return (files("crossrl.cross.report") / name).read_text(encoding="utf-8")


def _links() -> Html:
    return tag("nav", [tag("a", text, href=f"#{name}") for name, text in LINKS], aria_label="parts of this page")


def _footer(material: Material) -> Html:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return join([f"Written by {written_by()} at {now} from ", tag("code", str(material.folder.root.absolute())),
                 ". This page is one file and asks the network for nothing."])  # fmt: skip


def _plotly() -> str:
    """plotly.js as its Python package brings it (MIT licence, its notice is the file's first lines)."""
    return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def _policy(scripts: list[str]) -> str:
    """Only these scripts may run, and nothing may be fetched: a second lock behind the escaping of all data."""
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
