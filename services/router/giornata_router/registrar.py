"""Having a registered template recorded: its picture is encoded, and one worker is asked to record it."""

from __future__ import annotations

from functools import partial

import structlog

from giornata.deadlines import Deadline
from giornata.records.templates import TemplateRecords
from giornata.scheduling.demand import Demand, RowShape
from giornata.wire import subjects, templates
from giornata.wire.errors import DeadlineExceeded, InternalError, Overloaded, ServiceUnavailable
from giornata.wire.messages import RecordRequest, RunAnswer, RunReply, TemplateRequest
from giornata.wire.templates import TemplateInputs, TemplateRecord
from giornata_router.tools import RUN_REPLY_S, Tools

log = structlog.get_logger(__name__)


class Registrar:
    """Carries registrations from their picture to a worker; that worker tells the record how it ends."""

    def __init__(self, tools: Tools, records: TemplateRecords) -> None:
        self._tools = tools
        self._records = records

    async def record(self, request: TemplateRequest) -> TemplateRecord:
        """Endpoint ``giornata.router.template``: the record, once a worker is recording the template.

        Raises:
            BadRequest: or a kind of it: the picture cannot be a template.
            ServiceUnavailable: no worker takes it.
            TemplateNotFound: it was deleted meanwhile.
        """
        template, deadline = request.template, Deadline.after_ms(request.remaining_ms)
        inputs = await self._tools.prepost.template(template, deadline)
        tried: set[str] = set()
        while worker := self._tools.dispatch.placement.soonest(_demand(template, inputs), tried):
            tried.add(worker)
            # the record names the worker before it is asked, since it may be done before it has answered
            recording = partial(templates.recording, worker=worker, inspection=inputs.inspection)
            record = await self._records.change(template.tenant, template.template_id, recording)
            if await self._taken(worker, record, inputs, deadline):
                return record
        raise ServiceUnavailable("No denoiser takes the template now.", retry_after_s=2)

    async def _taken(
        self, worker: str, record: TemplateRecord, inputs: TemplateInputs, deadline: Deadline
    ) -> bool:
        limit = deadline.at_most(RUN_REPLY_S)
        request = RecordRequest(template=record, inputs=inputs, remaining_ms=limit.remaining_ms())
        try:
            reply = await self._tools.bus.call(subjects.worker_record(worker), request, RunReply, limit)
        except (Overloaded, DeadlineExceeded, InternalError) as error:
            log.warning("worker_unreachable", template=record.template_id, worker=worker, error=str(error))
            deadline.check()
            return False
        return reply.answer is RunAnswer.ACCEPTED


def _demand(template: TemplateRecord, inputs: TemplateInputs) -> Demand:
    """One row; the worker chooses its number of steps, and no job waits for it."""
    tokens = inputs.inspection.tokens
    return Demand(template.model, template.model_digest, (RowShape(0, tokens, tokens, steps=1),))
