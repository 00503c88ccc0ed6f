"""Every instance of every service is replaced under load: no request fails, and nothing is computed twice."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import giornata.client
from giornata.bus import bus
from giornata.fleet import Fleet
from giornata.records import JobRecordStore
from giornata.wire import subjects
from giornata.wire.jobs import JobState
from giornata.wire.messages import EventKind
from giornata.wire.subjects import EVENTS, NatsRole
from giornata.wire.workers import ServiceName
from tests.e2e.live import LiveStack, paced
from tests.lab.chaos.balancer import balancing
from tests.lab.chaos.conftest import StartStack
from tests.lab.chaos.load import LONG_STEPS, Load

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

REPLICAS = dict.fromkeys(ServiceName, 2) | {ServiceName.CONTROLNET: 0, ServiceName.LORA_STORE: 1}
STEP_S = 0.03
"""That a step waits for each picture of 128 x 96 pixels, for larger ones up to four times as long."""


async def roll(stack: LiveStack, service: ServiceName) -> None:
    """Replace each instance, one after the other, as an operator would."""
    for old in stack.instances(service):
        [new] = await stack.start(service)
        if service is ServiceName.DENOISER:
            await stack.until(lambda fleet, old=old: _computes(fleet, old))  # type: ignore[misc]
        assert await stack.terminate(old) == 0, f"{old} has drained"
        assert new in stack.instances(service)


def _computes(fleet: Fleet, denoiser: str) -> bool:
    """Whether it is in the middle of a long job."""
    state = fleet.get(denoiser)
    rows = state.worker.running if state and state.worker else ()
    return any(row.steps == LONG_STEPS and row.step < LONG_STEPS // 2 for row in rows)


async def test_every_instance_is_replaced_and_no_request_fails(start_stack: StartStack, pace: Path) -> None:
    async with AsyncExitStack() as around:
        env = around.enter_context(paced(pace, STEP_S))[ServiceName.DENOISER]
        stack = await asyncio.to_thread(
            start_stack,
            REPLICAS,
            {"GIORNATA_NOTICE_S": "5"},
            env_of={
                ServiceName.DENOISER: {**env, "GIORNATA_DRAIN_S": "0"}
            },  # what they have begun goes on elsewhere
        )
        before = {service: stack.instances(service) for service in ServiceName}
        balancer = await around.enter_async_context(balancing(lambda: stack.urls))
        client = await around.enter_async_context(giornata.client.connect(stack.nats_url))
        load = Load(balancer, client)
        async with asyncio.TaskGroup() as clients:
            for edit in (load.edit, load.ask, load.follow, load.follow):
                clients.create_task(load.run(edit))
            for service in ServiceName:
                load.long = service is ServiceName.DENOISER
                await roll(stack, service)
            load.stop()
    assert not any(set(names) & set(stack.instances(service)) for service, names in before.items())
    assert all((load.edits, load.asked, load.followed))
    await each_has_ended_once(stack, {*load.edits, *load.asked, *load.followed})


async def each_has_ended_once(stack: LiveStack, jobs: set[str]) -> None:
    """Every job has completed, was said to have ended once, and has lost no attempt; some were handed on."""
    password_file = stack.password_file(NatsRole.GATEWAY)
    async with bus.connect(
        stack.nats_url, "test", user=NatsRole.GATEWAY, password_file=password_file
    ) as connected:
        records = await JobRecordStore.open(connected.jetstream)
        found = {job_id: await records.get(job_id) for job_id in jobs}
        done = subjects.events_of_kind(EventKind.DONE)
        stream = await connected.jetstream.stream_info(EVENTS, subjects_filter=done)
    assert {job_id for job_id, record in found.items() if record.state is not JobState.COMPLETED} == set()
    assert {job_id: record.causes for job_id, record in found.items() if record.causes} == {}
    assert sum(record.attempt > 1 for record in found.values()) >= REPLICAS[ServiceName.DENOISER]
    assert stream.state.subjects == {
        subjects.event(record.job.gateway, job_id, EventKind.DONE): 1 for job_id, record in found.items()
    }
