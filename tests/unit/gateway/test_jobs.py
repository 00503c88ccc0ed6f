"""Jobs from their request to their end: prepared, submitted once by key, in doubt, and told of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError
from pydantic import BaseModel

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.wire import codec, subjects
from giornata.wire.adapters import CONTROL_IMAGES, LoraUse
from giornata.wire.errors import (
    BlobStoreFull,
    DeadlineExceeded,
    GiornataError,
    IdempotencyKeyReused,
    InvalidField,
    JobNotFound,
    QueueFull,
    ServiceUnavailable,
    StorageFull,
    StoreFull,
    TenantQueueFull,
)
from giornata.wire.jobs import BlobRef, Job, JobState, Priority
from giornata.wire.messages import DoneEvent, EventKind, StateEvent, StepEvent
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters
from giornata.wire.values import StageTimes
from giornata.wire.workers import FleetSummary, ServiceName
from giornata_gateway.admission import Tenant
from giornata_gateway.config import GatewayConfig
from giornata_gateway.fleet import FleetListener
from giornata_gateway.jobs.events import StreamedEvent, open_feed
from giornata_gateway.jobs.preparation import (
    HEADER,
    EditOrder,
    JobPreparer,
    SegmentationClient,
    check_same,
    fingerprint,
    job_id_of,
    read_key,
)
from giornata_gateway.jobs.resources import Loras
from giornata_gateway.jobs.submission import AdmittedJob, JobSubmitter
from tests.contract.messages import JOB
from tests.fakes import virtual_time
from tests.fakes.blobs import MemoryBlobs
from tests.fakes.fleet import CARD


def order_of(image: bytes | BlobRef, mask: bytes) -> EditOrder:
    return EditOrder(
        EditParameters(prompt="x"),
        image,
        mask,
        Tenant("alice"),
        Priority.BATCH,
        Deadline.after_ms(60_000),
        None,
    )


def preparation_of(blobs: MemoryBlobs, tasks: asyncio.TaskGroup) -> JobPreparer:
    fleet = FleetListener(bridged_s=0)
    ready = {ServiceName.PREPOST: 1, ServiceName.DENOISER: 1}
    fleet.hear(FleetSummary(router="r", ready=ready, models=(CARD,)))
    config = GatewayConfig(instance="gateway-1", result_ttl_s=60)
    nobody = cast("Bus", None)  # no order here asks for a mask
    return JobPreparer(
        config, blobs, fleet, LORALESS, SegmentationClient(config, nobody, blobs, fleet, tasks), tasks
    )


async def no_loras(tenant: str, asked: EditParameters, card: ModelCard) -> tuple[LoraUse, ...]:
    assert (tenant, card, asked.loras) == ("alice", CARD, ())
    return ()


LORALESS = cast("Loras", SimpleNamespace(used=no_loras))


async def test_nothing_stays_of_an_order_whose_mask_finds_no_room() -> None:
    blobs = MemoryBlobs(capacity_bytes=10)
    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(BlobStoreFull):
            await preparation_of(blobs, tasks).prepare(order_of(b"12345678", b"1234"))
    await blobs.put("alice/other", b"1234567890", 60)


async def test_forgetting_a_job_leaves_the_claim_checks_of_its_caller() -> None:
    blobs = MemoryBlobs()
    own = await blobs.put("alice/upload_1/image", b"image", 60)
    async with asyncio.TaskGroup() as tasks:
        preparation = preparation_of(blobs, tasks)
        job = await preparation.prepare(order_of(own, b"mask"))
        assert job.image == own
        assert job.mask is not None
        assert job.mask.key.startswith(f"alice/{job.job_id}/")
        await preparation.forget(job)
        assert await blobs.has(own)
        assert not await blobs.has(job.mask)


# Idempotency keys: which are taken, to which job they lead, and what counts as the same edit.


PRINTABLE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=255)


@given(PRINTABLE)
def test_printable_keys_are_taken_as_they_are(key: str) -> None:
    assert read_key([key], HEADER) == key


def test_no_header_is_no_key() -> None:
    assert read_key([], HEADER) is None


@pytest.mark.parametrize(
    ("values", "received"),
    [
        ([""], "0 characters"),
        ([" "], "1 characters"),
        (["x" * 256], "256 characters"),
        (["a\tb"], repr("a\tb")),
        (["a\x00b"], repr("a\x00b")),
        (["ключ"], repr("ключ")),
        (["\udcff"], repr("\udcff")),
        (["a", "a"], "2 headers"),
    ],
)
def test_bad_keys_are_refused_by_name(values: list[str], received: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read_key(values, HEADER)
    assert (caught.value.field, caught.value.received) == (HEADER, received)


@given(st.sampled_from(["a", "b", "ab", "default"]), PRINTABLE, st.sampled_from(["a", "b", "ab"]), PRINTABLE)
def test_tenant_and_key_lead_to_a_job_of_their_own(tenant: str, key: str, other: str, another: str) -> None:
    job_id = job_id_of(tenant, key)
    assert subjects.token(job_id) == job_id_of(tenant, key)
    assert (job_id == job_id_of(other, another)) == ((tenant, key) == (other, another))


def asked(**changes: Any) -> str:
    files = {"image", "mask", "reference_0", "reference_1", *CONTROL_IMAGES}
    given: dict[str, Any] = {"image": "aa", "mask": "bb"} | {
        name: changes[name] for name in files & changes.keys()
    }
    own = {"template_id", *files}
    fields: dict[str, Any] = {"prompt": "x", "n": 2} | {
        name: value for name, value in changes.items() if name not in own
    }
    pictures = {name: digest for name, digest in given.items() if digest is not None}
    return fingerprint(EditParameters(**fields), pictures, changes.get("template_id"))


def test_fields_at_their_defaults_are_the_same_as_left_out() -> None:
    assert asked(grow_mask=0, size="auto") == asked()


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"prompt": "y"}, "its fields"),
        ({"n": 3}, "its fields"),
        ({"seed": 1}, "its fields"),
        ({"user": "u"}, "its fields"),
        ({"image": "ab"}, "its image or template"),
        ({"image": None, "template_id": "aa"}, "its image or template"),
        ({"mask": None}, "its mask"),
        ({"reference_0": "cc"}, "its references"),
        ({"control_image_0": "cc"}, "its references and its control images"),
        ({"mask": "aa", "image": "bb"}, "its image or template and its mask"),
    ],
)
def test_another_edit_under_the_same_key_is_refused_and_told_by_what_differs(
    changes: dict[str, Any], differs: str
) -> None:
    job = JOB.model_copy(update={"fingerprint": asked()})
    check_same(job, asked())
    with pytest.raises(IdempotencyKeyReused, match=f"differs in {differs} from job_1"):
        check_same(job, asked(**changes))


def test_a_job_of_no_key_is_another() -> None:
    with pytest.raises(IdempotencyKeyReused):
        check_same(JOB.model_copy(update={"fingerprint": None}), asked())


def test_control_images_differ_by_their_order_and_from_references() -> None:
    one, other = (
        {"control_image_0": "cc", "control_image_1": "dd"},
        {"control_image_0": "dd", "control_image_1": "cc"},
    )
    told = [asked(**one), asked(**other), asked(reference_0="cc", reference_1="dd"), asked()]
    assert len(set(told)) == len(told)
    assert asked(**dict(reversed(one.items()))) == asked(**one)


# How a job is offered to the router: again while it does not answer, and in doubt its pictures stay.


WINDOW_S = 10.0
EDIT = JOB.model_copy(update={"fingerprint": None})


class Routers:
    """Answers of the routers that are asked, in order; None accepts. The last one is given again."""

    def __init__(self, answers: Sequence[GiornataError | None], full: GiornataError | None = None) -> None:
        self._answers, self._full = [*answers], full
        self.asked: list[str] = []

    async def call(self, subject: str, *_: object) -> None:
        self.asked.append(subject)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is not None:
            raise answer

    async def full_for_jobs(self, *, afresh: bool = False) -> GiornataError | None:
        """Why the streams take nothing, found out when a router has not answered."""
        return self._full if afresh else None


async def offered(routers: Routers) -> tuple[int, type[GiornataError] | None, bool]:
    """How often routers are asked to take a job, the outcome, and whether its pictures are kept."""
    forgotten: list[Job] = []

    async def forget(job: Job) -> None:
        forgotten.append(job)

    async def unknown(job_id: str) -> None:
        raise JobNotFound(received=job_id)

    outcome = None
    async with asyncio.TaskGroup() as tasks:
        submission = JobSubmitter(
            config=cast("Any", SimpleNamespace(submit_window_s=WINDOW_S)),
            bus=cast("Bus", routers),
            fleet=cast("Any", SimpleNamespace(serves=lambda *_: True)),
            ledger=cast("Any", SimpleNamespace(cancel=unknown)),
            storage=cast("Any", routers),
            preparation=cast("Any", SimpleNamespace(forget=forget)),
            ends=cast("Any", None),
            tasks=tasks,
            given_up=lambda _: None,
        )
        try:
            await submission.submit(
                AdmittedJob(EDIT, Deadline.after_ms(1000), cast("Any", SimpleNamespace()))
            )
        except GiornataError as error:
            outcome = type(error)
    assert not submission.doubtful, "nothing is remembered of a job that is settled"
    assert set(routers.asked) == {subjects.SUBMIT}
    return len(routers.asked), outcome, not forgotten


@pytest.mark.parametrize(
    ("answers", "full", "expected"),
    [
        ([QueueFull(), None], None, (1, QueueFull, False)),
        ([TenantQueueFull(), None], None, (1, TenantQueueFull, False)),
        ([StoreFull(), None], None, (1, StoreFull, False)),
        ([GiornataError(), None], None, (1, GiornataError, False)),
        ([DeadlineExceeded(), QueueFull()], None, (2, QueueFull, True)),
        ([DeadlineExceeded(), None], StorageFull(), (1, StorageFull, True)),
        ([ServiceUnavailable(), DeadlineExceeded(), None], None, (3, None, True)),
    ],
)
def test_pictures_of_a_job_stay_while_a_router_may_have_accepted_it(
    answers: list[GiornataError | None], full: GiornataError | None, expected: tuple[object, ...]
) -> None:
    """The first router may have queued it and died, and the one after it have no room: else there are two jobs."""
    assert virtual_time.run(offered(Routers(answers, full))) == expected


# A job's events from the stream: each once and in order, whatever the consumer repeats.


JOB_ID = "job_1"


class Stream:
    """A bus with one stream, whose ordered consumer a test drives."""

    def __init__(self, *, missing: bool = False) -> None:
        self.jetstream = self
        self.missing = missing
        self.open = 0
        self.after: list[int | None] = []
        self.hear: Callable[[StepEvent], None]
        self._receive: Callable[[Msg], Awaitable[None]]

    async def subscribe(self, subject: str, *, cb: Any, config: Any, **_: object) -> Stream:
        if self.missing:
            raise NotFoundError
        self._receive = cb
        self.after.append(config.opt_start_seq)
        self.open += 1
        return self

    async def unsubscribe(self) -> None:
        self.open -= 1

    @asynccontextmanager
    async def listen(self, subject: str, kind: object, hear: Any) -> AsyncIterator[None]:
        self.hear = hear
        yield

    async def deliver(self, sequence: int, kind: EventKind, event: BaseModel) -> None:
        metadata = SimpleNamespace(
            sequence=SimpleNamespace(stream=sequence), timestamp=datetime.fromtimestamp(1000 + sequence, UTC)
        )
        subject = subjects.event("g", JOB_ID, kind)
        message = SimpleNamespace(metadata=metadata, subject=subject, data=codec.encode(event))
        await self._receive(cast("Msg", message))


def state(of: JobState) -> StateEvent:
    return StateEvent(job_id=JOB_ID, attempt=0, state=of)


def step(number: int) -> StepEvent:
    return StepEvent(job_id=JOB_ID, attempt=0, index=0, step=number, steps=4)


DONE = DoneEvent(job_id=JOB_ID, state=JobState.COMPLETED, stage_ms=StageTimes())


def told(queue: asyncio.Queue[StreamedEvent | None]) -> list[tuple[int | None, str]]:
    """Sequence and kind of what a reader has been told."""
    found = [queue.get_nowait() for _ in range(queue.qsize())]
    return [(item.sequence, type(item.event).__name__) for item in found if item is not None]


async def nothing() -> None:
    """There is nothing to be restored."""


async def test_a_consumer_that_begins_again_where_it_was_interrupted_tells_nothing_twice() -> None:
    stream = Stream()
    async with open_feed(cast("Bus", stream), JOB_ID, 0, nothing) as queue:
        await stream.deliver(3, EventKind.STATE, state(JobState.PREPARING))
        await stream.deliver(5, EventKind.STATE, state(JobState.RUNNING))
        for sequence in (3, 5):
            await stream.deliver(sequence, EventKind.STATE, state(JobState.RUNNING))
        await stream.deliver(8, EventKind.DONE, DONE)
        await stream.deliver(8, EventKind.DONE, DONE)
        assert told(queue) == [(3, "StateEvent"), (5, "StateEvent"), (8, "DoneEvent")]
    assert (stream.after, stream.open) == ([None], 0)


async def test_a_reader_that_comes_again_is_told_what_it_has_not_had() -> None:
    stream = Stream()
    async with open_feed(cast("Bus", stream), JOB_ID, 5, nothing) as queue:
        stream.hear(step(2))
        await stream.deliver(5, EventKind.STATE, state(JobState.RUNNING))
        await stream.deliver(6, EventKind.DONE, DONE)
        assert told(queue) == [(None, "StepEvent"), (6, "DoneEvent")]
    assert stream.after == [6]


async def test_steps_are_held_back_until_the_stream_tells_that_the_job_is_running() -> None:
    stream = Stream()
    async with open_feed(cast("Bus", stream), JOB_ID, 0, nothing) as queue:
        stream.hear(step(1))
        await stream.deliver(1, EventKind.STATE, state(JobState.PREPARING))
        assert told(queue) == [(1, "StateEvent")]
        await stream.deliver(2, EventKind.STATE, state(JobState.RUNNING))
        stream.hear(step(2))
        assert told(queue) == [(2, "StateEvent"), (None, "StepEvent"), (None, "StepEvent")]


async def test_a_stream_that_is_gone_is_made_again_before_it_is_read() -> None:
    stream = Stream(missing=True)

    async def restore() -> None:
        stream.missing = False

    async with open_feed(cast("Bus", stream), JOB_ID, 0, restore) as queue:
        await stream.deliver(1, EventKind.DONE, DONE)
        assert told(queue) == [(1, "DoneEvent")]
    with pytest.raises(NotFoundError):
        async with open_feed(cast("Bus", Stream(missing=True)), JOB_ID, 0, nothing):
            pass
