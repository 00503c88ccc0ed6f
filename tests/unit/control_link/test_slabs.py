"""Places of a slab, against a model that looks at every unit of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.control.link.slabs import SlabAllocator, align_up
from giornata.wire.controlnets import ALIGNMENT_BYTES

UNITS = 12


class Model:
    """Which units of the slab are taken, one by one."""

    def __init__(self) -> None:
        self.owners: list[int | None] = [None] * UNITS

    def has_room(self, units: int) -> bool:
        return any(
            all(owner is None for owner in self.owners[start : start + units])
            for start in range(UNITS - units + 1)
        )

    def mark(self, offset: int, units: int, owner: int | None) -> None:
        start = offset // ALIGNMENT_BYTES
        before = {owner is not None for owner in self.owners[start : start + units]}
        assert before == {owner is None}, (
            "a place is taken where all is free, and given back where all is taken"
        )
        self.owners[start : start + units] = [owner] * units


@given(st.lists(st.tuples(st.booleans(), st.integers(1, UNITS * ALIGNMENT_BYTES + 1)), max_size=60))
def test_places_never_overlap_and_are_refused_only_where_no_gap_is_long_enough(
    turns: list[tuple[bool, int]],
) -> None:
    ring, model = SlabAllocator(UNITS * ALIGNMENT_BYTES), Model()
    held: list[tuple[int, int]] = []
    for number, (gives_back, size) in enumerate(turns):
        if gives_back and held:
            offset, units = held.pop(size % len(held))
            ring.give_back(offset)
            model.mark(offset, units, None)
            continue
        units, offset_or_none = align_up(size) // ALIGNMENT_BYTES, ring.take(size)
        assert (offset_or_none is not None) == model.has_room(units)
        if offset_or_none is not None:
            assert offset_or_none % ALIGNMENT_BYTES == 0
            assert 0 <= offset_or_none <= ring.size_bytes - size
            model.mark(offset_or_none, units, number)
            held.append((offset_or_none, units))
    for offset, _ in held:
        ring.give_back(offset)
    assert ring.take(ring.size_bytes) == 0, "all that was given back is one place again"


def test_what_is_no_place_is_refused() -> None:
    ring = SlabAllocator(1000)
    with pytest.raises(ValueError, match="at least one byte"):
        ring.take(0)
    ring.take(100)
    with pytest.raises(ValueError, match="byte 64"):
        ring.give_back(64)
    ring.give_back(0)
    with pytest.raises(ValueError, match="byte 0"):
        ring.give_back(0)
