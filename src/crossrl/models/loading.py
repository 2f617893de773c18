"""Causal language models and tokenizers from local Hugging Face folders, and back into such folders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

OWN_ATTENTION = "crossrl"  # of the packed form (``models/attention.py``), which needs more than a name
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelFolderError(ValueError):
    """The folder does not hold what was asked for; the message says what is missing."""


def load_causal_lm(
    path: str | Path,
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """The causal LM in the Hugging Face folder ``path``, on ``device``, in ``dtype``, without dropout.

    Reads local files only: a missing folder never turns into a download. The model is in eval mode, and
    every dropout of its config is set to 0 (a policy whose log-probs are drawn anew at each call cannot be
    compared with anything), so the mode makes no difference. ``override_config``: config keys to replace.

    Raises ``ModelFolderError``: no such folder, no config.json, no weights, or an unknown override key.
    """
    folder = model_folder(path)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ModelFolderError(f"{folder} holds a config.json but no weights (*.safetensors or pytorch_model*.bin)")
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    _override(config, override_config or {}, folder)
    switch_dropout_off(config)
    with _no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=as_dtype(dtype),
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    model.to(device)  # type: ignore[arg-type]
    _own_storage(model)
    return model.eval()


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in the Hugging Face folder ``path`` (local files only)."""
    folder = model_folder(path)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ModelFolderError(
            f"{folder} holds no tokenizer (tokenizer.json, tokenizer_config.json or tokenizer.model)"
        )
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)


def save_hf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | Path,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write ``model`` (safetensors) and ``tokenizer`` as a Hugging Face folder that ``load_causal_lm`` reads.

    ``weights``: to be written in the place of the model's own, under all names."""
    with _no_progress_bar():
        model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """A bar per model that is loaded or saved says nothing in a run that has a progress display of its own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def model_folder(path: str | Path) -> Path:
    """``path`` as a folder with a config.json, or ``ModelFolderError``."""
    folder = Path(path).expanduser()
    if not folder.exists():
        raise ModelFolderError(
            f"no such model folder: {folder}. Models are read from local folders only; "
            "`crossrl model smollm2 --out DIR` makes one without network access"
        )
    if not folder.is_dir():
        raise ModelFolderError(f"{folder} is a file; a model is a folder with config.json and weights")
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    return folder


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype named ``dtype`` (``float32``, ``bfloat16`` or ``float16``)."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ModelFolderError(f"unknown dtype {dtype!r}: want one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def switch_dropout_off(config: Any) -> list[str]:
    """Set every dropout rate of ``config`` and its sub-configs to 0; returns the names of those that were not."""
    changed = []
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            changed += [f"{name}.{inner}" for inner in switch_dropout_off(value)]
        elif ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float) and value > 0:
            setattr(config, name, 0.0)
            changed.append(name)
    return changed


def distinct_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Each parameter once, under its first name: a tied weight appears under one name only."""
    return model.named_parameters(remove_duplicate=True)


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Names that share the storage of another parameter, mapped to that parameter's first name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


@torch.no_grad()
def _own_storage(model: torch.nn.Module) -> None:
    """Copy parameters and buffers out of the file that they are mapped from.

    Until a page is written to, a mapped weight is whatever the file holds now, so that a file replaced in place
    would change a run under way; and it lies at odd addresses, which makes matrix products slower.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone(memory_format=torch.preserve_format)


def _override(config: Any, changes: Mapping[str, Any], folder: Path) -> None:
    for key, value in changes.items():
        if key == "attn_implementation":  # a key of config.json under which transformers keeps no attribute
            valid = sorted({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()} - {OWN_ATTENTION, "paged|eager"})
            if value not in valid:
                raise ModelFolderError(f"override_config.attn_implementation={value}: want one of {', '.join(valid)}")
            config._attn_implementation = value
            continue
        if not hasattr(config, key):
            raise ModelFolderError(f"override_config.{key}: the config of {folder} has no such key")
        setattr(config, key, value)
