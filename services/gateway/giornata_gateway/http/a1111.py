"""A1111's API, below ``/sdapi/v1`` and ``/controlnet``: a translation onto the jobs that the other routes make."""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, Literal

from aiohttp import web
from pydantic import BaseModel, RootModel

from giornata.wire.errors import GiornataError, InvalidField, ModelNotFound
from giornata.wire.jobs import JobRecord, JobState
from giornata.wire.loras import LoraState
from giornata.wire.messages import JobEstimate, StepEvent
from giornata_gateway.fleet import FleetListener
from giornata_gateway.http.requests import check_query, order_in, read_json
from giornata_gateway.http.responses import (
    GATEWAY,
    JOB_ID,
    JSON,
    TENANT,
    Handler,
    ignore,
    json_answer,
    send_pictures,
)
from giornata_gateway.http.routes import GET, ONCE, POST, Body, Reply, Route
from giornata_gateway.jobs.preparation import EditOrder
from giornata_gateway.jobs.submission import AwaitedJob
from giornata_gateway.rules import a1111_forms as forms
from giornata_gateway.rules.a1111_forms import (
    Emphasis,
    ImageToImage,
    Settings,
    TextToImage,
    hash_of,
    model_of,
    names_of,
    read,
    read_settings,
    title_of,
)
from giornata_gateway.rules.a1111_parameters import (
    AUTOMATIC,
    MODULES,
    NAMES,
    SCRIPTS,
    PaintedAnswer,
    controls_of,
    painted,
    parameters_of,
    rename_field,
    stamp,
    taken,
    unused_fields,
)
from giornata_gateway.rules.forms import RequestBody, picture
from giornata_gateway.views.jobs import View, error_of, job_view


class ProgressState(View):
    """`state` of a progress."""

    skipped: bool = False
    interrupted: bool = False
    stopping_generation: bool = False
    job: str = ""
    """The job's id; empty while there is none."""
    job_count: int = 0
    """The tenant's jobs in progress at this gateway."""
    job_timestamp: str = "0"
    job_no: int = 0
    sampling_step: int = 0
    sampling_steps: int = 0


class ProgressView(View):
    """Answer of ``GET /sdapi/v1/progress``: the oldest of the tenant's jobs."""

    progress: float = 0.0
    """0 to 1."""
    eta_relative: float = 0.0
    """Seconds until its pictures should be there; 0 where that is not known."""
    state: ProgressState = ProgressState()
    current_image: None = None
    """Always null."""
    textinfo: None = None
    current_task: str | None = None


class StableDiffusionModel(View):
    """A served model."""

    title: str
    """What `sd_model_checkpoint` names it by; its `model_name` and its hash do, too."""
    model_name: str
    hash: str
    sha256: str
    filename: str
    config: None = None


class StableDiffusionModels(RootModel[list[StableDiffusionModel]]):
    """Answer of ``GET /sdapi/v1/sd-models``: by name."""


class SamplerItem(View):
    """A sampler that some served model takes."""

    name: str
    aliases: list[str]
    options: dict[str, str]
    """`scheduler`: what `automatic` stands for."""


class SamplerItems(RootModel[list[SamplerItem]]):
    """Answer of ``GET /sdapi/v1/samplers``: by name."""


class SchedulerItem(View):
    """Noise levels that some served model takes."""

    name: str
    label: str
    aliases: None = None
    default_rho: float = -1.0
    need_inner_model: bool = False


class SchedulerItems(RootModel[list[SchedulerItem]]):
    """Answer of ``GET /sdapi/v1/schedulers``."""


class ControlModels(View):
    """Answer of ``GET /controlnet/model_list``: what `model` of a unit names."""

    model_list: list[str]


class LoraItem(View):
    """A LoRA that the tenant may use."""

    name: str
    """What a prompt calls it; `alias` does, too."""
    alias: str
    path: str
    metadata: dict[str, str]


class LoraItems(RootModel[list[LoraItem]]):
    """Answer of ``GET /sdapi/v1/loras``: the newest first."""


class Options(View):
    """The options that hold for requests which override nothing."""

    sd_model_checkpoint: str | None
    """The model's title; null where several are served, and requests name one."""
    sd_checkpoint_hash: str | None
    samples_format: Literal["png"] = "png"


