"""The embedded rollout engine: generation with any transformers causal LM, each prompt prefilled once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from crossrl.batch import Meaning, Ragged
from crossrl.engines.base import EngineError, Generation, Sampling
from crossrl.engines.rollout.sampling import choose, uniforms
from crossrl.engines.rollout.transaction import WeightTransaction
from crossrl.models.decode import DecodeCache, Prefill
from crossrl.models.digest import weights_digest
from crossrl.models.layout import MIN_ROWS, Group, lay_out
from crossrl.models.loading import distinct_parameters
from crossrl.models.policy import Policy

PREFILL_TOKENS = 4096


@dataclass(slots=True)
class _Request:
    """One response in the making: its place in the call, its prompt and what was sampled so far."""

    place: int
    prompt: np.ndarray
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reason: str = "length"


class HfRolloutEngine:
    """``RolloutEngine`` for ``model``, which may be the trainer's own (then a weight update copies nothing).

    ``eos_token_ids``: sampling one ends a response (and it is part of it). ``max_num_seqs``: responses in the
    making at once. ``digest``: whether ``finish_update`` hashes the weights (else it returns ""). ``packed``: see
    ``Policy``; ``notice`` says when the fallback is in use.
    """

    name = "hf"

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        *,
        max_num_seqs: int = 256,
        digest: bool = True,
        packed: bool | None = None,
        weight_version: int = 0,
    ) -> None:
        if max_num_seqs < 1:
            raise EngineError(f"max_num_seqs is {max_num_seqs}, want at least 1")
        self.policy = Policy(model, packed)
        self.weight_version = weight_version
        self._eos = torch.tensor(sorted(set(eos_token_ids)), dtype=torch.int64, device=self.policy.device)
        self._max_num_seqs, self._digest = max_num_seqs, digest
        self._held = {n: p.detach() for n, p in distinct_parameters(model)}
        self._update: WeightTransaction | None = None
        self._usable = True
        if self.policy.packed:
            self.policy.check(self._gap, required=packed is True)
        self.notice = self.policy.notice

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[np.ndarray],
        seeds: Sequence[int],
        sampling: Sampling,
        progress: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """See ``RolloutEngine.generate``. Raises ``EngineError`` for an empty prompt and for one that leaves no
        room for ``max_tokens`` in the model's positions."""
        self._check(prompts, seeds, sampling)
        requests = [_Request(i, np.asarray(p)) for i, p in enumerate(prompts)]
        draws = uniforms(seeds, sampling.max_tokens).to(self.policy.device)
        done = 0

        def finished(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, len(requests))

        generate = self._generate if self.policy.packed else self._generate_plain
        for chunk in chunks(requests, self._max_num_seqs):
            generate(chunk, draws, sampling, finished)
        return Generation(
            response_ids=Ragged.from_rows([r.tokens for r in requests], np.int32),
            log_probs=Ragged.from_rows([r.log_probs for r in requests], np.float32),
            finish_reason=[r.reason for r in requests],
            meaning=Meaning(sampling.temperature or 1.0, sampling.truncation, self.name, self.weight_version),
            weight_version=self.weight_version,
        )

    def begin_update(self, version: int, manifest: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """See ``RolloutEngine``. Until the update has finished, generation is refused."""
        self._update, self._usable = WeightTransaction(self._held, version, manifest), False

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See ``RolloutEngine``."""
        if self._update is None:
            raise EngineError("load: no weight update was begun")
        self._update.load(named)

    def finish_update(self) -> str:
        """See ``RolloutEngine``. A failed update leaves the version, and generation refused until one succeeds."""
        if self._update is None:
            raise EngineError("finish_update: no weight update was begun")
        update, self._update = self._update, None
        update.finish()
        self.weight_version, self._usable = update.version, True
        return weights_digest(self._held.items()) if self._digest else ""

    def _check(self, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: Sampling) -> None:
        if not self._usable:
            raise EngineError("a weight update was begun and has not succeeded; the weights may be a mixture")
        if len(seeds) != len(prompts):
            raise EngineError(f"{len(prompts)} prompts, but {len(seeds)} seeds: want one for each")
        if sampling.max_tokens < 1:
            raise EngineError(f"max_tokens is {sampling.max_tokens}, want at least 1")
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
            raise EngineError(f"temperature {sampling.temperature} and top_p {sampling.top_p}: want >= 0 and in (0, 1]")
        limit = self.policy.max_length
        for i, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise EngineError(f"prompt {i} has no tokens")
            if limit is not None and len(prompt) + sampling.max_tokens > limit:
                raise EngineError(
                    f"prompt {i} has {len(prompt)} tokens; with {sampling.max_tokens} response tokens that is more "
                    f"than the {limit} positions of the model. Lower max_tokens or shorten the prompt"
                )

    def _generate(
        self, requests: list[_Request], draws: torch.Tensor, sampling: Sampling, finished: Callable[[int], None]
    ) -> None:
        """Run the requests of one chunk to their ends."""
        active = requests
        cache, logits = self._prefill(requests, sampling.max_tokens)
        for step in range(sampling.max_tokens):
            places = torch.tensor([r.place for r in active], device=draws.device)
            tokens, log_probs = choose(logits, draws[places, step], sampling)
            self._append(active, tokens, log_probs, sampling)
            if step + 1 == sampling.max_tokens:
                break
            going = [i for i, r in enumerate(active) if r.reason != "stop"]
            if len(going) < len(active):
                finished(len(active) - len(going))
                if not going:
                    return
                rows = torch.tensor(going, device=tokens.device)
                active, tokens = [active[i] for i in going], tokens[rows]
                cache.keep(rows)
            logits = self._decode(tokens, cache)
        finished(len(active))

    def _generate_plain(
        self, requests: list[_Request], draws: torch.Tensor, sampling: Sampling, finished: Callable[[int], None]
    ) -> None:
        """The same through the model's own ``generate``; prompts of one length at a time, so that nothing is padded."""
        for length in sorted({len(r.prompt) for r in requests}):
            batch = [r for r in requests if len(r.prompt) == length]
            places = torch.tensor([r.place for r in batch], device=draws.device)

            def force(
                ids: torch.Tensor, scores: torch.Tensor, batch=batch, places=places, length=length
            ) -> torch.Tensor:  # type: ignore[no-untyped-def]
                going = torch.tensor([r.reason != "stop" for r in batch], device=scores.device)
                tokens, log_probs = choose(scores.float(), draws[places, ids.shape[1] - length], sampling)
                kept = going.nonzero()[:, 0]
                self._append([batch[i] for i in kept.tolist()], tokens[kept], log_probs[kept], sampling)
                return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)

            def over(ids: torch.Tensor, scores: torch.Tensor, batch=batch) -> torch.Tensor:  # type: ignore[no-untyped-def]
                return torch.full((len(batch),), all(r.reason == "stop" for r in batch), device=ids.device)

            self.policy.generate_plain(np.stack([r.prompt for r in batch]), sampling.max_tokens, force, over)
            finished(len(batch))

    def _append(
        self, active: list[_Request], tokens: torch.Tensor, log_probs: torch.Tensor, sampling: Sampling
    ) -> None:
        ended = torch.isin(tokens, self._eos).tolist()
        for request, token, log_prob, end in zip(active, tokens.tolist(), log_probs.tolist(), ended, strict=True):
            request.tokens.append(token)
            request.log_probs.append(log_prob)
            if end and not sampling.ignore_eos:
                request.reason = "stop"

    def _gap(self) -> float:
        """The largest difference between the log-probs of a short generation and the model's own, for ``Policy.check``."""
        draw = np.random.Generator(np.random.Philox(1))
        prompts = [draw.integers(0, self.policy.vocab_size, n) for n in (5, 5, 2)]
        prompts[1] = prompts[0]
        out = self.generate(prompts, [1, 2, 3], Sampling(max_tokens=4, ignore_eos=True))
        rows = zip(prompts, out.response_ids.rows(), strict=True)
        with torch.no_grad():
            plain, _, _ = self.policy.plain_log_probs([Group(p, [r]) for p, r in rows], 1.0, False)
        return float((plain.cpu() - torch.from_numpy(out.log_probs.values)).abs().max())

    def _prefill(self, requests: list[_Request], max_tokens: int) -> tuple[DecodeCache, torch.Tensor]:
        """A cache that holds the prompts, and the logits of each request's first token."""
        distinct, group = neighbours([r.prompt for r in requests])
        device = self.policy.device
        lengths = torch.tensor([len(p) for p in distinct], device=device)
        rows = torch.tensor(group, device=device)
        cache = DecodeCache(lengths, rows, int(lengths.max()) + max_tokens)
        last = []
        for first, part in prefill_parts(distinct):
            layout = lay_out([Group(p) for p in part]).to(device)
            hidden = self.policy.hidden(layout.input_ids, layout.position_ids, Prefill(layout, cache, first, len(part)))
            last.append(hidden[layout.prompt_last])
        return cache, self._logits(torch.cat(last))[rows]

    def _decode(self, tokens: torch.Tensor, cache: DecodeCache) -> torch.Tensor:
        """Append one token to each sequence; logits of the next, float32 ``[B, V]``."""
        missing = max(0, MIN_ROWS - len(tokens))
        cache.begin_step()
        ids = torch.nn.functional.pad(tokens, (0, missing))[None]
        positions = torch.nn.functional.pad(cache.length, (0, missing))[None]
        hidden = self.policy.hidden(ids, positions, cache)
        cache.end_step()
        return self._logits(hidden)[: len(tokens)]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        missing = max(0, MIN_ROWS - len(hidden))
        return self.policy.head().logits(torch.nn.functional.pad(hidden, (0, 0, 0, missing)))[: len(hidden)]


