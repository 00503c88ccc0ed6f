"""The job records of a gateway that is there before any router."""

from __future__ import annotations

import pytest

from giornata.bus import bus, streams
from giornata.records import JobRecordStore
from giornata.wire import subjects
from giornata.wire.errors import JobNotFound
from giornata_gateway.jobs.records import JobLedger
from giornata_router.job_records import accepted
from tests.integration.router.bench import make_job


@pytest.mark.world
async def test_a_gateway_knows_no_job_until_a_router_has_made_the_bucket_or_made_it_again(
    nats_account: str,
) -> None:
    record = accepted(make_job())
    job_id = record.job.job_id
    async with bus.connect(nats_account, "g") as connected:
        jetstream = connected.jetstream
        records = JobLedger(connected)
        with pytest.raises(JobNotFound):
            await records.get(job_id)
        for _ in range(2):
            await streams.ensure(jetstream, replicas=1, events_ttl_s=60)
            await (await JobRecordStore.open(jetstream)).create(record)
            assert (await records.get(job_id)).job == record.job
            assert (await records.change(job_id, lambda one: one.model_copy(update={"cancel": True}))).cancel
            await jetstream.delete_key_value(subjects.RECORDS)
            with pytest.raises(JobNotFound):
                await records.change(job_id, lambda one: one)
