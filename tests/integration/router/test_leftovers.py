"""What of a job stays in the blob store once it has ended, and what becomes of a job that loses something there."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial

import pytest

from giornata.blobs import BlobStore, intermediate
from giornata.bus.bus import Bus
from giornata.wire.errors import ImageUnreadable, IntermediateLost
from giornata.wire.jobs import BlobRef, Encoding, Inspection, Job, JobState
from giornata.wire.messages import (
    EncodeRequest,
    FinishReply,
    FinishRequest,
    InspectRequest,
    RunRequest,
)
from giornata.wire.values import Intermediate
from tests.fakes.denoiser import FakeDenoiser
from tests.fakes.fleet import INSPECTION, FakePrepost
from tests.fakes.nats_world.server import MemoryLink
from tests.integration.gateway_fakes import ListedBlobs
from tests.integration.router.bench import Bench, make_job, open_bench, running_router
from tests.patience import HUNG_S
from tests.present import present

OTHERS = ("default/template_1/image", "default/upload_1/image", "shared/prepost/empty-text")
"""Blobs that several jobs may use."""


class Blobs(ListedBlobs):
    """Tells when the router has deleted, which `going` lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.going = asyncio.Event()
        self.going.set()
        self.asked, self.deleted = asyncio.Event(), asyncio.Event()

    async def delete(self, *refs: BlobRef) -> None:
        self.asked.set()
        await self.going.wait()
        await super().delete(*refs)
        self.deleted.set()

    async def lose(self, ref: BlobRef) -> None:
        await super().delete(ref)


class Prepost(FakePrepost):
    """Reads and stores blobs as the real one; `losing` names what is lost before it is read, and how often."""

    def __init__(self, bus: Bus, blobs: Blobs) -> None:
        super().__init__(bus)
        self.blobs, self.losing = blobs, dict[Intermediate, int]()

    async def read(self, ref: BlobRef, name: Intermediate) -> None:
        if self.losing.get(name, 0) > 0:
            self.losing[name] -= 1
            await self.blobs.lose(ref)
        await intermediate(self.blobs, ref, name)

    async def _inspect(self, request: InspectRequest) -> Inspection:
        await super()._inspect(request)
        await self.blobs.get(present(request.job.image))
        prepared, alpha = [await store(self.blobs, request.job, name) for name in ("prepared", "alpha")]
        return INSPECTION.model_copy(update={"prepared": prepared, "alpha": alpha})

    async def _encode(self, request: EncodeRequest) -> Encoding:
        await super()._encode(request)
        await self.read(present(request.inspection.prepared), Intermediate.PREPARED)
        rows = [await store(self.blobs, request.job, "row") for _ in range(request.job.parameters.n)]
        text, empty = (
            await store(self.blobs, request.job, "text"),
            BlobRef(key=OTHERS[2], size_bytes=1, sha256=""),
        )
        return Encoding(text=text, text_tokens=48, rows=tuple(rows), empty_text=empty)

    async def _finish(self, request: FinishRequest) -> FinishReply:
        await super()._finish(request)
        await self.read(request.latents, Intermediate.LATENTS)
        await self.read(present(request.inspection.alpha), Intermediate.ALPHA)
        await self.blobs.get(present(request.job.image))
        return FinishReply(image=await store(self.blobs, request.job, "image"), decode_ms=1, paste_ms=1)


class Denoiser(FakeDenoiser):
    """Reads the encoding when its rows are done, and stores latents."""

    prepost: Prepost

    async def _report_rows(
        self, request: RunRequest, outcome: Callable[..., dict[str, object]], *, handed_back: bool = False
    ) -> None:
        changes: dict[int, dict[str, object]] = {}
        for row in request.rows:
            try:
                await self.prepost.read(request.encoding.rows[row.index], Intermediate.ENCODING)
                changes[row.index] = {"latents": await store(self.prepost.blobs, request.job, "latents")}
            except IntermediateLost as error:
                changes[row.index] = {"error": error.body()}
        await super()._report_rows(request, lambda row: changes[row.index], handed_back=handed_back)


async def store(blobs: BlobStore, job: Job, name: str) -> BlobRef:
    return await blobs.put(f"{job.folder}{name}-{secrets.token_hex(4)}", b"x", 60)


async def stored_job(blobs: Blobs, n: int = 1) -> Job:
    """A job with pictures of its own, in a store that holds blobs of others."""
    for key in OTHERS:
        await blobs.put(key, b"x", 60)
    job = make_job(n=n)
    image, mask = [await blobs.put(f"{job.upload_folder}x/{name}", b"x", 60) for name in ("image", "mask")]
    return job.model_copy(update={"image": image, "mask": mask})


@pytest.fixture
def blobs() -> Blobs:
    return Blobs()


@pytest.fixture
async def bench(nats_account: str, blobs: Blobs) -> AsyncIterator[Bench]:
    async with open_bench(nats_account, partial(Prepost, blobs=blobs)) as bench:
        worker = Denoiser(bench.bus, bench.records, "d1")
        assert isinstance(bench.prepost, Prepost)
        worker.prepost = bench.prepost
        async with bench.prepost.run(), worker.run():
            yield bench


@pytest.fixture
async def stack(bench: Bench, nats_account: str, blobs: Blobs) -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_router(nats_account, "router-a", blobs=blobs))
        yield stack


async def left(bench: Bench, blobs: Blobs, job: Job) -> set[str]:
    """What there is beside the blobs of others once the job has ended and the router has cleared up."""
    await bench.ended(job)
    await asyncio.wait_for(blobs.deleted.wait(), HUNG_S)
    assert blobs.keys >= set(OTHERS)
    return blobs.keys - set(OTHERS)


