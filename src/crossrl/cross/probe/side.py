"""One side: its model, its settings, its forward path, on a recorded sample and with the weights of that step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from crossrl import settings
from crossrl.assemble import assemble, tokenizer_of
from crossrl.batch import Batch, Ragged
from crossrl.checkpoint import CheckpointStore
from crossrl.config import load_config
from crossrl.config.root import RunConfig
from crossrl.cross.faults import plant
from crossrl.cross.probe.dump import Dump, ProbeError, Way, write_dump
from crossrl.cross.probe.hooks import Call, Recorder
from crossrl.cross.probe.weights import dtype_name
from crossrl.engines.base import EngineState, Sampling, TrainEngine
from crossrl.engines.rollout import hf
from crossrl.engines.rollout.hf import HfRolloutEngine
from crossrl.engines.train.fsdp import FsdpTrainEngine
from crossrl.engines.train.saving import model_of
from crossrl.models.loading import distinct_parameters
from crossrl.models.policy import Policy
from crossrl.placement import autocast_of, open_engines
from crossrl.stages.base import At, Stage
from crossrl.stages.sync import Sync
from crossrl.tape import RunTape, SampleView, open_run
from crossrl.tape.versions import versions


@dataclass(frozen=True, slots=True)
class Request:
    """``run``: a recorded run, whose tokens and weights are used. ``step``: with the weights before this step's update.
    ``out``: where the dump goes. ``sample``: see ``choose_sample``. ``config``: the side's
    configuration; None: the run's. ``tokens``: only so many of the response's first tokens; None: all."""

    run: Path
    step: int
    out: Path
    sample: str | None = None
    config: Path | None = None
    way: Way = "train"
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """The parts of a run through which tokens pass."""

    trainer: FsdpTrainEngine
    engine: HfRolloutEngine
    sync: Stage


@dataclass(frozen=True, slots=True)
class Heard:
    """``kept``: by digest (``Recorder.finish``). ``log_probs``: float32, nat, one per response token."""

    policy: Policy
    recorder: Recorder
    calls: tuple[Call, ...]
    kept: dict[str, np.ndarray]
    log_probs: np.ndarray


def make_dump(request: Request) -> Dump:
    """Run the side and write its dump. Raises ``ProbeError``, and what tape, configuration and engines raise.

    Memory: besides what the forward pass itself needs, 256 bytes per token and tensor (``sketch.py``), of which each
    module has about two. On the packed paths, logits exist for a chunk of tokens at a time.
    """
    file = request.config or request.run / "config.yaml"
    if not file.is_file():
        raise ProbeError(f"{file} is not there: want a run's folder (trainer.default_local_dir), or --config SIDE.yaml")
    cfg = load_config([], str(file)).config
    tape = tape_of(request.run)
    view = choose_sample(tape, request.step, request.sample)
    prompt, response = view.columns["prompt_ids"], view.columns["response_ids"][: request.tokens]
    if not len(response):
        raise ProbeError(f"sample {view.sample_id} has no response tokens; name another one with --sample")
    temperature = cfg.actor_rollout_ref.rollout.temperature or 1.0
    with _open_side(cfg) as side:
        # As a run does: once with the model as it begins, so that an engine that lags behind does so here too.
        side.sync(Batch(()), At(0))
        source = put_weights(side.trainer, tape, request.run, request.step)
        if request.step > 1:
            side.sync(Batch(()), At(request.step - 1))
        heard = hear(side, request.way, prompt, response, temperature)
        autocast = autocast_of(cfg) if request.way == "train" else None
        dump = Dump(
            run=str(request.run), step=request.step, sample_id=view.sample_id, side=str(file), way=request.way,
            packed=heard.policy.packed, dtype=dtype_name(heard.policy.dtype),
            autocast=dtype_name(autocast) if autocast else None,
            device=str(heard.policy.device), temperature=temperature, planted=cfg.cross.plant,
            versions=versions(str(heard.policy.device)),
            weights_from=source, prompt_ids=tuple(prompt.tolist()), response_ids=tuple(response.tolist()),
            parameters=heard.recorder.parameters, buffers=heard.recorder.buffers, calls=heard.calls,
            recorded=_recorded(view, len(response)),
        )  # fmt: skip
    write_dump(request.out, dump, heard.kept, heard.log_probs)
    return dump


def hear(side: Side, way: Way, prompt: np.ndarray, response: np.ndarray, temperature: float) -> Heard:
    """One sample (int token ids) through the side's own path, all modules listened to."""
    policy = (side.trainer if way == "train" else side.engine).policy
    recorder = Recorder(policy, len(prompt), len(response), stepwise=way == "rollout")
    with recorder.listen():
        log_probs = (_train if way == "train" else _decode)(side, prompt, response, temperature)
    calls, kept = recorder.finish()
    return Heard(policy, recorder, tuple(calls), kept, log_probs)


def tape_of(run: Path) -> RunTape:
    """The run's tape, also where ``tape.dir`` put it elsewhere. The run may be of another version: its configuration
    is not checked."""
    body = yaml.safe_load((run / "config.yaml").read_text("utf-8")) if (run / "config.yaml").is_file() else {}
    return open_run((body.get("tape") or {}).get("dir") or run)


