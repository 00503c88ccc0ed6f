"""Rows that give way to those of another tenant: they are computed later, and nothing counts as lost."""

from __future__ import annotations

from giornata.wire.jobs import JobState
from giornata.wire.requests import Reuse
from tests.fakes.denoiser import FakeDenoiser
from tests.integration.router.bench import Bench, make_job, running_router


async def test_rows_of_one_tenant_give_way_to_another_s_and_go_on_from_their_step(
    bench: Bench, nats_account: str
) -> None:
    """Alice's long edits fill the worker and its queue; bob's comes at once and is the only one that may end."""
    worker = FakeDenoiser(bench.bus, bench.records, "d1", capacity=2)
    worker.going.clear()
    async with running_router(nats_account, "r"), worker.run():
        alices = [make_job(reuse=Reuse.OFF, tenant="alice") for _ in range(6)]
        for job in alices:
            await bench.submit(job)
        await worker.news.until(lambda: len(worker._running) == 2)
        bobs = make_job(reuse=Reuse.OFF, tenant="bob")
        await bench.submit(bobs)
        await worker.news.until(lambda: any(one.job.tenant == "bob" for one in worker.requests))
        backs = set(worker.cancelled)
        assert backs
        assert backs <= {job.job_id for job in alices}
        worker.going.set()
        ended = [await bench.ended(job) for job in (bobs, *alices)]
    assert [event.state for event in ended] == [JobState.COMPLETED] * 7
    for back in backs:
        assert worker.cancelled.count(back) == 1, "its worker is told once to hand the rows back"
        assert (await bench.records.get(back)).causes == ()
        assert any(one.job.job_id == back and one.rows[0].resume for one in worker.requests)
