"""Run by an interpreter that has verl (test_hosts_verl_real.py): the conversion of real ``DataProto`` objects.

Prints one line of JSON: case name to what was found.
"""

from __future__ import annotations

import json
import types
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopWorker, _InternalAgentLoopOutput
from verl.protocol import DataProto

from crossrl.hosts.verl.errors import HostError
from crossrl.hosts.verl.session import Session
from crossrl.hosts.verl.stages import Generate
from crossrl.hosts.verl.start import check_contract
from crossrl.hosts.verl.v0 import V0
from crossrl.tape.layout import RunLayout
from crossrl.tape.tape import Tape

WIDE, LONG, PAD, END = 6, 5, 0, 1
PROMPTS, ANSWERS = [[5, 6, 7], [8, 9]], [[2, 3, END], [4], [2, 2, 3, 4, 3], [9, END]]


class Tokenizer:
    pad_token_id, eos_token_id = PAD, END

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


def config() -> Any:
    return OmegaConf.create({
        "trainer": {"device": "cpu"}, "algorithm": {},
        "actor_rollout_ref": {
            "rollout": {"n": 2, "prompt_length": WIDE, "response_length": LONG, "temperature": 0.7, "top_k": -1,
                        "top_p": 1.0, "name": "vllm", "agent": {"default_agent_loop": "other"}},
            "actor": {"strategy": "fsdp2"}},
    })  # fmt: skip


def output_of(prompt: list[int], answer: list[int], score: float) -> _InternalAgentLoopOutput:
    """One sample as verl's agent loop worker hands it to ``_postprocess``."""
    ids = torch.tensor([[PAD] * (WIDE - len(prompt)) + prompt + answer + [PAD] * (LONG - len(answer))])
    mask = torch.tensor([[0] * (WIDE - len(prompt)) + [1] * (len(prompt) + len(answer)) + [0] * (LONG - len(answer))])
    log_probs = [-0.1 * (i + 1) for i in range(len(answer))] + [0.0] * (LONG - len(answer))
    return _InternalAgentLoopOutput(
        prompt_ids=ids[:, :WIDE], response_ids=ids[:, WIDE:], input_ids=ids, attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0), response_mask=mask[:, WIDE:],
        response_logprobs=torch.tensor([log_probs]), reward_score=score, num_turns=2, metrics=AgentLoopMetrics(),
        multi_modal_inputs={},
        extra_fields={"reward_extra_info": {"acc": score}, "turn_scores": [], "max_global_steps": 3},
    )  # fmt: skip


def prompts() -> DataProto:
    rows = [i for i in range(len(PROMPTS)) for _ in range(2)]
    message = np.empty(4, dtype=object)
    message[:] = [[{"role": "user", "content": str(i)}] for i in rows]
    other = {"raw_prompt": message, "uid": np.array([f"u{i}" for i in rows], dtype=object),
             "index": np.array(rows, dtype=object), "data_source": np.array(["s"] * 4, dtype=object)}  # fmt: skip
    return DataProto.from_dict(tensors={"dummy": torch.zeros(4, 1)}, non_tensors=other)