class Nothing(View):
    """An empty answer."""


def progress(records: Sequence[JobRecord], forecast: JobEstimate | None, now: float) -> ProgressView:
    """Return how far the first of a tenant's jobs is, by a `forecast` of it; `now` is the Unix time in seconds."""
    if not records:
        return ProgressView()
    record = records[0]
    view, job = job_view(record, "", forecast), record.job
    steps = job.denoising_steps * max(1, len(record.rows))
    done = sum(picture.step or 0 for picture in view.pictures)
    share = done / steps if record.state is JobState.RUNNING else float(record.state is JobState.FINISHING)
    return ProgressView(
        progress=share,
        eta_relative=view.predicted_finish_s or 0.0,
        state=ProgressState(
            interrupted=record.cancel,
            job=job.job_id,
            job_count=len(records),
            job_timestamp=stamp(now),
            sampling_step=view.step or 0,
            sampling_steps=job.denoising_steps,
        ),
        current_task=job.job_id,
    )


def models(fleet: FleetListener) -> StableDiffusionModels:
    """Served models."""
    return StableDiffusionModels(
        [
            StableDiffusionModel(
                title=title_of(card), model_name=name, hash=hash_of(card), sha256=card.digest, filename=name
            )
            for name, card in sorted(fleet.cards().items())
        ]
    )


def samplers(fleet: FleetListener) -> SamplerItems:
    """The samplers that the served models take, each once."""
    listed = {
        named.name: named for card in fleet.cards().values() for named in taken(card) if named.automatic
    }
    return SamplerItems(
        [
            SamplerItem(
                name=name,
                aliases=[sampler for sampler, other in NAMES.items() if other.name == name],
                options={"scheduler": named.scheduler},
            )
            for name, named in sorted(listed.items())
        ]
    )


def schedulers(fleet: FleetListener) -> SchedulerItems:
    """The noise levels that the served models take, each once."""
    listed = {named.scheduler for card in fleet.cards().values() for named in taken(card)}
    names = (AUTOMATIC, *sorted(listed))
    return SchedulerItems([SchedulerItem(name=name, label=name.title()) for name in names])


def control_models(fleet: FleetListener) -> ControlModels:
    """The served ControlNets by name, each once."""
    listed = {f"{card.name} [{card.digest[:8]}]" for cards in fleet.controlnets().values() for card in cards}
    return ControlModels(model_list=sorted(listed))


def options(fleet: FleetListener) -> Options:
    """Return what stands in place of A1111's settings."""
    cards = list(fleet.cards().values())
    if len(cards) != 1:
        return Options(sd_model_checkpoint=None, sd_checkpoint_hash=None)
    return Options(sd_model_checkpoint=title_of(cards[0]), sd_checkpoint_hash=cards[0].digest)


# A1111 paints one picture at a time, so that its `progress` and `interrupt` name none. Here they mean the
# jobs of the tenant that asks, as far as requests of this API wait for them at this gateway.


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


async def tell_progress(request: web.Request) -> web.Response:
    """Return how far the oldest of the tenant's jobs is."""
    check_query(request.query, "skip_current_image")
    ledger, tenant = request.app[GATEWAY].ledger, request[TENANT].name
    awaited = request.app[AWAITED_JOBS].of(tenant)
    records = [await ledger.get(job_id) for job_id in awaited]
    forecast, oldest = None, next(iter(awaited), None)
    if oldest is not None:
        told = await ledger.forecast(oldest) or JobEstimate()
        forecast = told.model_copy(update={"steps": tuple(awaited[oldest].items())})
    return json_answer(progress(records, forecast, time.time()))


async def interrupt(request: web.Request) -> web.Response:
    """Cancel all of the tenant's jobs in progress."""
    for job_id in request.app[AWAITED_JOBS].of(request[TENANT].name):
        await request.app[GATEWAY].ledger.cancel(job_id)
    return json_answer(Nothing())


async def skip(request: web.Request) -> web.Response:
    """Cancel the oldest of the tenant's jobs in progress: the one that `progress` tells of."""
    if (oldest := next(iter(request.app[AWAITED_JOBS].of(request[TENANT].name)), None)) is not None:
        await request.app[GATEWAY].ledger.cancel(oldest)
    return json_answer(Nothing())


