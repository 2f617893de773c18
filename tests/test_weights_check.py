"""``crossrl weights check``: an engine that holds other weights is found, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from crossrl.assemble import tokenizer_of
from crossrl.cli.main import main
from crossrl.config import load_config
from crossrl.cross.weights import Holding, check_engines
from crossrl.placement import Engines, open_engines

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture
def engines(demo_files: Path) -> Callable[..., Engines]:
    def opened(*more: str) -> Engines:
        return open_engines(cfg := load_config(settings(demo_files, *more)).config, tokenizer_of(cfg))

    return opened


def settings(demo: Path, *more: str) -> list[str]:
    model = f"actor_rollout_ref.model.path={demo}/model"
    return [f"data.train_files={demo}/train.parquet", model, "trainer.num_threads=1", "trainer.device=cpu", *more]


def checked(engines: Engines) -> Holding:
    engines.carrier.bring()
    (found,) = check_engines(engines)
    return found


@pytest.mark.parametrize("more", [[], [f"{ROLLOUT}.own_weights=True"], [f"{ROLLOUT}.dtype=bfloat16"]])
def test_an_engine_that_got_the_weights_holds_them(engines: Callable[..., Engines], more: list[str]) -> None:
    found = checked(engines(*more))
    assert found.right and found.equal == 21 and not found.differences


def test_one_tensor_that_is_another_is_named_with_its_size_and_shows_in_the_log_probs(
    engines: Callable[..., Engines],
) -> None:
    opened: Any = engines(f"{ROLLOUT}.own_weights=True")
    load = opened.rollout.load

    def wrong(named: Any) -> None:
        load((n, t.roll(1, 0) if n.endswith("0.mlp.down_proj.weight") else t) for n, t in named)

    opened.rollout.load = wrong
    found = checked(opened)
    assert not found.right and found.equal == 20
    (difference,) = found.differences
    assert difference.name == "model.layers.0.mlp.down_proj.weight" and "values that differ" in difference.what
    assert difference.largest is not None and difference.largest > 0 and found.gap > found.limit


def test_a_head_that_stays_behind_is_named(engines: Callable[..., Engines]) -> None:
    opened: Any = engines(f"{ROLLOUT}.own_weights=True")
    head = opened.rollout.policy.model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach() + 0.01, requires_grad=False)
    opened.carrier.bring()
    (found,) = check_engines(opened)
    assert [d.name for d in found.differences] == ["lm_head.weight"] and not found.right


def test_the_command_says_so_and_fails(demo_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "check", "--json", *settings(demo_files)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["engines"][0]["right"] and told["engines"][0]["equal"] == 21
    assert main(["weights", "check", *settings(demo_files), f"{ROLLOUT}.own_weights=True"]) == 0
    assert "holds them" in capsys.readouterr().out


@pytest.mark.slow
def test_an_engine_in_another_process_is_checked_there(demo_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*settings(demo_files), "cluster.launcher=local", f"{ROLLOUT}.replicas=2"]
    assert main(["weights", "check", "--json", *arguments]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [e["engine"] for e in told["engines"]] == ["rollout-0", "rollout-1"]
    assert all(e["right"] and e["equal"] == 21 for e in told["engines"])
