"""The demo as a user of the REST API: one streamed edit, and what the API tells of it afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import BaseModel

from giornata.wire.values import StageTimes
from giornata.wire.workers import FleetView, InstanceView
from giornata_tools.doors.edits import EditCall, Refused, Stopped, Tell
from giornata_tools.doors.http_door import HttpClient
from giornata_tools.launcher.process import LaunchError


class JobFigures(BaseModel):
    """What the demo reads of ``GET /v1/jobs/{id}``."""

    model: str
    steps: int
    mask_ratio: float
    stage_ms: StageTimes


@dataclass(frozen=True)
class DemoEdit:
    """One edit, and what the system measured of it."""

    job_id: str
    picture: bytes
    """The PNG file that was sent."""
    latency_s: float
    """Seconds from sending the request to having the picture."""
    status: JobFigures


async def ask(door: HttpClient, order: EditCall, tell: Tell) -> DemoEdit:
    """Have one picture edited, and ask what was measured.

    Raises:
        LaunchError: the edit was refused or failed; the sentence is the gateway's.
    """
    started_s = time.monotonic()
    with _as_launch_error():
        outcome = await door.edit(order, tell)
        latency_s = time.monotonic() - started_s
        status = JobFigures.model_validate(await door.read(f"/v1/jobs/{outcome.job_id}"))
    return DemoEdit(outcome.job_id, outcome.pictures[0].data, latency_s, status)


async def fleet(door: HttpClient) -> list[InstanceView]:
    """Every living instance.

    Raises:
        LaunchError: the gateway stopped answering.
    """
    with _as_launch_error():
        told = await door.read("/v1/fleet")
    return FleetView.model_validate(told).instances


@contextmanager
def _as_launch_error() -> Iterator[None]:
    try:
        yield
    except Refused as error:
        raise LaunchError(str(error)) from error
    except Stopped as stopped:  # the door has cancelled the job; the demo still has to end
        raise asyncio.CancelledError from stopped
