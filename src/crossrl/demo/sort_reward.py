"""The reward of the demo, in the form that verl calls. Copy it, change it, and train with

crossrl train --config-name demo reward.custom_reward_function.path=my_reward.py
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Half for the share of digits in the right place, half for an answer that is all right.

    With the second half alone most groups of answers score the same, and there is nothing to learn from.
    """
    right = sum(found == wanted for found, wanted in zip(solution_str, ground_truth))
    exact = solution_str == ground_truth
    return {"score": 0.5 * right / len(ground_truth) + 0.5 * exact, "acc": exact}
