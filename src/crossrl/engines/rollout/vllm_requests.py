"""Requests to vLLM: what is asked for, and the loop that steps vLLM until each is answered."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

from crossrl.engines.base import EngineError, Sampling
from crossrl.engines.rollout.condition import Condition

SEED_BITS = 2**63 - 1  # vLLM takes signed seeds, and -1 as none


def to_sample(sampling: Sampling, seed: int, stops: Collection[int]) -> Any:
    """vLLM's ``SamplingParams``: one log-prob per token, that of the sampled one; nothing is turned into text."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=seed & SEED_BITS,
        stop_token_ids=list(stops),
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def to_score(last: int) -> Any:
    """For a prompt whose tokens are scored. ``last``: the token after it, which is scored where it would be sampled, so
    that a sequence may use every position."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        prompt_logprobs=0,
        logprob_token_ids=[last],
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


class Requests:
    """Runs requests on ``llm`` (vLLM's ``LLMEngine``), a call at a time; ``condition`` says whether to end early."""

    def __init__(self, llm: Any, condition: Condition) -> None:
        self._llm, self._condition, self._calls = llm, condition, itertools.count()

    def run(
        self,
        what: str,
        prompts: list[list[int]],
        parameters: list[Any],
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Any]:
        """vLLM's output of each request, in the order of the requests.

        Waits for: all requests to finish. Unblocked by: their end, ``abort``, an exception of vLLM's, vLLM having
        nothing left to do. No limit of its own: it is bounded by ``max_tokens``.
        """
        call, llm = next(self._calls), self._llm
        waiting = dict[str, int]()
        outputs: list[Any] = [None] * len(prompts)
        with self._condition.running(what):
            try:
                for i, (ids, params) in enumerate(zip(prompts, parameters, strict=True)):
                    name = f"crossrl-{call}-{i}"
                    self._add(i, name, ids, params)
                    waiting[name] = i
                while waiting:
                    self._condition.check_abort(len(prompts) - len(waiting), len(prompts))
                    finished = [output for output in llm.step() if output.finished]
                    for output in finished:
                        if (i := waiting.pop(output.request_id, -1)) < 0:
                            raise EngineError(f"vLLM answered a request that is not waited for: {output.request_id}")
                        outputs[i] = output
                    if finished and progress is not None:
                        progress(len(prompts) - len(waiting), len(prompts))
                    if waiting and not llm.has_unfinished_requests():
                        raise EngineError(
                            f"vLLM dropped {len(waiting)} requests, such as request {min(waiting.values())}"
                        )
            except BaseException as error:
                self._give_up(list(waiting), error)
                raise
        return outputs

    def _add(self, i: int, name: str, ids: list[int], params: Any) -> None:
        try:
            self._llm.add_request(name, {"prompt_token_ids": ids}, params)
        except ValueError as error:
            raise EngineError(f"vLLM refuses request {i}: {error}") from error

    def _give_up(self, requests: list[str], error: BaseException) -> None:
        """Take the requests back. After an exception of vLLM's own its state is unknown: it is not used again."""
        try:
            self._llm.abort_request(requests)
            while self._llm.has_unfinished_requests():
                self._llm.step()
        except Exception as second:
            self._condition.broken = f"vLLM failed while requests were taken back: {type(second).__name__}: {second}"
        if isinstance(error, Exception) and not isinstance(error, EngineError):
            self._condition.broken = f"vLLM failed: {type(error).__name__}: {error}"
