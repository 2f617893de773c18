"""The rollout engine on vLLM: token ids in, token ids and log-probs out, weights by proven transfer.

vLLM's offline engine is stepped from here (``add_request``, ``step``), in this process, so that progress is seen, a
generation can be ended from another thread, and each result is joined with its request by the request's id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from crossrl.batch import Meaning, Ragged
from crossrl.engines.base import EngineError, Generation, Sampling
from crossrl.engines.rollout.condition import Condition, check_requests, check_scored
from crossrl.engines.rollout.transaction import dtype_name
from crossrl.engines.rollout.vllm_environment import HOW_TO, check_environment, check_platform, require_vllm
from crossrl.engines.rollout.vllm_options import VllmOptions, check_names, engine_arguments, lowest_temperature
from crossrl.engines.rollout.vllm_outputs import sampled, scored
from crossrl.engines.rollout.vllm_requests import Requests, to_sample, to_score

if TYPE_CHECKING:
    from crossrl.engines.rollout.vllm_worker import VllmTarget
    from crossrl.sync.receiver import Received


class VllmEngine:
    """``RolloutEngine`` on vLLM. The process must have the environment of ``vllm_environment``; raises ``EngineError``
    if not, if vLLM is not installed, and for options that vLLM cannot honour (see ``VllmOptions``).

    What it promises less than the engine ``hf``: a response depends on prompt, seed and weights, but its log-probs (and
    so, now and then, a token) can differ in the last bits with what else is in the call, since vLLM's kernels are not
    batch-invariant on a CPU. The same call on the same weights with an empty prefix cache gives the same bits.

    Log-probs are those of vLLM's ``processed_logprobs``: after temperature and after truncation (top-k, top-p), of the
    distribution that was sampled from, which is what ``Meaning`` says, and the same as of the engine ``hf``. (vLLM has
    no mode between: ``raw_logprobs`` are before temperature.)
    """

    name = "vllm"

    def __init__(self, options: VllmOptions) -> None:
        require_vllm()
        check_environment(options.device)
        self.options, self.weight_version = options, options.weight_version
        self._condition = Condition()
        self._llm = _started(options)
        self._requests = Requests(self._llm, self._condition)
        config = self._llm.vllm_config
        self._positions = int(config.model_config.max_model_len)
        self._dtype = config.model_config.dtype
        self._cpu = config.device_config.device_type == "cpu"
        self._workers = int(config.parallel_config.world_size)
        found = self._rpc("crossrl_set_up", options.receives, options.weight_version)[0]
        check_names(options.model, found)
        self._try()

    def _try(self) -> None:
        """One token, so that a model for which vLLM has no kernel fails here and not in the first step of a run."""
        try:
            self.generate([np.zeros(1, np.int32)], [0], Sampling(temperature=0.0, max_tokens=1, ignore_eos=True))
            self.clear_prefix_cache()
        except Exception as error:
            raise EngineError(
                f"vLLM starts with {self.options.model} and cannot generate: {type(error).__name__}: {error} "
                f"(which head dimensions it has kernels for on a CPU: {HOW_TO})"
            ) from error

    # --- generating ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        seeds: Sequence[int],
        sampling: Sampling,
        progress: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """See ``RolloutEngine.generate``. Raises ``EngineError`` also for a request that vLLM drops, ends for another
        reason than an end token or the limit, or returns without exactly one log-prob per token."""
        self._condition.require_usable("generate")
        check_requests(prompts, seeds, sampling, self._positions, "vLLM (max_model_len)")
        lowest_temperature(sampling.temperature)
        stops = () if sampling.ignore_eos else self.options.eos_token_ids
        parameters = [to_sample(sampling, int(seed), stops) for seed in seeds]
        outputs = self._requests.run("the generation", [_ids(p) for p in prompts], parameters, progress)
        rows = [sampled(i, output, sampling.max_tokens, stops) for i, output in enumerate(outputs)]
        return Generation(
            response_ids=Ragged.from_rows([row.tokens for row in rows], np.int32),
            log_probs=Ragged.from_rows([row.log_probs for row in rows], np.float32),
            finish_reason=[row.reason for row in rows],
            meaning=Meaning(sampling.temperature or 1.0, sampling.truncation, self.name, self.weight_version),
            weight_version=self.weight_version,
        )

    def score(self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], temperature: float) -> Ragged:
        """See ``RolloutEngine.score``. Each sequence is one prefill; the prefix cache is neither read nor needed."""
        self._condition.require_usable("score")
        check_scored(prompts, responses, temperature, self._positions, "vLLM (max_model_len)")
        asked = [i for i, response in enumerate(responses) if len(response)]
        inputs = [_ids(prompts[i]) + _ids(responses[i])[:-1] for i in asked]
        parameters = [to_score(int(responses[i][-1])) for i in asked]
        try:
            if not all(self._rpc("crossrl_divide_logits", temperature)):
                raise EngineError("score: this model has no LogitsProcessor through which vLLM could apply temperature")
            outputs = self._requests.run("the scoring", inputs, parameters) if asked else []
        finally:
            self._rpc("crossrl_divide_logits", 1.0)
        rows = [np.zeros(0, np.float32)] * len(responses)
        for i, output in zip(asked, outputs, strict=True):
            rows[i] = scored(i, output, _ids(responses[i]))
        return Ragged.from_rows(rows, np.float32)

    def abort(self) -> str:
        """See ``RolloutEngine.abort``. Waits for: nothing. The running call ends after vLLM's present step."""
        return self._condition.abort()

    # --- weights ------------------------------------------------------------------------------------------------

    def receiver_names(self, base: str) -> list[str]:
        """See ``RolloutEngine.receiver_names``: one for each worker process."""
        return [base] if self._workers == 1 else [f"{base}.{rank}" for rank in range(self._workers)]

    def receive(self, address: str, base: str, limit_s: float) -> list[Received]:
        """See ``RolloutEngine.receive``. The prefix cache is cleared before (nothing is generated meanwhile)."""
        from crossrl.sync.messages import SyncError
        from crossrl.sync.receiver import Received

        self._condition.require_awake("receive")
        cleared = self.clear_prefix_cache()
        try:
            answers = self._rpc("crossrl_receive", address, self.receiver_names(base), limit_s, cleared)
        except Exception as error:
            self._condition.broken = f"a worker failed while weights came: {type(error).__name__}: {error}"
            raise EngineError(self._condition.broken) from error
        failed = [answer for answer in answers if "error" in answer]
        if any(answer["began"] for answer in failed) or (failed and len(failed) < len(answers)):
            self._condition.update_failed(failed[0]["error"])
        if failed:
            raise SyncError("; ".join(answer["error"] for answer in failed))
        received = [Received(**answer) for answer in answers]
        self.weight_version = received[0].version
        self._condition.update_succeeded()
        return received

    def begin_update(self, version: int, manifest: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """See ``RolloutEngine``. Until the update has finished, generation is refused."""
        self._condition.require_awake("begin_update")
        self._condition.update_begun()
        self._target().begin_update(version, manifest)

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See ``RolloutEngine``. The tensors must stay as they are until ``check_update`` or ``finish_update``."""
        self._target().load(named)

    def check_update(self) -> None:
        """See ``RolloutEngine``."""
        self._target().check_update()

    def finish_update(self) -> None:
        """See ``RolloutEngine``. A failed update leaves the version, and generation refused until one succeeds."""
        target = self._target()
        target.prefix_cache = self.clear_prefix_cache()
        target.finish_update()
        self.weight_version = target.weight_version
        self._condition.update_succeeded()

    def abort_update(self, reason: str) -> None:
        """See ``RolloutEngine``."""
        self._condition.update_failed(reason)
        self._target().abort_update(reason)

    def clear_prefix_cache(self) -> str:
        """See ``RolloutEngine``. Raises ``EngineError`` if vLLM does not do it."""
        self._condition.require_awake("clear_prefix_cache")
        self._llm.reset_encoder_cache()
        done = self._llm.reset_prefix_cache()
        if done is not True:
            raise EngineError(
                f"vLLM did not clear its prefix cache (reset_prefix_cache gave {done!r}): keys and values of earlier "
                "weights would be used with new ones"
            )
        return "reset_prefix_cache: True"

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``RolloutEngine``, and ``vllm_held`` for how it is read."""
        return self._target().held() if self._workers == 1 else iter(self._rpc("crossrl_held")[0])

    def as_held(self, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``named`` after the declared cast."""
        return dict(named) if self.options.receives is None else {n: t.to(self._dtype) for n, t in named.items()}

    def shares(self, named: Mapping[str, torch.Tensor]) -> bool:
        """False: vLLM has a model of its own."""
        return False

    @property
    def cast(self) -> str | None:
        """The declared cast, such as "float32 to bfloat16"."""
        receives = self.options.receives
        return None if receives is None else f"{receives} to {dtype_name(self._dtype)}"

    def _target(self) -> VllmTarget:
        if self._workers > 1:
            raise EngineError(
                f"vLLM's model is spread over {self._workers} worker processes: weights reach them by receive(), and "
                "are checked there"
            )
        target: VllmTarget = self._rpc("crossrl_get_target")[0]
        return target

    # --- memory -------------------------------------------------------------------------------------------------

    def sleep(self) -> str:
        """See ``RolloutEngine.sleep``. On a GPU weights go to the host's memory and the cache is given up."""
        if self._condition.asleep:
            return "it was asleep already"
        self._condition.require_awake("sleep")
        cleared = self.clear_prefix_cache()
        if not self._cpu:
            self._llm.sleep(1)
        self._condition.asleep = True
        return f"vLLM gives no memory back on a CPU; {cleared}" if self._cpu else f"vLLM sleeps at level 1; {cleared}"

    def wake(self) -> str:
        """See ``RolloutEngine.wake``."""
        if not self._condition.asleep:
            return "it was awake already"
        if not self._cpu:
            self._llm.wake_up()
        self._condition.asleep = False
        return "awake"

    def close(self) -> None:
        """Give vLLM up. Waits for: its worker processes, if it has any. Limit: vLLM's own."""
        self._rpc("crossrl_close")
        self._llm.engine_core.shutdown()

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """The answer of each worker."""
        return list(self._llm.collective_rpc(method, args=args))


def _ids(tokens: np.ndarray) -> list[int]:
    ids: list[int] = np.asarray(tokens).tolist()
    return ids


def _started(options: VllmOptions) -> Any:
    """vLLM's ``LLMEngine``."""
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise EngineError(f"vLLM is installed and cannot be imported: {error}; see {HOW_TO}") from error

    device = check_platform(options.device)
    arguments = engine_arguments(options, cpu=device == "cpu")
    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except Exception as error:
        raise EngineError(f"vLLM does not start with {options.model}: {type(error).__name__}: {error}") from error
