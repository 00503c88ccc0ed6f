"""The latest step at which a LoRA may join: pictures in which it joins later and later, compared and told of."""

from __future__ import annotations

import asyncio
import io
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import nats.errors
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from skimage.metrics import structural_similarity

from giornata.blobs import BlobStore, open_blobs
from giornata.bus import bus
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline, heed_cancel, retry_patiently
from giornata.records import LoraRecords
from giornata.wire import subjects
from giornata.wire.adapters import AskedLora
from giornata.wire.errors import (
    DeadlineExceeded,
    Failed,
    GiornataError,
    LoraNotFound,
    LoraNotReady,
    ModelNotFound,
    NotPermitted,
    Overloaded,
    PayloadTooLarge,
    ServiceUnavailable,
)
from giornata.wire.jobs import Priority
from giornata.wire.loras import EVERYONE, LoraRecord, LoraState, ProfiledLora
from giornata.wire.messages import INLINE_BYTES, EditReply, Picture, ProbeMessage
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters, MaskMode, Reuse, evaluations_of
from giornata.wire.resolution import resolve
from giornata.wire.subjects import NatsRole
from giornata.wire.workers import FleetSummary
from giornata_tools.lora_profiler.probes import Probe, built_in

if TYPE_CHECKING:
    from giornata_tools.launcher.stack import Stack

# Which steps are tried, and how late a LoRA may join after what was seen. Pure.


Pixels = NDArray[np.uint8]
"""(height, width, 3)."""
LEAST_SSIM: Final = 0.95
"""Mean over the probes, of each picture in its mask's box beside the picture that has the LoRA in every step."""
SURELY: Final = 2.0
"""Standard errors by which the mean exceeds it: of other pictures, the mean is then below it in 2 cases of 100."""
FINE: Final = 5
"""Steps up to which each is tried."""
GROWTH: Final = 1.25
"""Beyond `FINE`, each step that is tried is so many times the one before."""


@dataclass(frozen=True)
class JoinStepTrial:
    """Pictures whose LoRA joined after `step` steps of `steps`."""

    step: int
    steps: int
    ssims: tuple[float, ...]
    """SSIM of each probe, in the mask's box."""

    @property
    def share(self) -> float:
        """Share of the steps after which the LoRA joined."""
        return self.step / self.steps

    @property
    def least(self) -> float:
        """SSIM of the probe that is least alike."""
        return min(self.ssims)

    @property
    def mean(self) -> float:
        """Mean SSIM of the probes."""
        return statistics.fmean(self.ssims)

    @property
    def error(self) -> float:
        """Standard error of the mean; 0 of a single probe, which tells none."""
        n = len(self.ssims)
        return statistics.stdev(self.ssims) / math.sqrt(n) if n > 1 else 0.0

    @property
    def alike(self) -> bool:
        """Return whether pictures are like those with the LoRA in every step, and not by the chance of few probes."""
        return self.mean - SURELY * self.error >= LEAST_SSIM


def candidates(steps: int, at_most: float) -> Iterator[int]:
    """Steps to try, from the first on, none above the share `at_most` of `steps` and none that is the last.

    Every one up to `FINE`, then fewer: a share that lies between two of them is taken for the lower one.
    """
    step = 1
    while step < steps and step <= at_most * steps:
        yield step
        step = step + 1 if step < FINE else max(step + 1, int(step * GROWTH))


def joins_within(tried: Sequence[JoinStepTrial]) -> float:
    """The largest share of the steps up to which all that was `tried`, in rising order, is alike; 0 where none is.

    What is alike again after one that is not is chance, and does not count.
    """
    share = 0.0
    for one in tried:
        if not one.alike:
            break
        share = one.share
    return share


def ssim(one: Pixels, other: Pixels, where: NDArray[np.bool_] | None = None) -> float:
    """Mean structural similarity (Wang et al., 2004; windows of 7 pixels) over `where`, default all."""
    mean, every = structural_similarity(one, other, channel_axis=2, full=True)
    return float(mean if where is None else every[where].mean())


# Pictures of one LoRA: made by the system, compared, and what they say told to the LoRA store.


