"""A job without image on the router's way: it costs whole rows, asks for no template, and leaves nothing."""

from __future__ import annotations

from contextlib import AsyncExitStack

from giornata.wire.jobs import Encoding, JobState
from giornata.wire.requests import Reuse
from giornata_router import job_records
from tests.fakes.fleet import INSPECTION, REF
from tests.integration.router.bench import Bench, denoiser, make_job

WHOLE = INSPECTION.model_copy(
    update={"prepared": None, "template_key": "", "compute_tokens": INSPECTION.tokens, "mask_ratio": 1.0}
)


async def test_a_job_without_image_is_carried_to_its_end(bench: Bench, stack: AsyncExitStack) -> None:
    await denoiser(stack, bench, "d1")
    bench.prepost.inspection = WHOLE
    job = make_job(n=2, reuse=Reuse.OFF).model_copy(update={"image": None})
    await bench.submit(job)
    assert (await bench.ended(job)).state is JobState.COMPLETED
    record = await bench.records.get(job.job_id)
    assert record.job.image is None
    assert len(record.images) == 2
    assert bench.prepost.calls == ["inspect", "encode", "finish", "finish"]


def test_it_costs_whole_rows_and_leaves_only_what_was_made_of_it() -> None:
    record = job_records.accepted(make_job(n=2, reuse=Reuse.OFF).model_copy(update={"image": None}))
    demand = job_records.demand(record, WHOLE, record.rows, None)
    assert demand.template is None
    assert [(shape.image, shape.computed) for shape in demand.shapes] == [(WHOLE.tokens, WHOLE.tokens)] * 2
    encoding = Encoding(text=REF, text_tokens=1, rows=())
    made = record.model_copy(update={"inspection": WHOLE, "encoding": encoding})
    assert list(job_records.of_record(made)) == [REF]