def telling(view: Callable[[FleetListener], BaseModel]) -> Handler:
    """A handler that answers with a view of what the fleet serves."""

    async def tell(request: web.Request) -> web.Response:
        return json_answer(view(request.app[GATEWAY].fleet))

    return tell


async def list_loras(request: web.Request) -> web.Response:
    """The LoRAs that the tenant may use and that are ready."""
    items = [
        LoraItem(
            name=names_of(record)[0],
            alias=record.lora_id,
            path=record.shared_path or record.lora_id,
            metadata={"model": record.model or ""},
        )
        for record in await request.app[GATEWAY].loras.of(request[TENANT].name)
        if record.state is LoraState.READY
    ]
    return json_answer(LoraItems(items))


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
    return json_answer(Nothing())


async def paint(kind: type[TextToImage], request: web.Request) -> web.StreamResponse:
    """Make pictures as a form of this kind says, and answer with them; a client that leaves cancels that."""
    gateway, tenant = request.app[GATEWAY], request[TENANT]
    try:
        with ExitStack() as held:
            with gateway.receiving(tenant) as grow:
                form, ignored = read(kind, await read_json(request, grow, PICTURES))
                ignore(request, ignored)
                admitted = await gateway.admit(await order_of(request, form), None, held)
            async with gateway.submission.awaited(admitted, streamed=True) as awaited:
                request[JOB_ID] = awaited.job.job_id
                with request.app[AWAITED_JOBS].held(awaited):
                    record = await gateway.submission.outcome(awaited)
            admitted.carried_out()
        if (error := error_of(record)) is not None:
            raise error
    except GiornataError as error:
        rename_field(error)
        raise
    asked, refs = form.model_dump(exclude=set(PICTURES)), [row.image for row in record.images if row.image]

    def told(pictures: Sequence[bytes]) -> PaintedAnswer:
        return painted(record, pictures, asked, time.time())

    return await send_pictures(request, refs, {"X-Giornata-Job": record.job.job_id}, told, gateway.picture)


async def order_of(request: web.Request, form: TextToImage) -> EditOrder:
    """The order that a form means; a GiornataError names the field at fault, by our name or by A1111's."""
    gateway, tenant = request.app[GATEWAY], request[TENANT]
    label, cards = form.override_settings.sd_model_checkpoint, gateway.fleet.cards()
    try:
        card = gateway.fleet.choose(None if label is None else model_of(label, cards), form.task)
    except ModelNotFound as error:
        error.received = label
        raise
    emphasis = form.override_settings.emphasis
    prompt, tags = forms.split(form.prompt, "prompt", emphasis)
    negative, refused = forms.split(form.negative_prompt, "negative_prompt", emphasis)
    if refused:
        raise InvalidField(
            "A negative prompt names no LoRA.",
            field="negative_prompt",
            received=refused[0].name,
            accepted="words",
        )
    named = forms.named(tags, await gateway.loras.of(tenant.name), card) if tags else ()
    controls = await asyncio.to_thread(controls_of, form.alwayson_scripts)
    image = mask = None
    if isinstance(form, ImageToImage):
        image = await asyncio.to_thread(picture, form.init_images[0], "init_images")
        mask = await asyncio.to_thread(picture, form.mask, "mask") if form.mask else None
    form = form.model_copy(update={"prompt": prompt, "negative_prompt": negative})
    parameters = parameters_of(form, card, named, controls)
    ignore(request, (*controls.ignored, *unused_fields(form, card, parameters)))
    brought = RequestBody((), image, mask, (), controls.images)
    return order_in(request, parameters, form.task, brought)


_SKIP: Final = {
    "name": "skip_current_image",
    "in": "query",
    "schema": {"type": "boolean"},
    "description": "Sent by A1111's clients; `current_image` is always null.",
}
FIXED: Final[Mapping[str, Any]] = {
    "/sdapi/v1/cmd-flags": {"api": True, "nowebui": True},
    "/sdapi/v1/upscalers": [
        {"name": "None", "model_name": None, "model_path": None, "model_url": None, "scale": 1}
    ],
    "/sdapi/v1/latent-upscale-modes": [],
    "/sdapi/v1/sd-vae": [],
    "/sdapi/v1/memory": {"ram": {"error": "unavailable"}, "cuda": {"error": "unavailable"}},
    "/controlnet/version": {"version": 2},
    "/controlnet/module_list": {
        "module_list": list(MODULES),
        "module_detail": {name: {"model_free": False, "sliders": []} for name in MODULES},
    },
}
"""Answers that are always the same, in A1111's forms. A gateway's memory says nothing about that of workers."""

