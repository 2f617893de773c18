"""A small part of benchmarks/cross.py: one fault of each part is found where it is, nothing harmless is blamed."""

from dataclasses import replace
from pathlib import Path

import pytest

from crossrl.cross import bench
from crossrl.cross.faults import select
from crossrl.cross.findings import Verdict

FAULTS = (
    "inference.stale_weights", "reward.flipped", "training.moment_zeroed", "sync.transposed", "data.duplicate_group",
)  # fmt: skip
HARMLESS = ("harmless.attention", "harmless.bf16_inference", "harmless.batch_composition")


@pytest.fixture(scope="module")
def outcomes(demo_files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bench.Outcome]:
    faults, harmless = select([*FAULTS, *HARMLESS])
    setup = bench.small(demo_files, tmp_path_factory.mktemp("bench"))
    found = [*bench.run_faults(setup, faults), *bench.run_harmless(setup, harmless, seeds=(3,))]
    return {o.name: o for o in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_in_its_part_at_its_first_step(outcomes, name):
    found = outcomes[name]
    assert found.right_part, found.verdict
    assert found.right_step, found.verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_nothing_harmless_is_blamed(outcomes, name):
    assert outcomes[name].verdict.conclusion == "no difference", outcomes[name].verdict


@pytest.mark.slow
@pytest.mark.long
def test_a_fault_of_a_is_found_while_b_differs_harmlessly(demo_files, tmp_path):
    faults, _ = select(["inference.stale_weights", "training.moment_zeroed", "inference.same_seed"])
    found = list(bench.run_mixed(bench.small(demo_files, tmp_path), faults))
    assert [(o.name, o.other) for o in found] == [
        (name, ", ".join(other)) for other in bench.WHILE
        for name in ("inference.stale_weights", "training.moment_zeroed")
    ]  # fmt: skip
    assert all(o.right_part and o.right_step for o in found), [(o.name, o.other, o.verdict) for o in found]


def test_what_is_known_to_be_below_the_noise_is_said_to_be_and_nothing_else_is_excused():
    quiet = bench.Outcome("inference.frozen_tensor", 1, Verdict("no difference"), ("inference", 2), 3.0, "harmless.x")
    wrong = replace(quiet, verdict=Verdict("reward", "A", step=2))
    unknown = replace(quiet, name="inference.rotary_base")
    assert [o.good for o in (quiet, wrong, unknown, replace(quiet, other=""))] == [True, False, False, False]
    text = bench.as_markdown([quiet, wrong, unknown])
    assert "| `inference.frozen_tensor` | harmless.x | inference, step 2 | not seen, below the noise (" in text
    assert "| inference, step 2 | reward, step 2 **missed** |" in text
    assert "Part and first step right in 0 of 3; 1 below the noise." in text
    assert set(bench.BELOW) <= set(bench.MIXED) <= {f.name for f in select([])[0]}


def test_a_wrong_verdict_shows_in_the_table():
    good = bench.Outcome("x", 1, Verdict("training", "A", step=2), ("training", 2), 3.0)
    bad = [
        replace(good, verdict=Verdict("reward", "A", step=2)),
        replace(good, verdict=Verdict("training", "A", step=1)),
        replace(good, verdict=Verdict("training", "B", step=2)),
        replace(good, expected=None),
    ]
    assert good.right_part and good.right_step
    assert not any(o.right_part and o.right_step for o in bad)
    text = bench.as_markdown([good, bad[0], bad[3]])
    assert "while B has" not in text
    assert "| `x` | training, step 2 | reward, step 2 **missed** | 3.0 |" in text
    assert "Part right in 1 of 2, part and first step in 1." in text
    assert "| `x` | 1 | training (seed 1) |" in text
