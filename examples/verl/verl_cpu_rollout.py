"""A rollout for verl that samples with Hugging Face's model on a CPU: one Ray actor, one request after the other.

What it samples depends on the weights, their version, the prompt and the request's seed (``verl_cpu_patches``), not on
other requests or their order. So two runs with the same weights sample the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

ACTOR = "cpu_hf_{}"


class Server:
    """Holds the model. verl calls the methods without a body; there is nothing to put to sleep on a CPU."""

    def __init__(self, config: Any, model_config: Any) -> None:
        torch.set_num_threads(1)
        self.config = omega_conf_to_dataclass(config)
        self.model_config = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self.model = AutoModelForCausalLM.from_pretrained(self.model_config.local_path, dtype=torch.float32).eval()
        self.version: int | None = None
        self.busy = asyncio.Lock()
        self.calls = 0

    async def load(self, named: dict[str, torch.Tensor], version: int | None) -> None:
        """Take over weights: all of them, with the right shapes, or an error."""
        held = self.model.state_dict()
        unknown, missing = sorted(set(named) - set(held)), sorted(set(held) - set(named))
        if unknown or missing:
            raise RuntimeError(f"weights: unknown {unknown[:3]}, missing {missing[:3]}")
        with torch.no_grad():
            for name, value in named.items():
                held[name].copy_(value)
        self.version = version

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **media: Any
    ) -> TokenOutput:
        async with self.busy:
            self.calls += 1
            if path := os.environ.get("VERL_CPU_REQUESTS"):  # one character for each request, for who counts them
                with Path(path).open("a") as file:
                    file.write(".")
            what = f"{list(prompt_ids)} {self.version} {sampling_params.get('seed')}"
            seed = hashlib.sha256(what.encode()).digest()
            limit = sampling_params.get("max_tokens") or self.config.response_length
            ids, log_probs, why = await asyncio.to_thread(
                self.sample, list(prompt_ids), float(sampling_params.get("temperature", 1.0)), limit,
                int.from_bytes(seed[:6], "little"),
            )  # fmt: skip
        return TokenOutput(
            token_ids=ids,
            log_probs=log_probs if sampling_params.get("logprobs") else None,
            stop_reason=why,
            num_preempted=0,
            extra_fields={"global_steps": self.version},
        )

    @torch.no_grad()
    def sample(
        self, prompt: list[int], temperature: float, limit: int, seed: int
    ) -> tuple[list[int], list[float], str]:
        chance, past, tokens = torch.Generator().manual_seed(seed), None, torch.tensor([prompt])
        vocabulary, end = len(self.model_config.tokenizer), self.model_config.tokenizer.eos_token_id
        ids: list[int] = []
        log_probs: list[float] = []
        while len(ids) < limit:
            out = self.model(input_ids=tokens, past_key_values=past, use_cache=True)
            past, logits = out.past_key_values, out.logits[0, -1].float()
            logits[vocabulary:] = -torch.inf  # rows of the head without a token
            scaled = torch.log_softmax(logits / (temperature or 1.0), -1)
            token = int(torch.multinomial(scaled.exp(), 1, generator=chance)) if temperature else int(scaled.argmax())
            ids.append(token)
            log_probs.append(float(scaled[token]))
            if token == end:
                return ids, log_probs, "completed"
            tokens = torch.tensor([[token]])
        return ids, log_probs, "length"

    async def count(self) -> int:
        """Requests answered so far."""
        return self.calls

    async def wake_up(self, **kwargs: Any) -> None: ...

    async def sleep(self, **kwargs: Any) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def abort_all_requests(self, **kwargs: Any) -> None: ...

    async def resume_generation(self) -> None: ...

    async def start_profile(self, **kwargs: Any) -> None: ...

    async def stop_profile(self) -> None: ...


class Replica(RolloutReplica):
    """Starts the actor."""

    async def launch_servers(self) -> None:
        name = ACTOR.format(self.replica_rank)
        actor = ray.remote(Server).options(name=name, num_cpus=0, max_concurrency=1000)
        self._server_handle = actor.remote(self.config, self.model_config)
        self._server_address = f"{name}:0"
        self.servers = [self._server_handle]
        await self._server_handle.count.remote()


class Adapter(BaseRollout):
    """In the training worker: hands weights to the actor."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int | None = None, **kwargs: Any) -> None:
        named = {}
        if hasattr(weights, "__aiter__"):
            async for name, value in weights:
                named[name] = value.detach().cpu().clone()
        else:
            for name, value in weights:
                named[name] = value.detach().cpu().clone()
        await ray.get_actor(ACTOR.format(self.replica_rank)).load.remote(named, global_steps)
