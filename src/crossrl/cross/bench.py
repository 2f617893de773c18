"""The catalogue against the tool: each fault planted in one of two equal runs, is it found, and where?

Both runs are recorded for a few steps and examined by each other, in this process; the verdict is compared with what
the catalogue says. The same for the harmless differences, of which none may be blamed; and for faults in A while B has
a harmless difference of its own, behind whose noise they must not disappear.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from crossrl.config import load_config
from crossrl.config.load import LoadedConfig
from crossrl.cross import faults
from crossrl.cross.curves import read_curves
from crossrl.cross.examine import examine
from crossrl.cross.faults.base import Fault, Harmless
from crossrl.cross.findings import Examination, Verdict
from crossrl.cross.plan import ARM_KEYS
from crossrl.cross.verdict import conclude
from crossrl.report import MetricsFile, Reporter
from crossrl.report.console import Display, open_display
from crossrl.trainer import Trainer

STEPS = 3
SEEDS = (1, 2, 3, 4, 5)
# Faults of each part, small ones among them, in A, while B has the harmless differences.
MIXED = (
    "inference.stale_weights", "inference.frozen_tensor", "inference.rotary_base", "inference.cache_kept",
    "inference.head_bf16", "inference.hidden_top_k", "training.lr_times_ten", "training.moment_zeroed",
    "training.advantage_sign", "reward.flipped", "sync.transposed", "data.duplicate_group",
)  # fmt: skip
WHILE = (("harmless.bf16_inference",), ("harmless.micro_batch", "harmless.plain_engine"))
# As in practice: with small updates, weights that are one step old are nearly the right ones.
MIXED_KEYS = ("actor_rollout_ref.actor.optim.lr=1e-5",)
# What stays below the limits of float32 (``noise.LOG_PROBS``), which must hold for larger models than this one, too.
BELOW = {
    "inference.frozen_tensor": "one tensor, two small updates old: log-probs differ by 1.9e-4 nat at most and 1.6e-5 "
    "in the mean; allowed in float32 are 2e-4 and 2e-5",
}
Run = tuple[LoadedConfig, Path]


@dataclass(frozen=True, slots=True)
class Setup:
    """``keys``: settings of all runs. ``out``: where the runs go, a folder of its own for each case."""

    keys: tuple[str, ...]
    out: Path


@dataclass(frozen=True, slots=True)
class Outcome:
    """``expected``: part and first step; None for a harmless difference. ``steps_to_verdict``: the time of A's steps up
    to the first faulty one, and of both examinations of these, in multiples of one training step; without loading.
    ``other``: the harmless differences that B has while A has the fault."""

    name: str
    seed: int
    verdict: Verdict
    expected: tuple[str, int] | None
    steps_to_verdict: float
    other: str = ""

    @property
    def good(self) -> bool:
        return (self.right_part and self.right_step) or self.below

    @property
    def below(self) -> bool:
        """Not found, and known to be smaller than what is allowed for rounding."""
        return bool(self.other) and self.name in BELOW and self.verdict.conclusion == "no difference"

    @property
    def right_part(self) -> bool:
        if self.expected is None:
            return self.verdict.conclusion == "no difference"
        return self.verdict.conclusion == self.expected[0] and self.verdict.side == "A"

    @property
    def right_step(self) -> bool:
        return self.expected is None or self.verdict.step == self.expected[1]


def small(demo: Path, out: Path) -> Setup:
    """The demo's model and data, with few prompts: a step takes a tenth of a second."""
    return Setup(
        (
            f"data.train_files={demo}/train.parquet", "data.train_max_samples=64", "data.train_batch_size=8",
            "data.max_prompt_length=8", "data.max_response_length=8", f"actor_rollout_ref.model.path={demo}/model",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.rollout.n=8", f"reward.custom_reward_function.path={demo}/sort_reward.py",
            "reward.num_workers=1", "trainer.total_training_steps=8", "trainer.num_threads=1", "trainer.device=cpu",
        ),
        out,
    )  # fmt: skip


def run_faults(setup: Setup, chosen: Sequence[Fault], seed: int = 1) -> Iterator[Outcome]:
    """One outcome for each fault, as they come."""
    clean: dict[tuple[str, ...], Run] = {}
    for fault in chosen:
        needs = (*fault.needs, f"trainer.seed={seed}")
        if needs not in clean:
            clean[needs] = record(setup, f"clean-{len(clean)}-{seed}", needs)
        planted = record(setup, f"{fault.name}-{seed}", (*needs, f"cross.plant={fault.name}"))
        expected = (fault.part, fault.first_step())
        yield compare(fault.name, seed, planted, clean[needs], expected)
        shutil.rmtree(planted[1])


def run_harmless(setup: Setup, chosen: Sequence[Harmless], seeds: Sequence[int] = SEEDS) -> Iterator[Outcome]:
    """One outcome for each difference and seed, as they come."""
    for seed in seeds:
        clean = record(setup, f"clean-{seed}", (f"trainer.seed={seed}",))
        for each in chosen:
            other = record(setup, f"{each.name}-{seed}", (f"trainer.seed={seed}", *each.overrides))
            yield compare(each.name, seed, other, clean, None)
            shutil.rmtree(other[1])


