"""The folder of an experiment: where each arm runs, and where what was found is kept.

DIR/experiment.json          what was asked for (``Experiment``)
DIR/sides/a.yaml, b.yaml     the resolved configuration of each side
DIR/arms/AA, BB, BB2         run folders, each side alone: config.yaml, metrics.jsonl, tape/
DIR/arms/AB/{infer,train}    inference of A, training of B: two live runs, and the folder share/ between them
DIR/arms/BA/{infer,train}    inference of B, training of A
DIR/examined/A_by_B.json     ``Examination``: the tape of arms/AA by the installation of B; B_by_A, A_by_A, B_by_B
DIR/verdict.json             ``Verdict``
DIR/report.html
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ALONE = ("AA", "BB", "BB2")
PAIRS = ("AB", "BA")  # first letter: who infers; second: who trains


@dataclass(frozen=True, slots=True)
class Folder:
    """Paths below ``root``; nothing is made here."""

    root: Path

    def arm(self, name: str) -> Path:
        """Where the arm's metrics and tape are: for a pair, the run that trains, which sees both halves."""
        return self.root / "arms" / name / "train" if name in PAIRS else self.root / "arms" / name

    def runs(self, name: str) -> tuple[Path, ...]:
        """All run folders of an arm."""
        base = self.root / "arms" / name
        return (base / "infer", base / "train") if name in PAIRS else (base,)

    def share(self, name: str) -> Path:
        return self.root / "arms" / name / "share"

    def side(self, side: str) -> Path:
        return self.root / "sides" / f"{side.lower()}.yaml"

    def examined(self, of: str, by: str) -> Path:
        return self.root / "examined" / f"{of}_by_{by}.json"

    @property
    def experiment(self) -> Path:
        return self.root / "experiment.json"

    @property
    def verdict(self) -> Path:
        return self.root / "verdict.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"
