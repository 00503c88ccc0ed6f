"""The job records of all cells. Each cell has a bucket of its own; a job's id does not say which."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

import nats.errors
import structlog
from nats.js.errors import APIError, NotFoundError

from giornata.bus.bus import Bus
from giornata.records import Change, Records
from giornata.retries import repeated
from giornata.wire import stores
from giornata.wire.cells import MAIN
from giornata.wire.errors import JobNotFound
from giornata.wire.progress import JobRecord

LOOKED_S: Final = 1.0
"""Least time between two looks for buckets that are not known yet."""
REMEMBERED: Final = 100_000
"""Jobs whose cell is remembered."""
ASKED_S: Final = 5.0

log = structlog.get_logger(__name__)


class CellRecords:
    """Job records by id, wherever they are; the cell that a job was seen in is asked first.

    `heard` tells the cells whose routers were heard.
    """

    def __init__(self, bus: Bus, heard: Callable[[], Iterable[str]]) -> None:
        self._bus, self._heard = bus, heard
        self._open: dict[str, Records] = {}
        self._opening = asyncio.Lock()
        self._looked_s = -LOOKED_S
        self._cell_of: OrderedDict[str, str] = OrderedDict()

    async def open(self, cell: str) -> Records:
        """The records of a cell.

        Raises:
            nats.errors.Error: there is no such bucket, NATS does not answer, or it does not let this gateway in.
        """
        if (known := self._open.get(cell)) is not None:
            return known
        async with self._opening:
            if cell not in self._open:
                self._open[cell] = await Records.open(self._bus.jetstream, cell)
        return self._open[cell]

    def remember(self, job_id: str, cell: str) -> None:
        """A job is in `cell`."""
        self._cell_of[job_id] = cell
        self._cell_of.move_to_end(job_id)
        if len(self._cell_of) > REMEMBERED:
            self._cell_of.popitem(last=False)

    def cell_of(self, job_id: str) -> str:
        """The cell in which a job was seen; the first one where it was not."""
        return self._cell_of.get(job_id, MAIN)

    async def get(self, job_id: str) -> JobRecord:
        """A record; an id that no cell knows raises JobNotFound."""
        cell = self._cell_of.get(job_id)
        if cell is not None:
            try:
                return await (await self.open(cell)).get(job_id)
            except (JobNotFound, NotFoundError):  # it expired or was refused there, or the cell is gone
                self._cell_of.pop(job_id, None)
        asked = list(self._open)
        found = await self._in(asked, job_id)
        if found is None and await self.look():
            found = await self._in([cell for cell in self._open if cell not in asked], job_id)
        if found is None:
            raise JobNotFound(received=job_id)
        return found

    async def change(self, job_id: str, change: Change[JobRecord]) -> JobRecord:
        """Change a record as in every bucket; JobNotFound as :meth:`get`."""
        if job_id in self._cell_of:
            try:
                return await (await self.open(self.cell_of(job_id))).change(job_id, change)
            except (JobNotFound, NotFoundError):  # as in get, which looks elsewhere
                pass
        await self.get(job_id)
        return await (await self.open(self.cell_of(job_id))).change(job_id, change)

    async def look(self) -> bool:
        """Open the buckets that are not open yet; whether there are any. It looks at most every :data:`LOOKED_S`."""
        if time.monotonic() - self._looked_s < LOOKED_S:
            return False
        self._looked_s = time.monotonic()
        try:
            names = await repeated(self._streams)
        except nats.errors.Error as error:
            log.warning("cells_not_listed", error=repr(error))
            found = {MAIN, *self._heard()}
        else:
            first = stores.bucket_stream(stores.RECORDS)
            found = {cell for name in names if (cell := stores.cell_of(name, first)) is not None}
        return any([await self._opened(cell) for cell in sorted(found - self._open.keys())])

    async def _opened(self, cell: str) -> bool:
        try:
            await self.open(cell)
        except nats.errors.Error as error:
            log.warning("cell_not_opened", cell=cell, error=repr(error))
            return False
        return True

    async def _in(self, cells: Iterable[str], job_id: str) -> JobRecord | None:
        """The record of a job in one of `cells`."""

        async def ask(cell: str) -> JobRecord | None:
            try:
                record = await self._open[cell].get(job_id)
            except JobNotFound:
                return None
            except NotFoundError:  # the cell was removed
                self._open.pop(cell, None)
                return None
            self.remember(job_id, cell)
            return record

        answers = await asyncio.gather(*map(ask, cells))
        return next((record for record in answers if record is not None), None)

    async def _streams(self) -> list[str]:
        """The names of JetStream's streams that hold keys."""
        names: list[str] = []
        while True:
            request = json.dumps({"subject": "$KV.>", "offset": len(names)}).encode()
            answer = await self._bus.client.request("$JS.API.STREAM.NAMES", request, timeout=ASKED_S)
            told = json.loads(answer.data)
            if "error" in told:
                raise APIError.from_error(told["error"])
            page = told.get("streams") or ()
            names += page
            if not page or len(names) >= told["total"]:
                return names
