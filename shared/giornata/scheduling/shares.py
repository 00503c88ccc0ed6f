"""Whose turn it is among flows of jobs: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Pure.

Every flow, such as a tenant, has a start tag: the virtual time at which its next work begins. The flow with the least
tag is next, and what it is served moves its tag on by the work over its weight. So a tenant with a thousand jobs delays
another tenant's single job by about one job, and the order of a tenant's own jobs is free. A job that leaves unserved
costs its flow nothing.

Virtual time moves on by the work over the weights of all flows that wait, and is never before the least of their tags
(WF2Q+, Bennett and Zhang, INFOCOM 1996). It passes every tag in the end: no stream of new flows starves an old one, and
no flow is remembered for ever.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, Generic, NamedTuple, TypeVar

F = TypeVar("F", bound=Hashable)

VOID: Final = 64
"""So many void entries may there be beside as many as are needed."""


class _StartTag(NamedTuple, Generic[F]):
    """Where the next work of a flow begins."""

    tag: float
    ticket: int
    """Of equal tags the older one comes first."""
    flow: F


class FairShares(Generic[F]):
    """The start tags of flows that wait, and of flows that had more than their share lately; operations in O(log n)."""

    def __init__(self) -> None:
        self._virtual = 0.0
        self._places: dict[F, _StartTag[F]] = {}
        self._waiting: dict[F, tuple[int, float]] = {}
        """How many jobs of a flow wait, and its weight."""
        self._weights = 0.0
        """Their sum."""
        self._heap: list[_StartTag[F]] = []
        """Places of flows that wait, and void ones."""
        self._tickets = count()
        self._most = VOID
        """With more places than these, void ones are dropped."""

    def __len__(self) -> int:
        return max(len(self._places), len(self._heap))

    def tag(self, flow: F) -> float:
        """Where the next work of a flow that waits begins, in virtual time."""
        return self._places[flow].tag

    def first(self) -> F | None:
        """The flow with the least tag; None where none waits."""
        while self._heap:
            place = self._heap[0]
            if place.flow in self._waiting and self._places[place.flow] is place:
                return place.flow
            heappop(self._heap)
        return None

    def join(self, flow: F, weight: float) -> None:
        """One more job of `flow` waits; `weight`, above 0, is the flow's from now on."""
        jobs, before = self._waiting.get(flow, (0, 0.0))
        first, known = self.first(), self._places.get(flow)
        self._waiting[flow] = jobs + 1, weight
        self._weights += weight - before
        if not jobs:
            self._virtual = max(self._virtual, 0.0 if first is None else self.tag(first))
            self._stand(flow, max(self._virtual, known.tag if known else 0.0))

    def leave(self, flow: F) -> None:
        """One job of `flow` waits no longer, served or not."""
        jobs, weight = self._waiting.pop(flow)
        if jobs > 1:
            self._waiting[flow] = jobs - 1, weight
        else:
            self._weights = self._weights - weight if self._waiting else 0.0  # no rounding adds up

    def charge(self, flow: F, work: float) -> None:
        """Serve `work` of a flow that waits."""
        self._virtual += work / self._weights
        self._stand(flow, self.tag(flow) + work / self._waiting[flow][1])

    def _stand(self, flow: F, tag: float) -> None:
        place = self._places[flow] = _StartTag(tag, next(self._tickets), flow)
        heappush(self._heap, place)
        if len(self) > self._most:
            known = self._places.items()
            kept = {f: at for f, at in known if f in self._waiting or at.tag > self._virtual}
            self._places, self._heap = kept, list(kept.values())
            heapify(self._heap)
            self._most = 2 * len(self._places) + VOID
