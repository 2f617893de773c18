"""Listening to a model while it runs one sample: what each module was given and returned, in the order of the tokens.

The paths differ in how tokens lie in a call. Packed training: the prompt, filler, the response. Plain training: one
padded row. Rollout: the prompt (and filler), then one call per response token, of which all rows are the same
sequence. Rows are put back into the order of the tokens here, so that any two paths line up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from crossrl.cross.probe.sketch import Seen, Sink
from crossrl.cross.probe.weights import Weight, plain_name, weights_of
from crossrl.models.head import Head
from crossrl.models.policy import Policy

TOKENS, LOGITS = "(input)", "(logits)"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module in a forward pass. ``kind``: its class. ``occurrence``: counts the calls of this module in
    one pass, from 0. ``apart``: what it returned that does not have one row per token, and is not compared."""

    module: str
    kind: str
    occurrence: int
    inputs: tuple[Seen, ...]
    outputs: tuple[Seen, ...]
    apart: tuple[str, ...]


@dataclass(slots=True)
class _Heard:
    """A call while rows of it still come."""

    kind: str
    inputs: dict[str, Sink] = field(default_factory=dict)
    outputs: dict[str, Sink] = field(default_factory=dict)
    apart: dict[str, None] = field(default_factory=dict)
    done: int = -1


