"""Whether an engine may be used now, and if not, why: what every rollout engine says in the same words."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from crossrl.engines.base import EngineError, Sampling


class Condition:
    """``asleep``; ``unusable`` (with a reason: ``because``) since an update was begun that has not succeeded; and
    whether the call that runs now is to end early.

    ``abort`` may be called by any thread, the rest by one thread at a time.
    """

    def __init__(self) -> None:
        self.asleep, self.unusable, self.because = False, False, ""
        self.broken = ""  # why nothing but a new start helps
        self._lock = threading.Lock()
        self._running, self._aborted = "", False

    def update_begun(self) -> None:
        self.unusable, self.because = True, ""

    def update_failed(self, reason: str) -> None:
        self.unusable, self.because = True, reason

    def update_succeeded(self) -> None:
        self.unusable, self.because = False, ""

    def require_awake(self, what: str) -> None:
        """Raises ``EngineError`` while asleep, and for ever once broken."""
        if self.broken:
            raise EngineError(f"{what}: {self.broken}; start the engine again")
        if self.asleep:
            raise EngineError(f"{what}: the engine is asleep; call wake() first")

    def require_usable(self, what: str) -> None:
        """Raises ``EngineError`` while asleep, or while the weights may be a mixture of two versions."""
        self.require_awake(what)
        if self.unusable:
            why = f" ({self.because})" if self.because else ""
            raise EngineError(f"a weight update was begun and has not succeeded; the weights may be a mixture{why}")

    @contextmanager
    def running(self, what: str) -> Iterator[None]:
        """The time in which ``abort`` has an effect."""
        with self._lock:
            self._running, self._aborted = what, False
        try:
            yield
        finally:
            with self._lock:
                self._running, self._aborted = "", False

    def abort(self) -> str:
        """End what runs now; in words what that is. Nothing is left behind for the next call. Waits for: nothing."""
        with self._lock:
            self._aborted = bool(self._running)
            return f"{self._running} is being aborted" if self._running else "nothing was running"

    @property
    def aborted(self) -> bool:
        return self._aborted

    def check_abort(self, done: int, total: int) -> None:
        """Raises ``EngineError`` if ``abort`` was called since ``running`` began."""
        if self._aborted:
            raise EngineError(
                f"{self._running} was aborted when {done} of {total} responses were finished; none of them is returned"
            )


def check_requests(
    prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: Sampling, positions: int | None, whose: str
) -> None:
    """Raises ``EngineError`` for what cannot be generated: ``positions`` of ``whose`` ("the model") is the longest
    sequence, prompt and response together, or None."""
    if len(seeds) != len(prompts):
        raise EngineError(f"{len(prompts)} prompts, but {len(seeds)} seeds: want one for each")
    if sampling.max_tokens < 1:
        raise EngineError(f"max_tokens is {sampling.max_tokens}, want at least 1")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
        raise EngineError(f"temperature {sampling.temperature} and top_p {sampling.top_p}: want >= 0 and in (0, 1]")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise EngineError(f"prompt {i} has no tokens")
        if positions is not None and len(prompt) + sampling.max_tokens > positions:
            raise EngineError(
                f"prompt {i} has {len(prompt)} tokens; with {sampling.max_tokens} response tokens that is more "
                f"than the {positions} positions of {whose}. Lower max_tokens or shorten the prompt"
            )


def check_scored(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    temperature: float,
    positions: int | None,
    whose: str,
) -> None:
    """Raises ``EngineError`` for what cannot be scored; see ``check_requests``."""
    if len(prompts) != len(responses):
        raise EngineError(f"{len(prompts)} prompts, but {len(responses)} responses: want one for each")
    if not temperature > 0:
        raise EngineError(f"score: temperature is {temperature}, want more than 0")
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if len(prompt) == 0:
            raise EngineError(f"prompt {i} has no tokens")
        if positions is not None and len(prompt) + len(response) > positions:
            raise EngineError(
                f"prompt {i} and its response have {len(prompt) + len(response)} tokens, more than the {positions} "
                f"positions of {whose}"
            )
