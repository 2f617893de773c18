"""Several equal rollout engines, each in its own process, as one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crossrl.batch import Ragged
from crossrl.cluster.worker import Launcher, Pending, Worker, WorkerDied, WorkerError, WorkerLate, close_all, collect
from crossrl.engines.base import EngineError, Generation, Sampling
from crossrl.engines.rollout.hf import neighbours
from crossrl.engines.rollout.remote import FACTORY, RemoteEngine
from crossrl.engines.rollout.spec import EngineSpec, environment


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """``count``: how many. ``gpus``: of each. ``sleeps``: give the memory back between calls of generation.
    ``start_s``, ``call_s``: limits of starting and of one call. ``plant``: a fault for each of them (``cross.plant``).
    """

    count: int = 1
    gpus: float = 0.0
    sleeps: bool = False
    start_s: float = 600.0
    call_s: float = 3600.0
    plant: str = ""


class Replicas:
    """Generates with all of them. Group ``g`` of a call (equal neighbours among the prompts) goes to replica
    ``g % count``, so that the sample ids alone, and no completion order, decide who computes what.

    A replica that dies, hangs longer than ``call_s`` or loses a response is ended, and its share goes to the others;
    the next weight transfer starts it anew (``revive``). ``take_notes``: what happened, for the user.
    Without any left, generation is an ``EngineError``. They are started by the constructor; call ``wait`` before use.
    """

    def __init__(self, launcher: Launcher, spec: EngineSpec, options: ReplicaOptions, env: Mapping[str, str]) -> None:
        self.launcher, self.spec, self.options, self._base = launcher, spec, options, env
        self.weight_version = 0
        self.notes: list[str] = []
        self._asleep = False
        self._engines: dict[int, RemoteEngine] = {}
        self._lost: set[int] = set()
        self._starting = self._launch(range(options.count))
        self.name, self.cast, self.notice = spec.name, None, ""

    def wait(self) -> None:
        """For all to have started, each of which takes as long as its imports and its model. Limit: ``start_s``."""
        workers, self._starting = self._starting, {}
        try:
            collect([w.born for w in workers.values()], "start", self.options.start_s)
            facts = collect([w.start("facts") for w in workers.values()], "describe itself", self.options.start_s)
        except BaseException:
            for worker in workers.values():
                worker.kill()
            raise
        for (i, worker), fact in zip(workers.items(), facts, strict=True):
            self._engines[i] = RemoteEngine(worker, fact, self.options.call_s)
            self.cast, self.notice = fact.cast, fact.notice

    @property
    def engines(self) -> list[RemoteEngine]:
        """Those that live."""
        return [engine for i, engine in sorted(self._engines.items()) if i not in self._lost]

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        seeds: Sequence[int],
        sampling: Sampling,
        progress: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """See ``RolloutEngine``. Waits for: all replicas. Limit: ``call_s`` for each share."""
        self.wake()
        self._missing_is_an_error()
        shares = deal(prompts, self.options.count)
        done: dict[int, int] = {}
        parts: list[tuple[np.ndarray, Generation]] = []
        while shares:
            asked = self._ask(shares, prompts, seeds, sampling, progress, done, len(prompts))
            try:
                found = collect([p for _, _, p in asked], "generate", self.options.call_s, keep_going=True)
            except BaseException:  # Ctrl-C: or they would go on for minutes, and closing them wait for it
                for engine in self.engines:
                    engine.worker.now("abort")
                raise
            left: list[np.ndarray] = []
            for (i, share, _), one in zip(asked, found, strict=True):
                if isinstance(one, Generation) and not (problem := self._missing(i, one, len(share))):
                    parts.append((share, one))
                    continue
                if isinstance(one, WorkerError):
                    problem = self._loss(one)
                self._lose(i, problem, len(share))
                left.append(share)
            shares = self._deal_again(left)
        if self.options.sleeps:
            self.sleep()
        return together(parts, len(prompts))

    def _ask(
        self,
        shares: Mapping[int, np.ndarray],
        prompts: Sequence[np.ndarray],
        seeds: Sequence[int],
        sampling: Sampling,
        progress: Callable[[int, int], None] | None,
        done: dict[int, int],
        total: int,
    ) -> list[tuple[int, np.ndarray, Pending]]:
        def report(i: int) -> Callable[[int, int], None]:
            def count(finished: int, _: int) -> None:
                done[i] = finished
                if progress:
                    progress(sum(done.values()), total)

            return count

        asked = []
        for i, share in ((self._alive(i), share) for i, share in shares.items() if len(share)):
            mine = [prompts[k] for k in share], [seeds[k] for k in share]
            asked.append((i, share, self._engines[i].start_generate(*mine, sampling, report(i) if progress else None)))
        return asked

    def _alive(self, i: int) -> int:
        """Who takes the share of replica ``i``: itself, or the next one that lives."""
        self._missing_is_an_error()
        living = sorted(self._engines.keys() - self._lost)
        return i if i in living else living[i % len(living)]

    def _missing(self, i: int, found: Generation, count: int) -> str:
        """What is missing of the share of replica ``i``, or "". Raises ``EngineError`` for other weights."""
        if found.weight_version != self.weight_version:
            raise EngineError(
                f"rollout-{i} generated with weights of version {found.weight_version}, "
                f"the others have version {self.weight_version}"
            )
        have = len(found.response_ids)
        return "" if have == count else f"rollout-{i} gave {have} of {count} responses"

    def _loss(self, error: WorkerError) -> str:
        """How a replica was lost. Raises what every replica would raise."""
        if not isinstance(error, WorkerDied | WorkerLate):
            raise EngineError(str(error)) from error
        return str(error)

    def _deal_again(self, shares: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
        living = sorted(self._engines.keys() - self._lost)
        out: dict[int, np.ndarray] = {}
        for n, share in enumerate(shares):
            i = living[n % len(living)] if living else self._alive(0)
            out[i] = np.concatenate([out[i], share]) if i in out else share
        return out

    def _lose(self, i: int, problem: str, samples: int = 0) -> None:
        self._lost.add(i)
        with contextlib.suppress(Exception):  # it may be gone already
            self._engines[i].worker.kill()
            self._engines[i].worker.close()
        left = len(self._engines) - len(self._lost)
        self.notes.append(
            problem + (f". Its {samples} samples go to the {left} replicas that are left" * bool(samples))
        )

    def _missing_is_an_error(self) -> None:
        if len(self._lost) == len(self._engines):
            raise EngineError("no inference replica is left: " + (self.notes[-1] if self.notes else ""))

    def revive(self, limit_s: float) -> None:
        """Look who still lives (``limit_s``: to say so), and start anew whatever was lost; that has no weights of this
        run until a transfer brings them."""
        self._all("ping", "say that it lives", limit_s)
        if self._lost:
            lost = sorted(self._lost)
            self._starting = self._launch(lost)
            self.wait()
            self._lost.clear()
            self.notes.append(f"started anew: {', '.join(f'rollout-{i}' for i in lost)}")

    def _launch(self, numbers: Iterable[int]) -> dict[int, Worker]:
        env, options = environment(self.spec, self._base), self.options
        return {
            i: self.launcher.start(
                f"rollout-{i}", FACTORY, f"rollout-{i}", self.spec, options.plant, env=env, gpus=options.gpus
            )
            for i in numbers
        }

    def score(self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], temperature: float) -> Ragged:
        """See ``RolloutEngine``: by the first replica that lives."""
        self.wake()
        self._missing_is_an_error()
        return self.engines[0].score(prompts, responses, temperature)

    def take_notes(self) -> list[str]:
        """What happened since this was asked last."""
        notes, self.notes = self.notes, []
        return notes

    def sleep(self) -> None:
        """See ``RolloutEngine``: all of them."""
        self._all("sleep", "go to sleep")
        self._asleep = True

    def wake(self) -> None:
        """See ``RolloutEngine``. Nothing where they are awake."""
        if self._asleep:
            self._all("wake", "wake up")
            self._asleep = False

    def _all(self, method: str, what: str, limit_s: float | None = None) -> None:
        """Call ``method`` of all that live; one that does not answer is lost, and the others go on."""
        living = {i: e for i, e in self._engines.items() if i not in self._lost}
        calls = [engine.worker.start(method) for engine in living.values()]
        for i, found in zip(living, collect(calls, what, limit_s or self.options.call_s, keep_going=True), strict=True):
            if isinstance(found, WorkerError):
                self._lose(i, self._loss(found))

    def close(self) -> None:
        close_all([*self._starting.values(), *(engine.worker for engine in self._engines.values())])


def deal(prompts: Sequence[np.ndarray], count: int) -> dict[int, np.ndarray]:
    """Replica to the positions of its prompts: whole groups in turn, so that shares differ by a group at most.

    >>> deal([np.array([1]), np.array([1]), np.array([2]), np.array([3])], 2)
    {0: array([0, 1, 3]), 1: array([2])}
    """
    _, group = neighbours(prompts)
    of = np.asarray(group, dtype=np.int64) % count
    return {i: np.flatnonzero(of == i) for i in range(count)}


def together(parts: Sequence[tuple[np.ndarray, Generation]], total: int) -> Generation:
    """One generation of ``total`` responses, in the order of the requests, from shares of it.

    Raises ``EngineError`` unless every position is there once, and all shares mean the same.
    """
    if not parts:
        raise EngineError("there was nothing to generate")
    places = np.concatenate([where for where, _ in parts])
    if not np.array_equal(np.sort(places), np.arange(total)):
        raise EngineError(f"{total} responses were asked for, the replicas answered {len(set(places.tolist()))}")
    first = parts[0][1]
    if any(part.meaning != first.meaning for _, part in parts):
        raise EngineError(f"the replicas' log-probs have different meanings: {[p.meaning for _, p in parts]}")
    order = np.argsort(places)

    def joined(columns: Sequence[Ragged]) -> Ragged:
        whole = Ragged(np.concatenate([c.values for c in columns]), np.concatenate([c.lengths for c in columns]))
        return whole.take(order)

    reasons = [reason for _, part in parts for reason in part.finish_reason]
    return Generation(
        response_ids=joined([part.response_ids for _, part in parts]),
        log_probs=joined([part.log_probs for _, part in parts]),
        finish_reason=[reasons[i] for i in order],
        meaning=first.meaning,
        weight_version=first.weight_version,
    )
