"""``giornata top``: numbers and rates from telemetry, and how they look."""

from __future__ import annotations

import dataclasses
import json

import pytest
from rich.console import Console

from giornata.fleet import SILENCE_S
from giornata.wire.queues import QueueState
from giornata.wire.workers import (
    AdapterCounters,
    RowProgress,
    ServiceName,
    ServiceState,
    StepSample,
    TemplateCounters,
    WorkerState,
)
from giornata_tools.cli.top.screen import COLUMNS, screen
from giornata_tools.cli.top.seen import WINDOW_S, CounterWindow, TelemetryAggregator


def row(index: int, computed: int | None) -> RowProgress:
    return RowProgress(
        job_id="j", attempt=1, index=index, step=1, steps=8, tokens=64, computed_tokens=computed
    )


def sample(rows: int, tokens: int, ms: float) -> StepSample:
    return StepSample(
        rows=rows,
        sequences=rows,
        image_tokens=tokens,
        text_tokens=0,
        attention_pairs=0,
        assemble_ms=0.0,
        step_ms=ms,
    )


def worker(
    steps: int, hits: int, samples: tuple[StepSample, ...] = (), name: str = "d1", **more: object
) -> ServiceState:
    told = WorkerState(
        capacity_rows=4,
        capacity_tokens=1024,
        running=(row(0, 16), row(1, None)),
        waiting=(row(2, None),),
        steps_total=steps,
        templates=TemplateCounters(hits_memory=hits, misses=1, memory_bytes=3_000_000),
        adapters=AdapterCounters(device_bytes=1_500_000),
        samples=samples,
    )
    fields = {"service": ServiceName.DENOISER, "instance": name, "host": "h", "version": "1", "ready": True}
    return ServiceState.model_validate({**fields, "worker": told, **more})


def router(active: bool = True) -> ServiceState:
    return ServiceState(
        service=ServiceName.ROUTER,
        instance="r1",
        host="h",
        version="1",
        ready=True,
        active=active,
        queue=QueueState(jobs=3, rows=5, steps=40, wait_ms=2500.0),
    )


def lines(seen: TelemetryAggregator, now: float) -> list[str]:
    console = Console(width=220)
    with console.capture() as capture:
        console.print(screen(seen.top(now)))
    return capture.get().splitlines()


def test_rates_are_those_of_the_counters_between_two_messages() -> None:
    seen = TelemetryAggregator()
    seen.hear(worker(100, 10), 1.0)
    seen.hear(worker(140, 12, (sample(2, 80, 20.0), sample(2, 80, 30.0))), 3.0)
    [one] = seen.top(3.0).workers
    assert one.steps_per_s == 20
    assert one.step_ms == 25
    assert one.tokens_per_s == 20 * 40, "40 tokens for each row's step"
    assert one.hits_per_s == {"memory": 1.0, "disk": 0.0, "first": 0.0, "none": 0.0}
    assert (one.running_rows, one.waiting_rows, one.free_rows) == (2, 1, 1)
    assert (one.computed_tokens, one.tokens) == (16 + 64, 128)


def test_what_one_message_cannot_tell_is_unknown() -> None:
    seen = TelemetryAggregator()
    seen.hear(worker(100, 10), 1.0)
    [one] = seen.top(1.0).workers
    assert (one.steps_per_s, one.step_ms, one.tokens_per_s) == (None, None, None)
    assert seen.top(1.0).total("steps_per_s") is None


def test_an_idle_worker_computes_no_tokens() -> None:
    seen = TelemetryAggregator()
    for now in (1.0, 2.0):
        seen.hear(worker(100, 10), now)
    assert seen.top(2.0).workers[0].tokens_per_s == 0


def test_rates_forget_what_is_older_than_the_window() -> None:
    counts = CounterWindow()
    for now in range(20):
        counts.add(float(now), {"steps": 0.0 if now < 10 else 6.0 * (now - 10)})
    assert counts.per_s("steps") == 6
    assert 19 - WINDOW_S >= 10
    assert counts.per_s("other") is None


def test_the_queue_is_the_active_routers_word() -> None:
    seen = TelemetryAggregator()
    seen.hear(router(active=False), 0.0)
    assert seen.top(0.0).queued_jobs is None
    seen.hear(router(), 0.0)
    told = seen.top(0.0)
    assert (told.queued_jobs, told.queued_rows, told.wait_s) == (3, 5, 2.5)


def test_who_falls_silent_is_left_out() -> None:
    seen = TelemetryAggregator()
    seen.hear(worker(1, 1), 0.0)
    seen.hear(worker(1, 1, name="d2"), SILENCE_S)
    assert [one.name for one in seen.top(SILENCE_S + 0.1).workers] == ["d2"]


def test_the_picture_has_sums_and_a_line_for_each_worker() -> None:
    seen = TelemetryAggregator()
    for now, steps in ((1.0, 100), (3.0, 140)):
        seen.hear(worker(steps, 10, (sample(2, 80, 20.0),)), now)
        seen.hear(worker(0, 0, name="d2", ready=False), now)
        seen.hear(router(), now)
    services, sums, _, head, first, second = lines(seen, 3.0)
    assert services == "ready: router 1/1, denoiser 1/2"
    assert sums == ("queue: 3 jobs, 5 pictures; wait: 2.5 s; running: 4 pictures, 20.0 steps/s, 800 tokens/s")
    assert head.split() == " ".join(COLUMNS).split()
    assert first.split() == [
        *("d1", "ready", "2", "1", "1", "20.0", "20.0", "80", "128", "800"),
        *("0.0", "0.0", "0.0", "0.0", "3.0", "0.0", "1.5"),
    ]
    assert second.split()[:2] == ["d2", "starting"]


@pytest.mark.parametrize("heard", [False, True])
def test_json_holds_all_that_is_known(heard: bool) -> None:
    seen = TelemetryAggregator()
    if heard:
        seen.hear(worker(1, 1), 0.0)
    told = json.loads(json.dumps(dataclasses.asdict(seen.top(0.0))))
    assert len(told["workers"]) == heard
