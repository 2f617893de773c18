"""The verifiers: right, wrong, and what a response cannot get away with."""

import json

import pytest

from crossrl.rewards import verifiers
from crossrl.rewards.protocol import RewardError


def score(source, response, truth, extra=None):
    result = verifiers.prepare(source)(source, response, truth, extra or {})
    return result["score"] if isinstance(result, dict) else result


@pytest.mark.parametrize(
    ("response", "truth", "want"),
    [("123456", "123456", 1.0), (" 123456\n", "123456", 1.0), ("123465", "123456", 0.0), ("", "1", 0.0), ("7", 7, 1.0)],
)
def test_exact_compares_the_whole_response(response, truth, want):
    assert score("exact", response, truth) == want


@pytest.mark.parametrize(
    ("response", "truth", "want"),
    [
        ("first 3, then 42.", "42", 1.0),
        ("42, no: 41", "42", 0.0),
        ("it costs $1,234,567.50", "1234567.5", 1.0),
        ("-5", "-5", 1.0),
        ("12-5", "5", 1.0),
        ("\u22125", -5, 1.0),
        ("1e3", 1000, 1.0),
        (".5", "0.5", 1.0),
        ("no number", "42", 0.0),
        ("9" * 400, "42", 0.0),
        ("", "0", 0.0),
    ],
)
def test_numeric_takes_the_last_number(response, truth, want):
    assert score("numeric", response, truth) == want


def test_numeric_tolerance_comes_with_the_row():
    assert score("numeric", "3.14", "3.14159") == 0.0
    assert score("numeric", "3.14", "3.14159", {"tolerance": 0.01}) == 1.0


@pytest.mark.parametrize(("response", "want"), [("42", 1.0), (" 42.0 ", 1.0), ("It is 42", 0.0), ("42 42", 0.0)])
def test_numeric_only_refuses_words_around_the_number(response, want):
    assert score("numeric-only", response, "42") == want


def test_an_answer_that_is_no_number_is_named_and_not_a_wrong_response():
    with pytest.raises(ValueError, match="ground_truth 'blue' is not a number"):
        score("numeric", "3", "blue")


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("so 6*7\n#### 42", 1.0, 1.0),
        ("#### 1,042", 0.0, 0.0),
        ("the answer is 42", 0.0, 1.0),
        ("#### 42\nwait\n#### 41", 0.0, 0.0),
        ("#### 1.2.3", 0.0, 0.0),
        ("####", 0.0, 0.0),
    ],
)
def test_gsm8k_wants_the_mark_and_reports_the_last_number_beside_it(response, strict, flexible):
    for truth in ("42", "6*7=42\n#### 42"):
        assert verifiers.gsm8k("openai/gsm8k", response, truth, {}) == {"score": strict, "flexible": flexible}


@pytest.mark.parametrize(
    ("response", "truth", "want"),
    [
        ("so it is $\\frac{2}{4}$", "1/2", 1.0),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("\\boxed{5,4}", "4,5", 1.0),
        ("\\boxed{\\text{Evelyn}}", "\\text{Evelyn}", 1.0),
        ("\\boxed{0.4}", "\\frac{1}{2}", 0.0),
        ("\\boxed{", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_math_verify_compares_values_not_text(response, truth, want):
    assert score("math-verify", response, truth) == want
    assert score("HuggingFaceH4/MATH-500", response, truth) == want
    assert score("aime2024", response, truth) == want


def test_math_verify_names_an_answer_that_it_cannot_parse():
    with pytest.raises(ValueError, match="is not an expression that Math-Verify can parse"):
        score("math-verify", "1", "")


def test_reasoning_gym_scores_from_the_row_alone():
    entry = {"question": "?", "answer": "12", "metadata": {}}
    extra = {"reasoning_gym": {"name": "chain_sum", "config": {"seed": 1}, "entry": json.dumps(entry)}}
    source = "reasoning_gym:chain_sum"
    assert score(source, "12", "12", extra) == 1.0
    assert score(source, "I think <answer>3</answer> no, <answer> 12 </answer>", "12", extra) == 1.0
    assert score(source, "13", "12", extra) == 0.0
    with pytest.raises(ValueError, match="no 'reasoning_gym' entry"):
        score(source, "12", "12", {})


def test_an_unknown_source_is_named_with_the_nearest_and_the_way_out():
    with pytest.raises(RewardError, match=r"'gsm8k' \(did you mean 'openai/gsm8k'\?\)") as error:
        verifiers.require_known(["exact", "gsm8k"])
    assert "reward.custom_reward_function.path" in str(error.value)
    verifiers.require_known(["exact", "reasoning_gym:chain_sum", "aime24"])
