"""A prepost service that computes nothing, for tests of what asks it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from giornata import __version__
from giornata.bus.bus import Bus, Endpoint, publish_state
from giornata.families import Family
from giornata.wire import subjects
from giornata.wire.jobs import BlobRef, Encoding, Inspection
from giornata.wire.messages import (
    EncodeRequest,
    FinishReply,
    FinishRequest,
    InspectRequest,
    Question,
    TemplateRequest,
    question,
)
from giornata.wire.models import DISCRETE_TIME, ModelCard, Task
from giornata.wire.templates import TemplateInputs
from giornata.wire.workers import CostFit, PrepostState, ServiceName, ServiceState, StepSample, WorkerCosts
from tests.fakes.news import News

Q = TypeVar("Q", bound=Question)
R = TypeVar("R")

CARD = ModelCard(
    name="tiny",
    family=Family.FLUX_FILL,
    digest="d" * 64,
    vae_scale_factor=8,
    latent_channels=16,
    max_text_tokens=48,
    takes_guidance=True,
    takes_true_cfg=False,
    default_steps=4,
    default_guidance_scale=30.0,
    default_strength=1.0,
)
PAINTER = CARD.model_copy(
    update={
        "name": "painter",
        "family": Family.FLUX_INPAINT,
        "digest": "f" * 64,
        "tasks": (Task.EDIT, Task.GENERATE),
        "generation_guidance_scale": 3.5,
    }
)
"""A model that also makes pictures from text."""
SDXL = CARD.model_copy(
    update={
        "name": "sdxl",
        "family": Family.SDXL,
        "digest": "5" * 64,
        "guided_above": 1.0,
        "samplers": DISCRETE_TIME,
        "tasks": (Task.EDIT, Task.GENERATE),
        "generation_guidance_scale": 5.0,
        "native_size": 1024,
    }
)
"""A model with classifier-free guidance that makes pictures from text, too."""


def worker_costs(
    *weights: float, device: str = "gpu", load: tuple[float, float] = (0.0, 0.0), r2: float = 1.0
) -> WorkerCosts:
    """Costs of steps by the first of their weights; the others are 0, and loads take no time by default."""
    fit = CostFit(
        weights=(*weights, *(0.0,) * (6 - len(weights))), r2=r2, residual_ms=0, samples=0, outliers=0
    )
    return WorkerCosts(compute=fit, load=fit.model_copy(update={"weights": load}), device=device)


STEP = StepSample(
    rows=1, sequences=1, image_tokens=1, text_tokens=1, attention_pairs=1, assemble_ms=0.0, step_ms=0.0
)
"""A step of which only the time matters."""


def state_of(service: ServiceName, instance: str, **fields: object) -> ServiceState:
    """The telemetry of an instance that is ready, with these fields."""
    told = {"service": service, "instance": instance, "host": "h", "version": "1", "ready": True, **fields}
    return ServiceState.model_validate(told)


REF = BlobRef(key="k", size_bytes=1, sha256="0" * 64)
INSPECTION = Inspection(
    width=64,
    height=64,
    has_alpha=False,
    model_width=64,
    model_height=64,
    output_width=64,
    output_height=64,
    tokens=16,
    compute_tokens=4,
    mask_ratio=0.25,
    template_key="t",
    prepared=REF,
)


class FakePrepost:
    """Answers inspect, encode and finish at once; `fail` may raise instead."""

    def __init__(
        self,
        bus: Bus,
        instance: str = "prepost-fake",
        *,
        image_processes: int = 64,
        card: ModelCard = CARD,
    ) -> None:
        self._bus = bus
        self._instance, self._image_processes, self._card = instance, image_processes, card
        self.going = asyncio.Event()
        """Clear it to freeze the instance: it tells nothing and answers nothing, and its connection stays."""
        self.going.set()
        self.news = News()
        """Told of every question that comes."""
        self.calls: list[str] = []
        self.finished: list[FinishRequest] = []
        self.inspection = INSPECTION
        """What every picture is measured as."""
        self.fail: Callable[[str], None] = lambda _verb: None
        self.took_ms: dict[str, int] = {}
        """The work that answers tell, by verb."""
        self.hold: asyncio.Event | None = None
        """Answers wait for it."""
        self.asked: list[str] = []
        """Every question that came, whether it was answered or not."""
        self.remaining_ms: list[int] = []
        """The time that each of them had."""
        self.lost: set[str] = set()
        """Verbs of which the next question is lost: it is not answered, and nobody says to have it."""
        self._answering: list[str] = []
        self._left = asyncio.Event()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Serve while inside."""
        stages: dict[str, tuple[type[Question], Callable[..., Awaitable[Any]]]] = {
            "inspect": (InspectRequest, self._listed(self._inspect)),
            "encode": (EncodeRequest, self._listed(self._encode)),
            "finish": (FinishRequest, self._listed(self._finish)),
            "template": (TemplateRequest, self._listed(self._template)),
        }
        endpoints = [
            Endpoint(subjects.prepost_at(self._instance, verb), *one) for verb, one in stages.items()
        ]
        async with self._bus.serve("prepost", *endpoints, instance=self._instance):
            telling = asyncio.create_task(self._tell())
            try:
                yield
            finally:
                self._left.set()
                self.going.set()
                if (
                    self.hold is not None
                ):  # or the answers it holds would be waited for until their time is over
                    self.hold.set()
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)
                await publish_state(
                    self._bus, self._report().model_copy(update={"ready": False, "draining": True})
                )

    async def _tell(self) -> None:
        while True:
            await self.going.wait()
            await publish_state(self._bus, self._report())
            await asyncio.sleep(0.1)  # the rate of telemetry

    def _listed(self, handler: Callable[[Q], Awaitable[R]]) -> Callable[[Q], Awaitable[R]]:
        async def handle(request: Q) -> R:
            name = question(request)
            verb = name.split()[0]
            self.asked.append(name)
            self.remaining_ms.append(request.remaining_ms)
            self.news.tell()
            await self.going.wait()
            if verb in self.lost:
                self.lost.remove(verb)
                self.calls.append(verb)
                await self._left.wait()
            self._answering.append(name)
            try:
                answer = await handler(request)
                if self.hold is not None:
                    await self.hold.wait()
                await self.going.wait()
                return answer
            finally:
                self._answering.remove(name)

        return handle

    async def _inspect(self, _request: InspectRequest) -> Inspection:
        self._called("inspect")
        return self.inspection.model_copy(
            update={"compute_ms": self.took_ms.get("inspect", self.inspection.compute_ms)}
        )

    async def _encode(self, request: EncodeRequest) -> Encoding:
        self._called("encode")
        rows = (REF,) * request.job.row_count
        return Encoding(text=REF, text_tokens=48, rows=rows, compute_ms=self.took_ms.get("encode", 0))

    async def _finish(self, request: FinishRequest) -> FinishReply:
        self._called("finish")
        self.finished.append(request)
        return FinishReply(
            image=REF.model_copy(update={"key": f"image{request.index}"}),
            decode_ms=self.took_ms.get("finish", 1),
            paste_ms=1,
        )

    async def _template(self, _request: TemplateRequest) -> TemplateInputs:
        self._called("template")
        return TemplateInputs(inspection=INSPECTION, empty_text=REF, conditioning=REF)

    def _called(self, verb: str) -> None:
        self.calls.append(verb)
        self.fail(verb)

    def _report(self) -> ServiceState:
        return ServiceState(
            service=ServiceName.PREPOST,
            instance=self._instance,
            host=socket.gethostname(),
            version=__version__,
            ready=True,
            models=(self._card,),
            prepost=PrepostState(image_processes=self._image_processes),
            answering=tuple(self._answering),
        )
