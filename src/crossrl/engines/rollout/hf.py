"""The embedded rollout engine: generation with any transformers causal LM, each prompt prefilled once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from crossrl.batch import Meaning, Ragged
from crossrl.engines.base import EngineError, Generation, Sampling
from crossrl.engines.rollout.condition import Condition, check_requests, check_scored
from crossrl.engines.rollout.receiving import Receiving
from crossrl.engines.rollout.sampling import choose, uniforms
from crossrl.engines.rollout.transaction import WeightTransaction, dtype_name
from crossrl.models.decode import DecodeCache, Prefill
from crossrl.models.digest import same_storage
from crossrl.models.layout import MIN_ROWS, Group, lay_out
from crossrl.models.loading import distinct_parameters
from crossrl.models.policy import Policy

if TYPE_CHECKING:
    from crossrl.sync.receiver import Received

PREFILL_TOKENS = 4096
# Rows of ended responses are dropped when this share or less of the rows is still needed: dropping copies the cache.
KEEP_IDLE = 0.875


class _Responses:
    """What was sampled so far for N requests, on the model's device: ``[N, max_tokens]`` and ``[N]``."""

    def __init__(self, count: int, max_tokens: int, device: torch.device) -> None:
        self.tokens = torch.zeros((count, max_tokens), dtype=torch.int32, device=device)
        self.log_probs = torch.zeros((count, max_tokens), dtype=torch.float32, device=device)
        self.length = torch.zeros(count, dtype=torch.int64, device=device)
        self.stopped = torch.zeros(count, dtype=torch.bool, device=device)

    def append(self, which: torch.Tensor, tokens: torch.Tensor, log_probs: torch.Tensor, ended: torch.Tensor) -> None:
        """One more token for the requests ``which``; all of them have equally many."""
        step = self.length[which]
        self.tokens[which, step] = tokens.int()
        self.log_probs[which, step] = log_probs
        self.length[which] = step + 1
        self.stopped[which] = ended

    def finished(self) -> int:
        return int((self.stopped | (self.length == self.tokens.shape[1])).sum())

    def ragged(self) -> tuple[Ragged, Ragged, list[str]]:
        """Token ids, log-probs, finish reasons."""
        lengths = self.length.cpu().numpy()
        inside = np.arange(self.tokens.shape[1]) < lengths[:, None]
        tokens, log_probs = (Ragged(x.cpu().numpy()[inside], lengths) for x in (self.tokens, self.log_probs))
        return tokens, log_probs, ["stop" if stopped else "length" for stopped in self.stopped.tolist()]


