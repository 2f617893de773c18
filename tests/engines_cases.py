"""Rollout engines for tests of what all of them promise: each behind a pipe, ``hf`` in a thread, ``vllm`` in a process.

The process is a Python that has vLLM: ``$CROSSRL_TEST_VLLM`` (the path of one), else the one that runs the tests. vLLM
takes about fifteen seconds to start, so there is one engine for all tests of a process, with fresh weights for each.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from crossrl.batch import Batch, Ragged
from crossrl.engines.base import EngineError
from crossrl.engines.rollout.transaction import manifest_of
from crossrl.engines.rollout.vllm_environment import vllm_environment
from crossrl.engines.train.fsdp import FsdpTrainEngine
from crossrl.models.digest import combined, tensor_digests
from crossrl.models.loading import distinct_parameters, tied_names
from crossrl.sync.manifest import Manifest
from crossrl.sync.messages import SyncError
from crossrl.sync.sender import Sent, WeightSender

EOS, VOCABULARY, POSITIONS = 2, 200, 256
BASE = "engine"
LIMIT_S = 20.0
START_S = 400  # a fifth of that on an idle machine


@functools.cache
def initial() -> PreTrainedModel:
    """The model that all engines start with: tied, with a head dimension that vLLM has on a CPU."""
    return llama(0)


def llama(seed: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=POSITIONS, tie_word_embeddings=True,
        eos_token_id=EOS, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return randomised(LlamaForCausalLM, config, seed)


def randomised(kind: Any, config: Any, seed: int) -> PreTrainedModel:
    """Weights large enough that the distributions are far from uniform."""
    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in distinct_parameters(model)}


def all_names(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A tied weight under each of its names."""
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def trainer_log_probs(model: PreTrainedModel, prompts: list[np.ndarray], responses: Ragged, temperature: float) -> Any:
    """Flat, aligned with ``responses``."""
    columns = {"prompt_ids": Ragged.from_rows(prompts, np.int32), "response_ids": responses}
    batch = Batch(tuple(f"s{i}" for i in range(len(prompts))), columns)
    return FsdpTrainEngine(model).log_probs(batch, temperature, entropy=False)[0].values


# The serving end


def serve(connection: Connection, engine: Any) -> None:
    """Answer calls one after another until the pipe is closed. "run": a function of this module, with the engine."""
    while True:
        try:
            method, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            if method == "run":
                value = globals()[args[0]](engine, *args[1:])
            else:
                value = getattr(engine, method)(*args, **kwargs)
            connection.send(("value", value))
        except Exception as error:
            connection.send((type(error).__name__, str(error)))


def held(engine: Any) -> dict[str, np.ndarray]:
    """Bits of what it computes with."""
    return {name: bits(tensor) for name, tensor in engine.held()}


def bits(tensor: torch.Tensor) -> np.ndarray:
    kinds = {4: torch.int32, 2: torch.int16}
    return tensor.detach().contiguous().view(kinds[tensor.element_size()]).numpy().copy()


def updated_in_place(engine: Any, named: Mapping[str, np.ndarray], version: int) -> str:
    """An update without a sender; the digest of what is held."""
    tensors = {name: torch.from_numpy(values) for name, values in named.items()}
    engine.begin_update(version, manifest_of(tensors.items()))
    engine.load(tensors.items())
    engine.check_update()
    engine.finish_update()
    return combined(tensor_digests(engine.held()))


def version(engine: Any) -> int:
    return int(engine.weight_version)


def seen_progress(engine: Any, *args: Any) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    engine.generate(*args, lambda done, total: seen.append((done, total)))
    return seen


def abort_soon(engine: Any, after_s: float, *args: Any) -> str:
    """Generate, and abort from another thread; the error's text."""
    timer = threading.Timer(after_s, engine.abort)
    timer.start()
    try:
        engine.generate(*args)
    except EngineError as error:
        return str(error)
    finally:
        timer.join()
    return "it was not aborted"


def leave_head_packed(engine: Any, planted: bool) -> None:
    """The fault of vLLM's own ways to update: a tied output head is not packed again."""
    target = engine._target()
    if planted:
        target._pack_tied_heads = lambda: None
    else:
        del target._pack_tied_heads


def keep_layer(engine: Any, name: str) -> None:
    """At the next update the module ``name`` goes on with what it multiplied with before."""
    target = engine._target()
    module, finalize = target._model.get_submodule(name), target._finalize
    old = module.cpu_linear

    def planted() -> None:
        finalize()
        module.cpu_linear = old
        del target._finalize

    target._finalize = planted


def packed_names(engine: Any) -> set[str]:
    return set(engine._target()._packed)


def refuse_to_clear(engine: Any, planted: bool) -> None:
    """vLLM's answer while requests are running."""
    if planted:
        engine._llm.reset_prefix_cache = lambda *args, **kwargs: False
    else:
        del engine._llm.reset_prefix_cache


kept: list[Any] = []


def in_another(engine: Any, options: Mapping[str, Any], named: Mapping[str, np.ndarray], asked: Any, how: Any) -> Any:
    """A second engine in this process (which takes seconds, not a quarter of a minute): brought ``named``, what it then
    holds, its digest, what it generates, and its scores of that."""
    from crossrl.engines.rollout.vllm import VllmEngine, VllmOptions

    other = VllmEngine(VllmOptions(**options))
    kept.append(other)  # with the last reference vLLM takes the process groups away, those of the first engine too
    digest = updated_in_place(other, named, 1)
    out = other.generate(asked, range(len(asked)), how)
    scores = other.score(asked, out.response_ids.rows(), how.temperature)
    return held(other), digest, out, scores, other.cast


