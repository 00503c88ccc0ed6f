"""Every instance of every service is replaced under load: no request fails, and nothing is computed twice."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

import aiohttp
import pytest

import giornata.client
from giornata import bus, subjects
from giornata.events import EventKind, StepEvent
from giornata.jobs import JobState
from giornata.permissions import User
from giornata.records import Records
from giornata.streams import EVENTS
from giornata.workers import ServiceName
from tests.e2e.balancer import Balancer, balancing
from tests.e2e.conftest import LiveStack, StartStack
from tests.e2e.pictures import box, edit_form, file, scene

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REPLICAS = dict.fromkeys(ServiceName, 2) | {ServiceName.CONTROLNET: 1, ServiceName.LORA_STORE: 1}
PAUSE_S = 0.1
"""Of each client between two edits: it leaves the processors time to start the successors."""
LONG_STEPS = 120
"""Of every asynchronous job: enough that some run while their denoiser leaves."""
ENDED = {"image_edit.completed", "error"}


class Load:
    """Clients that edit until they are told to stop; what they asked for, by job."""

    def __init__(self, balancer: Balancer, client: giornata.client.Client) -> None:
        self._balancer = balancer
        self._client = client
        self._seeds = itertools.count()
        self._stop = asyncio.Event()
        self.jobs: dict[str, int] = {}
        """Steps of each."""
        self.streams_cut = 0
        """Event streams that a leaving gateway has ended before their job."""

    async def run(self, edit: Callable[[], Awaitable[None]]) -> None:
        while not self._stop.is_set():
            await edit()
            await asyncio.sleep(PAUSE_S)

    def stop(self) -> None:
        self._stop.set()

    async def wait_for(self) -> None:
        """An edit whose client waits for the answer."""
        form = partial(edit_form, file(scene()), file(box()), seed=next(self._seeds), response_format="url")
        async with self._balancer.request("POST", "/v1/images/edits", form) as answer:
            body = await answer.json()
            assert answer.status == 200, body
        self.jobs[body["giornata"]["job_id"]] = 4

    async def follow(self) -> None:
        """An asynchronous job, whose events are followed from gateway to gateway."""
        seed, steps = next(self._seeds), LONG_STEPS
        form = partial(edit_form, file(scene()), file(box()), seed=seed, num_inference_steps=steps)
        async with self._balancer.request("POST", "/v1/jobs", form) as answer:
            body = await answer.json()
            assert answer.status == 202, body
        last, types = "0", list[str]()
        while not ENDED.intersection(types):
            self.streams_cut += bool(types)
            headers = {"Last-Event-ID": last}
            async with self._balancer.request("GET", f"/v1/jobs/{body['id']}/events", headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                last, told = await _events(answer, last)
            types += told or ["none"]
        assert types[-1] == "image_edit.completed"
        self.jobs[body["id"]] = steps

    async def ask(self) -> None:
        """An edit over NATS."""
        edit = await self._client.edit(
            image=file(scene()), mask=file(box()), prompt="a hat", seed=next(self._seeds), num_inference_steps=4
        )
        result = await edit
        assert len(result.pictures) == 1
        self.jobs[result.job_id] = 4


async def _events(answer: aiohttp.ClientResponse, last: str) -> tuple[str, list[str]]:
    """The id of the last event of a stream, and all events' types."""
    types = []
    async for line in answer.content:
        if line.startswith(b"id: "):
            last = line[4:].decode().strip()
        elif line.startswith(b"data: "):
            types.append(json.loads(line[6:])["type"])
    return last, types


async def roll(stack: LiveStack, service: ServiceName) -> None:
    """Replace each instance, one after the other, as an operator would."""
    import time
    for old in stack.instances(service):
        began=time.monotonic()
        await stack.start(service)
        assert await stack.terminate(old) == 0, f"{old} has drained"
        print(old, time.monotonic()-began)


async def test_every_instance_is_replaced_and_no_request_fails(start_stack: StartStack) -> None:
    stack = await asyncio.to_thread(
        start_stack,
        REPLICAS,
        {"GIORNATA_NOTICE_S": "3"},
        env_of={ServiceName.DENOISER: {"GIORNATA_DRAIN_S": "0"}},  # what they have begun goes on elsewhere
    )
    first = {service: stack.instances(service) for service in ServiceName}
    async with AsyncExitStack() as around:
        balancer = await around.enter_async_context(balancing(lambda: stack.urls))
        client = await around.enter_async_context(giornata.client.connect(stack.nats_url))
        load = Load(balancer, client)
        async with asyncio.TaskGroup() as clients:
            for edit in (load.wait_for, load.wait_for, load.follow, load.ask):
                clients.create_task(load.run(edit))
            for service in ServiceName:
                await roll(stack, service)
            load.stop()
        for service, names in first.items():
            assert not set(names) & set(stack.instances(service))
        await each_was_computed_once(stack, load.jobs)


async def each_was_computed_once(stack: LiveStack, jobs: dict[str, int]) -> None:
    """Every job has completed once, lost no attempt, and made each of its steps once."""
    name, file_of = "test", stack.password_file(User.GATEWAY)
    async with bus.connect(stack.nats_url, name, user=User.GATEWAY, password_file=file_of) as connected:
        records = await Records.open(connected.jetstream)
        found = {job_id: await records.get(job_id) for job_id in jobs}
        assert {job_id for job_id, record in found.items() if record.state is not JobState.COMPLETED} == set()
        assert {job_id: record.causes for job_id, record in found.items() if record.failures} == {}
        assert any(record.attempt > 1 for record in found.values()), "some were handed on"
