"""The demo's model: a Llama of a hundred thousand parameters that has seen a few thousand sorted examples.

A model that never sorts anything right would get the same reward for all answers and learn nothing, so it is
warmed up by supervised training until it is right now and then; reinforcement learning does the rest.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from crossrl.demo.task import answer
from crossrl.seeds import derive

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, END = "_", "$"
VOCABULARY = [*"0123456789", ">", END, PAD]
BATCH = 256


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, ``$`` ends a response, ``_`` pads. There is no chat template: prompts are plain text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=64,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_model(seed: int, heads: int = 4) -> LlamaForCausalLM:
    """float32, random weights: normal with 0.05; what feeds the residual stream is scaled down (GPT-2, section 2.3)."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    end, pad = VOCABULARY.index(END), VOCABULARY.index(PAD)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=64, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        bos_token_id=None, eos_token_id=end, pad_token_id=pad, dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    numbers = torch.Generator().manual_seed(derive(seed, "demo", "weights") % 2**63)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
                continue
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = 0.05 / math.sqrt(2 * config.num_hidden_layers) if residual else 0.05
            parameter.normal_(0.0, deviation, generator=numbers)
    return model


def warm_up(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    digits: Sequence[str],
    progress: Callable[[int, int], None] | None = None,
) -> float:
    """Train ``model`` on the right answers to ``digits``, ``BATCH`` at a time; returns the last loss (nat per token).

    One thread, whatever the machine has: it is about as fast for a model of this size, and sums have one order.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    total, loss = len(digits) // BATCH, torch.zeros(())
    model.train()
    with _one_thread():
        for step in range(total):
            batch = digits[step * BATCH : (step + 1) * BATCH]
            ids = torch.tensor([tokenizer.encode(f"{text}>{answer(text)}{END}") for text in batch])
            labels = ids.clone()
            labels[:, : ids.shape[1] // 2] = -100  # the prompt: as long as the answer and its end token
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * min(1.0, (step + 1) / 10)
            optimizer.step()
            optimizer.zero_grad()
            if progress is not None:
                progress(step + 1, total)
    model.eval()
    return float(loss.detach())


def write_model(folder: Path, model: LlamaForCausalLM, tokenizer: Any) -> None:
    """A normal Hugging Face folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