SHARED_TENANT: Final = "default"
"""On whose behalf LoRAs are probed that are everybody's; it needs no key of its own."""
MESSAGE_BYTES: Final = INLINE_BYTES + (1 << 20)
TOLD_MS: Final = 30_000

Probes = Callable[[ModelCard], Sequence[Probe]]
"""The probes for a model."""
Done = Callable[[int, JoinStepTrial | None], None]
"""Told of each finished edit: how many are done, and what all pictures of a step say once they are there."""


@dataclass(frozen=True)
class ProbeSetting:
    """The options with which every probe is edited."""

    steps: int | None = None
    """None: the model's default."""
    padding_mask_crop: int | None = None
    at_most: float = 0.5
    """Share of the steps beyond which none is tried."""
    in_flight: int = 2
    """Edits at a time."""
    timeout_s: float = 900.0
    """For one edit, waiting included."""


@dataclass(frozen=True)
class LoraProfile:
    """The latest step at which a LoRA may join, and the measurements behind it."""

    record: LoraRecord
    steps: int
    tried: tuple[JoinStepTrial, ...]
    """In rising order; all but the last are alike."""

    @property
    def joins_within(self) -> float:
        """Share of the steps."""
        return joins_within(self.tried)


@dataclass(frozen=True)
class LoraProfiler:
    """Makes pictures by a connection that belongs to the NATS user `profiler`."""

    bus: Bus
    blobs: BlobStore | None
    """For pictures that do not fit into a message."""
    probes: Probes
    setting: ProbeSetting

    async def profile(self, record: LoraRecord, card: ModelCard, done: Done) -> LoraProfile:
        """See how late a ready LoRA of the served model `card` may join, and have the LoRA store keep it.

        Raises:
            LoraNotFound: it was deleted meanwhile.
            LoraNotReady: it is not ready.
            GiornataError: why an edit was refused or failed, or the store could not be told.
        """
        if record.canonical is None:
            raise LoraNotReady(received=str(record.state), accepted="a LoRA that is ready")
        profile = LoraProfile(record, *await self._seen(record, card, done))
        told = ProfiledLora(
            lora_id=record.lora_id,
            tenant=record.tenant,
            sha256=record.canonical.file.sha256,
            model_digest=record.canonical.model_digest,
            joins_within=profile.joins_within,
            remaining_ms=TOLD_MS,
        )
        await self.bus.call(subjects.lora("profiled"), told, LoraRecord, Deadline.after_ms(TOLD_MS))
        return profile

    async def _seen(
        self, record: LoraRecord, card: ModelCard, done: Done
    ) -> tuple[int, tuple[JoinStepTrial, ...]]:
        """Steps of an edit, and what joining later and later does."""
        asked = EditParameters(
            prompt="-",
            model=card.name,
            mask_mode=MaskMode.WHITE,
            mask_blur=0,  # the paste's feather is no work of the LoRA's
            reuse=Reuse.OFF,
            num_inference_steps=self.setting.steps,
            padding_mask_crop=self.setting.padding_mask_crop,
            loras=(AskedLora(id=record.lora_id),),
        )
        steps = evaluations_of(resolve(asked, card, 0), keeps_whole_steps=card.keeps_whole_steps)
        if record.canonical is not None and not record.canonical.modules:
            return steps, ()  # its text encoders' part acts before the first step
        probes = await asyncio.to_thread(self.probes, card)
        count = _ProfileProgress(done)
        whole = await self._edited(record, asked, probes, count)
        tried: list[JoinStepTrial] = []
        for step in candidates(steps, self.setting.at_most):
            joining = asked.model_copy(update={"lora_join": step / steps})
            pictures = await self._edited(record, joining, probes, count)
            pairs = zip(probes, whole, pictures, strict=True)
            tried.append(
                JoinStepTrial(step, steps, tuple(ssim(one, other, probe.box) for probe, one, other in pairs))
            )
            count.tell(tried[-1])
            if not tried[-1].alike:
                break
        return steps, tuple(tried)

    async def _edited(
        self, record: LoraRecord, asked: EditParameters, probes: Sequence[Probe], count: _ProfileProgress
    ) -> list[Pixels]:
        """The picture of each probe, some at a time. The first failure is raised once what runs has ended."""
        places = asyncio.Semaphore(self.setting.in_flight)
        pictures: dict[int, Pixels] = {}
        failures: list[GiornataError] = []

        async def edit(probe: Probe) -> None:
            async with places:
                if failures:
                    return
                parameters = asked.model_copy(update={"prompt": probe.prompt, "seed": probe.seed})
                try:
                    pictures[probe.seed] = await self._picture(record, parameters, probe)
                except GiornataError as error:
                    failures.append(error)
                else:
                    count.add()

        # a failure in a group cancels the task that waits for it, which on Python 3.11 stays marked as cancelled
        async with asyncio.TaskGroup() as tasks:
            for probe in probes:
                tasks.create_task(edit(probe), name=f"probe-{probe.name}")
        if failures:
            raise failures[0]
        return [pictures[probe.seed] for probe in probes]

    async def _picture(self, record: LoraRecord, asked: EditParameters, probe: Probe) -> Pixels:
        deadline = Deadline.after_ms(self.setting.timeout_s * 1000)

        async def ask() -> EditReply:
            message = ProbeMessage(
                parameters=asked,
                image=probe.image,
                mask=probe.mask,
                tenant=SHARED_TENANT if record.tenant == EVERYONE else record.tenant,
                priority=Priority.BATCH,
                remaining_ms=deadline.remaining_ms(),
            )
            return await self.bus.call(
                subjects.EDIT_PROBE, message, EditReply, deadline, limit_bytes=MESSAGE_BYTES
            )

        # a full queue is no reason to begin with the first picture again
        reply: EditReply = await retry_patiently(Overloaded, self.setting.timeout_s)(ask)
        if not reply.pictures:
            raise Failed("; ".join(reply.errors))
        _check_step(reply.pictures[0], asked)
        with Image.open(io.BytesIO(await self._file(reply.pictures[0]))) as opened:
            pixels = np.asarray(opened.convert("RGB"))
        if pixels.shape[:2] != probe.box.shape:
            raise Failed(
                f"The picture of {probe.name} has another size than the probe.",
                received=f"{pixels.shape[1]}x{pixels.shape[0]} pixels",
                accepted=f"{probe.box.shape[1]}x{probe.box.shape[0]}",
            )
        return pixels

    async def _file(self, picture: Picture) -> bytes:
        if picture.data is not None:
            return picture.data
        if picture.ref is None or self.blobs is None:
            raise PayloadTooLarge("A picture is too large to travel over NATS.", accepted="--blobs")
        return await self.blobs.get(picture.ref)


