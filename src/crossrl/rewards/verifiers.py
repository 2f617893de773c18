"""The verifiers that come with CrossRL: small functions from a response and an answer to a score.

All have verl's signature ``(data_source, solution_str, ground_truth, extra_info)`` and return a number, or a
dict with ``score`` and more. They raise when the *answer* is unusable; a response that cannot be read is wrong.
Runs in scoring children: nothing here imports PyTorch, and slow imports wait until a data source needs them.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from crossrl.data import reasoning
from crossrl.rewards.protocol import RewardError

Verifier = Callable[[str, str, Any, Mapping[str, Any]], Any]

# A sign counts only where no word or number ends before it ("7-5" holds 7 and 5); commas only between thousands.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|(?<!\d)\.\d+"
_NUMBER = re.compile(rf"(?:(?<![\w.)])[-+])?(?:{_DIGITS})")
_GSM8K = re.compile(rf"####\s*\$?\s*([-+]?(?:{_DIGITS}))")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def exact(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """1 if the response is the answer, white space around either left aside."""
    return float(solution_str.strip() == str(ground_truth).strip())


def numeric(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """1 if the last number in the response equals the answer.

    ``extra_info["tolerance"]``: largest allowed difference, absolute; by default a relative 1e-9.
    """
    found = _NUMBER.findall(solution_str.replace("\u2212", "-"))
    return float(bool(found) and _same(_number(found[-1]), _answer(ground_truth), extra_info))


def numeric_only(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """1 if the response is a number, nothing else, and equals the answer; tolerance as in ``numeric``."""
    text = solution_str.strip().replace("\u2212", "-")
    return float(bool(_NUMBER.fullmatch(text)) and _same(_number(text), _answer(ground_truth), extra_info))


def gsm8k(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> dict[str, float]:
    """GSM8K (Cobbe et al. 2021, arXiv:2110.14168): 1 if the number after the last ``####`` is the answer.

    ``flexible``, reported beside it, asks only for the last number: the two apart show format and arithmetic.
    """
    marked = _GSM8K.findall(str(ground_truth))
    answer = marked[-1] if marked else ground_truth
    given = _GSM8K.findall(solution_str.replace("\u2212", "-"))
    strict = bool(given) and _same(_number(given[-1]), _answer(answer), {})
    return {"score": float(strict), "flexible": numeric(data_source, solution_str, answer, {})}


def math_verify(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """1 if the response's final expression is mathematically the answer (Hugging Face's Math-Verify).

    The answer may be plain ("1/2"), LaTeX, or boxed. Raises ``ValueError`` when it cannot be parsed.
    """
    package = _math_verify_package()
    answer = str(ground_truth)
    boxed = answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
    # No time limits of its own: they rest on alarm signals. The child that this runs in is killed instead.
    gold = package.parse(boxed, parsing_timeout=None)
    if not gold:
        raise ValueError(f"ground_truth {answer!r:.200} is not an expression that Math-Verify can parse")
    given = package.parse(solution_str, parsing_timeout=None)
    return float(bool(given) and package.verify(gold, given, timeout_seconds=None))


def reasoning_gym(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Any:
    """The score that the task's own scorer in reasoning-gym gives, from 0 to 1.

    It is given what stands in the last ``<answer>`` tag, or the whole response where there is none.
    """
    try:
        source = extra_info["reasoning_gym"]
        name, config, entry = source["name"], source["config"], source["entry"]
    except (KeyError, TypeError):
        raise ValueError("extra_info has no 'reasoning_gym' entry (name, config, entry) to score with") from None
    tagged = _ANSWER_TAG.findall(solution_str)
    answer = (tagged[-1] if tagged else solution_str).strip()
    dataset = _reasoning_dataset(name, json.dumps(config, sort_keys=True))
    return dataset.score_answer(answer, entry=reasoning.decode_entry(json.loads(entry)))


BY_SOURCE: dict[str, Verifier] = {
    "exact": exact,
    "numeric": numeric,
    "numeric-only": numeric_only,
    "math-verify": math_verify,
    "math_verify": math_verify,
    # Names that data prepared for verl carries.
    "openai/gsm8k": gsm8k,
    "lighteval/MATH": math_verify,
    "DigitalLearningGmbH/MATH-lighteval": math_verify,
    "HuggingFaceH4/MATH-500": math_verify,
    "math": math_verify,
    "math_dapo": math_verify,
    "math_dapo_reasoning": math_verify,
}


def find(data_source: str) -> Verifier | None:
    """The verifier for a data source; None if there is none."""
    if reasoning.is_spec(data_source):
        return reasoning_gym
    if data_source.startswith("aime"):
        return math_verify
    return BY_SOURCE.get(data_source)


def require_known(sources: Iterable[str]) -> None:
    """Raise ``RewardError`` unless there is a verifier for each of ``sources``."""
    unknown = sorted(source for source in set(sources) if find(source) is None)
    if not unknown:
        return
    near = difflib.get_close_matches(unknown[0], BY_SOURCE, n=1, cutoff=0.5)
    raise RewardError(
        f"no verifier for data_source {', '.join(map(repr, unknown))}"
        f"{f' (did you mean {near[0]!r}?)' if near else ''}. Known: {', '.join(sorted(BY_SOURCE))}, aime*, "
        f"reasoning_gym:NAME. Change the column, or set reward.custom_reward_function.path to a file with your own"
    )


def prepare(data_source: str) -> Verifier:
    """The verifier, with its slow imports done, so that they are not in the first sample's time.

    Raises ``RewardError``: unknown source, package missing.
    """
    require_known([data_source])
    verifier = find(data_source)
    assert verifier is not None
    try:
        if verifier is math_verify:
            _math_verify_package().parse("\\boxed{1}", parsing_timeout=None)
        elif verifier is reasoning_gym:
            import reasoning_gym as _  # noqa: F401
    except ImportError as error:
        what = "'crossrl[tasks]'" if verifier is reasoning_gym else "'math-verify[antlr4_9_3]'"
        raise RewardError(f"data_source {data_source!r}: {error}; install it with: pip install {what}") from error
    return verifier


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _answer(ground_truth: Any) -> float:
    try:
        return _number(str(ground_truth).strip().replace("\u2212", "-"))
    except ValueError:
        raise ValueError(f"ground_truth {ground_truth!r:.200} is not a number; use math-verify or exact") from None


def _same(value: float, answer: float, extra_info: Mapping[str, Any]) -> bool:
    tolerance = extra_info.get("tolerance")
    if tolerance is None:
        return math.isclose(value, answer, rel_tol=1e-9, abs_tol=1e-12)
    return abs(value - answer) <= float(tolerance)


@functools.cache
def _math_verify_package() -> Any:
    import logging

    import math_verify as package

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns on every call that it has no time limit
    return package


@functools.cache
def _reasoning_dataset(name: str, config: str) -> Any:
    return reasoning.build(name, json.loads(config))
