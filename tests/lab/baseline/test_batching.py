"""The baseline's batches: alike, full or late, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from giornata_lab.baseline.server import BatchCandidate, BatchPolicy, next_batch


@given(
    kinds=st.lists(st.sampled_from("abc"), max_size=20),
    size=st.integers(1, 5),
    window_s=st.floats(0, 2),
    now=st.floats(0, 4),
)
def test_rows_of_a_batch_are_alike_and_the_first_of_their_kind(
    kinds: list[str], size: int, window_s: float, now: float
) -> None:
    waiting = [BatchCandidate(kind, 0.0) for kind in kinds]
    places = list(map(waiting.index, next_batch(waiting, BatchPolicy(size, window_s), now)))
    assert len(places) <= size
    if places:
        kind = kinds[places[0]]
        assert places == [place for place, other in enumerate(kinds) if other == kind][: len(places)]
        assert len(places) == min(size, kinds.count(kind))
    elif kinds:
        assert now < window_s
        assert max(map(kinds.count, kinds)) < size
    if kinds and now >= window_s:
        assert places[0] == 0, "who came first goes first once it has waited"