def neighbours(prompts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
    """The prompts with equal neighbours merged, and for each prompt which of those it is."""
    distinct: list[np.ndarray] = []
    group: list[int] = []
    for prompt in prompts:
        if not distinct or not np.array_equal(distinct[-1], prompt):
            distinct.append(prompt)
        group.append(len(distinct) - 1)
    return distinct, group


def chunks(requests: list[_Request], limit: int) -> list[list[_Request]]:
    """At most ``limit`` requests each; groups (equal neighbours) are split only when larger than that."""
    _, group = neighbours([r.prompt for r in requests])
    out: list[list[_Request]] = []
    start = 0
    while start < len(requests):
        end = min(start + limit, len(requests))
        if end < len(requests) and group[end] == group[end - 1] and group[start] != group[end - 1]:
            end = group.index(group[end])
        out.append(requests[start:end])
        start = end
    return out


def prefill_parts(prompts: list[np.ndarray]) -> list[tuple[int, list[np.ndarray]]]:
    """(number of the first, prompts) with at most ``PREFILL_TOKENS`` tokens each, so that memory stays bounded."""
    parts: list[tuple[int, list[np.ndarray]]] = []
    size = 0
    for i, prompt in enumerate(prompts):
        if not parts or size + len(prompt) > PREFILL_TOKENS:
            parts.append((i, []))
            size = 0
        parts[-1][1].append(prompt)
        size += len(prompt)
    return parts
