"""What a vLLM model computes with, under the names that Hugging Face gives its weights.

vLLM fuses layers (``q_proj``, ``k_proj`` and ``v_proj`` are rows of one ``qkv_proj``), pads the vocabulary, and on a
CPU packs matrices into a form of oneDNN's and drops the parameter; a tied output head then has a packed copy of its
own. Reading parameters would therefore prove little. A packed matrix is read through the layer's own kernel instead:
its product with rows of the identity matrix is the matrix, exactly, since x * 1 plus zeros is x in any float format. So
what is seen is what the next token is computed with, bit for bit, whatever went wrong on the way.

Two things do not survive such a product. The sign of a zero is lost: the positions of the negative zeros that arrived
are remembered, and get their sign back where a zero is found. And a NaN or an infinity makes its whole row NaN, so a
weight that has one is reported as not held: as it should be.

What it costs: as much as the prefill of one prompt with as many tokens as a layer has inputs (hundreds to a few
thousand), whatever the size of the model. Measured on SmolLM2-135M in float32 on two busy cores: 3.2 s, where bringing
the weights in takes 0.8 s and 64 responses of 64 tokens about 40 s. So all of every matrix is read, after every
transfer; nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from crossrl.engines.base import EngineError

ROWS = 512  # of the identity matrix at a time: bounds the memory of a product
RANKS_S = 60.0


@dataclass(frozen=True, slots=True)
class Part:
    """A weight of ``shape`` that Hugging Face calls ``name``: in this process, rows ``start`` to ``stop`` of the
    parameter ``attribute`` of the module ``owner`` (vLLM's name of it).

    ``split``: along which dimension the tensor-parallel ranks share it, None if each has all of it; ``copies``: how
    many neighbouring ranks have the same piece. ``head``: it is used as an output head, not as an embedding.
    """

    name: str
    owner: str
    attribute: str
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    split: int | None = None
    copies: int = 1
    head: bool = False


def parts_of(model: Any, tied_head: bool) -> list[Part]:
    """All weights of ``model``. ``tied_head``: the config ties the output head to the embedding (vLLM's model may then
    have no module for it). Raises ``EngineError`` for layers that are fused in a way that is not known here."""
    found: list[Part] = []
    fused = getattr(model, "packed_modules_mapping", None) or {}
    for owner, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                found += _parts(type(model).__name__, fused, owner, module, attribute, parameter)
    if tied_head and "lm_head.weight" not in {part.name for part in found}:
        embeddings = [part for part in found if part.name.endswith("embed_tokens.weight")]
        found += [replace(part, name="lm_head.weight", head=True) for part in embeddings]
    return found


def _parts(model: str, fused: Mapping[str, Any], owner: str, module: Any, attribute: str, parameter: Any) -> list[Part]:
    prefix, _, last = owner.rpartition(".")
    kinds, ranks = {kind.__name__ for kind in type(module).__mro__}, int(getattr(module, "tp_size", 1))
    shape = _local_shape(module, attribute, parameter)
    split = None
    if ranks > 1 and kinds & {"ColumnParallelLinear", "VocabParallelEmbedding"}:
        split = 0
    elif ranks > 1 and "RowParallelLinear" in kinds and attribute == "weight":
        split = 1
    subs, sizes = list(fused.get(last, ())), [int(size) // ranks for size in getattr(module, "output_sizes", ())]
    if len(subs) < 2:
        subs, sizes = [last], [shape[0] if shape else 1]
    elif len(sizes) != len(subs) or sum(sizes) != shape[0]:
        raise EngineError(
            f"{model}: vLLM fuses {', '.join(subs)} into {owner} with {shape[0]} rows, in parts of {sizes}: this "
            "adapter cannot take that apart. Use the engine hf for this model"
        )
    found, start = [], 0
    for i, (sub, size) in enumerate(zip(subs, sizes, strict=True)):
        copies = int(getattr(module, "num_kv_head_replicas", 1)) if i and "QKVParallelLinear" in kinds else 1
        whole = [size, *shape[1:]] if shape else []
        if split is not None:
            whole[split] = whole[split] * ranks // copies
        if "VocabParallelEmbedding" in kinds:
            whole[0] = module.org_vocab_size  # without what pads it
        name = ".".join(part for part in (prefix, sub, attribute) if part)
        head = last == "lm_head" or "ParallelLMHead" in kinds
        found.append(
            Part(name, owner, attribute, start, start + size, tuple(whole), parameter.dtype, split, copies, head)
        )  # fmt: skip
        start += size
    return found


def _local_shape(module: Any, attribute: str, parameter: torch.Tensor) -> tuple[int, ...]:
    """In this process; of an emptied parameter too."""
    if attribute == "weight" and not parameter.numel() and hasattr(module, "output_size_per_partition"):
        return module.output_size_per_partition, module.input_size_per_partition
    return tuple(parameter.shape)


def packed(module: Any, head: bool) -> bool:
    """Whether ``module`` multiplies with something else than its parameter ``weight``.

    ``cpu_linear`` is what vLLM calls on a CPU, with the parameter as an argument; only a function that has closed over
    something can use anything else. An embedding looks rows up in the parameter itself.
    """
    multiply = getattr(module, "cpu_linear", None)
    if multiply is None or (type(module).__name__ == "VocabParallelEmbedding" and not head):
        return False
    return getattr(multiply, "__closure__", None) is not None or not hasattr(multiply, "__code__")


@torch.no_grad()
def read(
    model: Any, parts: list[Part], negative_zeros: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, what is computed with) of each of ``parts``: views of live parameters, copies of what is packed or shared
    among ranks.

    ``negative_zeros``: by name, the flat positions that arrived as -0.0. Where ranks share weights, all of them must
    read at once, to the end. Waits for: the other ranks. Unblocked by: their reading, their death. Limit:
    ``RANKS_S`` for all to begin.
    """
    ranks = _Ranks() if any(part.split is not None for part in parts) else None
    matrices: dict[tuple[str, bool], torch.Tensor] = {}
    left = [(part.owner, part.head) for part in parts if part.attribute == "weight"]
    for part in parts:
        module, key = model.get_submodule(part.owner), (part.owner, part.head)
        through_kernel = part.attribute == "weight" and packed(module, part.head)
        if through_kernel:
            left.remove(key)
            if key not in matrices:
                matrices[key] = _through_kernel(module, part.dtype)
            whole = matrices[key] if key in left else matrices.pop(key)
        else:
            whole = getattr(module, part.attribute).detach()
        values = whole[part.start : part.stop] if whole.dim() else whole
        if ranks is not None and part.split is not None:
            values = ranks.gather(values, part.split, part.copies)
        values = values[: part.shape[0]] if part.shape else values
        yield part.name, _signed(values, negative_zeros.get(part.name)) if through_kernel else values


def _through_kernel(module: Any, dtype: torch.dtype) -> torch.Tensor:
    """The matrix ``[rows, width]`` that ``module`` multiplies with, by its own kernel."""
    width = int(getattr(module, "input_size_per_partition", 0) or module.embedding_dim)
    columns = []
    for start in range(0, width, ROWS):
        count = min(ROWS, width - start)
        unit = torch.zeros((count, width), dtype=dtype)
        unit[torch.arange(count), torch.arange(start, start + count)] = 1
        columns.append(module.quant_method.apply(module, unit, None).t())
    return torch.cat(columns, 1) if len(columns) > 1 else columns[0].contiguous()


class _Ranks:
    """The tensor-parallel ranks, each in a process of its own."""

    def __init__(self) -> None:
        import torch.distributed
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        self._group, self._size = group.device_group, group.world_size
        torch.distributed.monitored_barrier(group.cpu_group, timedelta(seconds=RANKS_S), wait_all_ranks=True)

    def gather(self, values: torch.Tensor, dim: int, copies: int) -> torch.Tensor:
        """The pieces of all ranks, put together."""
        mine = values.contiguous()
        pieces = [torch.empty_like(mine) for _ in range(self._size)]
        torch.distributed.all_gather(pieces, mine, group=self._group)
        return torch.cat(pieces[::copies], dim)


def _signed(values: torch.Tensor, negative_zeros: torch.Tensor | None) -> torch.Tensor:
    """``values`` with the sign of the zeros that arrived with one."""
    if negative_zeros is None:
        return values
    values = values.clone()
    flat = values.view(-1)
    flat[negative_zeros[flat[negative_zeros] == 0]] = -0.0
    return values


def negative_zeros_of(tensor: torch.Tensor) -> torch.Tensor:
    """Flat positions of -0.0, int64.

    >>> negative_zeros_of(torch.tensor([[0.0, -0.0], [1.0, -0.0]])).tolist()
    [1, 3]
    """
    flat = tensor.reshape(-1)
    return ((flat == 0) & torch.signbit(flat)).nonzero()[:, 0].cpu()
