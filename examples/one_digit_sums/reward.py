"""The reward of the sums: 1 for the number and nothing else; 0.3 for a start in the right direction."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Small steps matter: at first the model answers in sentences, and with exact answers only, all would get 0."""
    text = solution_str.strip()
    exact = text == ground_truth
    numbers = re.findall(r"\d+", text)
    on_the_way = text.isdigit() or (bool(numbers) and numbers[-1] == ground_truth)
    return {"score": 1.0 if exact else 0.3 if on_the_way else 0.0, "acc": exact}