class HfRolloutEngine:
    """``RolloutEngine`` for ``model``, which may be the trainer's own (then a weight update copies nothing).

    ``eos_token_ids``: sampling one ends a response (and it is part of it). ``max_num_seqs``: responses in the
    making at once. ``receives``: the dtype in which weights come, where it is not that of ``model``: they are cast.
    ``packed``: see ``Policy``; ``notice`` says when the fallback is in use.
    """

    name = "hf"

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        *,
        max_num_seqs: int = 256,
        receives: torch.dtype | None = None,
        packed: bool | None = None,
        weight_version: int = 0,
    ) -> None:
        if max_num_seqs < 1:
            raise EngineError(f"max_num_seqs is {max_num_seqs}, want at least 1")
        self.policy = Policy(model, packed)
        self.weight_version = weight_version
        self._eos = torch.tensor(sorted(set(eos_token_ids)), dtype=torch.int64, device=self.policy.device)
        self._max_num_seqs, self._receives = max_num_seqs, receives
        self._held = {n: p.detach() for n, p in distinct_parameters(model)}
        self._update: WeightTransaction | None = None
        self._condition = Condition()
        self._receiving = Receiving(self)
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
        self._condition.require_usable("generate")
        check_requests(prompts, seeds, sampling, self.policy.max_length, "the model")
        device = self.policy.device
        responses = _Responses(len(prompts), sampling.max_tokens, device)
        draws = uniforms(seeds, sampling.max_tokens).to(device)

        def report() -> None:
            if progress is not None:
                progress(responses.finished(), len(prompts))

        generate = self._generate if self.policy.packed else self._generate_plain
        with self._condition.running("the generation"):
            for chunk in chunks(prompts, self._max_num_seqs):
                generate(prompts, chunk, responses, draws, sampling, report)
        tokens, log_probs, reasons = responses.ragged()
        return Generation(
            response_ids=tokens,
            log_probs=log_probs,
            finish_reason=reasons,
            meaning=Meaning(sampling.temperature or 1.0, sampling.truncation, self.name, self.weight_version),
            weight_version=self.weight_version,
        )

    @torch.inference_mode()
    def score(self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], temperature: float) -> Ragged:
        """See ``RolloutEngine.score``."""
        self._condition.require_usable("score")
        check_scored(prompts, responses, temperature, self.policy.max_length, "the model")
        _, group = neighbours(prompts)
        values = [np.zeros(0, np.float32)]
        with self._condition.running("the scoring"):
            for chunk in chunks(prompts, self._max_num_seqs):
                self._condition.check_abort(chunk.start, len(prompts))
                groups = [Group(prompts[i], []) for i in chunk if i == chunk.start or group[i] != group[i - 1]]
                for i in chunk:
                    groups[group[i] - group[chunk.start]].responses.append(responses[i])  # type: ignore[attr-defined]
                values.append(self.policy.log_probs(groups, temperature, False)[0].cpu().numpy())
        return Ragged(np.concatenate(values), np.array([len(r) for r in responses], dtype=np.int64))

    def abort(self) -> str:
        """See ``RolloutEngine``: the running call ends before its next token."""
        return self._condition.abort()

    def sleep(self) -> str:
        """See ``RolloutEngine``. Nothing is given back: no cache outlives a call; the model may be the trainer's."""
        if self._condition.asleep:
            return "it was asleep already"
        self._condition.asleep = True
        return "nothing to give back: keys and values live for one call, and the weights may be the trainer's own"

    def wake(self) -> str:
        """See ``RolloutEngine``."""
        if not self._condition.asleep:
            return "it was awake already"
        self._condition.asleep = False
        return "awake"

    def receiver_names(self, base: str) -> list[str]:
        """See ``RolloutEngine``: one, in this process."""
        return [base]

    def receive(self, address: str, base: str, limit_s: float) -> list[Received]:
        """See ``RolloutEngine``."""
        self._condition.require_awake("receive")
        return [self._receiving.receive(address, base, limit_s)]

    def begin_update(self, version: int, manifest: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """See ``RolloutEngine``. Until the update has finished, generation is refused."""
        self._condition.require_awake("begin_update")
        self._update = WeightTransaction(self._held, version, manifest, self._receives)
        self._condition.update_begun()

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See ``RolloutEngine``."""
        self._begun("load").load(named)

    def load_part(self, name: str, shape: tuple[int, ...], start: int, values: torch.Tensor) -> None:
        """See ``crossrl.sync.target.PartTarget``."""
        self._begun("load_part").load_part(name, shape, start, values)

    def check_update(self) -> None:
        """See ``RolloutEngine``."""
        self._begun("check_update").finish()

    def _begun(self, what: str) -> WeightTransaction:
        if self._update is None:
            raise EngineError(f"{what}: no weight update was begun")
        return self._update

    def finish_update(self) -> None:
        """See ``RolloutEngine``. A failed update leaves the version, and generation refused until one succeeds."""
        update = self._begun("finish_update")
        self._update = None
        update.finish()
        self.weight_version = update.version
        self._condition.update_succeeded()

    def abort_update(self, reason: str) -> None:
        """See ``RolloutEngine``."""
        self._update = None
        self._condition.update_failed(reason)

    def clear_prefix_cache(self) -> str:
        """See ``RolloutEngine``: keys and values live for one call of ``generate``."""
        return "none is kept"

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What it computes with, live: a tied weight under each of its names, so that one that is no longer tied is
        seen."""
        return ((n, p.detach()) for n, p in self.policy.model.named_parameters(remove_duplicate=False))

    def as_held(self, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``named`` after the declared cast: what it must hold when it has received them."""
        if self._receives is None:
            return dict(named)
        held = dict(self.held())
        return {name: tensor.to(held[name].dtype) for name, tensor in named.items()}

    def shares(self, named: Mapping[str, torch.Tensor]) -> bool:
        """Whether it computes with these very tensors, and no others."""
        held = dict(self.held())
        return held.keys() == named.keys() and all(same_storage(held[name], named[name]) for name in held)

    @property
    def cast(self) -> str | None:
        """The declared cast, such as "float32 to bfloat16"."""
        return None if self._receives is None else f"{dtype_name(self._receives)} to {dtype_name(self.policy.dtype)}"

    def _stop_if_aborted(self, responses: _Responses) -> None:
        if self._condition.aborted:
            self._condition.check_abort(responses.finished(), len(responses.length))

    def _generate(
        self,
        prompts: Sequence[np.ndarray],
        chunk: range,
        responses: _Responses,
        draws: torch.Tensor,
        sampling: Sampling,
        report: Callable[[], None],
    ) -> None:
        """Run one chunk to its end. A row of the model's input is a request, or idle once that has ended."""
        which = fill_up(torch.tensor(chunk, device=draws.device))
        live = torch.arange(len(which), device=draws.device) < len(chunk)
        cache, logits = self._prefill([prompts[i] for i in which.tolist()], sampling.max_tokens)
        for step in range(sampling.max_tokens):
            self._stop_if_aborted(responses)
            tokens, log_probs = choose(logits, draws[which, step], sampling)
            ended = torch.isin(tokens, self._eos) & (not sampling.ignore_eos)
            responses.append(which[live], tokens[live], log_probs[live], ended[live])
            if bool((ended & live).any()):
                live &= ~ended
                report()
            count = int(live.sum())
            if count == 0 or step + 1 == sampling.max_tokens:
                break
            if max(count, MIN_ROWS) <= len(which) * KEEP_IDLE:
                rows = fill_up(live.nonzero()[:, 0])
                which, tokens = which[rows], tokens[rows]
                live = torch.arange(len(rows), device=rows.device) < count
                cache.keep(rows)
            logits = self._decode(tokens, cache)
        report()

    def _generate_plain(
        self,
        prompts: Sequence[np.ndarray],
        chunk: range,
        responses: _Responses,
        draws: torch.Tensor,
        sampling: Sampling,
        report: Callable[[], None],
    ) -> None:
        """The same through the model's own ``generate``; prompts of one length at a time, so that nothing is padded."""
        for length in sorted({len(prompts[i]) for i in chunk}):
            which = torch.tensor([i for i in chunk if len(prompts[i]) == length], device=draws.device)

            def force(ids: torch.Tensor, scores: torch.Tensor, which: torch.Tensor = which) -> torch.Tensor:
                self._stop_if_aborted(responses)
                tokens, log_probs = choose(scores.float(), draws[which, responses.length[which].max()], sampling)
                ended = torch.isin(tokens, self._eos) & (not sampling.ignore_eos)
                live = ~responses.stopped[which]
                responses.append(which[live], tokens[live], log_probs[live], ended[live])
                return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)

            def over(ids: torch.Tensor, scores: torch.Tensor, which: torch.Tensor = which) -> torch.Tensor:
                return responses.stopped[which].all().expand(len(which))

            rows = np.stack([prompts[i] for i in which.tolist()])
            self.policy.generate_plain(rows, sampling.max_tokens, force, over)
            report()

    def _gap(self) -> float:
        """For ``Policy.check``: how far the log-probs of a short generation are from the model's own."""
        draw = np.random.Generator(np.random.Philox(1))
        prompts = [draw.integers(0, self.policy.vocab_size, n) for n in (5, 5, 2)]
        prompts[1] = prompts[0]
        out = self.generate(prompts, [1, 2, 3], Sampling(max_tokens=4, ignore_eos=True))
        rows = zip(prompts, out.response_ids.rows(), strict=True)
        with torch.no_grad():
            plain, _, _ = self.policy.plain_log_probs([Group(p, [r]) for p, r in rows], 1.0, False)
        return float((plain.cpu() - torch.from_numpy(out.log_probs.values)).abs().max())

    def _prefill(self, prompts: Sequence[np.ndarray], max_tokens: int) -> tuple[DecodeCache, torch.Tensor]:
        """A cache that holds the prompts, and the logits of each one's first token; equal neighbours computed once."""
        distinct, group = neighbours(prompts)
        device = self.policy.device
        lengths = torch.tensor([len(p) for p in distinct], device=device)
        rows = torch.tensor(group, device=device)
        cache = DecodeCache(lengths, rows, int(lengths.max()) + max_tokens)
        last = []
        for first, part in prefill_parts(distinct):
            layout = lay_out([Group(p) for p in part]).to(device)
            hidden = self.policy.hidden(layout.input_ids, layout.position_ids, Prefill(layout, cache, first, len(part)))
            last.append(hidden[layout.prompt_last])
        hidden = torch.cat(last)
        return cache, self.policy.head().logits(hidden[fill_up(torch.arange(len(hidden), device=device))])[rows]

    def _decode(self, tokens: torch.Tensor, cache: DecodeCache) -> torch.Tensor:
        """Append one token to each sequence; logits of the next, float32 ``[B, V]``."""
        cache.begin_step()
        hidden = self.policy.hidden(tokens[None], cache.length[None], cache)
        cache.end_step()
        return self.policy.head().logits(hidden)


def fill_up(rows: torch.Tensor) -> torch.Tensor:
    """``rows`` and, if they are fewer than ``MIN_ROWS``, the first of them again."""
    missing = max(0, MIN_ROWS - len(rows))
    return torch.cat([rows, rows[:1].expand(missing)]) if missing else rows


def neighbours(prompts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
    """The prompts with equal neighbours merged, and for each prompt which of those it is."""
    distinct: list[np.ndarray] = []
    group: list[int] = []
    previous = b""
    for prompt in prompts:
        current = np.asarray(prompt, dtype=np.int32).tobytes()
        if not distinct or current != previous:
            distinct.append(prompt)
            previous = current
        group.append(len(distinct) - 1)
    return distinct, group


def chunks(prompts: Sequence[np.ndarray], limit: int) -> list[range]:
    """Places of at most ``limit`` requests each; groups (equal neighbours) are split only when larger than that."""
    _, group = neighbours(prompts)
    out: list[range] = []
    start = 0
    while start < len(prompts):
        end = min(start + limit, len(prompts))
        if end < len(prompts) and group[end] == group[end - 1] and group[start] != group[end - 1]:
            end = group.index(group[end])
        out.append(range(start, end))
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
