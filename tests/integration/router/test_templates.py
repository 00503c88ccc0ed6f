"""The router and templates: who records them, who reads them ahead of their edits."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.records import TemplateRecords
from giornata.wire import subjects
from giornata.wire.adapters import LoraUse
from giornata.wire.errors import ImageUnreadable, ServiceUnavailable, TemplateNotFound
from giornata.wire.jobs import JobState
from giornata.wire.messages import RunAnswer, TemplateRequest
from giornata.wire.requests import Reuse
from giornata.wire.templates import TemplateRecord, TemplateState
from giornata.wire.workers import ServiceName, ServiceState
from tests.fakes.denoiser import FakeDenoiser
from tests.fakes.fleet import CARD, INSPECTION
from tests.fakes.news import News
from tests.integration.router.bench import IMAGE, Bench, make_job, open_bench, running_router
from tests.patience import HUNG_MS

LORA = LoraUse(lora_id="lora_1", sha256="a" * 64, size_bytes=600, rank=4, modules=3)


@pytest.fixture
async def bench(nats_account: str) -> AsyncIterator[Bench]:
    async with (
        open_bench(nats_account) as bench,
        bench.prepost.run(),
        running_router(nats_account, "router-a"),
    ):
        yield bench


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def denoiser(stack: AsyncExitStack, bench: Bench, name: str) -> FakeDenoiser:
    """Started, and heard of."""
    fake = FakeDenoiser(bench.bus, bench.records, name)
    news, states = News(), list[ServiceState]()

    def hear(state: ServiceState) -> None:
        states.append(state)
        news.tell()

    async with bench.bus.listen(subjects.telemetry(ServiceName.DENOISER, name), ServiceState, hear):
        await stack.enter_async_context(fake.run())
        await news.until(lambda: len(states) > 1)
    return fake


async def registered(bench: Bench) -> TemplateRecord:
    record = TemplateRecord(
        template_id=f"template_{secrets.token_hex(8)}",
        tenant="default",
        model=CARD.name,
        model_digest=CARD.digest,
        size="auto",
        image=IMAGE,
        created_s=1,
        expires_s=2,
    )
    assert await (await TemplateRecords.open(bench.bus.jetstream)).create(record)
    return record


async def ask(bus: Bus, record: TemplateRecord) -> TemplateRecord:
    deadline = Deadline.after_ms(HUNG_MS)
    while True:
        request = TemplateRequest(template=record, remaining_ms=deadline.remaining_ms())
        try:
            return await bus.call(subjects.TEMPLATE, request, TemplateRecord, deadline)
        except ServiceUnavailable as error:
            if "No service answers" not in str(error):  # the router is not active yet
                raise


async def test_a_template_is_encoded_and_given_to_one_worker(bench: Bench, stack: AsyncExitStack) -> None:
    workers = [await denoiser(stack, bench, name) for name in ("d1", "d2")]
    record = await registered(bench)
    told = await ask(bench.bus, record)
    (taken,) = [worker for worker in workers if worker.recorded]
    assert (told.state, told.worker) == (TemplateState.RECORDING, taken.instance)
    assert (told.width, told.height, told.template_key) == (64, 64, INSPECTION.template_key)
    assert bench.prepost.calls == ["template"]
    assert await (await TemplateRecords.open(bench.bus.jetstream)).get("default", record.template_id) == told


async def test_a_worker_that_drains_is_passed_over_and_nobody_is_an_error(
    bench: Bench, stack: AsyncExitStack
) -> None:
    first, second = [await denoiser(stack, bench, name) for name in ("d1", "d2")]
    first.answer = RunAnswer.DRAINING
    assert (await ask(bench.bus, await registered(bench))).worker == "d2"
    second.answer = RunAnswer.DRAINING
    with pytest.raises(ServiceUnavailable, match="No denoiser takes"):
        await ask(bench.bus, await registered(bench))


async def test_a_picture_that_cannot_be_read_is_the_callers_to_mend(
    bench: Bench, stack: AsyncExitStack
) -> None:
    worker = await denoiser(stack, bench, "d1")

    def refuse(_verb: str) -> None:
        raise ImageUnreadable

    bench.prepost.fail = refuse
    with pytest.raises(ImageUnreadable):
        await ask(bench.bus, await registered(bench))
    assert worker.recorded == []


async def test_a_template_that_was_deleted_meanwhile_is_not_recorded(
    bench: Bench, stack: AsyncExitStack
) -> None:
    worker = await denoiser(stack, bench, "d1")
    record = (await registered(bench)).model_copy(update={"template_id": "template_gone"})
    with pytest.raises(TemplateNotFound):
        await ask(bench.bus, record)
    assert worker.recorded == []


@pytest.mark.parametrize(
    ("reuse", "loras"),
    [(Reuse.OFF, ()), (Reuse.OFF, (LORA,)), (Reuse.AUTO, ()), (Reuse.STRICT, ())],
)
async def test_the_likely_worker_prefetches_for_edits_that_reuse_or_have_loras_and_gets_them(
    bench: Bench, stack: AsyncExitStack, reuse: Reuse, loras: tuple[LoraUse, ...]
) -> None:
    workers = [await denoiser(stack, bench, name) for name in ("d1", "d2")]
    job = make_job()
    parameters = job.parameters.model_copy(update={"reuse": reuse})
    job = job.model_copy(update={"parameters": parameters, "loras": loras})
    await bench.submit(job)
    (taken,) = await _until_taken(workers)
    if reuse is Reuse.OFF and not loras:
        assert [worker.prefetched for worker in workers] == [[], []]
        return
    await taken.news.until(lambda: taken.prefetched == [job.job_id])
    assert (await bench.records.get(job.job_id)).state is not JobState.FAILED


async def test_the_worker_that_probably_gets_the_rows_next_loads_while_they_wait(
    bench: Bench, stack: AsyncExitStack
) -> None:
    """Both jobs are encoded before any worker is there; one gets the only place."""
    encoded, called = News(), list[str]()

    def call(verb: str) -> None:
        called.append(verb)
        encoded.tell()

    bench.prepost.fail = call
    jobs = [make_job(reuse=Reuse.OFF).model_copy(update={"loras": (LORA,)}) for _ in range(2)]
    await bench.submit(*jobs)
    await encoded.until(lambda: called.count("encode") == 2)
    worker = FakeDenoiser(bench.bus, bench.records, "d1", capacity=1)
    worker.going.clear()
    await stack.enter_async_context(worker.run())
    await worker.news.until(lambda: bool(worker.prefetched))
    (running,) = worker.requests
    assert {running.job.job_id, *worker.prefetched} == {job.job_id for job in jobs}
    worker.going.set()
    await worker.news.until(lambda: len(worker.requests) == 2)
    assert [worker.requests[1].job.job_id] == worker.prefetched


async def _until_taken(workers: list[FakeDenoiser]) -> list[FakeDenoiser]:
    """Whoever has rows; telling of any of the fakes is telling of all."""
    news = News()
    for worker in workers:
        worker.news = news
    await news.until(lambda: any(worker.requests for worker in workers))
    return [worker for worker in workers if worker.requests]
