"""Which rows give way to those of a tenant that has fewer. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Final

from giornata.scheduling.line import AGEING_S, QueuedRows, RowQueue, SchedulingParams
from giornata.scheduling.occupancy import Attempt
from giornata.scheduling.placement import Placement
from giornata.shares import SharedPool, TenantAllocation
from giornata.wire.jobs import Priority

SOON_MS: Final = 1000.0
"""Rows that end within this time are waited for."""


def giving_way(
    line: RowQueue, placement: Placement, claims: Mapping[Attempt, SchedulingParams], now: float
) -> Attempt | None:
    """An attempt that should go back to the line, since a tenant with fewer rows at the model's workers finds no room.

    Places of a model's workers are shared as in :class:`~giornata.shares.SharedPool`; of the tenant that has most, the
    attempt that began first gives way, so that its rows take turns. Interactive rows give way to batch jobs that have
    waited for :data:`AGEING_S`, and to no other ones. `claims` are those of the attempts at workers.
    """
    first: dict[str, QueuedRows] = {}
    for entry in line.order(now):
        first.setdefault(entry.claim.tenant, entry)
    if len(first.keys() | {claim.tenant for claim in claims.values()}) < 2:
        return None
    for tenant, entry in first.items():
        asked = entry.demand.piece()
        booked = {b.key: b for job, _ in claims for b in placement.assigned(job) if b.key in claims}
        here = {
            key: b.demand.rows for key, b in booked.items() if b.demand.model_digest == asked.model_digest
        }
        known = placement.least_ms(asked) > 0
        if placement.has_room(asked) or (
            known and any(_ends_ms(placement, job) < SOON_MS for job, _ in here)
        ):
            continue
        pool, gone, own = SharedPool(sum(here.values())), list[Attempt](), entry.claim
        urgent = own.priority is Priority.INTERACTIVE or now - entry.since_s >= AGEING_S
        for key, rows in here.items():
            other = claims[key]
            may_go = partial(bool, urgent or other.priority is Priority.BATCH)
            pool.take(
                TenantAllocation(other.tenant, other.weight, may_go, partial(gone.append, key)), rows, now
            )
        pool.take(TenantAllocation(tenant, own.weight), asked.rows, now)
        if gone:
            return gone[0]
    return None


def _ends_ms(placement: Placement, job_id: str) -> float:
    found = placement.finish_ms(job_id)
    return math.inf if found is None else found
