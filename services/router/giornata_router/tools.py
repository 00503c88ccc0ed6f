"""What every walk uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from giornata.blobs import BlobStore
from giornata.bus.bus import Bus
from giornata.records import Quarantine
from giornata_router.config import RouterConfig
from giornata_router.dispatch import Dispatch
from giornata_router.fenced import LeaderRecords, WorkerClient
from giornata_router.lease import Leadership
from giornata_router.prepost import PrepostClient
from giornata_router.room import StreamCapacity
from giornata_router.rules.forecasting import FinishTimeEstimator

RUN_REPLY_S: Final = 5.0
"""A worker answers at once whether it takes rows; after this time it counts as gone."""


@dataclass(frozen=True)
class RouterContext:
    """Edges and books of one router."""

    bus: Bus
    records: LeaderRecords
    prepost: PrepostClient
    dispatch: Dispatch
    forecasting: FinishTimeEstimator
    quarantine: Quarantine
    room: StreamCapacity
    config: RouterConfig
    workers: WorkerClient
    leadership: Leadership
    blobs: BlobStore
