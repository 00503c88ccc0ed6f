"""Giving workers to those who wait: who is served next, who passes whom, and for whom a worker is kept free. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from giornata.scheduling.demand import Demand, RowShape
from giornata.scheduling.line import Entry, Line
from giornata.scheduling.placement import Placement

MAX_PASSED: Final = 32
"""Jobs served before an older one that needs more room than they; after these a worker is kept free for it."""
MAX_CHOOSY: Final = 16
"""Jobs that may wait for a better worker while others are asked; a bound on the time that serving takes."""
ROW: Final = RowShape(text=0, image=1, computed=1, steps=1)
"""The least that a job asks for."""


def anybody(line: Line, placement: Placement, refused: Collection[str] = ()) -> bool:
    """Whether anybody could be served at all; while many wait, nearly every message of a worker says no.

    Then nobody need be put in order. It holds for policies that choose among workers with room.
    """
    return any(placement.has_room(Demand(*model, (ROW,)), refused) for model in line.models)


def serve(
    line: Line, placement: Placement, now: float, refused: Collection[str] = ()
) -> Iterator[tuple[Entry, str]]:
    """Who gets which worker now, in order. Assign each before the next is asked for.

    A job that no worker has room for lets later, smaller ones pass, but only :data:`MAX_PASSED` of them: then the
    worker that is empty first is kept for it. A job that waits although there is room, for a worker that is better for
    it, holds up nobody: when that one has room, it is asked first. Interactive jobs come before batch jobs and never
    wait for them.

    Args:
        line: who waits; those served leave it.
        placement: of the workers.
        now: seconds.
        refused: workers that are not asked.
    """
    excluded = set(refused)
    left: dict[str, Entry] = {}
    """By model, the first job that there is no room for."""
    too_many: dict[str, int] = {}
    """By model, rows that there is no room for: less cannot help those that follow."""
    choosy = 0
    for entry in line.order(now):
        demand, model = entry.asked(now), entry.demand.model_digest
        if demand.rows >= too_many.get(model, demand.rows + 1):
            continue
        worker = placement.choose(demand, excluded, entry.fetching)
        if worker is not None:
            line.leave(entry.job_id, served=True)
            if model in left:
                line.passed_by(left[model].job_id)
            yield entry, worker
        elif placement.has_room(demand, excluded):
            choosy += 1
            if choosy >= MAX_CHOOSY:
                return
        else:
            if not demand.alone:
                too_many[model] = demand.rows
            first = left.setdefault(model, entry)
            if first is entry and entry.passed >= MAX_PASSED:
                excluded |= placement.soonest(demand, excluded)
