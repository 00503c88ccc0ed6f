"""What steps of a row keep of its tokens outside of a region, and which steps keep it."""

from __future__ import annotations

from giornata.control.protocol import ControlNet
from giornata.packed.region import Region


class Renewals:
    """Which steps of one row compute all of its tokens: those that have to, and one in `every`; 0 is all.

    Others compute a region alone, with keys and values that the last such step kept of the rest.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._last: tuple[int, tuple[bool, ...]] | None = None
        """The last step that computed all tokens, and which ControlNets acted; None before the first."""

    def due(self, step: int, acting: tuple[bool, ...], *, whole: bool) -> bool:
        """Whether a step computes all tokens, which is noted. One that is computed again decides alike.

        Args:
            step: of the row.
            acting: by ControlNet, whether it acts in the step.
            whole: whether all tokens are asked for.
        """
        since = step - self._last[0] if self._last is not None and self._last[1] == acting else 0
        if not whole and 0 < since < self._every:
            return False
        self._last = step, acting
        return True


def keeping(net: ControlNet, opened: object, sequences: int, region: Region) -> tuple[object, ...]:
    """By sequence, where steps keep what lies outside of a region; empty where the ControlNet can keep nothing."""
    kept = (net.keeping(opened, sequence, region) for sequence in range(sequences))
    return tuple(each for each in kept if each is not None)
