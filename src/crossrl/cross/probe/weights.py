"""What identifies the weights that a side computed with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from crossrl.models.digest import weights_digest

# What wrappers (compilation, sharding, checkpointing) add to names.
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"}


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer. ``digest``: of its bytes, dtype and shape; ``rounded``: of the same in bfloat16, to
    compare sides of other dtypes by."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    rounded: str


def weights_of(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Weight]:
    """In the order of ``named``."""
    for name, tensor in named:
        digest = weights_digest([("", tensor)])
        wide = tensor.is_floating_point() and tensor.dtype != torch.bfloat16
        rounded = weights_digest([("", tensor.detach().to(torch.bfloat16))]) if wide else digest
        yield Weight(plain_name(name), dtype_name(tensor.dtype), tuple(tensor.shape), digest, rounded)


def plain_name(name: str) -> str:
    """A module's or parameter's name without what wrappers add.

    >>> plain_name("_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp")
    'model.layers.0.mlp'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
