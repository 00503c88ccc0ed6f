"""Which bytes of a slab are taken. Values in, values out: the memory itself is the caller's."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from giornata.wire.control_steps import ALIGNMENT_BYTES


def aligned(size_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class RingAllocator:
    """Places of any length in `size_bytes` bytes, taken one behind the other and given back in any order.

    A search begins behind the last place and goes around once. It also finds what lies between places that are still
    taken, so a place that is kept for long holds up nobody.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._taken: list[tuple[int, int]] = []
        """(start, end) of each place, in order."""
        self._next = 0
        """Where the last place ends."""

    def take(self, size_bytes: int) -> int | None:
        """The offset of a new place, a multiple of the alignment; None where there is no room.

        Raises:
            ValueError: a place of less than one byte.
        """
        if size_bytes < 1:
            raise ValueError(f"a place has at least one byte, not {size_bytes}")
        length = aligned(size_bytes)
        fitting = [start for start, end in self._gaps() if start + length <= end]
        if not fitting:
            return None
        start = min(fitting, key=lambda each: (each < self._next, each))
        insort(self._taken, (start, start + length))
        self._next = start + length
        return start

    def give_back(self, offset: int) -> None:
        """The place at `offset` may be taken again.

        Raises:
            ValueError: no place begins there.
        """
        for index, (start, _) in enumerate(self._taken):
            if start == offset:
                del self._taken[index]
                return
        raise ValueError(f"no place begins at byte {offset}")

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """(start, end) of what is free; a gap around the next place's start also from there."""
        begins = [0, *(end for _, end in self._taken)]
        ends = [*(start for start, _ in self._taken), self.size_bytes]
        for start, end in zip(begins, ends, strict=True):
            yield start, end
            if start < self._next < end:
                yield self._next, end
