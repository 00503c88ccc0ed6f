"""Giving workers to those who wait: who is served next, who passes whom, and for whom a worker is kept free. Pure.

Rows are placed one by one, so that the pictures of one job are computed side by side where several workers have room.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Final

from giornata.scheduling.demand import Demand, RowShape
from giornata.scheduling.line import Entry, Line
from giornata.scheduling.placement import Placement

MAX_PASSED: Final = 32
"""Rows served before an older job that needs more room than they; after these a worker is kept free for it."""
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
    line: Line,
    placement: Placement,
    now: float,
    refused: Collection[str] = (),
    *,
    spreads: bool = True,
) -> Iterator[tuple[Entry, str]]:
    """Who gets which worker now, in order: entries with the rows that go there. Assign each before the next is asked.

    A job that no worker has room for, since its rows are to stay together or want a worker for themselves, lets later
    ones pass, but only :data:`MAX_PASSED` rows of them: then the worker that is empty first is kept for it. A job that
    waits although there is room, for a worker that is better for it, holds up nobody: when that one has room, it is
    asked first. Interactive jobs come before batch jobs and never wait for them.

    Args:
        line: who waits; rows that are served leave it.
        placement: of the workers.
        now: seconds.
        refused: workers that are not asked.
        spreads: rows of one job may go to several workers; else all go to one, as in the simulator's baselines.
    """
    excluded = set(refused)
    left: dict[str, Entry] = {}
    """By model, the first job that there is no room for, though there may be for a row."""
    too_many: dict[str, int] = {}
    """By model, rows that there is no room for together: fewer places cannot help those that follow."""
    choosy = 0
    for first in line.order(now):
        rest: Entry | None = first
        model = first.demand.model_digest
        while rest is not None:
            entry, whole = rest, rest.asked(now)
            asked = whole.piece() if spreads else whole
            if asked.rows >= too_many.get(model, asked.rows + 1):
                break
            worker = placement.choose(asked, excluded, entry.fetching)
            if worker is not None:
                rest = line.serve(entry.key, asked.rows)
                if model in left:
                    line.passed_by(left[model].key)
                yield replace(entry, demand=asked), worker
                continue
            rest = None
            if placement.has_room(asked, excluded):
                choosy += 1
                if choosy >= MAX_CHOOSY:
                    return
                continue
            if not asked.alone:
                too_many[model] = asked.rows
            if left.setdefault(model, entry) is entry and entry.passed >= MAX_PASSED:
                excluded |= placement.soonest(asked, excluded)
