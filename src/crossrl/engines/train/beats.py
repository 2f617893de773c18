"""Signs of life of ranks: where each of them is, so that the one that others wait for can be named."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

BEAT_S = 0.5
CONNECT_S = 60.0


def listen(host: str) -> tuple[dist.TCPStore, str]:
    """A store on this machine at which ranks meet, and its address for them, under which they reach ``host``."""
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_S))
    return store, f"{host}:{store.port}"


def connect(address: str) -> dist.TCPStore:
    """The store at ``address``. Raises ``dist.DistNetworkError`` if nobody is there for ``CONNECT_S``."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=CONNECT_S))


class Beats:
    """Tells the store at ``address``, twice a second from a thread, how far ``rank`` is. A process that is stopped
    stops telling; one that hangs tells the same place again and again."""

    def __init__(self, address: str, rank: int) -> None:
        self._store, self._key = connect(address), f"beat/{rank}"  # a connection of its own: others may block
        self._place, self._count = "start", 0
        self._over = threading.Event()
        self._tell(0)
        self._thread = threading.Thread(target=self._run, name="crossrl-beats", daemon=True)
        self._thread.start()

    def at(self, place: str) -> None:
        """The next place of this rank; all ranks come to the same places in the same order."""
        self._count += 1
        self._place = place

    def close(self) -> None:
        self._over.set()
        self._thread.join(2 * BEAT_S)

    def _run(self) -> None:
        beat = 0
        while not self._over.wait(BEAT_S):
            beat += 1
            try:
                self._tell(beat)
            except (RuntimeError, OSError):  # the driver, which has the store, is gone: nobody to tell
                return

    def _tell(self, beat: int) -> None:
        self._store.set(self._key, f"{beat}|{self._count}|{self._place}")


def behind(store: dist.Store, ranks: Sequence[int]) -> tuple[list[int], str]:
    """Which of ``ranks`` the others wait for, as far as their beats say, and a sentence about all that are late.

    Waits for: two beats of each. Limit: 4 beats."""
    first = {rank: _beat(store, rank) for rank in ranks}
    time.sleep(4 * BEAT_S)
    now = {rank: _beat(store, rank) for rank in ranks}
    stopped = [r for r in ranks if now[r][0] == first[r][0]]
    if stopped:
        return stopped, "; ".join(f"rank {r} gives no sign of life (last at: {now[r][2]})" for r in stopped)
    least = min(count for _, count, _ in now.values())
    last = [r for r in ranks if now[r][1] == least]
    places = "; ".join(f"rank {r} is at: {now[r][2]}" for r in ranks)
    return last, places


def _beat(store: dist.Store, rank: int) -> tuple[int, int, str]:
    key = f"beat/{rank}"
    if not store.check([key]):
        return -1, -1, "not started"
    beat, count, place = store.get(key).decode().split("|", 2)
    return int(beat), int(count), place
