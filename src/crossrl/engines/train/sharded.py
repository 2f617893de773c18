"""The training engine on several ranks: PyTorch FSDP2, each rank with its shard of weights, gradients and moments."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from crossrl.batch import Batch
from crossrl.engines.base import EngineError, EngineState, LossInput, Objective
from crossrl.engines.train import saving
from crossrl.engines.train.fsdp import PARTS, FsdpTrainEngine
from crossrl.engines.train.micro_batches import MicroBatch
from crossrl.engines.train.optimizer import AdamWSettings, NamedAdamW, check_fit, local
from crossrl.engines.train.ranks import Agreed, Ranks
from crossrl.engines.train.sharding import rows, shard
from crossrl.engines.train.trouble import check_scalars, gradient_trouble, log_prob_trouble
from crossrl.models.digest import passing_digest, weights_digest
from crossrl.models.layout import Group
from crossrl.sync.messages import describe

if TYPE_CHECKING:
    from crossrl.sync.sender import Sent

# What a rank computes while others have a micro-batch and it has none: its part in the collectives, of no weight.
NOTHING = MicroBatch((Group(np.zeros(1, np.int64), (np.zeros(1, np.int64),)),), np.zeros(0, np.int64), 0)


class ShardedTrainEngine(FsdpTrainEngine):
    """One of ``ranks`` engines that train one model: its methods are called on all of them at once, each with its part
    of the batch. Losses of all parts add up (they carry their weights), and so do gradients.

    ``model``: whole, the same on every rank, on the CPU; each rank keeps its shard of it, on its device.
    ``reshard``: let go of a layer's weights after its forward and its backward pass. False keeps weights and gradients
    of the whole model in memory during a step, and gathers and reduces them once and not for each micro-batch.

    Errors that concern the data or the numbers are raised on every rank alike, as ``Agreed``, with nothing changed. Any
    other leaves the ranks apart, so that the group must be ended.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: AdamWSettings | None,
        ranks: Ranks,
        *,
        reshard: bool = True,
        **options: Any,
    ) -> None:
        self.ranks, self._reshard = ranks, reshard
        self._problems: list[str] = []
        self._left = self._count = 0
        super().__init__(model, optimizer, **options)
        self.facts = replace(self.facts, ranks=ranks.world)

    def _place(self) -> None:
        digests = self.ranks.all(weights_digest(self.model.named_parameters()))
        if other := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise EngineError(
                f"ranks {other} have loaded other weights than rank 0: the model folder is not the same everywhere"
            )
        self._root, self._sharded = shard(self.policy, self.ranks.mesh, self._reshard)

    def _rounds(self, batch: Batch, skip: np.ndarray | None) -> list[MicroBatch]:
        """This rank's micro-batches, and nothing as often as another has more."""
        self._problems.clear()
        self.ranks.beats.at("dealing out")
        micros, problem = list[MicroBatch](), ""
        try:
            micros = self._split(batch, skip)
        except EngineError as error:
            problem = str(error)
        self._left = self._count = max(self.ranks.agree(problem, len(micros)))
        return micros + [NOTHING] * (self._count - len(micros))

    def _accumulating(self) -> AbstractContextManager[None]:
        return nullcontext()  # gradients must reach FSDP, which reduces them

    def _forward(
        self, micro: MicroBatch, temperature: float, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        self._left -= 1
        self._at("forward pass")
        log_p, h, sequence = self._root(micro.groups, temperature, entropy)
        if not torch.is_grad_enabled():
            for module in self._sharded:
                module.reshard()  # or the next step would leave whole weights of before in use
        if not micro.samples.size:
            return log_p[:0], None if h is None else h[:0], sequence[:0]
        return log_p, h, sequence

    def _backward(
        self,
        batch: Batch,
        micro: MicroBatch,
        objective: Objective,
        temperature: float,
        entropy: bool,
        sums: dict[str, float],
    ) -> tuple[float, np.ndarray]:
        if not self._reshard:
            last = self._left == 1
            self._root.set_requires_gradient_sync(last)
            self._root.set_reshard_after_backward(last)
        if micro.samples.size:
            return super()._backward(batch, micro, objective, temperature, entropy, sums)
        with self.policy.autocast(self._autocast):
            log_p, _, _ = self._forward(micro, temperature, entropy)
        self._at("loss")
        self._at("backward pass")
        log_p.sum().backward()
        return 0.0, np.zeros(0, np.float32)

    def _loss(self, objective: Objective, given: LossInput) -> tuple[torch.Tensor, dict[str, float]]:
        self._at("loss")
        try:
            loss, sums = objective(given)
        except Exception as error:  # the other ranks wait for this one's backward pass, and hear of it after
            self._trouble(describe(error))
            loss, sums = given.log_probs.sum() * 0.0, {}
        self._at("backward pass")
        return loss, sums

    def _trouble(self, problem: str) -> None:
        self._problems.append(problem)

    def _norm(self, optimizer: NamedAdamW) -> float:
        self.ranks.beats.at("gradient norm")
        mine = optimizer.grad_norm()
        bad = [] if math.isfinite(mine) else optimizer.not_finite()
        found = self.ranks.agree("; ".join(self._problems[:3]), (mine, bad))
        norm = math.sqrt(math.fsum(part * part for part, _ in found))
        if not math.isfinite(norm):
            names = {name for _, bad in found for name in bad}
            raise Agreed(gradient_trouble(norm, [n for n in self._parameters if n in names]))
        return norm

    def _check_log_probs(self, batch: Batch, values: np.ndarray) -> None:
        self.ranks.agree(log_prob_trouble(batch, values), None)

    def _group(self) -> Any:
        return self.ranks.group

    def _at(self, what: str) -> None:
        self.ranks.beats.at(f"{what} of micro-batch {self._count - self._left} of {self._count}")

    def whole(
        self, part: str, names: Sequence[str] | None = None, everywhere: bool = False
    ) -> Generator[tuple[str, torch.Tensor]]:
        """The whole tensors of ``part``, gathered one at a time, in name order: on rank 0, and on the others only if
        they are wanted ``everywhere``. All ranks must go through it; if rank 0 stops early, it must close it."""
        tensors = self.tensors(part)
        self.ranks.beats.at(f"gathering {part}")
        with closing(self.ranks.together(sorted(tensors if names is None else names))) as together:
            for name in together:
                tensor = tensors[name]
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if self.ranks.rank == 0 or everywhere:
                    yield name, whole

    def state(self) -> EngineState:
        """Whole copies on the CPU on rank 0, nothing on the others."""
        weights, optimizer = ({n: t.cpu() for n, t in self.whole(part)} for part in PARTS)
        return EngineState(weights, optimizer, self.scalars())

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.whole("weights")

    def digests(self, *parts: str) -> dict[str, str]:
        """On rank 0."""
        return {part: passing_digest(self.whole(part)) for part in parts or PARTS}

    @property
    def changed(self) -> bool | None:
        """Of any rank's shard."""
        found = self.ranks.all(self._changes.since_sent(self._shards("weights").values()))
        return True if True in found else None if None in found else False

    def sent(self) -> None:
        self._changes.sent(self._shards("weights").values())

    def load_state(self, state: EngineState) -> None:
        """Take this rank's shards of whole tensors."""
        check_scalars(state.scalars)
        parts = {"weights": state.weights, "optimizer": state.optimizer if self._optimizer else {}}
        for part, tensors in parts.items():
            check_fit(self.tensors(part), tensors, part)
        for part, tensors in parts.items():
            self.load_shards(part, {n: t[rows(len(t), self.ranks.rank, self.ranks.world)] for n, t in tensors.items()})
        self.loaded(state.scalars)

    def save(self, folder: Path, tokenizer: Any = None) -> None:
        """See ``TrainEngine.save``: ``model/`` without weights, and ``shards/``."""
        self.ranks.beats.at("saving")
        problem = ""
        try:
            saving.make_shards(folder)  # by every rank: the folder may be of another machine
            if self.ranks.rank == 0:
                saving.write_config(folder, self.model, tokenizer)
        except OSError as error:
            problem = describe(error)
            if isinstance(error, FileNotFoundError):
                problem += ": all ranks must write to one folder, on a file system that their machines share"
        self._agree_on_files(problem)
        saving.write_shards(folder, self._held().named(), self.ranks.group)

    def load(self, folder: Path, scalars: Mapping[str, Any], trust_remote_code: bool = False) -> None:
        self.ranks.beats.at("loading")
        problem = ""
        try:
            check_scalars(scalars)
            if saving.is_sharded(folder):
                saving.check_shards(folder, self._held().named())
            else:
                weights, moments = saving.read_whole(folder, self.policy.dtype, trust_remote_code)
                self.load_state(EngineState(weights, moments, scalars))
        except (EngineError, OSError) as error:
            problem = describe(error)
        self.ranks.agree(problem, None)
        if saving.is_sharded(folder):
            super().load(folder, scalars, trust_remote_code)

    def save_hf(self, folder: Path, tokenizer: Any = None) -> None:
        weights = {name: tensor.cpu() for name, tensor in self.whole("weights")}
        problem = ""
        if self.ranks.rank == 0:
            tied = {name: weights[first] for name, first in self.facts.tied.items()}
            try:
                saving.write_model(folder, self.model, tokenizer, weights | tied)
            except OSError as error:
                problem = describe(error)
        self._agree_on_files(problem)

    def send(self, version: int) -> Sent:
        """See ``TrainEngine.send``. A rank without receivers takes part, and returns None."""
        changed, found, problem = self.changed, None, None
        with closing(self.whole("weights", everywhere=True)) as named:
            if self._sending.is_open:
                try:
                    found = self._sending.send(version, self.layout(), self.facts.tied, named, changed)
                except Exception as error:
                    problem = error
            if self.ranks.rank or not problem:  # if rank 0 stops, all do; any other goes along to the end
                for _ in named:
                    pass
        arrived = all(self.ranks.all(problem is None))
        if problem:
            raise problem
        if arrived:
            self.sent()
        return found  # type: ignore[return-value]

    def close(self) -> None:
        super().close()
        self.ranks.close()

    def _shards(self, part: str) -> dict[str, torch.Tensor]:
        return {name: local(tensor) for name, tensor in self.tensors(part).items()}

    def _agree_on_files(self, problem: str) -> None:
        try:
            self.ranks.agree(problem, None)
        except Agreed as error:
            raise OSError(str(error)) from None
