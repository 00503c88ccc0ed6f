"""Drawn clusters of hosts and devices, their adapters, and what jobs have asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from giornata.residency.use_based import AdapterTier, AdapterUsage, ResidencySnapshot, TierKind, Wanted

ADAPTERS = tuple(f"{number:02d}" * 2 for number in range(24))


@dataclass(frozen=True)
class Drawn:
    """A cluster, and jobs: the time of each and its adapters."""

    observed: ResidencySnapshot
    jobs: tuple[tuple[float, frozenset[str]], ...]

    @property
    def uses(self) -> AdapterUsage:
        uses = AdapterUsage()
        for at_s, asked in self.jobs:
            uses.see(asked, at_s)
        return uses


@st.composite
def drawn(draw: st.DrawFn, hosts: int = 5) -> Drawn:
    sizes = {digest: draw(st.integers(1, 100)) for digest in ADAPTERS}
    some = st.frozensets(st.sampled_from(ADAPTERS), max_size=10)
    places = []
    for number in range(draw(st.integers(1, hosts))):
        host = f"host-{number}"
        for name, kind in ((host, TierKind.HOST), (f"device-{number}", TierKind.DEVICE)):
            held = {digest: sizes[digest] for digest in sorted(draw(some))}
            places.append(
                AdapterTier(
                    name,
                    kind,
                    host,
                    budget_bytes=draw(st.integers(0, 400)),
                    held=held,
                    bytes_per_s=draw(st.sampled_from((1e7, 1e8, 1e9))),
                    latency_s=draw(st.sampled_from((0.0, 1e-6))),
                )
            )
    asked = st.frozensets(st.sampled_from(ADAPTERS), min_size=1, max_size=3)
    times = st.floats(0.0, 100.0, allow_nan=False)
    jobs = draw(st.lists(st.tuples(times, asked), max_size=60))
    observed = ResidencySnapshot(tuple(places), sizes, pinned=draw(some), registered=draw(some))
    return Drawn(observed, tuple(sorted(jobs, key=lambda job: job[0])))


def applied(observed: ResidencySnapshot, wanted: Wanted) -> ResidencySnapshot:
    """The cluster once every place has what is wanted of it, and nothing else."""
    places = (
        replace(place, held=_sized(observed.sizes, wanted[place.name])) if place.name in wanted else place
        for place in observed.places
    )
    return replace(observed, places=tuple(places))


def _sized(sizes: Mapping[str, int], digests: tuple[str, ...]) -> dict[str, int]:
    return {digest: sizes[digest] for digest in digests}
