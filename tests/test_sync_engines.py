"""The embedded engine at the receiving end: the weights that arrive are those that it generates with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models_for_tests import tiny
from sync_cases import pair, raw

from crossrl.engines.base import EngineError, Sampling
from crossrl.engines.rollout.hf import HfRolloutEngine
from crossrl.models.loading import distinct_parameters, tied_names
from crossrl.sync.check import check
from crossrl.sync.manifest import Manifest
from crossrl.sync.messages import SyncError

PROMPTS = [np.array([3, 5, 8, 13], dtype=np.int32)]


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in distinct_parameters(model)}


def generated(engine: HfRolloutEngine) -> tuple[list[int], list[float]]:
    out = engine.generate(PROMPTS, [7], Sampling(max_tokens=8, ignore_eos=True))
    return out.response_ids.values.tolist(), out.log_probs.values.tolist()


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_an_engine_that_received_weights_generates_what_their_owner_generates(name: str) -> None:
    trainer, engine = tiny(name, seed=1), HfRolloutEngine(tiny(name, seed=2), [0])
    old = generated(engine)
    weights, tied = weights_of(trainer), tied_names(trainer)
    with pair(engine) as one:
        first = dict(weights_of(tiny(name, seed=2)))
        one.send(weights, 4, Manifest.of(weights.items(), tied))
        assert generated(engine) == generated(HfRolloutEngine(trainer, [0])) != old
        assert engine.weight_version == 4 and not check(engine, weights, tied)
        one.send(first, 5, Manifest.of(first.items(), tied), changed=True)
        assert generated(engine) == old  # there and back, bit for bit


def test_an_engine_refuses_to_generate_after_a_failed_transfer_and_says_why() -> None:
    trainer, engine = tiny(seed=1), HfRolloutEngine(tiny(seed=2), [0])
    weights, tied = weights_of(trainer), tied_names(trainer)
    announced = Manifest.of(weights.items(), tied)
    missing = dict(weights)
    name, _ = missing.popitem()
    with pair(engine) as one:
        with pytest.raises(SyncError, match=f"{name} did not come"):
            one.send(missing, 1, announced)
        with pytest.raises(EngineError, match=f"may be a mixture .*{name} did not come"):
            generated(engine)
        assert engine.weight_version == 0
        one.send(weights, 1, announced)
        assert raw(dict(engine.held())) == raw(dict(HfRolloutEngine(trainer, [0]).held()))


def test_an_engine_in_bfloat16_holds_the_declared_cast_of_float32_weights() -> None:
    trainer = tiny(seed=1)
    engine = HfRolloutEngine(tiny(seed=2).bfloat16(), [0], receives=torch.float32)
    weights, tied = weights_of(trainer), tied_names(trainer)
    with pair(engine) as one:
        with pytest.raises(SyncError, match="was sent as float32 and is held as bfloat16; declared was float32"):
            one.send(weights, 1, Manifest.of(weights.items(), tied))
        one.send(weights, 2, Manifest.of(weights.items(), tied, casts=dict.fromkeys(weights, "bfloat16")))
        assert engine.weight_version == 2
        assert not check(engine, engine.as_held(weights), tied)
        found = check(engine, weights, tied)
        assert len(found) == len(weights) + len(tied) and "is held as bfloat16, want float32" in str(found[0])


def test_an_output_head_that_is_no_longer_tied_is_found_after_an_update() -> None:
    trainer, model = tiny(seed=1), tiny(seed=2)
    weights, tied = weights_of(trainer), tied_names(trainer)
    assert tied
    engine = HfRolloutEngine(model, [0])
    with pair(engine) as one:
        one.send(weights, 1, Manifest.of(weights.items(), tied))
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        changed = {n: t + 1 for n, t in weights.items()}
        with pytest.raises(SyncError, match=r"lm_head.weight is no longer tied to model\.embed_tokens\.weight"):
            one.send(changed, 2, Manifest.of(changed.items(), tied))
        assert engine.weight_version == 1
