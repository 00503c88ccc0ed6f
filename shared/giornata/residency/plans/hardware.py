"""Clusters of places by their hardware, as ROCK makes them (section 4). Imports scikit-learn where it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from giornata.residency.plans.values import AdapterTier

RADIUS: Final = 0.25
NEIGHBOURS: Final = 6
"""Radius and neighbours of DBSCAN, `eps` and `min_samples`, as published."""
LEAST_PLACES: Final = 12
"""Fewer are one cluster: two of them could not both have a core."""


def clusters(places: Sequence[AdapterTier]) -> list[list[AdapterTier]]:
    """Places by cluster: DBSCAN over budget, bandwidth and speed, each scaled to [0, 1]; noise is a cluster, too.

    Totals, not what is free: with that, places of one kind would be noise. In the order of the places' names.
    """
    known = sorted(places, key=lambda place: place.name)
    if len(known) < LEAST_PLACES:
        return [known] if known else []
    import numpy as np  # noqa: PLC0415 - with the extra alone, as the next
    from sklearn.cluster import DBSCAN  # noqa: PLC0415 - takes seconds

    totals = np.array([(place.budget_bytes, place.bytes_per_s, place.speed) for place in known], float)
    span = np.ptp(totals, axis=0)
    scaled = (totals - totals.min(0)) / np.where(span > 0, span, 1.0)
    labels = DBSCAN(eps=RADIUS, min_samples=NEIGHBOURS).fit(scaled).labels_
    found: dict[int, list[AdapterTier]] = {}
    for place, label in zip(known, labels, strict=True):
        found.setdefault(int(label), []).append(place)
    return [found[label] for label in sorted(found)]