class Recorder:
    """Hears one sample of ``prompt`` and ``response`` tokens pass through ``policy``.

    ``stepwise``: the first pass brings the prompt, each later one a response token (rollout); else one pass brings
    all. The last response token is never an input, so there are ``prompt + response - 1`` rows, and ``response`` rows
    of the head. ``parameters``, ``buffers``: as they are when the first pass begins, since a side may compute with
    others than it holds otherwise.
    """

    def __init__(self, policy: Policy, prompt: int, response: int, stepwise: bool) -> None:
        self.policy, self.prompt, self.response, self.stepwise = policy, prompt, response, stepwise
        self.parameters: tuple[Weight, ...] = ()
        self.buffers: tuple[Weight, ...] = ()
        self._heard: dict[tuple[str, int], _Heard] = {}
        self._passes, self._size, self._done = 0, 0, 0
        self._started: dict[str, int] = {}
        self._ended: dict[str, int] = {}
        self._head_name = _name_of(policy.model, policy.model.get_output_embeddings())

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Hooks are there inside this block only."""
        base = self.policy.model.base_model
        with ExitStack() as stack:
            handle = base.register_forward_pre_hook(self._begin, with_kwargs=True)
            stack.callback(handle.remove)
            for name, module in self.policy.model.named_modules():
                stack.callback(self._listen_to(plain_name(name), module).remove)
                if name:
                    stack.callback(self._listen_before(plain_name(name), module).remove)
            self._listen_to_head(stack)
            yield

    def finish(self) -> tuple[list[Call], dict[str, np.ndarray]]:
        """The calls in the order in which they ended, and what is kept, by digest."""
        kept: dict[str, np.ndarray] = {}

        def close(sinks: Mapping[str, Sink]) -> tuple[Seen, ...]:
            out = []
            for sink in sinks.values():
                if (done := sink.finish()) is not None:
                    out.append(done[0])
                    kept[done[0].digest] = done[1]
            return tuple(out)

        calls = []
        for (name, occurrence), heard in sorted(self._heard.items(), key=lambda item: item[1].done):
            if heard.done >= 0:
                inputs, outputs = close(heard.inputs), close(heard.outputs)
                apart = (*heard.apart, *(label for label, sink in heard.outputs.items() if sink.uneven))
                calls.append(Call(name, heard.kind, occurrence, inputs, outputs, apart))
        return calls, kept

    def _begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        assert isinstance(ids, torch.Tensor)
        if self._passes == 0:
            # A tied weight under each of its names, so that one that is no longer tied is seen.
            self.parameters = tuple(weights_of(self.policy.model.named_parameters(remove_duplicate=False)))
            self.buffers = tuple(weights_of(self.policy.model.named_buffers()))
        self._passes += 1
        self._size = ids.shape[-1]
        self._started.clear()
        self._ended.clear()
        given = {"input_ids": ids, "position_ids": kwargs.get("position_ids")}
        self._take(self._call(TOKENS, 0, "tokens").outputs, given, TOKENS)
        self._end(self._call(TOKENS, 0, "tokens"))

    def _listen_before(self, name: str, module: torch.nn.Module) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            number = self._started[name] = self._started.get(name, -1) + 1
            given = {**{str(i): a for i, a in enumerate(args)}, **{k: v for k, v in kwargs.items() if "mask" not in k}}
            self._take(self._call(name, number, type(module).__name__).inputs, given, name)

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def _listen_to(self, name: str, module: torch.nn.Module) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not name:  # the whole model, which plain paths call: what it adds to its head
                self._logits({"logits": getattr(output, "logits", None)})
                return
            number = self._ended[name] = self._ended.get(name, -1) + 1
            heard = self._call(name, number, type(module).__name__)
            for label in self._take(heard.outputs, {"": output}, name):
                heard.apart[label] = None
            self._end(heard)

        return module.register_forward_hook(hook, with_kwargs=True)

    def _logits(self, given: Mapping[str, Any]) -> None:
        heard = self._call(LOGITS, 0, "logits")
        self._take(heard.outputs, given, LOGITS)
        self._end(heard)

    def _listen_to_head(self, stack: ExitStack) -> None:
        """Packed paths use the head's weight and not its module (``models/head.py``), a chunk of rows at a time."""
        policy: Any = self.policy
        inner = policy.head

        def head() -> Head:
            found = inner()
            return _HeardHead(found.weight, found.bias, found.scale, found.softcap, found, self._hear_head)

        policy.head = head
        stack.callback(setattr, policy, "head", inner)

    def _hear_head(self, head: Head, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        # With a scale or a cap these are not what the module would return.
        name = self._head_name if head.scale == 1.0 and head.softcap is None else LOGITS
        heard = self._call(name, 0, "Linear" if name == self._head_name else "logits")
        rows = slice(0, 1) if self.stepwise else slice(None)
        for sinks, tensor in ((heard.inputs, hidden), (heard.outputs, logits)):
            self._sink(sinks, "", self.response).add(tensor[rows])
        self._end(heard)

    def _take(self, sinks: dict[str, Sink], given: Mapping[str, Any], name: str) -> list[str]:
        """Add the rows of all tensors in ``given``; returns the labels of those that have no row per token."""
        of_head = name in (self._head_name, LOGITS)
        apart = []
        for label, tensor in flatten(given):
            rows = self._rows(tensor, of_head)
            if rows is None:
                apart.append(label)
            else:
                self._sink(sinks, label, self.response if of_head else self.prompt + self.response - 1).add(rows)
        return apart

    def _rows(self, tensor: torch.Tensor, of_head: bool) -> torch.Tensor | None:
        if of_head and tensor.dim() == 3 and tensor.shape[1] == 1:  # transformers' generate: the last position only
            return tensor[0]
        rows = token_rows(tensor, self._size)
        if rows is None:
            return None
        if self.stepwise and self._passes > 1:
            return rows[:1]
        prompt = rows[: self.prompt]
        after = 0 if self.stepwise else self.response - 1
        start = len(rows) - after if self.policy.packed else self.prompt
        rows = torch.cat([prompt, rows[start : start + after]]) if after else prompt
        return rows[self.prompt - 1 :] if of_head else rows

    def _sink(self, sinks: dict[str, Sink], label: str, total: int) -> Sink:
        return sinks.setdefault(label, Sink(label, total))

    def _call(self, name: str, number: int, kind: str) -> _Heard:
        return self._heard.setdefault((name, number), _Heard(kind))

    def _end(self, heard: _Heard) -> None:
        if heard.done < 0:
            heard.done, self._done = self._done, self._done + 1


class _HeardHead(Head):
    """``inner``, whose logits are heard."""

    __slots__ = ("hear", "inner")

    def __init__(self, weight: Any, bias: Any, scale: float, softcap: float | None, inner: Head, hear: Any) -> None:
        super().__init__(weight, bias, scale, softcap)
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "hear", hear)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.inner.logits(hidden)  # type: ignore[attr-defined]
        self.hear(self.inner, hidden, out)  # type: ignore[attr-defined]
        return out


def flatten(value: Any, label: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested maps, lists and tuples, with where they are; anything else holds none."""
    if isinstance(value, torch.Tensor):
        yield label, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(inner, f"{label}.{key}".strip("."))
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from flatten(inner, f"{label}.{i}".strip("."))


def token_rows(tensor: torch.Tensor, size: int) -> torch.Tensor | None:
    """``tensor`` as ``[size, ...]``, one row per token of the pass; None where it has no such axis."""
    if tensor.dim() >= 2 and tensor.shape[0] == 1 and tensor.shape[1] == size:
        return tensor[0]
    if tensor.dim() == 4 and tensor.shape[0] == 1 and tensor.shape[2] == size:  # heads before tokens
        return tensor[0].transpose(0, 1)
    return tensor if tensor.dim() >= 2 and tensor.shape[0] == size else None


def _name_of(model: torch.nn.Module, module: torch.nn.Module) -> str:
    return next((plain_name(n) for n, m in model.named_modules() if m is module), "lm_head")