def generated() -> DataProto:
    worker = types.SimpleNamespace(reward_loop_worker_handles=[1])
    outputs = [output_of(PROMPTS[i // 2], answer, 0.25 * i) for i, answer in enumerate(ANSWERS)]
    found = AgentLoopWorker._postprocess(worker, outputs)
    found.meta_info.pop("metrics")
    return found


class Run:
    """A trainer and a session with a tape in ``root``; ``mode``: of the rollout."""

    def __init__(self, root: Any, mode: str) -> None:
        self.count, self.native = 0, generated()
        loops = types.SimpleNamespace(generate_sequences=self.generate)
        self.trainer = types.SimpleNamespace(
            config=config(), tokenizer=Tokenizer(), async_rollout_manager=loops, global_steps=1, steps_per_epoch=3
        )  # fmt: skip
        session = Session.__new__(Session)  # without workers to ask
        session.trainer, session.config, session.version = self.trainer, self.trainer.config, 0
        session.settings = types.SimpleNamespace(skip_dir=root, share=None)
        session._begun, session.generate = True, Generate(True)
        self.tape = Tape(RunLayout(root), "run", lambda stage, split: {}, None, lambda: 0)
        session._rollout = self.tape.wrap(session.generate, mode)
        self.adapter = V0(self.trainer, session)
        self.adapter.attach()

    def generate(self, batch: DataProto) -> DataProto:
        self.count += 1
        return self.native

    def ask(self) -> DataProto:
        found = self.trainer.async_rollout_manager.generate_sequences(prompts())
        self.tape.close()
        return found


class Rewards:
    """In the place of verl's reward workers: the score is the number of tokens, and there is a name that is new."""

    def __init__(self) -> None:
        self.reward_loop_workers, self.seen = [1, 2, 3], 0

    def compute_rm_score(self, data: DataProto) -> DataProto:
        self.seen = len(data)
        width = data.batch["prompts"].shape[1]
        lengths = data.batch["attention_mask"][:, width:].sum(1)
        scores = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        scores[torch.arange(len(data)), lengths - 1] = lengths.float()
        return DataProto.from_dict(
            tensors={"rm_scores": scores}, non_tensors={"tokens": lengths.numpy()},
            meta_info={"reward_extra_keys": ["tokens"]},
        )  # fmt: skip


def same(a: DataProto, b: DataProto) -> list[str]:
    """Names of what differs: tensors bit for bit, the rest by value and dtype."""
    odd = [k for k in {*a.batch.keys(), *b.batch.keys()} if k not in a.batch or k not in b.batch
           or a.batch[k].dtype != b.batch[k].dtype or not torch.equal(a.batch[k], b.batch[k])]  # fmt: skip
    for key in {*a.non_tensor_batch, *b.non_tensor_batch}:
        one, two = a.non_tensor_batch.get(key), b.non_tensor_batch.get(key)
        if one is None or two is None or one.dtype != two.dtype or one.tolist() != two.tolist():
            odd.append(key)
    return odd


def main(root: Any) -> dict[str, Any]:
    first = Run(root / "a", "cache")
    one = first.ask()
    again = Run(root / "a", "cache")
    two = again.ask()
    found: dict[str, Any] = {
        "passed through": one is first.native, "generated again": again.count, "differs": same(one, two),
        "reward keys": two.meta_info["reward_extra_keys"],
    }  # fmt: skip
    scored = Run(root / "a", "cache")
    scored.trainer.config.actor_rollout_ref.rollout.agent.default_agent_loop = "single_turn_agent"
    scored.trainer.reward_loop_manager = Rewards()
    three = scored.ask()
    found["scored anew"] = three.batch["rm_scores"].sum(1).tolist()
    found["scored keys"] = [three.meta_info["reward_extra_keys"], three.non_tensor_batch["tokens"].tolist()]
    found["besides"] = sorted(set(same(one, three)))
    strange = Run(root / "b", "cache")
    strange.native.batch["routed_experts"] = torch.ones(4, 2)
    try:
        strange.ask()
        found["unknown tensor"] = "accepted"
    except HostError as error:
        found["unknown tensor"] = str(error)
    moved = generated()
    moved.non_tensor_batch["uid"] = prompts().non_tensor_batch["uid"]
    moved.batch["token_level_scores"] = moved.batch["token_level_rewards"] = moved.batch["rm_scores"]
    moved.batch["advantages"] = torch.arange(20.0).reshape(4, 5)
    moved.reorder(torch.tensor([3, 0, 2, 1]))
    seen = again.adapter.visible((moved,), {})
    found["order of the update"] = [ids.rpartition("/")[2] + ids.split("/")[2] for ids in seen.sample_id]
    found["advantages"] = seen.ragged("advantages").row(0).tolist()
    found["score"] = seen["score"].tolist()
    check_contract(v1=False)
    return found


if __name__ == "__main__":
    import sys
    from pathlib import Path

    print(json.dumps(main(Path(sys.argv[1]))))
