"""What the router's spans tell of second tries, second attempts and failed jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from giornata.wire.errors import InternalError, MaskEmpty
from giornata.wire.jobs import JobState
from giornata.wire.messages import RunAnswer
from tests.fakes.spans import telling
from tests.integration.router.bench import Bench, denoiser, make_job
from tests.present import present

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def told() -> Iterator[InMemorySpanExporter]:
    with telling() as exporter:
        yield exporter


def of(told: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    """The ended spans of a name, in order of their begin."""
    found = [one for one in told.get_finished_spans() if one.name == name]
    return sorted(found, key=lambda one: one.start_time or 0)


def links(one: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in one.links]


def number(one: ReadableSpan) -> int:
    context = present(one.get_span_context())
    return context.span_id


def attribute(one: ReadableSpan, name: str) -> object:
    return (one.attributes or {}).get(name)


async def carried(bench: Bench, told: InMemorySpanExporter, state: JobState) -> ReadableSpan:
    """Submit a job with a trace of its own; its span, once it has ended in `state`."""
    job = make_job().model_copy(update={"traceparent": f"00-{TRACE}-{CALLER}-01"})
    await bench.submit(job)
    assert (await bench.ended(job)).state is state
    while not of(told, "job"):  # it ends a moment after its event
        await bench.bus.client.flush()
    [span] = of(told, "job")
    return span


async def test_a_job_goes_on_with_the_trace_that_its_record_names(
    bench: Bench, stack: AsyncExitStack, told: InMemorySpanExporter
) -> None:
    await denoiser(stack, bench, "d1")
    job = await carried(bench, told, JobState.COMPLETED)
    assert job.parent is not None
    assert (f"{job.parent.trace_id:032x}", f"{job.parent.span_id:016x}") == (TRACE, CALLER)
    for name in ("queue", "place", "attempt", "ask prepost inspect", "ask prepost finish"):
        [one] = of(told, name)
        assert present(one.parent).span_id == number(job), name


async def test_a_second_try_of_a_question_links_to_the_first(
    bench: Bench, stack: AsyncExitStack, told: InMemorySpanExporter
) -> None:
    def once(verb: str) -> None:
        if bench.prepost.calls.count("encode") == 1 and verb == "encode":
            raise InternalError("what a prompt said")

    bench.prepost.fail = once
    await denoiser(stack, bench, "d1")
    await carried(bench, told, JobState.COMPLETED)
    first, second = of(told, "ask prepost encode")
    assert attribute(first, "error.type") == "internal_error"
    assert (links(first), links(second)) == ([], [number(first)])
    assert attribute(second, "giornata.tries") == 2
    assert second.status.is_unset
    assert not any("what a prompt said" in one.to_json() for one in told.get_finished_spans())


async def test_an_attempt_that_was_not_taken_is_no_failure_and_the_next_one_links_to_it(
    bench: Bench, stack: AsyncExitStack, told: InMemorySpanExporter
) -> None:
    (await denoiser(stack, bench, "a-full")).answer = RunAnswer.FULL
    await denoiser(stack, bench, "b-free")
    await carried(bench, told, JobState.COMPLETED)
    first, second = of(told, "attempt")
    assert attribute(first, "giornata.outcome") == "not_taken"
    assert first.status.is_unset
    assert attribute(second, "giornata.outcome") == "computed"
    assert links(second) == [number(first)]


async def test_a_job_that_fails_says_so_by_its_code(
    bench: Bench, stack: AsyncExitStack, told: InMemorySpanExporter
) -> None:
    def refuse(verb: str) -> None:
        raise MaskEmpty(received="what a user wrote")

    bench.prepost.fail = refuse
    job = await carried(bench, told, JobState.FAILED)
    assert attribute(job, "error.type") == "mask_empty"
    assert attribute(job, "giornata.state") == "failed"
    assert not job.status.is_ok
    assert not any("what a user wrote" in one.to_json() for one in told.get_finished_spans())