def kind(key: str) -> str:
    """What an intermediate is, by its key."""
    return key.split("/")[2].partition("-")[0]


@pytest.mark.usefixtures("stack")
async def test_a_client_hears_of_the_end_before_anything_is_deleted(bench: Bench, blobs: Blobs) -> None:
    blobs.going.clear()
    job = await stored_job(blobs)
    await bench.submit(job)
    assert (await bench.ended(job)).state is JobState.COMPLETED
    blobs.going.set()


@pytest.mark.usefixtures("stack")
async def test_an_end_that_went_under_with_the_routers_connection_is_told_again(
    bench: Bench, blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway whose own connection holds would hear of it no more, for the queue has forgotten the job."""
    write, lost = MemoryLink.write, list[MemoryLink]()

    def lose(link: MemoryLink, data: bytes) -> None:
        if b".done " in data and not lost:
            lost.append(link)
            link.end()
        write(link, data)

    monkeypatch.setattr(MemoryLink, "write", lose)
    blobs.going.clear()
    job = await stored_job(blobs)
    await bench.submit(job)
    await blobs.asked.wait()
    await asyncio.sleep(5)  # the router is connected again
    assert lost
    assert not bench.done[job.job_id].done()
    blobs.going.set()
    assert (await bench.ended(job, 60)).state is JobState.COMPLETED


@pytest.mark.usefixtures("stack")
async def test_of_a_failed_job_nothing_stays(bench: Bench, blobs: Blobs) -> None:
    def fail(verb: str) -> None:
        if verb == "finish":
            raise ImageUnreadable

    bench.prepost.fail = fail
    job = await stored_job(blobs)
    await bench.submit(job)
    assert await left(bench, blobs, job) == set()


@pytest.mark.usefixtures("stack")
@pytest.mark.parametrize("held", ["inspect", "encode", "finish"])
async def test_of_a_cancelled_job_nothing_stays_that_its_record_names(
    bench: Bench, blobs: Blobs, held: str
) -> None:
    reached, gate = asyncio.Event(), asyncio.Event()

    def reach(verb: str) -> None:
        if verb == held:
            bench.prepost.hold = gate
            reached.set()

    bench.prepost.fail = reach
    job = await stored_job(blobs)
    await bench.submit(job)
    await reached.wait()
    await bench.cancel(job)
    found = await left(bench, blobs, job)
    gate.set()
    # the answer that the router did not wait for ends with its time
    stages = {kind(key) for key in found}
    assert stages <= {"inspect": {"prepared", "alpha"}, "encode": {"text", "row"}, "finish": {"image"}}[held]


@pytest.mark.parametrize(
    ("lost", "calls"),
    [
        (Intermediate.PREPARED, ["inspect", "encode", "inspect", "encode", "finish"]),
        (Intermediate.ENCODING, ["inspect", "encode", "encode", "finish"]),
        (Intermediate.LATENTS, ["inspect", "encode", "finish", "finish"]),
        (Intermediate.ALPHA, ["inspect", "encode", "finish", "inspect", "finish"]),
    ],
)
@pytest.mark.usefixtures("stack")
async def test_what_was_lost_is_made_again(
    bench: Bench, blobs: Blobs, lost: Intermediate, calls: list[str]
) -> None:
    assert isinstance(bench.prepost, Prepost)
    bench.prepost.losing = {lost: 1}
    job = await stored_job(blobs)
    await bench.submit(job)
    found = await left(bench, blobs, job)
    record = await bench.records.get(job.job_id)
    assert (record.state, record.remade, bench.prepost.calls) == (JobState.COMPLETED, 1, calls)
    assert found == {row.image.key for row in record.rows if row.image}


@pytest.mark.usefixtures("stack")
async def test_the_budget_ends_a_job_that_a_store_loses_for_ever(bench: Bench, blobs: Blobs) -> None:
    assert isinstance(bench.prepost, Prepost)
    bench.prepost.losing = {Intermediate.PREPARED: 1000}
    job = (await stored_job(blobs)).model_copy(update={"budget_ms": 3000})
    await bench.submit(job)
    ended = await bench.ended(job)
    assert (ended.state, ended.error and ended.error.code) == (JobState.FAILED, "deadline_exceeded")
    stays = sorted(kind(key) for key in await left(bench, blobs, job))
    # Its time may have ended while an answer was on its way.
    assert len(set(stays)) == len(stays)
    assert any(set(stays) <= made for made in ({"prepared", "alpha"}, {"row", "text"}))


@pytest.mark.usefixtures("stack")
async def test_a_lost_input_ends_the_job_as_such(bench: Bench, blobs: Blobs) -> None:
    job = await stored_job(blobs)
    await blobs.lose(present(job.image))
    await bench.submit(job)
    ended = await bench.ended(job)
    assert (ended.state, ended.error and ended.error.code) == (JobState.FAILED, "input_lost")
    assert bench.prepost.calls == ["inspect"]


async def test_the_next_router_clears_up_behind_one_that_died(
    bench: Bench, blobs: Blobs, nats_account: str
) -> None:
    blobs.going.clear()
    job = await stored_job(blobs)
    async with running_router(nats_account, "router-a", blobs=blobs) as dying:
        await bench.submit(job)
        await bench.ended(job)
        await blobs.asked.wait()
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
    blobs.going.set()
    assert present(job.image).key in blobs.keys
    async with running_router(nats_account, "router-b", blobs=blobs):
        found = await left(bench, blobs, job)
    record = await bench.records.get(job.job_id)
    delivered = {row.image.key for row in record.rows if row.image}
    unnamed = {key.removeprefix(job.folder).partition("-")[0] for key in found - delivered}
    assert delivered <= found
    assert unnamed <= {"alpha", "row", "latents"}, "the terminal record names no more than it must"
