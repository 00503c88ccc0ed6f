"""What every plan does to a place: pinned adapters come first, and the rest fits into what is left. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from giornata.residency.plans.values import AdapterTier, ResidencySnapshot, TierKind


class AdapterSelection:
    """The adapters that a place should have, most wanted first, as they are chosen.

    Args:
        place: what is filled.
        sizes: bytes of every adapter of the catalogue.
        pinned: what comes first, as far as it fits.
        share: part of the budget that the others may fill.
    """

    def __init__(
        self, place: AdapterTier, sizes: Mapping[str, int], pinned: Iterable[str] = (), share: float = 1.0
    ) -> None:
        self.place, self._sizes = place, sizes
        self._chosen: dict[str, None] = {}
        self._left_bytes = place.budget_bytes
        for digest in sorted(pinned):
            self.take(digest)
        self._left_bytes -= int(place.budget_bytes * (1.0 - share))

    @property
    def chosen(self) -> tuple[str, ...]:
        """What was taken, in order."""
        return tuple(self._chosen)

    def __contains__(self, digest: object) -> bool:
        return digest in self._chosen

    def fits(self, digest: str) -> bool:
        """Whether there is room for it."""
        return digest in self._sizes and self._sizes[digest] <= self._left_bytes

    def take(self, digest: str) -> bool:
        """Choose an adapter; whether it is chosen, now or before."""
        if digest in self._chosen:
            return True
        if not self.fits(digest):
            return False
        self._chosen[digest] = None
        self._left_bytes -= self._sizes[digest]
        return True


def pins_of(place: AdapterTier, observed: ResidencySnapshot) -> frozenset[str]:
    """Adapters that the catalogue pins to this place: hosts keep them, devices take them as jobs need them."""
    return observed.pinned if place.kind is TierKind.HOST else frozenset()
