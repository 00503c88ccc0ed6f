"""Every instance of every service is replaced under load: no request fails, and nothing is computed twice."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import giornata.client
from giornata.bus import bus
from giornata.fleet import Fleet
from giornata.records import Records
from giornata.wire import subjects
from giornata.wire.events import EventKind
from giornata.wire.jobs import JobState
from giornata.wire.permissions import User
from giornata.wire.stores import EVENTS
from giornata.wire.workers import ServiceName
from tests.e2e.balancer import Balancer, balancing
from tests.e2e.conftest import StartStack
from tests.e2e.live import LiveStack, paced
from tests.e2e.pictures import box, edit_form, file, scene

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

REPLICAS = dict.fromkeys(ServiceName, 2) | {ServiceName.CONTROLNET: 0, ServiceName.LORA_STORE: 1}
PAUSE_S = 0.5
"""Of each client between two edits: it leaves the processors time to start the successors."""
STEPS = 4
STEP_S = 0.03
"""That a step waits for each picture of 128 x 96 pixels, for larger ones up to four times as long."""
LONG_STEPS = 60
"""Of a long asynchronous job: enough that some run while their denoiser leaves, however quick the machine is."""


class Load:
    """Clients that edit until they are told to stop, and what they have seen."""

    def __init__(self, balancer: Balancer, client: giornata.client.Client) -> None:
        self._balancer = balancer
        self._client = client
        self._seeds = itertools.count()
        self._stop = asyncio.Event()
        self.edits: list[str] = []
        """Job ids of the edits that a client waited for."""
        self.asked: list[str] = []
        """Likewise of those over NATS."""
        self.long = False
        """Whether asynchronous jobs are to last for seconds; they keep a processor busy."""
        self.followed: list[str] = []
        """Of asynchronous jobs."""

    async def run(self, edit: Callable[[], Awaitable[None]]) -> None:
        while not self._stop.is_set():
            await edit()
            await asyncio.sleep(PAUSE_S)

    def stop(self) -> None:
        self._stop.set()

    async def edit(self) -> None:
        """An edit whose client waits for the answer."""
        form = partial(
            edit_form, file(scene()), file(box()), seed=next(self._seeds), num_inference_steps=STEPS
        )
        async with self._balancer.request("POST", "/v1/images/edits", form) as answer:
            body = await answer.json()
            assert answer.status == 200, body
        assert len(body["data"]) == 1
        self.edits.append(body["giornata"]["job_id"])

    async def ask(self) -> None:
        """An edit over NATS."""
        seed = next(self._seeds)
        edit = await self._client.edit(
            image=file(scene()), mask=file(box()), prompt="a hat", seed=seed, num_inference_steps=STEPS
        )
        result = await edit
        assert len(result.pictures) == 1
        self.asked.append(result.job_id)

    async def follow(self) -> None:
        """An asynchronous job, followed from gateway to gateway: no step is told twice, or after a later one.

        Steps are told live alone, to whoever follows at that moment.
        """
        steps, size = (LONG_STEPS, (512, 512)) if self.long else (STEPS, (128, 96))
        picture, mask, seed = file(scene(*size)), file(box(*size)), next(self._seeds)
        form = partial(edit_form, picture, mask, seed=seed, num_inference_steps=steps, reuse="off")
        async with self._balancer.request("POST", "/v1/jobs", form) as answer:
            job = await answer.json()
            assert answer.status == 202, job
        told: list[dict[str, Any]] = []
        last = "0"
        while not told or told[-1]["type"] == "image_edit.progress":
            headers = {"Last-Event-ID": last}
            async with self._balancer.request(
                "GET", f"/v1/jobs/{job['id']}/events", headers=headers
            ) as answer:
                assert answer.status == 200, await answer.text()
                async for line in answer.content:
                    if line.startswith(b"id: "):
                        last = line[4:].decode().strip()
                    elif line.startswith(b"data: "):
                        told.append(json.loads(line[6:]))
        assert told[-1]["type"] == "image_edit.completed", told[-1]
        seen = [event["step"] for event in told if event.get("step")]
        assert seen == sorted(set(seen))
        self.followed.append(job["id"])


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
    password_file = stack.password_file(User.GATEWAY)
    async with bus.connect(
        stack.nats_url, "test", user=User.GATEWAY, password_file=password_file
    ) as connected:
        records = await Records.open(connected.jetstream)
        found = {job_id: await records.get(job_id) for job_id in jobs}
        done = subjects.events_of_kind(EventKind.DONE)
        stream = await connected.jetstream.stream_info(EVENTS, subjects_filter=done)
    assert {job_id for job_id, record in found.items() if record.state is not JobState.COMPLETED} == set()
    assert {job_id: record.causes for job_id, record in found.items() if record.causes} == {}
    assert sum(record.attempt > 1 for record in found.values()) >= REPLICAS[ServiceName.DENOISER]
    assert stream.state.subjects == {
        subjects.event(record.job.gateway, job_id, EventKind.DONE): 1 for job_id, record in found.items()
    }
