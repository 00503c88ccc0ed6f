"""Which cell an edit goes to. Pure.

A tenant has two cells, by rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit
rates", 1998): a cell that comes or goes moves only the tenants that had it or get it. Of the two the edit takes the
first, where its tenant's templates are, unless the other's wait is shorter (Mitzenmacher, "The power of two choices in
randomized load balancing", 2001).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

CHOICES: Final = 2
"""Cells of a tenant."""
SHORTER_MS: Final = 250.0
"""So much shorter must the other's wait be: it was told up to this long ago, and other gateways have heard it too."""


def ranked(name: str, cells: Iterable[str]) -> list[str]:
    """`cells` in an order of their own for every `name`."""
    return sorted(cells, key=lambda cell: (hashlib.sha256(f"{name}\0{cell}".encode()).digest(), cell))


def of_tenant(tenant: str, cells: Iterable[str]) -> list[str]:
    """The cells that a tenant's edits go to, the first one first."""
    return ranked(tenant, cells)[:CHOICES]


def by_wait(tenant: str, wait_ms: Mapping[str, float | None]) -> list[str]:
    """The tenant's cells of those in `wait_ms`, the better one first.

    Args:
        tenant: whose edit it is.
        wait_ms: how long an edit would wait, by cell; None: unknown, which counts as no wait, so that it becomes known.
    """
    own = of_tenant(tenant, wait_ms)
    if len(own) == CHOICES:
        first, other = ((wait_ms[cell] or 0.0) for cell in own)
        if other + SHORTER_MS < first:
            own.reverse()
    return own


def by_key(tenant: str, job_id: str, cells: Iterable[str]) -> list[str]:
    """The one cell of a job whose id comes from an idempotency key: the same for every request with the key."""
    return ranked(job_id, of_tenant(tenant, cells))[:1]
