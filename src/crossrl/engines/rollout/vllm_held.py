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
from dataclasses import dataclass
from typing import Any

import torch

from crossrl.engines.base import EngineError

ROWS = 512  # of the identity matrix at a time: bounds the memory of a product


@dataclass(frozen=True, slots=True)
class Part:
    """A weight named ``name`` by Hugging Face: rows ``start`` to ``stop`` of the parameter ``attribute`` of the module
    ``owner`` (vLLM's name of it). ``head``: it is used as an output head, not as an embedding."""

    name: str
    owner: str
    attribute: str
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    head: bool = False


def parts_of(model: Any, tied_head: bool) -> list[Part]:
    """All weights of ``model``. ``tied_head``: the config ties the output head to the embedding (vLLM's model may then
    have no module for it)."""
    found: list[Part] = []
    fused = getattr(model, "packed_modules_mapping", None) or {}
    for owner, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                found += _parts(model, fused, owner, module, attribute, parameter)
    names = {part.name for part in found}
    if tied_head and "lm_head.weight" not in names:
        found += [
            Part("lm_head.weight", p.owner, p.attribute, p.start, p.stop, p.shape, p.dtype, head=True)
            for p in found
            if p.name.endswith("embed_tokens.weight")
        ]
    return found


def _parts(model: Any, fused: Mapping[str, Any], owner: str, module: Any, attribute: str, parameter: Any) -> list[Part]:
    prefix, _, last = owner.rpartition(".")
    head = last == "lm_head" or type(module).__name__ == "ParallelLMHead"
    rows, rest = _shape(module, attribute, parameter)
    subs = list(fused.get(last, ()))
    if len(subs) < 2:
        subs, sizes = [last], [rows]
    else:
        sizes = [int(size) for size in getattr(module, "output_sizes", ())]
        if len(sizes) != len(subs) or sum(sizes) != rows:
            raise EngineError(
                f"{type(model).__name__}: vLLM fuses {', '.join(subs)} into {owner} with {rows} rows, in parts of "
                f"{sizes}: this adapter cannot take that apart. Use the engine hf for this model"
            )
    found, start = [], 0
    for sub, size in zip(subs, sizes, strict=True):
        name = ".".join(part for part in (prefix, sub, attribute) if part)
        found.append(
            Part(name, owner, attribute, start, start + size, (size, *rest), parameter.dtype, head)
        )  # fmt: skip
        start += size
    return found


def _shape(module: Any, attribute: str, parameter: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Rows and the other sizes, without what pads the vocabulary; of an emptied parameter too."""
    shape = tuple(parameter.shape)
    if attribute == "weight" and not parameter.numel() and hasattr(module, "output_size_per_partition"):
        shape = (module.output_size_per_partition, module.input_size_per_partition)
    vocabulary = getattr(module, "org_vocab_size", None)
    return (vocabulary or shape[0] if shape else 1), shape[1:]


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
    """(name, what is computed with) of each of ``parts``: views of live parameters, copies of packed matrices.

    ``negative_zeros``: by name, the flat positions that arrived as -0.0.
    """
    matrices: dict[tuple[str, bool], torch.Tensor] = {}
    left = [(part.owner, part.head) for part in parts if part.attribute == "weight"]
    for part in parts:
        module, key = model.get_submodule(part.owner), (part.owner, part.head)
        if part.attribute == "weight" and packed(module, part.head):
            if key not in matrices:
                matrices[key] = _through_kernel(module, part.shape[1], part.dtype)
            whole = matrices[key]
            left.remove(key)
            values = whole[part.start : part.stop]
            if part.name in negative_zeros:
                values = values.clone()
                flat, places = values.view(-1), negative_zeros[part.name]
                zero = places[flat[places] == 0]
                flat[zero] = -0.0
            if key not in left:
                del matrices[key]
        else:
            parameter = getattr(module, part.attribute).detach()
            values = parameter[part.start : part.stop] if parameter.dim() else parameter
        yield part.name, values


def _through_kernel(module: Any, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The matrix ``[rows, width]`` that ``module`` multiplies with, by its own kernel."""
    columns = []
    for start in range(0, width, ROWS):
        count = min(ROWS, width - start)
        unit = torch.zeros((count, width), dtype=dtype)
        unit[torch.arange(count), torch.arange(start, start + count)] = 1
        columns.append(module.quant_method.apply(module, unit, None).t())
    return torch.cat(columns, 1) if len(columns) > 1 else columns[0].contiguous()


def negative_zeros_of(tensor: torch.Tensor) -> torch.Tensor:
    """Flat positions of -0.0, int64.

    >>> negative_zeros_of(torch.tensor([[0.0, -0.0], [1.0, -0.0]])).tolist()
    [1, 3]
    """
    flat = tensor.reshape(-1)
    return ((flat == 0) & torch.signbit(flat)).nonzero()[:, 0].cpu()