@dataclass
class _ProfileProgress:
    """Finished edits."""

    done: Done
    edits: int = 0

    def add(self) -> None:
        self.edits += 1
        self.done(self.edits, None)

    def tell(self, tried: JoinStepTrial) -> None:
        self.done(self.edits, tried)


def _check_step(picture: Picture, asked: EditParameters) -> None:
    """Refuse to compare a picture whose LoRA joined elsewhere than it was to: a worker of an older version."""
    late, wanted = bool(picture.loras_from), asked.lora_join is not None
    if picture.loras_from is None or late is not wanted:
        raise Failed(
            "A denoiser did not let the LoRA join where the request says.",
            received=f"from step {picture.loras_from}",
            accepted=f"after a share of {asked.lora_join or 0:g} of the steps",
        )


# The models that are served, as the router tells.


class ServedModels:
    """The models that are served. Used from one event loop; make it with :meth:`listening`."""

    def __init__(self) -> None:
        self._cards: tuple[ModelCard, ...] = ()
        self.news = asyncio.Event()
        """Set when the served models have changed; a task that waits for it clears it."""

    @classmethod
    @asynccontextmanager
    async def listening(cls, bus: Bus) -> AsyncIterator[ServedModels]:
        """Hear the router while inside."""
        served = cls()
        async with bus.listen(subjects.SUMMARY, FleetSummary, served.hear):
            yield served

    def hear(self, summary: FleetSummary) -> None:
        """Take in what the router tells."""
        if self._cards != summary.models:
            self._cards = summary.models
            self.news.set()

    def card(self, record: LoraRecord) -> ModelCard | None:
        """The checkpoint that a LoRA is for; None while it is not served."""
        wanted = (record.model, record.canonical and record.canonical.model_digest)
        return next((card for card in self._cards if (card.name, card.digest) == wanted), None)


