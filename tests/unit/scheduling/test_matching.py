"""ROCK's matching: weights by hand, the choice among the best, and decisions of a small fleet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.rock import FreeWorker, choose_worker, match_weights
from giornata.wire.workers import Tier
from giornata_lab.simulation.rock_kinds import affinity


def test_the_weight_by_hand() -> None:
    """0.6 · 0.5 + 0.3 · (1 - |0.4 - 0.7|) + 0.1 · 2 s / 4 s."""
    found = match_weights([FreeWorker("w", 0.5, 0.4, 4000.0), FreeWorker("best", 1.0, 0.7, 2000.0)])
    assert found == {"w": pytest.approx(0.3 + 0.21 + 0.05), "best": pytest.approx(1.0)}
    assert match_weights([FreeWorker("w", 0.0, 0.0, 0.0)]) == {"w": pytest.approx(0.09 + 0.1)}, (
        "nothing is to be computed"
    )


def test_affinity_counts_what_is_on_the_device() -> None:
    held = {"a": Tier.DEVICE, "b": Tier.MEMORY, "c": Tier.DISK}
    assert affinity({"a", "b", "d", "c"}, held) == 0.25
    assert affinity(set(), held) == 0.0


def test_of_the_three_best_the_least_utilised_is_chosen() -> None:
    workers = [
        FreeWorker("a", 1.0, 0.7, 1000.0),
        FreeWorker("b", 0.9, 0.6, 1000.0),
        FreeWorker("c", 0.8, 0.5, 1000.0),
        FreeWorker("d", 0.0, 0.0, 1000.0),
    ]
    assert sorted(match_weights(workers), key=match_weights(workers).__getitem__) == ["d", "c", "b", "a"]
    best = choose_worker(workers)
    assert best is not None
    assert best.name == "c"
    assert choose_worker([]) is None


@given(
    st.lists(
        st.builds(
            FreeWorker, st.text("abc", min_size=1), st.floats(0, 1), st.floats(0, 1), st.floats(1, 1e6)
        ),
        min_size=1,
        max_size=8,
        unique_by=lambda worker: worker.name,
    )
)
def test_weights_lie_between_nothing_and_one_and_the_chosen_one_is_among_the_best(
    workers: list[FreeWorker],
) -> None:
    weighed = match_weights(workers)
    assert all(0 <= value <= 1 + 1e-9 for value in weighed.values())
    best = choose_worker(workers)
    assert best is not None
    assert sum(value > weighed[best.name] for value in weighed.values()) < 3
    assert choose_worker(list(reversed(workers))) == best