def choose_sample(tape: RunTape, step: int, name: str | None) -> SampleView:
    """The sample called ``name`` (its id or the end of it); None: the one in which sampler and trainer differ most, of
    equal ones the longest."""
    views = [v for v in tape.samples(step) if {"prompt_ids", "response_ids"} <= set(v.columns)]
    if not views:
        raise ProbeError(f"{tape.layout.root} has no rollout of step {step}; it has steps {tape.steps()}")
    if name is None:
        return max(views, key=lambda v: (max((abs(a - b) for _, _, a, b in v.worst(1)), default=0.0), len(v.tokens())))
    found = [v for v in views if v.sample_id.endswith(name)]
    if len(found) != 1:
        known = ", ".join(v.sample_id for v in (found or views)[:4])
        raise ProbeError(f"--sample {name}: {len(found)} samples of step {step} end so; there are {known}, ...")
    return found[0]


def put_weights(trainer: TrainEngine, tape: RunTape, run: Path, step: int) -> str:
    """The weights that the run had before ``step`` into ``trainer``, in its dtype; returns where they came from.

    For step 1 those are the side's own initial model. Else they are on the tape (tape.state) or in a checkpoint.
    """
    if step == 1:
        return "the side's model, as it is before training"
    weights, source = _recorded_weights(tape, run, step - 1)
    targets = dict(trainer.named_weights())
    wrong = sorted(set(targets) ^ set(weights)) or [n for n, t in targets.items() if t.shape != weights[n].shape]
    if wrong:
        raise ProbeError(
            f"{source}: {len(wrong)} tensors do not fit the side's model (first: {wrong[0]}). Sides can be compared "
            "only on the same weights: check actor_rollout_ref.model.path"
        )
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(weights[name])
    trainer.weight_version = step - 1
    return source


def _recorded_weights(tape: RunTape, run: Path, after: int) -> tuple[dict[str, torch.Tensor], str]:
    if ("update", At(after)) in tape.calls(after):
        record = tape.record(after, "update")
        if record.has_state:
            return dict(EngineState.from_named(record.state(), {}).weights), str(record.path)
    store = CheckpointStore(run)
    if after in store.steps():
        path = store.load(store.path(after)).path
        return {n: p.detach() for n, p in distinct_parameters(model_of(path))}, str(path / "model")
    raise ProbeError(
        f"the weights before step {after + 1} are neither on the tape nor in a checkpoint of {run}: record with "
        f"tape.state=True, or save with trainer.save_freq, or probe step 1"
    )


def _train(side: Side, prompt: np.ndarray, response: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probs (float32, nat) of the response, as old_log_prob computes them."""
    columns = {n: Ragged.from_rows([ids], np.int32) for n, ids in (("prompt_ids", prompt), ("response_ids", response))}
    return side.trainer.log_probs(Batch(("probed",), columns), temperature, False)[0].values


def _decode(side: Side, prompt: np.ndarray, response: np.ndarray, temperature: float) -> np.ndarray:
    """The same by the engine's own generation, in which each token is the recorded one, whatever is drawn.

    Without truncation: what a top-k or top-p does to log-probs comes after all modules.
    """
    forced = _Forced(response)
    with _instead(hf, "choose", forced):
        out = side.engine.generate([prompt], [0], Sampling(temperature, max_tokens=len(response), ignore_eos=True))
    log_probs = np.full(len(response), np.nan, dtype=np.float32)
    log_probs[: len(out.log_probs.values)] = out.log_probs.values
    return log_probs


class _Forced:
    """Stands in for the choice of tokens: the recorded ones, with their log-probs."""

    def __init__(self, response: np.ndarray) -> None:
        self.response, self.done = response, 0

    def __call__(
        self, logits: torch.Tensor, draw: torch.Tensor, sampling: Sampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        token = torch.full_like(logits[:, 0], int(self.response[self.done]), dtype=torch.int64)
        self.done += 1
        log_p = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
        return token, log_p.gather(1, token[:, None])[:, 0]


@contextlib.contextmanager
def _open_side(cfg: RunConfig) -> Iterator[Side]:
    """Models and engines only: a side's data and rewards need not be on this machine. A planted fault may change any
    part, so then all are there."""
    if settings.launcher(cfg) != "none":
        raise ProbeError(
            "the probe looks inside the engines, which are in other processes with this configuration: use one with "
            "actor_rollout_ref.rollout.name=hf, trainer.nnodes=1, trainer.n_gpus_per_node=1 and cluster.launcher=auto"
        )
    if cfg.cross.plant:
        parts = assemble(cfg, lambda stage, done, total: None)
        try:
            plant(cfg.cross.plant, parts, cfg)
            yield Side(parts.local_trainer, parts.local_engine, parts.sync)
        finally:
            parts.close()
        return
    engines = open_engines(cfg, tokenizer_of(cfg))
    trainer, engine = engines.trainer, engines.rollout
    assert isinstance(trainer, FsdpTrainEngine) and isinstance(engine, HfRolloutEngine)
    yield Side(trainer, engine, Sync(engines.carrier))


@contextlib.contextmanager
def _instead(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _recorded(view: SampleView, count: int) -> dict[str, list[float | None]]:
    columns = {"rollout": view.sampler_log_probs, "train": view.trainer_log_probs}
    return {
        way: [None if np.isnan(x) else float(x) for x in values[:count]]
        for way, values in columns.items()
        if values is not None
    }
