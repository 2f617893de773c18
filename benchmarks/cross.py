"""The whole fault catalogue and all harmless differences: what is found, where, and how fast.

    python benchmarks/cross.py            # about ten minutes on two cores; writes docs/reference/faults-measured.md

Each fault is planted in one of two otherwise equal runs of the demo's model (3 steps of 8 prompts x 8 responses, one
thread); both are recorded, each examines the other, and the verdict is compared with the catalogue. The harmless
differences run with 5 seeds each, and none may be blamed. Some of the faults are planted once more while the other run
has a harmless difference, behind whose noise they must not disappear.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

from crossrl.cli.main import main
from crossrl.files import publish_text

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "faults-measured.md"

INTRODUCTION = """\
# Faults, measured

What `python benchmarks/cross.py` found: every fault of the [catalogue](faults.md) planted in one of two equal runs (the
demo's model, 3 steps of 8 prompts x 8 responses), each run examined by the other; every harmless difference with 5
seeds; and some of the faults in A while B has a harmless difference, at a learning rate of 1e-5. Steps to the verdict:
the time of the steps up to the first faulty one and of both examinations of them, in multiples of one training step,
without loading models. An examination runs every stage of a step again and reads and compares the weights and optimizer
of every step; `crossrl cross` runs the two at the same time, here they run one after the other.
"""

if __name__ == "__main__":
    start = time.monotonic()
    table = Path("outputs") / "cross-bench.md"
    code = main(["faults", "bench", "--markdown", str(table), *sys.argv[1:]])
    minutes = (time.monotonic() - start) / 60
    where = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    text = table.read_text(encoding="utf-8")
    publish_text(PAGE, f"{INTRODUCTION}\n{text}\n{where}; {minutes:.0f} minutes in all.\n")
    sys.exit(code)