def run_mixed(setup: Setup, chosen: Sequence[Fault], seed: int = SEEDS[0]) -> Iterator[Outcome]:
    """One outcome for each of ``WHILE`` and each fault of ``MIXED`` among ``chosen``, as they come."""
    keys = (*MIXED_KEYS, f"trainer.seed={seed}")
    for names in WHILE:
        overrides = [key for name in names for key in faults.HARMLESS[name].overrides]
        other: dict[tuple[str, ...], Run] = {}
        for fault in (f for f in chosen if f.name in MIXED):
            needs = (*keys, *fault.needs)
            if needs not in other:
                other[needs] = record(setup, f"{'-'.join(names)}-{len(other)}", (*needs, *overrides))
            planted = record(setup, fault.name, (*needs, f"cross.plant={fault.name}"))
            found = compare(fault.name, seed, planted, other[needs], (fault.part, fault.first_step()), STEPS)
            yield replace(found, other=", ".join(names))
            shutil.rmtree(planted[1])


def record(setup: Setup, name: str, keys: Sequence[str]) -> Run:
    """One run of ``STEPS`` steps, recorded with its states."""
    folder = setup.out / name
    shutil.rmtree(folder, ignore_errors=True)
    arm = [*ARM_KEYS, "tape.mode=record", "tape.state=True", f"trainer.stop_after_steps={STEPS}"]
    loaded = load_config([*arm, f"trainer.default_local_dir={folder}", *setup.keys, *keys])
    with Reporter(quiet(), loggers=[MetricsFile(folder / "metrics.jsonl")]) as reporter:
        Trainer(loaded, reporter, plant=planter(loaded)).fit()
    return loaded, folder


def quiet() -> Display:
    """Fifty runs would fill the screen with what nobody reads."""
    return open_display(Console(quiet=True))


def planter(loaded: LoadedConfig) -> Callable[..., None]:
    text = loaded.config.cross.plant
    return functools.partial(faults.plant, text, cfg=loaded.config) if text else lambda parts: None


def compare(
    name: str, seed: int, a: Run, b: Run, expected: tuple[str, int] | None, steps: int | None = None
) -> Outcome:
    """Each run examined by the other side, and the verdict over both. ``steps``: so many; None: up to the one at which
    the fault is expected."""
    needed = frozenset(range(1, (steps or (expected[1] if expected else STEPS)) + 1))
    examined: list[Examination] = []
    for of, by, tape, loaded in (("A", "B", a[1], b[0]), ("B", "A", b[1], a[0])):
        plant = planter(loaded)
        examined.append(examine(tape, loaded, of, by, needed, Reporter(quiet()), plant))  # type: ignore[arg-type]
    took = step_seconds(a[1])
    seconds = sum(took[: max(needed)]) + sum(e.seconds for e in examined)
    return Outcome(name, seed, conclude(examined), expected, seconds / (sum(took) / len(took)))


def step_seconds(run: Path) -> list[float]:
    """Seconds of each training step of a run."""
    return list(read_curves(run).finite("timing_s/step").values())


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """Three tables, of the faults, of the harmless differences and of both at once, and what they add up to."""
    planted = [o for o in outcomes if o.expected and not o.other]
    lines = ["| fault | expected | found | steps to the verdict |", "| --- | --- | --- | --- |"]
    for o in planted:
        part, step = o.expected or ("", 0)
        lines.append(f"| `{o.name}` | {part}, step {step} | {_found(o)} | {o.steps_to_verdict:.1f} |")
    right = sum(o.right_part for o in planted), sum(o.right_part and o.right_step for o in planted)
    lines += ["", f"Part right in {right[0]} of {len(planted)}, part and first step in {right[1]}."]
    times = [o.steps_to_verdict for o in planted if o.expected and o.expected[1] == 1]
    within = {n: sum(t <= n for t in times) for n in (3, 4)}
    lines.append(
        f"Of {len(times)} faults that act at step 1, {within[3]} are located within the time of 3 training steps (the "
        f"goal), {within[4]} within 4."
    )
    others: dict[str, list[Outcome]] = {}
    for o in outcomes:
        if not o.expected:
            others.setdefault(o.name, []).append(o)
    lines += ["", "| harmless difference | seeds | false alarms |", "| --- | --- | --- |"]
    for name, same in others.items():
        alarms = [f"{o.verdict.conclusion} (seed {o.seed})" for o in same if not o.right_part]
        lines.append(f"| `{name}` | {len(same)} | {', '.join(alarms) or '0'} |")
    return "\n".join([*lines, *_mixed_table([o for o in outcomes if o.other])]) + "\n"


def _found(o: Outcome) -> str:
    found = f"{o.verdict.conclusion}, step {o.verdict.step}" if o.verdict.step else o.verdict.conclusion
    return found if o.right_part and o.right_step else f"{found} **missed**"


def _mixed_table(mixed: Sequence[Outcome]) -> list[str]:
    if not mixed:
        return []
    lines = ["", "| fault in A | while B has | expected | found |", "| --- | --- | --- | --- |"]
    for o in mixed:
        part, step = o.expected or ("", 0)
        found = f"not seen, below the noise ({BELOW[o.name]})" if o.below else _found(o)
        lines.append(f"| `{o.name}` | {o.other} | {part}, step {step} | {found} |")
    right = sum(o.right_part and o.right_step for o in mixed)
    below = sum(o.below for o in mixed)
    return [*lines, "", f"Part and first step right in {right} of {len(mixed)}; {below} below the noise."]
