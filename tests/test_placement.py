"""Who computes where, worked out without starting anything."""

from __future__ import annotations

import pytest

from crossrl.cluster.ray import ClusterError, slot_of


@pytest.mark.parametrize(
    ("count", "slots", "expected"),
    [
        (4, 4, [0, 1, 2, 3]),  # rank i and engine i share a slot
        (2, 4, [0, 2]),  # two machines of two slots: one engine on each
        (8, 16, [0, 2, 4, 6, 8, 10, 12, 14]),
        (3, 4, [0, 1, 2]),
        (1, 4, [0]),
    ],
)
def test_workers_of_a_kind_are_spread_over_all_machines(count: int, slots: int, expected: list[int]) -> None:
    assert [slot_of(f"rollout-{i}", {"rollout": count}, slots) for i in range(count)] == expected


def test_a_worker_that_no_room_was_asked_for_is_refused() -> None:
    for name in ("rollout-2", "critic-0"):
        with pytest.raises(ClusterError, match=f"worker {name} is none of those"):
            slot_of(name, {"rollout": 2}, 4)
