"""What tests of a router share: jobs, a bus with a prepost behind it, routers and denoisers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from giornata.blobs import BlobStore
from giornata.bus import bus as buses
from giornata.bus import streams
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.records import JobRecordStore, Quarantine
from giornata.residency.use_based import USE_PERIOD_S
from giornata.scheduling.policies import PolicyName
from giornata.scheduling.queue import AGEING_S
from giornata.wire import subjects
from giornata.wire.errors import DeadlineExceeded, ServiceUnavailable
from giornata.wire.jobs import BlobRef, Job, JobRecord, JobState, Priority
from giornata.wire.messages import CancelRows, DoneEvent, EventKind, JobAck, SubmitRequest
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.resolution import resolve
from giornata.wire.subjects import STORE_BYTES, NatsRole
from giornata_router import dispatch, leadership
from giornata_router.config import RouterConfig
from giornata_router.service import Router
from tests.configs import configured
from tests.fakes.blobs import MemoryBlobs
from tests.fakes.denoiser import FakeDenoiser
from tests.fakes.fleet import CARD, FakePrepost, worker_costs
from tests.patience import HUNG_MS, HUNG_S

LEASE_S: Final = 30.0
"""The lease of a router here. In service it has a tenth of that: a machine that stands still for 3 s then ends it, and
every test of something else would be one of a router that takes over."""
COSTS = worker_costs(0.0, 0.0, 0.1)
IMAGE = BlobRef(key="image", size_bytes=1, sha256="0" * 64)


def make_job(
    *,
    n: int = 1,
    budget_ms: int = HUNG_MS,
    priority: Priority = Priority.INTERACTIVE,
    reuse: Reuse = Reuse.AUTO,
    tenant: str = "default",
    weight: float = 1.0,
    slo_ms: int | None = None,
    steps: int | None = None,
) -> Job:
    asked = EditParameters(
        prompt="a red star",
        n=n,
        reuse=reuse,
        slo_ms=slo_ms,
        num_inference_steps=steps,
    )
    return Job(
        job_id=f"job_{secrets.token_hex(8)}",
        tenant=tenant,
        weight=weight,
        gateway="gateway-test",
        priority=priority,
        model=CARD.name,
        model_digest=CARD.digest,
        parameters=resolve(asked, CARD, seed=7),
        image=IMAGE,
        budget_ms=budget_ms,
        result_ttl_s=60,
    )


class Bench:
    """A bus, the records, a prepost, and what the gateway would see."""

    def __init__(self, bus: Bus, records: JobRecordStore, prepost: FakePrepost) -> None:
        self.bus = bus
        self.records = records
        self.prepost = prepost
        self.done: dict[str, asyncio.Future[DoneEvent]] = {}
        self.done_count: dict[str, int] = {}

    def hear(self, event: DoneEvent) -> None:
        self.done_count[event.job_id] = self.done_count.get(event.job_id, 0) + 1
        future = self.done.setdefault(event.job_id, asyncio.get_running_loop().create_future())
        if not future.done():
            future.set_result(event)

    async def submit(self, *jobs: Job) -> None:
        """Submit again where no router answered, as one does not whose lease ends meanwhile on a slow machine."""
        for job in jobs:
            self.done.setdefault(job.job_id, asyncio.get_running_loop().create_future())
            request = SubmitRequest(job=job, remaining_ms=job.budget_ms)
            async with asyncio.timeout(HUNG_S):
                while True:
                    try:
                        await self.bus.call(subjects.SUBMIT, request, JobAck, Deadline.after_ms(20_000))
                        break
                    except (ServiceUnavailable, DeadlineExceeded):
                        await asyncio.sleep(0.1)

    async def submitted(self, **fields: Any) -> Job:
        """One that has just been submitted."""
        job = make_job(**fields)
        await self.submit(job)
        return job

    async def cancel(self, job: Job) -> None:
        """As a gateway does."""
        await self.records.change(job.job_id, lambda record: record.model_copy(update={"cancel": True}))
        await self.bus.publish(subjects.cancel(job.job_id), CancelRows(job_id=job.job_id, attempt=0))

    async def completed(self, job: Job) -> JobRecord:
        """The record of one that has ended so."""
        assert (await self.ended(job)).state is JobState.COMPLETED
        return await self.records.get(job.job_id)

    async def ended(self, job: Job, timeout_s: float = HUNG_S) -> DoneEvent:
        return await asyncio.wait_for(self.done[job.job_id], timeout_s)


@asynccontextmanager
async def open_bench(
    url: str, prepost_of: Callable[[Bus], FakePrepost] = FakePrepost, **ensured: Any
) -> AsyncIterator[Bench]:
    """A bench whose streams have these options; its prepost is not running yet."""
    async with buses.connect(url, "bench") as bus:
        await streams.ensure(bus.jetstream, replicas=1, events_ttl_s=60, **ensured)
        bench = Bench(bus, await JobRecordStore.open(bus.jetstream), prepost_of(bus))
        done = subjects.events_of_gateway("gateway-test", EventKind.DONE)
        async with bus.listen(done, DoneEvent, bench.hear):
            yield bench


@asynccontextmanager
async def running_router(
    url: str,
    name: str,
    *,
    queue_limit: int = 100,
    tenant_share: float = 1.0,
    prepared_rows: int = 64,
    replicas: int = 1,
    password_file: Path | None = None,
    policy: PolicyName = PolicyName.FINISH_TIME,
    ageing_s: float = AGEING_S,
    store_bytes: int = STORE_BYTES,
    linger_s: int = streams.LINGER_S,
    records_of: type[JobRecordStore] = JobRecordStore,
    quarantine_of: type[Quarantine] = Quarantine,
    blobs: BlobStore | None = None,
    placement_s: float = USE_PERIOD_S,
    lease_s: float = LEASE_S,
    **more: Any,
) -> AsyncIterator[asyncio.Task[None]]:
    """A router on a connection of its own; cancelling the task is its sudden death.

    `lease_s` is how long another router waits for one that has gone without a word, as where NATS was away.
    """
    config = configured(
        RouterConfig,
        nats_url=url,
        instance=name,
        telemetry_hz=10,
        queue_limit=queue_limit,
        tenant_share=tenant_share,
        prepared_rows=prepared_rows,
        policy=policy,
        ageing_s=ageing_s,
        placement_s=placement_s,
        **more,
    )
    stop = asyncio.Event()

    async def live() -> None:
        async with buses.connect(url, name, user=NatsRole.ROUTER, password_file=password_file) as bus:
            await streams.ensure_queue(
                bus.jetstream,
                replicas=replicas,
                max_messages=config.max_messages,
                store_bytes=store_bytes,
            )
            records = await records_of.open(bus.jetstream, linger_s=linger_s)
            quarantine = await quarantine_of.open(bus.jetstream)
            await Router(bus, blobs or MemoryBlobs(), records, quarantine, config).run(stop)

    with pytest.MonkeyPatch.context() as patch:
        for place in (streams, leadership):
            patch.setattr(place, "LEASE_TTL_S", lease_s)
        patch.setattr(dispatch, "RUN_REPLY_S", LEASE_S)  # a worker that answers late is asked nothing twice
        task = asyncio.create_task(live())
        try:
            yield task
        finally:
            stop.set()
            await asyncio.gather(task, return_exceptions=True)


async def denoiser(stack: AsyncExitStack, bench: Bench, name: str, **options: object) -> FakeDenoiser:
    fake = FakeDenoiser(bench.bus, bench.records, name, **options)  # type: ignore[arg-type]  # test options
    await stack.enter_async_context(fake.run())
    return fake
