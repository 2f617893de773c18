"""A tiny random Qwen2 with its own tokenizer, and sums as data: all that the example trains on, made offline."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path) -> None:
    """``folder/model`` (a Hugging Face folder) and ``folder/train.parquet``, ``folder/val.parquet``."""
    random.seed(0)
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    config = Qwen2Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(folder / "model")
    rows = [row(i) for i in range(56)]
    pq.write_table(pa.Table.from_pylist(rows[:48]), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[48:]), folder / "val.parquet")


def make_tokenizer() -> PreTrainedTokenizerFast:
    corpus = [f"What is {a} plus {b}? The answer is {a + b}." for a in range(40) for b in range(40)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=special, initial_alphabet=letters, show_progress=False)
    bpe.train_from_iterator(corpus, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[2], pad_token=special[0])
    made.chat_template = TEMPLATE
    return made


def row(index: int) -> dict[str, object]:
    a, b = random.randrange(40), random.randrange(40)
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"index": index, "split": "train"},
    }


if __name__ == "__main__":
    make(Path(sys.argv[1]))
