"""Promises of model loading, export and digests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models_for_tests import tiny
from transformers import LlamaConfig

from crossrl.engines.threads import choose_threads
from crossrl.models.digest import CHUNK_BYTES, weights_digest
from crossrl.models.loading import (
    ModelFolderError,
    distinct_parameters,
    load_causal_lm,
    load_tokenizer,
    save_hf,
    switch_dropout_off,
    tied_names,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_hf(tiny("Llama"), None, tmp_path / "model")
    return tmp_path / "model"


def test_an_exported_model_loads_with_the_same_weights(folder: Path) -> None:
    loaded = load_causal_lm(folder)
    assert (folder / "model.safetensors").is_file()
    assert weights_digest(distinct_parameters(loaded)) == weights_digest(distinct_parameters(tiny("Llama")))
    assert not loaded.training


def test_loaded_weights_do_not_follow_the_file(folder: Path) -> None:
    loaded = load_causal_lm(folder)
    before = weights_digest(distinct_parameters(loaded))
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(2000)
        file.write(b"\xff" * 20_000)
    assert weights_digest(distinct_parameters(loaded)) == before


def test_dtype_and_config_can_be_chosen(folder: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5.0}
    loaded = load_causal_lm(folder, dtype="bfloat16", override_config={"rope_parameters": rope})
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded.config.rope_parameters["rope_theta"] == 5.0
    with pytest.raises(ModelFolderError, match=r"override_config\.hiden_size"):
        load_causal_lm(folder, override_config={"hiden_size": 3})
    with pytest.raises(ModelFolderError, match="unknown dtype 'fp8'"):
        load_causal_lm(folder, dtype="fp8")


def test_dropout_is_off(tmp_path: Path) -> None:
    save_hf(tiny("Llama", attention_dropout=0.3), None, tmp_path)
    assert load_causal_lm(tmp_path).config.attention_dropout == 0.0
    assert switch_dropout_off(LlamaConfig(attention_dropout=0.1)) == ["attention_dropout"]


def test_another_attention_can_be_asked_for_and_a_misspelled_one_is_named(folder: Path) -> None:
    model = load_causal_lm(folder, override_config={"attn_implementation": "eager"})
    assert model.config._attn_implementation == "eager" != load_causal_lm(folder).config._attn_implementation
    with pytest.raises(ModelFolderError, match=r"attn_implementation=eagre: want one of eager, .*sdpa$"):
        load_causal_lm(folder, override_config={"attn_implementation": "eagre"})


def test_a_folder_that_is_not_a_model_is_a_clear_error(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"no such model folder.*local folders only"):
        load_causal_lm(tmp_path / "org" / "name")
    (tmp_path / "file").touch()
    with pytest.raises(ModelFolderError, match="is a file"):
        load_causal_lm(tmp_path / "file")
    with pytest.raises(ModelFolderError, match=r"no config\.json"):
        load_causal_lm(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match="no weights"):
        load_causal_lm(folder)
    with pytest.raises(ModelFolderError, match="no tokenizer"):
        load_tokenizer(folder)


def test_tied_weights_are_known_and_listed_once() -> None:
    model = tiny("Llama")
    assert tied_names(model) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in dict(distinct_parameters(model))
    assert tied_names(tiny("Qwen2", tie_word_embeddings=False)) == {}


def test_the_digest_depends_on_content_name_dtype_and_shape_only() -> None:
    big = torch.arange(CHUNK_BYTES // 4 + 5, dtype=torch.float32)
    named = [("a", big), ("b", torch.ones(2, 3)), ("c", torch.zeros(0))]
    digest = weights_digest(named)
    assert digest == weights_digest(named[::-1]) == weights_digest(named, threads=1) == weights_digest(named, threads=7)
    changed = big.clone()
    changed[-1] += 1
    others = [
        [("a", changed), *named[1:]],
        [("A", big), *named[1:]],
        [named[0], ("b", torch.ones(3, 2)), named[2]],
        [named[0], ("b", torch.ones(2, 3, dtype=torch.int32)), named[2]],
        named[:2],
        [("a", named[1][1]), ("b", big), named[2]],
    ]
    assert len({digest, *(weights_digest(o) for o in others)}) == 7


def test_threads_are_one_for_a_tiny_model_and_the_reason_is_given() -> None:
    count, why = choose_threads(100_000)
    assert count == 1
    assert "0.1M parameters" in why
    assert choose_threads(135_000_000)[0] >= 1