LISTED: Final[Mapping[str, tuple[type[BaseModel], Callable[[FleetListener], BaseModel]]]] = {
    "/sdapi/v1/sd-models": (StableDiffusionModels, models),
    "/sdapi/v1/samplers": (SamplerItems, samplers),
    "/sdapi/v1/schedulers": (SchedulerItems, schedulers),
    "/sdapi/v1/options": (Options, options),
    "/controlnet/model_list": (ControlModels, control_models),
}
"""Answers that tell what is served."""


def _listing(path: str, view: Callable[[FleetListener], BaseModel], schema: Body, summary: str) -> Route:
    words = re.split(r"[/_-]", path.removeprefix("/").removeprefix("sdapi/v1/").removeprefix("sd-"))
    name, reply = f"a1111{''.join(map(str.title, words))}", Reply("In A1111's form.", {JSON: schema})
    return Route(GET, path, telling(view), name, f"A1111: {summary}.", {200: reply}, (401,), basic=True)


def _fixed(path: str, answer: Any) -> Route:
    return _listing(path, lambda _: RootModel[Any](answer), {"const": answer}, "the same for all")


A1111_ROUTES: Final = (
    *(_listing(path, view, kind, "what is served") for path, (kind, view) in LISTED.items()),
    *(_fixed(path, answer) for path, answer in FIXED.items()),
    Route(
        POST, "/sdapi/v1/txt2img", partial(paint, TextToImage), "a1111TextToImage", "A1111: make pictures from text.",
        {200: Reply("Made.", {JSON: PaintedAnswer})}, ONCE, json_body=TextToImage, basic=True,
    ),
    Route(
        POST, "/sdapi/v1/img2img", partial(paint, ImageToImage), "a1111ImageToImage", "A1111: edit a picture.",
        {200: Reply("Edited.", {JSON: PaintedAnswer})}, ONCE, json_body=ImageToImage, basic=True,
    ),
    Route(
        GET, "/sdapi/v1/progress", tell_progress, "a1111Progress",
        "A1111: how far the oldest of the tenant's jobs is that A1111's requests wait for at this gateway.",
        {200: Reply("Its progress.", {JSON: ProgressView})}, (400, 401, 503), (_SKIP,), basic=True,
    ),
    Route(
        POST, "/sdapi/v1/interrupt", interrupt, "a1111Interrupt",
        "A1111: cancel the tenant's jobs that A1111's requests wait for at this gateway.",
        {200: Reply("They end at their next step.", {JSON: Nothing})}, (401, 403, 503), basic=True,
    ),
    Route(
        POST, "/sdapi/v1/skip", skip, "a1111Skip",
        "A1111: cancel the oldest of the tenant's jobs that A1111's requests wait for at this gateway.",
        {200: Reply("It ends at its next step.", {JSON: Nothing})}, (401, 403, 503), basic=True,
    ),
    Route(
        POST, "/sdapi/v1/refresh-checkpoints", telling(lambda _: Nothing()), "a1111RefreshCheckpoints",
        "A1111: nothing, since lists tell what is served now.",
        {200: Reply("Done.", {JSON: Nothing})}, (401, 403), basic=True,
    ),
    Route(
        GET, "/sdapi/v1/loras", list_loras, "a1111Loras", "A1111: LoRAs that the tenant may use.",
        {200: Reply("The newest first.", {JSON: LoraItems})}, (401, 503), basic=True,
    ),
    Route(
        POST, "/sdapi/v1/options", set_options, "a1111SetOptions",
        "A1111: accept options that are as they stand; none are kept.",
        {200: Reply("They are.", {JSON: Nothing})}, (400, 401, 403, 408, 413, 429),
        json_body=Settings, basic=True,
    ),
)  # fmt: skip
"""A1111's API; served where the gateway's `a1111` says so."""
