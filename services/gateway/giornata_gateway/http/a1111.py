"""``/sdapi/v1`` and ``/controlnet``: A1111's API, a translation onto the jobs that the other routes make.

A1111 paints one picture at a time, so that its `progress` and `interrupt` name none. Here they mean the jobs of the
tenant that asks, as far as requests of this API wait for them at this gateway.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Final

from aiohttp import web
from pydantic import BaseModel

from giornata.deadlines import Deadline
from giornata.wire.errors import GiornataError, InvalidField, ModelNotFound
from giornata.wire.events import StepEvent
from giornata.wire.jobs import Priority
from giornata.wire.messages import JobEstimate
from giornata.wire.models import ModelCard
from giornata.wire.progress import JobRecord
from giornata_gateway.fleet import FleetListener
from giornata_gateway.gateway import Gateway
from giornata_gateway.http.body import JSON_COPIES, room, send
from giornata_gateway.http.errors import GATEWAY, JOB_ID, TENANT, Handler, json_answer
from giornata_gateway.http.ignored import ignore
from giornata_gateway.http.requests import check_query, trace_of
from giornata_gateway.http.uploads import read_json
from giornata_gateway.intake.rules.a1111 import prompts
from giornata_gateway.intake.rules.a1111.forms import ImageToImage, TextToImage, read, read_settings
from giornata_gateway.intake.rules.a1111.models import model_of
from giornata_gateway.intake.rules.a1111.parameters import parameters_of, rename_field, unused_fields
from giornata_gateway.intake.rules.a1111.prompts import Emphasis
from giornata_gateway.intake.rules.a1111.units import SCRIPTS, controls_of
from giornata_gateway.intake.rules.written import picture
from giornata_gateway.jobs.preparation import EditOrder
from giornata_gateway.jobs.submission import AwaitedJob
from giornata_gateway.views import a1111 as views
from giornata_gateway.views.answers import error_of

PICTURES: Final = frozenset({"mask", "init_images", SCRIPTS})
"""Fields that hold pictures."""


class AwaitedJobs:
    """Jobs of each tenant while requests at this gateway wait for them, and how far each picture is."""

    def __init__(self) -> None:
        self._steps: defaultdict[str, dict[str, dict[int, int]]] = defaultdict(dict)

    @contextmanager
    def held(self, awaited: AwaitedJob) -> Iterator[None]:
        """Count the job as its tenant's while inside; its steps are known where the request listens to them."""
        job, steps = awaited.job, dict[int, int]()

        def hear(event: StepEvent) -> None:
            steps[event.index] = event.step

        if awaited.steps is not None:
            awaited.steps.told(hear)
        own = self._steps[job.tenant]
        own[job.job_id] = steps
        try:
            yield
        finally:
            del own[job.job_id]
            if not own:
                del self._steps[job.tenant]

    def of(self, tenant: str) -> dict[str, dict[int, int]]:
        """Steps computed of each picture by its index, by job; the tenant's oldest job comes first."""
        return dict(self._steps.get(tenant, {}))


AWAITED_JOBS: Final = web.AppKey("a1111_awaited_jobs", AwaitedJobs)


async def txt2img(request: web.Request) -> web.StreamResponse:
    """Make pictures from text and answer with them; a client that leaves cancels that."""
    return await _painted(request, TextToImage)


async def img2img(request: web.Request) -> web.StreamResponse:
    """Edit a picture and answer with what it became; a client that leaves cancels that."""
    return await _painted(request, ImageToImage)


async def progress(request: web.Request) -> web.Response:
    """How far the oldest of the tenant's jobs is."""
    check_query(request.query, "skip_current_image")
    ledger, tenant = request.app[GATEWAY].ledger, request[TENANT].name
    awaited = request.app[AWAITED_JOBS].of(tenant)
    records = [await ledger.records.get(job_id) for job_id in awaited]
    forecast, oldest = None, next(iter(awaited), None)
    if oldest is not None:
        told = await ledger.forecast(oldest) or JobEstimate()
        forecast = told.model_copy(update={"steps": tuple(awaited[oldest].items())})
    return json_answer(views.progress(records, forecast, time.time()))


async def interrupt(request: web.Request) -> web.Response:
    """Cancel all of the tenant's jobs in progress."""
    for job_id in request.app[AWAITED_JOBS].of(request[TENANT].name):
        await request.app[GATEWAY].ledger.cancel(job_id)
    return json_answer(views.Nothing())


async def skip(request: web.Request) -> web.Response:
    """Cancel the oldest of the tenant's jobs in progress: the one that `progress` tells of."""
    if (oldest := next(iter(request.app[AWAITED_JOBS].of(request[TENANT].name)), None)) is not None:
        await request.app[GATEWAY].ledger.cancel(oldest)
    return json_answer(views.Nothing())