# One connection as the NATS user `profiler`: LoRAs by name, the ones that are due, or all that come, one after
# the other, as soon as their models are served.


HEARD_S: Final = 10.0
"""How long the routers are waited for; they tell every second what is served."""
RETRY_S: Final = 60.0
"""After how long a LoRA comes again that could not be profiled for a reason that passes."""

Begin = Callable[[LoraRecord], Done]
"""Is told of a LoRA that is profiled now; what it returns is told of its edits."""
Ended = Callable[[LoraRecord, LoraProfile | GiornataError], None]
"""Is told what became of it."""


@dataclass(frozen=True)
class ProfilerLogin:
    """The address of the system, and the credentials of the profiler."""

    nats_url: str
    password_file: Path | None = None
    blobs_url: str | None = None


@dataclass
class ProfilerSession:
    """A connected profiler. Used from one event loop; make it with :func:`connected`."""

    records: LoraRecords
    profiler: LoraProfiler
    served: ServedModels
    retry_s: float = RETRY_S
    _waiting: dict[str, LoraRecord] = field(default_factory=dict)
    """Those that :meth:`watch` has not profiled yet, by key."""
    _not_before_s: dict[str, float] = field(default_factory=dict)
    """When those may come again that could not be profiled, on the monotonic clock."""

    async def found(self, ids: Iterable[str]) -> list[LoraRecord]:
        """The LoRAs of these ids, of any tenant.

        Raises:
            LoraNotFound: one of them is none.
        """
        found = []
        for lora_id in ids:
            try:
                named = await self.records.bucket.matching(f"*.{subjects.token(lora_id)}")
            except ValueError as error:
                raise LoraNotFound(received=lora_id) from error
            if not named:
                raise LoraNotFound(received=lora_id)
            found += named
        return found

    async def due(self) -> list[LoraRecord]:
        """The LoRAs that were not profiled yet, the oldest first."""
        return sorted(filter(is_due, await self.records.all()), key=lambda record: record.created_s)

    async def profile(self, records: Iterable[LoraRecord], begin: Begin, ended: Ended) -> bool:
        """Profile these, one after the other; whether all could be."""
        whole = True
        for record in records:
            try:
                outcome = await self._outcome(record, await self._card(record), begin)
            except GiornataError as error:
                outcome = error
            whole = whole and not isinstance(outcome, GiornataError)
            ended(record, outcome)
        return whole

    async def watch(self, begin: Begin, ended: Ended) -> None:
        """Profile what is due and what comes. It never returns; called once.

        Raises:
            ServiceUnavailable: the records can be followed no more.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(), name="follow-loras")
                while True:
                    heed_cancel()
                    key, record, card = await self._next()
                    outcome = await self._outcome(record, card, begin)
                    again = isinstance(outcome, GiornataError) and _passes(outcome)
                    if self._waiting.get(key) == record and not again:
                        del self._waiting[key]
                    if again:
                        self._not_before_s[key] = time.monotonic() + self.retry_s
                        asyncio.get_running_loop().call_later(self.retry_s, self.served.news.set)
                    ended(record, outcome)
        except ExceptionGroup as group:
            lost, rest = group.split(nats.errors.Error)
            if lost is None or rest is not None:
                raise
            raise ServiceUnavailable(
                f"The records of LoRAs cannot be followed: {lost.exceptions[0]}."
            ) from lost

    async def _follow(self) -> None:
        """Keep what waits up to date with the records."""
        async with aclosing(self.records.bucket.changes(">")) as changes:
            async for key, record in changes:
                self._not_before_s.pop(key, None)
                if record is not None and is_due(record):
                    self._waiting[key] = record
                    self.served.news.set()
                else:
                    self._waiting.pop(key, None)

    async def _next(self) -> tuple[str, LoraRecord, ModelCard]:
        """The oldest LoRA whose turn it is and whose model is served, as soon as there is one."""
        while True:
            self.served.news.clear()
            now_s = time.monotonic()
            for key, record in sorted(self._waiting.items(), key=lambda item: item[1].created_s):
                card = self.served.card(record)
                if card is not None and self._not_before_s.get(key, 0.0) <= now_s:
                    return key, record, card
            await self.served.news.wait()

    async def _outcome(
        self, record: LoraRecord, card: ModelCard, begin: Begin
    ) -> LoraProfile | GiornataError:
        try:
            return await self.profiler.profile(record, card, begin(record))
        except GiornataError as error:
            return error

    async def _card(self, record: LoraRecord) -> ModelCard:
        if not is_due(record.model_copy(update={"joins_within": None})):
            raise LoraNotReady(received=str(record.state), accepted="a LoRA that is ready")
        try:
            async with asyncio.timeout(HEARD_S):
                while (card := self.served.card(record)) is None:
                    self.served.news.clear()
                    await self.served.news.wait()
        except TimeoutError:
            raise ServiceUnavailable(
                f"The checkpoint of the model {record.model} that the LoRA is for is not served.",
                retry_after_s=HEARD_S,
            ) from None
        return card


def is_due(record: LoraRecord) -> bool:
    """Return whether a LoRA can be used and was not profiled yet."""
    return record.state is LoraState.READY and record.canonical is not None and record.joins_within is None


def _passes(error: GiornataError) -> bool:
    """Return whether an error says nothing of the LoRA: what it needs is away."""
    return error.retryable or isinstance(error, ModelNotFound | DeadlineExceeded)


@asynccontextmanager
async def connected(
    login: ProfilerLogin, setting: ProbeSetting, probes: list[Probe] | None = None
) -> AsyncIterator[ProfilerSession]:
    """A session while inside, with `probes`, or with those that are built in.

    Raises:
        ServiceUnavailable: no server answers, or lets us in.
        NotPermitted: the user may not do what a profiler does.
    """
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(
            bus.connect(login.nats_url, "profiler", user=NatsRole.PROFILER, password_file=login.password_file)
        )
        blobs = await stack.enter_async_context(open_blobs(login.blobs_url)) if login.blobs_url else None
        served = await stack.enter_async_context(ServedModels.listening(connection))
        try:
            records = await LoraRecords.open(connection.jetstream)
        except nats.errors.Error as error:
            raise NotPermitted(
                "The records of LoRAs do not answer.",
                accepted="a server with a LoRA store, and the password of the NATS user profiler",
            ) from error
        choose = built_in if probes is None else lambda _: probes
        yield ProfilerSession(records, LoraProfiler(connection, blobs, choose, setting), served)


# LoRAs of a running stack, profiled in the background.


async def profiling(stack: Stack, say: Callable[[str], None]) -> None:
    """Profile the LoRAs of `stack` until cancelled, one edit at a time, and say how late each may join.

    Where that cannot go on, it says so and waits: the stack stays.
    """

    def begin(_: LoraRecord) -> Done:
        return lambda _edits, _tried: None

    def ended(record: LoraRecord, outcome: LoraProfile | GiornataError) -> None:
        name = record.name or record.lora_id
        if isinstance(outcome, GiornataError):
            say(f"The LoRA {name} could not be profiled: {outcome}")
        else:
            say(f"The LoRA {name} may join after {outcome.joins_within:.0%} of the steps.")

    login = ProfilerLogin(stack.nats_url, stack.nats_password_file(NatsRole.PROFILER), stack.blobs_url)
    try:
        async with connected(login, ProbeSetting(in_flight=1)) as session:
            await session.watch(begin, ended)
    except Exception as error:  # noqa: BLE001 - the task's edge: said, and the stack goes on
        say(f"LoRAs are profiled no more: {error}")
    await asyncio.Event().wait()
