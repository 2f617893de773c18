"""Training on several ranks as the driver sees it: one ``TrainEngine`` over worker processes that hold a rank each."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from crossrl.batch import Batch, Ragged
from crossrl.cluster.worker import Launcher, Worker
from crossrl.engines.base import EngineError, EngineState, Objective, StepResult, TrainFacts
from crossrl.engines.train.beats import listen
from crossrl.engines.train.calls import Calls
from crossrl.engines.train.dealing import deal
from crossrl.engines.train.fsdp import LOSS_FIELDS, PARTS
from crossrl.engines.train.micro_batches import flat_index
from crossrl.engines.train.optimizer import check_fit
from crossrl.engines.train.saving import MODEL, SHARDS, check_shards, check_written
from crossrl.engines.train.sending import Layout, check_machines, merged
from crossrl.engines.train.sharding import rows
from crossrl.engines.train.spec import TrainSpec
from crossrl.engines.train.trouble import check_scalars
from crossrl.engines.train.wire import pack, unpack

if TYPE_CHECKING:
    from crossrl.sync.sender import Sent

AT_ONCE_BYTES = 64 << 20  # of tensors in one message


class TrainGroup:
    """``TrainEngine`` over ``workers``, which host a ``TrainRank`` each, in the order of their ranks.

    ``store``: where the ranks meet, held open. Every call waits for all ranks, at most ``limit_s``. If a rank dies,
    fails or is late, all of them are ended and the error names it: the run goes on from its last checkpoint. An error
    that all ranks agree on (a loss that is not finite) leaves the group as it was. ``start_s``: the limit for making
    the ranks' objects, which load the model; None: ``limit_s``.
    """

    name = "fsdp"

    def __init__(
        self,
        workers: Sequence[Worker],
        limit_s: float,
        store: dist.TCPStore | None = None,
        start_s: float | None = None,
    ) -> None:
        self._calls = Calls(workers, limit_s, store)
        self.weight_version = 0
        self.world = len(workers)
        try:
            self._calls.born(limit_s if start_s is None else start_s)
            self.facts: TrainFacts
            self.facts, self._layout = self._calls.all("facts", "say what they hold")[0]
        except BaseException:
            self.close()
            raise

    @classmethod
    def start(
        cls,
        launcher: Launcher,
        spec: TrainSpec,
        world: int,
        *,
        host: str = "127.0.0.1",
        name: str = "train",
        env: Mapping[str, str] | None = None,
        gpus: float = 0.0,
        start_s: float | None = None,
    ) -> TrainGroup:
        """Launch ``world`` ranks of ``spec`` as workers ``{name}-{rank}`` and wait until they hold the model, at most
        ``start_s`` (None: ``spec.limit_s``).

        ``host``: under which they reach this process. ``env``, ``gpus``: of each, see ``Launcher``.
        """
        begin_s = spec.limit_s if start_s is None else start_s
        store, address = listen(host) if world > 1 else (None, "")
        workers: list[Worker] = []
        factory = "crossrl.engines.train.rank:make_rank"
        for rank in range(world):
            # A rank's own limit is only a backstop, and must not end a start that may take longer.
            args = (replace(spec, limit_s=max(spec.limit_s, begin_s)), rank, world, address)
            workers.append(launcher.start(f"{name}-{rank}", factory, *args, env=env, gpus=gpus))
        return cls(workers, spec.limit_s, store, begin_s)

    @property
    def notice(self) -> str:
        return self.facts.notice

    @property
    def changed(self) -> bool | None:
        return self._calls.all("changed", "compare weights")[0]

    def sent(self) -> None:
        self._calls.all("sent", "note what was sent")

    def log_probs(self, batch: Batch, temperature: float, entropy: bool) -> tuple[Ragged, Ragged | None]:
        """See ``TrainEngine.log_probs``."""
        batch = batch.only(["prompt_ids", "response_ids"])
        dealt = self._deal(batch, np.ones(len(batch), dtype=bool))
        calls = [(batch.take(mine), temperature, entropy) for mine in dealt]
        found = self._calls.each("log_probs", calls, "compute log-probs")
        values = _joined(batch, dealt, [v for v, _ in found])
        return values, _joined(batch, dealt, [h for _, h in found]) if entropy else None

    def step(
        self,
        batch: Batch,
        objective: Objective,
        *,
        lr: float,
        temperature: float,
        entropy: bool,
        skip: np.ndarray | None = None,
    ) -> StepResult:
        """See ``TrainEngine.step``."""
        if not self._layout["optimizer"]:
            raise EngineError("these ranks were made without an optimizer (a reference model); they cannot step")
        if skip is not None and skip.shape != (len(batch),):
            raise EngineError(f"skip has shape {skip.shape}, want one entry for each of the {len(batch)} samples")
        _need_picklable(objective)
        batch = batch.only(["prompt_ids", "response_ids", *(n for n in LOSS_FIELDS if n in batch)])
        dealt = self._deal(batch, np.ones(len(batch), dtype=bool) if skip is None else ~skip)
        calls = [
            (batch.take(mine), objective, lr, temperature, entropy, None if skip is None else skip[mine])
            for mine in dealt
        ]
        found: list[StepResult] = self._calls.each("step", calls, "do an optimizer step")
        self.weight_version += 1
        sums: dict[str, float] = {}
        for result in found:
            for key, value in result.sums.items():
                sums[key] = sums.get(key, 0.0) + value
        return StepResult(
            sum(r.loss for r in found),
            found[0].grad_norm,
            lr,
            sums,
            _joined(batch, dealt, [r.log_probs for r in found]),
            sum(r.tokens for r in found),
            sum(r.skipped_samples for r in found),
        )

    def state(self) -> EngineState:
        """See ``TrainEngine.state``: copies in this process, gathered a few at a time."""
        weights, optimizer = (dict(self._whole(part)) for part in PARTS)
        return EngineState(weights, optimizer, self.scalars())

    def scalars(self) -> dict[str, Any]:
        return self._calls.all("scalars", "tell their state")[0] | {"weight_version": self.weight_version}

    def digests(self, *parts: str) -> dict[str, str]:
        """See ``TrainEngine.digests``: made where the tensors are."""
        return self._calls.all("digests", "digest their state", parts or PARTS)[0]

    def load_state(self, state: EngineState) -> None:
        """See ``TrainEngine.load_state``."""
        check_scalars(state.scalars)
        parts = {"weights": state.weights}
        if self._layout["optimizer"]:  # a frozen engine may take the state of one that trains
            parts["optimizer"] = state.optimizer
        for part, tensors in parts.items():
            check_fit(_empty(self._layout[part]), tensors, part)
        for part, tensors in parts.items():
            for names in _portions(self._layout[part]):
                calls = [
                    (part, pack({n: tensors[n][rows(len(tensors[n]), rank, self.world)] for n in names}))
                    for rank in range(self.world)
                ]
                self._calls.each("load_shards", calls, f"load {part}")
        self._loaded(state.scalars)

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Each parameter once, whole: copies that are brought here a few at a time."""
        return self._whole("weights")

    def save(self, folder: Path, tokenizer: Any = None) -> None:
        """See ``TrainEngine.save``. ``folder`` must be one folder for this process and for every rank, or ``OSError``
        says so."""
        files = _union(self._calls.all("save", f"write their part of {folder}", str(folder)))
        check_written(folder, files, f"{SHARDS}/*.safetensors" if self.world > 1 else f"{MODEL}/*.safetensors")
        if self.world > 1:
            try:
                check_shards(folder, EngineState(*(_empty(self._layout[part]) for part in PARTS)).named())
            except EngineError as error:
                raise OSError(f"{error}. All ranks must write to the same file system as this process") from error
        if tokenizer is not None:
            tokenizer.save_pretrained(folder / MODEL)

    def load(self, folder: Path, scalars: Mapping[str, Any], trust_remote_code: bool = False) -> None:
        """See ``TrainEngine.load``. Whether the model's code may run was said in the ``TrainSpec``."""
        self._calls.all("load", f"load {folder}", str(folder), dict(scalars))
        self.weight_version = scalars["weight_version"]

    def save_hf(self, folder: Path, tokenizer: Any = None) -> None:
        """See ``TrainEngine.save_hf``; rank 0 holds the whole weights meanwhile. ``folder``: as for ``save``."""
        check_written(folder, self._calls.all("save_hf", f"export to {folder}", str(folder))[0], "*.safetensors")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def open_sender(self, receivers: Mapping[str, str], cast: str | None = None, **options: Any) -> dict[str, str]:
        """See ``TrainEngine.open_sender``: on each machine its first rank sends."""
        machines: list[str] = self._calls.all("machine", "say where they are")
        check_machines(receivers, machines)
        shares = [
            {name: at for name, at in receivers.items() if at == machine and machine not in machines[:rank]}
            for rank, machine in enumerate(machines)
        ]
        calls = [(share, cast, options) for share in shares]
        found = self._calls.each("open_sender", calls, "open a sender of weights")
        return {name: address for part in found for name, address in part.items()}

    def send(self, version: int) -> Sent:
        """See ``TrainEngine.send``. ``bytes`` and ``buckets`` are those of all senders."""
        return merged([s for s in self._calls.all("send", f"send the weights of version {version}", version) if s])

    def close_sender(self) -> None:
        self._calls.all("close_sender", "close the sender")

    def close(self) -> None:
        """Ends the ranks' processes."""
        self._calls.close()

    def _deal(self, batch: Batch, keep: np.ndarray) -> list[np.ndarray]:
        return deal(batch.ragged("prompt_ids"), batch.ragged("response_ids"), keep, self.world)

    def _whole(self, part: str) -> Iterator[tuple[str, torch.Tensor]]:
        for names in _portions(self._layout[part]):
            yield from unpack(self._calls.all("whole", f"gather {part}", part, names)[0]).items()

    def _loaded(self, scalars: Mapping[str, Any]) -> None:
        self._calls.all("loaded", "take the state into use", dict(scalars))
        self.weight_version = scalars["weight_version"]


