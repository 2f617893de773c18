"""The cache of an engine comes back when all ranks have let go of weights and buffers, and old entries are gone."""

import threading
import time

import numpy as np
import pytest
import torch
from sync_cases import TIED, HeldTensors, context, engine, pair, rank_in_process, weights

from crossrl.sync.barrier import RELEASED, Barrier, BarrierRank, resume_cache
from crossrl.sync.messages import SyncError

RANKS = ["rank-0", "rank-1", "rank-2"]


def run_ranks(tmp_path, late_s: float, limit_s: float):  # type: ignore[no-untyped-def]
    """Three ranks as processes, the last of them late; (what the controller raised or None, answers by rank)."""
    barrier = Barrier(f"ipc://{tmp_path}/b", RANKS)
    answers = context().Queue()
    started = [
        context().Process(
            target=rank_in_process,
            args=(barrier.address, name, late_s if name == "rank-2" else 0.0, limit_s + 30, answers), daemon=True,
        )
        for name in RANKS
    ]  # fmt: skip
    for process in started:
        process.start()
    error = None
    try:
        barrier.open("v1", RELEASED, limit_s)
    except SyncError as caught:
        error = caught
    try:
        waiting = RANKS if error is None else RANKS[:2]
        return error, {name: (what, times) for name, what, times in (answers.get(timeout=20) for _ in waiting)}
    finally:
        barrier.close()
        for process in started:
            process.kill()
            process.join(10)


def test_c15_the_cache_is_resumed_only_after_the_rank_that_is_one_second_late_has_released(tmp_path) -> None:
    error, answers = run_ranks(tmp_path, late_s=1.0, limit_s=20)
    assert error is None and {what for what, _ in answers.values()} == {"resumed"}
    released = max(times["released"] for _, times in answers.values())
    assert min(times["resumed"] for _, times in answers.values()) > released


def test_c15_a_rank_that_never_releases_is_named_with_its_phase_to_everybody_and_nothing_is_resumed(tmp_path) -> None:
    started = time.monotonic()
    error, answers = run_ranks(tmp_path, late_s=600, limit_s=4)
    assert time.monotonic() - started < 2 * 4 + 4
    said = "rank-2 is late: it last reported 'releasing weights and buffers'"
    assert said in str(error) and "rank-0" not in str(error)
    assert set(answers) == {"rank-0", "rank-1"}
    for what, times in answers.values():
        assert said in what and "resumed" not in times


def test_c15_control_a_rank_that_does_not_wait_for_the_others_resumes_too_early(monkeypatch, tmp_path) -> None:
    """The local sync that does not help: the order that the first test asserts is broken then."""
    monkeypatch.setattr(BarrierRank, "wait", lambda self, round, phase, limit_s: self.report(round, phase, waits=True))
    times = {}
    barrier = Barrier(f"ipc://{tmp_path}/b", RANKS[:2])
    ranks = [BarrierRank(barrier.address, name) for name in RANKS[:2]]

    def go(rank: BarrierRank, late_s: float) -> None:
        def released() -> None:
            time.sleep(late_s)
            times[rank.name, "released"] = time.monotonic()

        resume_cache(rank, "v1", released, lambda: times.update({(rank.name, "resumed"): time.monotonic()}), 5)

    threads = [threading.Thread(target=go, args=(r, 0.3 * i)) for i, r in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert times["rank-0", "resumed"] < times["rank-1", "released"]
    for end in (*ranks, barrier):
        end.close()


def in_threads(tmp_path, *releases, rounds=("v1",), limit_s=2.0):  # type: ignore[no-untyped-def]
    """What the controller raised in each round, for ranks that do ``releases``."""
    barrier = Barrier(f"ipc://{tmp_path}/b", RANKS[: len(releases)])
    ranks = [BarrierRank(barrier.address, name) for name in RANKS[: len(releases)]]
    errors = []

    def go(rank: BarrierRank, release, round: str) -> None:  # type: ignore[no-untyped-def]
        try:
            resume_cache(rank, round, lambda: release(round), lambda: None, 10)
        except Exception as error:
            errors.append(str(error))

    said = []
    for round in rounds:
        threads = [threading.Thread(target=go, args=(r, f, round)) for r, f in zip(ranks, releases, strict=True)]
        for thread in threads:
            thread.start()
        try:
            barrier.open(round, RELEASED, limit_s)
            said.append("")
        except SyncError as error:
            said.append(str(error))
        for thread in threads:
            thread.join(20)
    for end in (*ranks, barrier):
        end.close()
    return said, errors


def test_an_error_while_releasing_reaches_the_controller_and_all_ranks_and_the_next_round_goes_well(tmp_path) -> None:
    def release(round: str) -> None:
        if round == "v1":
            raise ValueError("the handle is still open")

    said, errors = in_threads(tmp_path, lambda _: None, release, rounds=("v1", "v2"))
    assert said[0].startswith("rank-1 failed at 'releasing weights and buffers': ValueError: the handle is still open")
    assert said[1] == ""
    assert any("rank-0 was not let past" in e and "the handle is still open" in e for e in errors)


def test_a_rank_that_died_is_noticed_at_once(tmp_path) -> None:
    barrier = Barrier(f"ipc://{tmp_path}/b", ["rank-0"])
    answers = context().Queue()
    process = context().Process(target=rank_in_process, args=(barrier.address, "rank-0", 600, 600, answers))
    process.start()
    threading.Timer(3.0, process.kill).start()
    try:
        with pytest.raises(SyncError, match=r"rank-0 (has died before|is late)"):
            barrier.open("v1", RELEASED, 30)
    finally:
        barrier.close()
        process.kill()
        process.join(10)


# Entries of the cache that were computed with old weights


class Caching(HeldTensors):
    """Scores a prompt with ``embed`` and remembers the score, as a prefix cache does."""

    forgets = True

    def __init__(self, *args, **how) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args, **how)
        self.cache: dict[tuple[int, ...], float] = {}

    def score(self, prompt: tuple[int, ...]) -> float:
        if prompt not in self.cache:
            self.cache[prompt] = fresh(self.tensors, prompt)
        return self.cache[prompt]

    def clear_prefix_cache(self) -> str:
        if self.forgets:
            count = len(self.cache)
            self.cache = {}
            return f"{count} entries"
        return "0 entries"


def fresh(tensors, prompt: tuple[int, ...]) -> float:  # type: ignore[no-untyped-def]
    logits = tensors["embed"][list(prompt)].sum(0) @ tensors["embed"].t()
    return float(torch.log_softmax(logits, 0)[prompt[0]])


@pytest.mark.parametrize("forgets", [True, False])
def test_c15_a_prompt_that_was_cached_under_old_weights_is_scored_with_the_new_and_the_clearing_is_recorded(
    monkeypatch, forgets
) -> None:
    """With the control: an engine that does not forget gives the old score."""
    monkeypatch.setattr(Caching, "forgets", forgets)
    held = engine(Caching)
    assert held.tied == TIED
    with pair(held) as one:
        one.send(weights(1), 1)
        old = held.score((1, 2, 3))
        sent = one.send(weights(2), 2)
        assert sent.prefix_caches == {"engine-0": "1 entries" if forgets else "0 entries"}
    expected = fresh(weights(2), (1, 2, 3))
    assert not np.isclose(old, expected)
    assert (held.score((1, 2, 3)) == expected) is forgets
