"""What cross-examination finds, as data: findings about stages, effects on curves, and the verdict over them.

All of it is stored as JSON (``to_json``, ``from_json``) below the experiment's folder; see ``cross/folder.py``.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")

Side = Literal["A", "B"]
Part = Literal["inference", "reward", "training", "weight sync", "data"]
Conclusion = Literal[
    "no difference", "inference", "reward", "training", "weight sync", "data", "several", "not distinguishable"
]  # fmt: skip
# equal: bit for bit. noise: differs by no more than the numerics of both sides explain. differs: by more.
# not judged: could not be run or compared; the sentence says why.
Judgement = Literal["equal", "noise", "differs", "not judged"]

# To which part of a run a stage belongs. "data" is not a stage: it is what the loader hands to rollout.
PART: dict[str, Part] = {
    "data": "data", "rollout": "inference", "reward": "reward", "old_log_prob": "training", "ref_log_prob": "training",
    "advantage": "training", "update": "training", "checkpoint": "training", "sync": "weight sync",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gap:
    """How one field (or, of an update, one tensor) differs. ``differing`` of ``total`` values.

    ``sample_id``, ``position``, ``recorded``, ``found``: the first place. ``samples``: ids of up to 8 samples that
    differ. ``largest``, ``mean``: absolute, over values that both have, in ``unit``. ``allowed``: what noise explains
    of ``largest`` or ``mean`` (which one the sentence of the finding says); None: only equal bits.
    """

    field: str
    kind: str
    differing: int = 0
    total: int = 0
    sample_id: str | None = None
    position: int | None = None
    recorded: Any = None
    found: Any = None
    samples: tuple[str, ...] = ()
    largest: float | None = None
    mean: float | None = None
    allowed: float | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One recorded call of a stage of side ``of``, judged. ``by``: the side whose installation ran it again; None: the
    run's own records contradict each other.

    >>> Finding("A", "B", "rollout", 1, "equal", "").part
    'inference'
    """

    of: Side
    by: Side | None
    stage: str
    step: int
    judged: Judgement
    sentence: str
    call: int = 0
    gaps: tuple[Gap, ...] = ()
    hint: str = ""
    """What would explain it, such as "matches the weights of one step before"."""
    harmless: bool = False
    """It differs, but in nothing that training sees (a constant added to the rewards of one group)."""

    def __post_init__(self) -> None:
        if self.stage not in PART:
            raise ValueError(f"Finding: stage: want one of {', '.join(PART)}, found {self.stage!r}")

    @property
    def part(self) -> Part:
        return PART[self.stage]


@dataclass(frozen=True, slots=True)
class Setting:
    """A configuration key, version or fact that differs between the sides. ``part``: what it concerns; None: nothing
    that changes a result."""

    key: str
    a: Any
    b: Any
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class Examination:
    """The tape of side ``of``, stage by stage, by the installation of side ``by``.

    ``numerics``: what kind of rounding differences is to be expected: ``exact``, ``float32`` (another order of
    summation) or ``bfloat16``; ``because``: the settings that say so. ``seconds``: without loading.
    """

    of: Side
    by: Side
    steps: tuple[int, ...]
    numerics: Literal["exact", "float32", "bfloat16"]
    because: tuple[str, ...]
    findings: tuple[Finding, ...]
    settings: tuple[Setting, ...] = ()
    seconds: float = 0.0
    unseen: tuple[str, ...] = ()
    """What is smaller than the limits of ``noise`` and so would have passed, in words; nothing where all is exact."""


@dataclass(frozen=True, slots=True)
class Effect:
    """One metric of one arm against the arm BB (or what ``against`` says), over the steps from ``first_step`` on.

    ``mean``: of the difference, ``low``..``high``: its 95 % interval; ``noise``: as large a difference as repeats or
    step-to-step scatter explain. ``beyond``: the interval lies outside the noise.
    """

    metric: str
    arm: str
    against: str
    steps: int
    mean: float
    low: float
    high: float
    noise: float
    beyond: bool
    first_step: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """One sentence, and where it comes from: ``stages`` (an examination), ``curves``, ``settings``, ``failure``."""

    source: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """``conclusion``: the part at fault. ``side``: whose; B is the reference, so what both sides judge differently is
    A's unless B's own records say otherwise. ``stages``, ``step``: where it is and since when. ``gaps``: of the first
    finding. ``noise``: the noise floor in a sentence. ``consequences``: differences that follow from the fault and are
    none of their own. ``todo``: what to run to find out more (never empty when ``exit_code`` is 2)."""

    conclusion: Conclusion
    side: Side | None = None
    stages: tuple[str, ...] = ()
    step: int | None = None
    parts: tuple[Part, ...] = ()
    gaps: tuple[Gap, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    effects: tuple[Effect, ...] = ()
    settings: tuple[Setting, ...] = ()
    noise: str = ""
    consequences: tuple[str, ...] = ()
    todo: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def exit_code(self) -> int:
        """0 no difference beyond noise, 1 a fault is located, 2 cannot tell."""
        return {"no difference": 0, "not distinguishable": 2}.get(self.conclusion, 1)


def to_json(value: Any) -> Any:
    """Dataclasses to maps, tuples to lists; NaN and infinities to strings, which strict JSON has no numbers for."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value.item() if hasattr(value, "item") else value


def from_json(kind: type[T], body: Any) -> T:
    """The inverse for the dataclasses of this module. Raises ``ValueError`` naming what is wrong: an unknown or missing
    key, or a value that its field cannot have."""
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(body, dict) or set(body) - known:
        raise ValueError(f"{kind.__name__}: want the keys {sorted(known)}, found {body!r:.200}")
    hints = typing.get_type_hints(kind)
    try:
        return kind(**{name: _value(hints[name], value, f"{kind.__name__}: {name}") for name, value in body.items()})
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from None


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return from_json(hint, value)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where}: want a list, found {value!r:.80}")
        return tuple(_value(args[0], v, where) for v in value)
    if origin in (types.UnionType, typing.Union):
        inner = next(a for a in args if a is not type(None))
        return None if value is None else _value(inner, value, where)
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{where}: want one of {', '.join(map(str, args))}, found {value!r:.80}")
        return value
    if hint is float and value in ("nan", "inf", "-inf"):
        return float(value)
    wanted = (int, float) if hint is float else hint
    if hint in (int, float, str, bool) and (
        not isinstance(value, wanted) or (hint is not bool and isinstance(value, bool))
    ):
        raise ValueError(f"{where}: want {hint.__name__}, found {value!r:.80}")
    return value