def serve_vllm(pipe: int, options: Mapping[str, Any]) -> None:
    """What the process does."""
    with Connection(pipe) as connection:
        try:
            from crossrl.engines.rollout.vllm import VllmEngine, VllmOptions

            engine = VllmEngine(VllmOptions(**options))
        except EngineError as error:
            connection.send(("EngineError", str(error)))
            return
        connection.send(("value", None))
        serve(connection, engine)
        engine.close()


# The asking end


class Case:
    """An engine, asked through a pipe."""

    def __init__(self, kind: str, connection: Connection) -> None:
        self.kind, self._connection = kind, connection
        self._sender: WeightSender | None = None
        self._base: Any = None
        self.version = 0

    def start(self, method: str, *args: Any, **kwargs: Any) -> None:
        self._connection.send((method, args, kwargs))

    def result(self, limit_s: float = 120) -> Any:
        assert self._connection.poll(limit_s), f"no answer within {limit_s} s"
        kind, value = self._connection.recv()
        if kind == "value":
            return value
        raise {"EngineError": EngineError, "SyncError": SyncError}.get(kind, RuntimeError)(f"{value}")

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.start(method, *args, **kwargs)
        return self.result()

    def run(self, function: str, *args: Any) -> Any:
        return self("run", function, *args)

    def send(
        self,
        named: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        announced: Manifest | None = None,
        tied: Mapping[str, str] | None = None,
        casts: Mapping[str, str] | None = None,
        **how: Any,
    ) -> Sent:
        """One transfer as the next version; the engine has left it when this returns or raises."""
        pairs = list(named.items()) if isinstance(named, Mapping) else list(named)
        tied = tied_names(initial()) if tied is None else tied
        if self._sender is None:
            self._sender = WeightSender(self("receiver_names", BASE), limit_s=LIMIT_S)
        self.start("receive", self._sender.address, BASE, LIMIT_S)
        try:
            sent = self._sender.send(
                self.version + 1, announced or Manifest.of(pairs, tied, casts=casts), pairs, **how
            )  # fmt: skip
        except SyncError:
            with pytest.raises(SyncError):
                self.result()
            raise
        self.version += 1
        for received in self.result():  # one for each worker process
            assert (received.version, received.digest) == (self.version, sent.digest)
        return sent

    def fresh(self) -> Case:
        """Awake, with the weights of ``initial``, whatever the test before did."""
        self("wake")
        self.send(weights_of(initial()))
        return self

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._connection.close()


@functools.cache
def case(kind: str) -> Case:
    """The engine of this kind, started when it is first asked for. Skips the test where there is no vLLM."""
    made = hf_case() if kind == "hf" else vllm_case({"model": saved_model()})
    atexit.register(made.close)
    return made


def hf_case() -> Case:
    from crossrl.engines.rollout.hf import HfRolloutEngine

    here, there = Pipe()
    engine = HfRolloutEngine(llama(0), [EOS])
    threading.Thread(target=serve, args=(there, engine), daemon=True).start()
    return Case("hf", here)


@functools.cache
def saved_model() -> str:
    folder = tempfile.TemporaryDirectory(prefix="crossrl-test-")
    atexit.register(folder.cleanup)
    initial().save_pretrained(folder.name)
    return folder.name


def vllm_python() -> str:
    """A Python that has vLLM; skips the test if there is none."""
    python = os.environ.get("CROSSRL_TEST_VLLM", "")
    if python or importlib.util.find_spec("vllm") is not None:
        return python or sys.executable
    pytest.skip(
        "vLLM is not installed, and $CROSSRL_TEST_VLLM does not name a Python that has it (docs/how-to/vllm.md)"
    )


def vllm_case(options: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Case:
    """An engine on vLLM in a process of its own, which ends with the pipe. Raises its ``EngineError``."""
    python = vllm_python()
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]
    env = {**os.environ, **vllm_environment(1, {}, "cpu"), "PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
    folder = tempfile.TemporaryDirectory(prefix="crossrl-test-")
    atexit.register(folder.cleanup)
    # vLLM takes seconds to look at an architecture for the first time, and notes what it finds there.
    env.setdefault("VLLM_CACHE_ROOT", f"{tempfile.gettempdir()}/crossrl-test-vllm-{os.getuid()}")
    here, there = Pipe()
    chosen = {"eos_token_ids": (EOS,), "max_num_seqs": 64, **options}
    program = f"import engines_cases; engines_cases.serve_vllm({there.fileno()}, {chosen!r})"
    log = Path(folder.name) / "log.txt"
    with log.open("w") as out:
        child = subprocess.Popen(
            [python, "-c", program], env=env, pass_fds=[there.fileno()], stdout=out, stderr=subprocess.STDOUT
        )
    there.close()
    atexit.register(ended, child)
    made = Case("vllm", here)
    try:
        made.result(START_S)
    except EOFError:
        raise RuntimeError(f"vLLM's process ended: {log.read_text()[-3000:]}") from None
    return made


def ended(child: subprocess.Popen[bytes]) -> None:
    """Its pipe is closed, so that it ends by itself; if not, it is killed."""
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(20)