def telling(view: Callable[[FleetListener], BaseModel]) -> Handler:
    """A handler that answers with a view of what the fleet serves."""

    async def tell(request: web.Request) -> web.Response:
        return json_answer(view(request.app[GATEWAY].fleet))

    return tell


async def loras(request: web.Request) -> web.Response:
    """The LoRAs that the tenant may use."""
    return json_answer(views.loras(await request.app[GATEWAY].loras.of(request[TENANT].name)))


async def set_options(request: web.Request) -> web.Response:
    """Accept options that are as they stand: a gateway keeps none, and each request brings its own."""
    gateway = request.app[GATEWAY]
    with gateway.uploads.growing(request[TENANT]) as grow:
        settings, ignored = read_settings(await read_json(request, grow, ()))
    ignore(request, ignored)
    model, cards = settings.sd_model_checkpoint, gateway.fleet.cards()
    name = None if model is None else model_of(model, cards)
    stands = {
        "sd_model_checkpoint": name is None or list(cards) in ([name], [gateway.fleet.aliases.get(name)]),
        "emphasis": settings.emphasis is Emphasis.ORIGINAL,
    }
    if name := next((name for name, same in stands.items() if not same), None):
        raise InvalidField(
            "Options are not kept between requests.",
            field=name,
            received=getattr(settings, name),
            accepted=f"override_settings.{name} in every request",
        )
    return json_answer(views.Nothing())


async def _painted(request: web.Request, kind: type[TextToImage]) -> web.StreamResponse:
    gateway, tenant = request.app[GATEWAY], request[TENANT]
    gateway.places.check(tenant)
    gateway.quotas.check(tenant)
    try:
        with ExitStack() as held:
            with gateway.uploads.growing(tenant) as grow:
                form, ignored = read(kind, await read_json(request, grow, PICTURES))
                ignore(request, ignored)
                admitted = await gateway.admit(await order_of(request, form), None, held)
            async with gateway.awaited(admitted, streamed=True) as awaited:
                request[JOB_ID] = awaited.job.job_id
                with request.app[AWAITED_JOBS].held(awaited):
                    record = await gateway.submission.outcome(awaited)
            admitted.carried_out()
        if (error := error_of(record)) is not None:
            raise error
    except GiornataError as error:
        rename_field(error)
        raise
    return await _answer(request, form, record)


async def order_of(request: web.Request, form: TextToImage) -> EditOrder:
    """The order that a form means; a GiornataError names the field at fault, by our name or by A1111's."""
    gateway, tenant = request.app[GATEWAY], request[TENANT]
    card = _card(gateway, form)
    emphasis = form.override_settings.emphasis
    prompt, tags = prompts.split(form.prompt, "prompt", emphasis)
    negative, refused = prompts.split(form.negative_prompt, "negative_prompt", emphasis)
    if refused:
        raise InvalidField(
            "A negative prompt names no LoRA.",
            field="negative_prompt",
            received=refused[0].name,
            accepted="words",
        )
    named = prompts.named(tags, await gateway.loras.of(tenant.name), card) if tags else ()
    controls = await asyncio.to_thread(controls_of, form.alwayson_scripts)
    image = mask = None
    if isinstance(form, ImageToImage):
        image = await asyncio.to_thread(picture, form.init_images[0], "init_images")
        mask = await asyncio.to_thread(picture, form.mask, "mask") if form.mask else None
    form = form.model_copy(update={"prompt": prompt, "negative_prompt": negative})
    parameters = parameters_of(form, card, named, controls)
    ignore(request, (*controls.ignored, *unused_fields(form, card, parameters)))
    return EditOrder(
        parameters=parameters,
        image=image,
        mask=mask,
        control_images=controls.images,
        tenant=tenant,
        priority=Priority.INTERACTIVE,
        deadline=Deadline.after_ms(gateway.config.budget_s * 1000),
        task=form.task,
        traceparent=trace_of(request),
    )


def _card(gateway: Gateway, form: TextToImage) -> ModelCard:
    cards: Mapping[str, ModelCard] = gateway.fleet.cards()
    label = form.override_settings.sd_model_checkpoint
    name = None if label is None else model_of(label, cards)
    try:
        return gateway.fleet.choose(name, form.task)
    except ModelNotFound as error:
        error.received = label
        raise


async def _answer(request: web.Request, form: TextToImage, record: JobRecord) -> web.StreamResponse:
    gateway, asked = request.app[GATEWAY], form.model_dump(exclude=set(PICTURES))
    refs = [row.image for row in record.images if row.image is not None]
    async with room(request, JSON_COPIES * sum(ref.size_bytes for ref in refs)):
        pictures = [await gateway.picture(ref) for ref in refs]
        body = await asyncio.to_thread(
            lambda: views.painted(record, pictures, asked, time.time()).model_dump_json().encode()
        )
        pictures.clear()
        return await send(request, body, "application/json", {"X-Giornata-Job": record.job.job_id})