def _union(files: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """What any rank sees: on a network file system it may see late what others have written."""
    return {name: size for part in files for name, size in part.items()}


def _joined(batch: Batch, dealt: list[np.ndarray], parts: list[Ragged]) -> Ragged:
    """``parts`` of the ranks, in the order of ``batch``."""
    responses = batch.ragged("response_ids")
    values = np.full(len(responses.values), np.nan, dtype=np.float32)
    for mine, part in zip(dealt, parts, strict=True):
        values[flat_index(responses, mine)] = part.values
    return Ragged(values, responses.lengths)


def _need_picklable(objective: Objective) -> None:
    try:
        pickle.dumps(objective)
    except Exception as error:
        raise EngineError(
            f"the objective {objective!r} cannot be sent to the ranks ({error}): want a function of a module, or an "
            "object of a class that can be pickled"
        ) from error


def _empty(layout: Layout) -> dict[str, torch.Tensor]:
    """Tensors without content."""
    return {n: torch.empty(s, dtype=getattr(torch, dtype), device="meta") for n, (s, dtype) in layout.items()}


def _portions(layout: Layout) -> Iterator[list[str]]:
    """All names, as many at a time as ``AT_ONCE_BYTES`` hold, and one at least."""
    names: list[str] = []
    size = 0
    for name, tensor in _empty(layout).items():
        if names and size + tensor.nbytes > AT_ONCE_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    if names:
        yield names
