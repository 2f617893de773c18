"""Which finding the page opens with."""

from __future__ import annotations

from typing import Any

from crossrl.cross.findings import Finding, Verdict
from crossrl.cross.report.gather import Material
from crossrl.tape.api import stage_rank


def first_finding(material: Material) -> Finding | None:
    """The finding that the verdict is about; without one, the first that differs, in the order of a run."""
    found = [f for examination in material.examined.values() for f in examination.findings if f.judged == "differs"]
    return min(found, key=lambda f: _rank(f, material.verdict), default=None)


def _rank(finding: Finding, verdict: Verdict | None) -> tuple[Any, ...]:
    meant = verdict is not None and finding.stage in verdict.stages and finding.step == verdict.step
    same_gaps = verdict is not None and bool(verdict.gaps) and finding.gaps == verdict.gaps
    other_side = verdict is not None and finding.of != verdict.side
    return (not (meant and same_gaps), not meant, other_side, finding.harmless, finding.step, finding.stage != "data",
            stage_rank(finding.stage), finding.call)  # fmt: skip
