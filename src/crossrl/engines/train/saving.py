"""The engine's part of a checkpoint: whole, written by one process, or in shards, of which each rank writes its own.
Either is read by any number of ranks. There is no pickle in them."""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from crossrl.engines.base import EngineError
from crossrl.engines.train.optimizer import check_fit
from crossrl.files import sync_folder
from crossrl.models.loading import distinct_parameters, load_causal_lm, load_tokenizer, save_hf

MODEL, OPTIMIZER, SHARDS = "model", "optimizer.safetensors", "shards"


def is_sharded(folder: Path) -> bool:
    return (folder / SHARDS).is_dir()


def write_whole(folder: Path, model: PreTrainedModel, optimizer: Mapping[str, torch.Tensor], tokenizer: Any) -> None:
    """``model/`` (a Hugging Face folder) and ``optimizer.safetensors``. Raises ``OSError``."""
    write_model(folder / MODEL, model, tokenizer)
    try:
        save_file({k: v.detach().contiguous() for k, v in optimizer.items()}, folder / OPTIMIZER)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    flush(folder)


def write_config(folder: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    """``model/`` without the weights. Raises ``OSError``."""
    target = folder / MODEL
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(target)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(target)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
    flush(folder)


def write_model(
    folder: Path, model: PreTrainedModel, tokenizer: Any, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """A Hugging Face folder; ``weights``: in the place of the model's own, under all names. Raises ``OSError``."""
    try:
        save_hf(model, tokenizer, folder, weights)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    flush(folder)


def read_whole(
    folder: Path, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and optimizer tensors, on the CPU, by the names that they have in the engine."""
    # Through transformers, which may store parameters under other names than the model has (fused experts).
    model = load_causal_lm(folder / MODEL, dtype, "cpu", trust_remote_code)
    weights = {name: tensor.detach() for name, tensor in distinct_parameters(model)}
    return weights, load_file(folder / OPTIMIZER)


def write_shards(folder: Path, state: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Each rank writes what it holds of ``state`` (sharded tensors, ``weights/NAME`` and ``optimizer/NAME``), all at
    once, into ``make_shards``. Raises ``OSError`` on every rank if one cannot."""
    writer = HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True)
    try:
        dcp.save(dict(state), storage_writer=writer, process_group=group)
    except (dcp.CheckpointException, SafetensorError) as error:
        raise OSError(_first_cause(error)) from error


def make_shards(folder: Path) -> None:
    """The folder that the shards go into. Raises ``OSError``, also where ``folder`` is not there."""
    (folder / SHARDS).mkdir(exist_ok=True)


def written(folder: Path) -> dict[str, int]:
    """Files below ``folder``, with their sizes in bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def check_written(folder: Path, files: Mapping[str, int], weights: str) -> None:
    """Raises ``OSError`` unless ``folder`` holds ``files`` (name to size), as another process says that it has written
    them there, and among them ``config.json`` and those that match ``weights``."""
    names = [PurePath(name) for name in files]
    absent = [what for what in ("config.json", weights) if not any(name.match(what) for name in names)]
    # By name, and not by listing: a network file system may list a folder as it was.
    absent += [n for n, size in files.items() if not (folder / n).is_file() or (folder / n).stat().st_size != size]
    if absent:
        raise OSError(
            f"{folder} does not hold {', '.join(sorted(absent)[:4])} after the training processes have written to it. "
            f"They and this process must share the folder: have it on a file system that all machines see, by an "
            "absolute path"
        )


def check_shards(folder: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Raises ``EngineError`` for a tensor that is missing in the shards, unknown, incomplete or of another shape or
    dtype than in ``into``."""
    shards = folder / SHARDS
    parts = {name.partition("/")[0] for name in into}  # a frozen engine takes the weights alone
    found = {name: t for name, t in _found(shards).items() if name.partition("/")[0] in parts}
    check_fit(into, found, f"the shards in {shards}")


def read_shards(folder: Path, into: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Fill ``into``, whole or sharded tensors, from the shards of any number of ranks, after ``check_shards``.

    ``group``: of the ranks that do so at once; None: this process is alone. Raises ``EngineError``.
    """
    check_shards(folder, into)
    reader = HuggingFaceStorageReader(str(folder / SHARDS))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is meant to be
            dcp.load(dict(into), storage_reader=reader, process_group=group, no_dist=group is None)
    except (dcp.CheckpointException, SafetensorError, OSError) as error:
        raise EngineError(f"cannot read the shards in {folder / SHARDS}: {_first_cause(error)}") from error


def _found(shards: Path) -> dict[str, torch.Tensor]:
    """Shapes and dtypes of what the files in ``shards`` hold together, as tensors without content."""
    try:
        metadata = HuggingFaceStorageReader(str(shards)).read_metadata()
    except (SafetensorError, OSError) as error:
        raise EngineError(f"cannot read the shards in {shards}: {error}") from error
    found = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        there = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if there != tensor.size.numel():
            raise EngineError(f"{shards}: of {name} there are {there} of {tensor.size.numel()} values")
        found[name] = torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")
    return found


def export_hf(checkpoint: Path, folder: Path, trust_remote_code: bool = False) -> None:
    """Write the weights of a checkpoint, whole or sharded, as a Hugging Face folder; needs no ranks and no optimizer.

    Raises ``EngineError`` or ``ModelFolderError`` for a checkpoint that cannot be read, ``OSError``.
    """
    source = checkpoint / MODEL
    if not is_sharded(checkpoint):
        shutil.copytree(source, folder, dirs_exist_ok=True)
        return
    model = model_of(checkpoint, trust_remote_code)
    has_tokenizer = (source / "tokenizer_config.json").is_file()
    save_hf(model, load_tokenizer(source, trust_remote_code) if has_tokenizer else None, folder)


def model_of(checkpoint: Path, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a checkpoint, on the CPU: in float32, or as the shards have it."""
    source, shards = checkpoint / MODEL, checkpoint / SHARDS
    if not is_sharded(checkpoint):
        return load_causal_lm(source, trust_remote_code=trust_remote_code)
    weights = {n: t for n, t in _found(shards).items() if n.startswith("weights/")}
    config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=trust_remote_code)
    dtype = next(iter(weights.values())).dtype
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    read_shards(checkpoint, {f"weights/{name}": p.detach() for name, p in distinct_parameters(model)})
    return model.eval()


def flush(folder: Path) -> None:
    """Bring every file below ``folder`` to the disk of this machine: with a network file system nobody else can."""
    for path, _, names in os.walk(folder):
        for name in names:
            sync_folder(Path(path) / name)
        sync_folder(Path(path))


def _first_cause(error: BaseException) -> str:
    """PyTorch wraps what a rank raised into a report of all ranks with their stacks."""
    if isinstance(error, dcp.CheckpointException):
        causes = [f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items()]
        return "; ".join(causes[:3])
    return str(error)
