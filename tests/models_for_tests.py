"""Small random models of several architectures, and batches for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from crossrl.batch import Batch, Ragged

VOCABULARY = 64
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
# The configs, by the name of their class without "Config". Sliding windows are shorter than the sequences used.
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 4},
    "Gemma2": {"head_dim": 8, "sliding_window": 4},  # soft-capped attention and logits
    "Gemma3Text": {"head_dim": 8, "sliding_window": 4},
    "Granite": {"logits_scaling": 3.0},
    "GptOss": {"head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
}
PLAIN_ONLY = ("Bloom", "Mamba")  # attention of their own, or none: the engines fall back


def tiny(name: str = "Llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model with random weights large enough that its distributions are far from uniform."""
    if name == "Bloom":
        sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    elif name == "Mamba":
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    else:
        sizes = {**_SIZES, **CONFIGS[name]}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def wide(**changes: Any) -> PreTrainedModel:
    """A Llama whose layers are large enough for the faster linear layers (``crossrl.models.linear``)."""
    return tiny("Llama", hidden_size=192, intermediate_size=256, head_dim=32, vocab_size=512, **changes)


def batch(lengths: list[tuple[int, list[int]]], seed: int = 0, vocabulary: int = VOCABULARY) -> Batch:
    """Random prompts and responses: a group per entry, (prompt length, response lengths)."""
    draw = np.random.default_rng(seed)
    prompts, responses = [], []
    for prompt_length, response_lengths in lengths:
        prompt = draw.integers(0, vocabulary, prompt_length)
        for length in response_lengths:
            prompts.append(prompt)
            responses.append(draw.integers(0, vocabulary, length))
    response_ids = Ragged.from_rows(responses, np.int32)
    advantages = draw.normal(size=len(responses)).astype(np.float32)
    return Batch(
        tuple(f"s{i}" for i in range(len(prompts))),
        {
            "prompt_ids": Ragged.from_rows(prompts, np.int32),
            "response_ids": response_ids,
            "advantages": Ragged.spread(advantages, response_ids.lengths),
            "loss_weights": Ragged.full_like(response_ids, 1 / max(1, len(response_ids.values)), np.float32),
        },
    )


def reference_log_probs(model: PreTrainedModel, data: Batch, temperature: float = 1.0) -> list[torch.Tensor]:
    """Per sample, one plain forward pass of the model itself, differentiable."""
    out = []
    prompts, responses = data.ragged("prompt_ids"), data.ragged("response_ids")
    for i in range(len(data)):
        ids = torch.from_numpy(np.concatenate([prompts.row(i), responses.row(i)]).astype(np.int64))
        first = len(prompts.row(i))
        logits = model(input_ids=ids[None], use_cache=False).logits[0, first - 1 : -1] / temperature
        out.append(torch.log_softmax(logits.float(), -1).gather(1, ids[first:, None])[:, 0])
    return out
