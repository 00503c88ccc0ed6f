"""Having a registered template recorded: its picture is encoded, and one worker is asked to record it."""

from __future__ import annotations

from functools import partial

import structlog

from giornata.deadlines import Deadline
from giornata.records import TemplateRecords
from giornata.scheduling.demand import JobDemand, RowShape
from giornata.wire import templates
from giornata.wire.errors import DeadlineExceeded, InternalError, Overloaded, ServiceUnavailable
from giornata.wire.messages import RecordRequest, RunAnswer, TemplateRequest
from giornata.wire.templates import TemplateRecord
from giornata_router.job_context import RUN_REPLY_S, RouterContext

log = structlog.get_logger(__name__)


async def register(
    tools: RouterContext, records: TemplateRecords, request: TemplateRequest
) -> TemplateRecord:
    """Endpoint ``giornata.router.template``: the record, once a worker is recording; the worker tells it how that ends.

    Raises:
        BadRequest: or a kind of it: the picture cannot be a template.
        ServiceUnavailable: no worker takes it.
        TemplateNotFound: it was deleted meanwhile.
    """
    template, deadline = request.template, Deadline.after_ms(request.remaining_ms)
    inputs = await tools.prepost.template(template, deadline)
    tokens = inputs.inspection.tokens
    # one row; the worker chooses its number of steps, and no job waits for it
    demand = JobDemand(template.model, template.model_digest, (RowShape(0, tokens, tokens, steps=1),))
    tried: set[str] = set()
    while worker := tools.dispatch.placement.soonest(demand, tried):
        tried.add(worker)
        # the record names the worker before it is asked, since it may be done before it has answered
        recording = partial(templates.recording, worker=worker, inspection=inputs.inspection)
        tools.leadership.check()
        record = await records.change(template.tenant, template.template_id, recording)
        limit = deadline.at_most(RUN_REPLY_S)
        question = RecordRequest(template=record, inputs=inputs, remaining_ms=limit.remaining_ms())
        try:
            reply = await tools.workers.record(worker, question, limit)
        except (Overloaded, DeadlineExceeded, InternalError) as error:
            log.warning("worker_unreachable", template=record.template_id, worker=worker, error=str(error))
            deadline.check()
        else:
            if reply.answer is RunAnswer.ACCEPTED:
                return record
    raise ServiceUnavailable("No denoiser takes the template now.", retry_after_s=2)
