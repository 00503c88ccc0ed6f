"""Telling the record of a registered template how its recording has ended."""

from __future__ import annotations

from dataclasses import dataclass

import nats.errors
import structlog

from giornata import retries
from giornata.records import Change
from giornata.tenant_records import TemplateRecords
from giornata.wire import templates
from giornata.wire.errors import GiornataError, TemplateNotFound

TELL_S = 60.0
"""How long NATS may be away; after it the record stays as it is until the template is registered or edited again."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class PendingRegistration:
    """A registration that waits for a recording."""

    tenant: str
    template_id: str
    template_key: str


class TemplateRegistrations:
    """The records of registered templates, as a worker changes them."""

    def __init__(self, records: TemplateRecords, worker: str) -> None:
        self._records, self._worker = records, worker

    async def report(
        self, registered: PendingRegistration, outcome: int | GiornataError, *, only_waiting: bool = False
    ) -> None:
        """Write how many bytes are recorded, or why nothing is; with `only_waiting`, unless the record is settled."""

        def change(record: templates.TemplateRecord) -> templates.TemplateRecord | None:
            if only_waiting and record.state.settled:
                return None
            if isinstance(outcome, GiornataError):
                return templates.failed(record, self._worker, outcome.body())
            return templates.ready(record, self._worker, registered.template_key, outcome)

        try:
            await self._change(registered, change)
        except TemplateNotFound:
            log.info("template_deleted", template=registered.template_id)
        except Exception:  # the report's edge: logged; edits find the template without it
            log.exception("template_not_reported", template=registered.template_id)

    @retries.patiently(nats.errors.Error, TELL_S).wraps
    async def _change(
        self, registered: PendingRegistration, change: Change[templates.TemplateRecord]
    ) -> None:
        await self._records.change(registered.tenant, registered.template_id, change)
