"""The Compose files in a Docker engine: built, started, scaled, replaced, clustered, restarted and stopped.

The tests are steps of one story, in the order of this file.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from standardwebhooks import Webhook

import giornata.client
from deploy.sbom.__main__ import write
from deploy.sbom.contents import OWN, images
from giornata.wire.workers import ServiceName
from giornata_gateway.webhooks import secret_of
from giornata_lab.bench.systems.edit_forms import edit_form
from tests.e2e.jobs import completions, ended, painted, submit, until_step
from tests.lab.chaos.balancer import balancing
from tests.lab.chaos.load import Load
from tests.lab.compose.bases import ROOT, python_image
from tests.lab.compose.images import distributions, own_size, run_inside, size
from tests.lab.compose.stack import CLUSTER, USER, Stack
from tests.receiver import receiving

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

MB: Final = 1_000_000
GATEWAY_MB: Final = 200
"""Largest size of the gateway's image, with all its layers."""
SERVERS: Final = ("nats", "valkey")
SERVICES: Final = ("gateway", "router", "lora-store", "denoiser", "prepost")
"""What the profile `cpu` starts; a ControlNet service comes when it is asked for."""
TOOLS: Final = "tools"
BUILT: Final = ("cpu", "profiling")
"""The profiles that have all images but those for GPUs."""
OLDER: Final = {"async-timeout"}
"""Asked for before Python 3.11.3: Debian's base has 3.11.2, and the bill tells of the one that the Dockerfile names."""
REPORT: Final = ROOT / "out" / "compose.json"
FOREIGN: Final = "command -v pip gcc cc ld make; find / -xdev -path '/venv/*' -type d -name tests"
"""What an image should have none of."""


@asynccontextmanager
async def doors(stack: Stack) -> AsyncIterator[Load]:
    """An application that uses both doors."""
    application = stack.application
    async with (
        balancing(lambda: stack.urls, application.headers) as balancer,
        giornata.client.connect(application.nats_url, api_key=application.api_key) as client,
    ):
        yield Load(balancer, client)


@asynccontextmanager
async def clients(stack: Stack) -> AsyncIterator[Load]:
    """Applications that edit over both doors while inside. Every edit has ended well when this returns."""
    async with doors(stack) as load, asyncio.TaskGroup() as running:
        for edit in (load.edit, load.ask, load.follow):
            running.create_task(load.run(edit))
        yield load
        load.stop()
    assert all((load.edits, load.asked, load.followed)), "each door has taken some"
    async with door(stack) as http:
        for job in (*load.edits, *load.asked, *load.followed):
            assert await completions(http, f"/v1/jobs/{job}") == 1


@asynccontextmanager
async def door(stack: Stack) -> AsyncIterator[aiohttp.ClientSession]:
    """A session with the first gateway that is ready."""
    async with aiohttp.ClientSession() as http:
        for url in stack.urls:
            try:
                async with http.get(f"{url}/readyz") as answer:
                    if answer.status == 200:
                        break
            except aiohttp.ClientConnectionError:
                continue
        else:
            raise AssertionError("no gateway is ready")
    async with aiohttp.ClientSession(url, headers=stack.application.headers) as http:
        yield http


async def edit_twice(stack: Stack) -> None:
    """One edit over each door."""
    async with doors(stack) as load:
        await load.edit()
        await load.ask()


def test_all_images_are_built_small_and_without_tools(stack: Stack) -> None:
    stack.compose("build", profiles=BUILT)
    built = stack.images(BUILT)
    assert built.keys() == {*ServiceName, TOOLS}
    for service, image in built.items():
        assert run_inside(stack.engine, image, "sh", "-c", f"{FOREIGN}; true") == "", service
    sizes = {service: round(size(stack.engine, image) / MB) for service, image in built.items()}
    own = {service: round(own_size(stack.engine, image) / MB) for service, image in built.items()}
    base = round(size(stack.engine, python_image()) / MB)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps({"base_mb": base, "image_mb": sizes, "own_mb": own}, indent=2) + "\n")
    assert sizes[ServiceName.GATEWAY] <= GATEWAY_MB
    computing = (built[it] for it in (ServiceName.DENOISER, ServiceName.PREPOST, ServiceName.CONTROLNET))
    shared = {json.loads(stack.engine.docker("inspect", it))[0]["RootFS"]["Layers"][2] for it in computing}
    assert len(shared) == 1, "torch is on the disk once"


@pytest.mark.parametrize("service", [*ServiceName, TOOLS])
def test_an_image_holds_what_its_bill_of_material_names(stack: Stack, tmp_path: Path, service: str) -> None:
    [described] = [image for image in images() if image.service == service]
    bill = json.loads(write(described, tmp_path).read_text(encoding="utf-8"))
    found = distributions(stack.engine, stack.images(BUILT)[service])
    assert [one for one in found if not one[0].startswith(OWN) and one[0] not in OLDER] == sorted(
        (one["name"], one["version"]) for one in bill["components"]
    )
    own = {name for name, _ in found if name.startswith(OWN)}
    assert own == {OWN, f"{OWN}-{service}"}, "the repository's own, which no bill names"


async def test_the_cpu_profile_starts_and_edits_come_from_outside(stack: Stack) -> None:
    await asyncio.to_thread(stack.up)
    assert set(stack.services()) == {*SERVERS, *SERVICES}
    await edit_twice(stack)


async def test_a_webhook_comes_out_signed_by_the_secret_that_compose_hands_over(stack: Stack) -> None:
    async with receiving(stack.engine.address) as receiver, door(stack) as http:
        job = await submit(http, edit_form(webhook=receiver.url))
        heard = await receiver.next()
        async with http.get("/v1/webhook-secret") as answer:
            assert answer.status == 200
            secret = (await answer.json())["secret"]
    assert heard.told["type"] == "job.completed"
    assert heard.told["data"]["id"] == job.rpartition("/")[2]
    assert secret == secret_of(stack.webhook_secret.read_bytes().strip(), stack.application.name)
    Webhook(secret).verify(heard.body, heard.headers)


def test_containers_have_no_rights_and_are_no_root(stack: Stack) -> None:
    for service, containers in stack.services().items():
        for container in containers:
            told = stack.inspect(container)
            assert told["HostConfig"]["ReadonlyRootfs"], service
            assert told["HostConfig"]["CapDrop"] == ["ALL"], service
            assert told["HostConfig"]["SecurityOpt"] == ["no-new-privileges:true"], service
            assert told["Config"]["User"] not in {"", "0", "root", "0:0"}, service
            uids = {row.split()[0] for row in stack.engine.docker("top", container).splitlines()[1:]}
            assert "root" not in uids, service
            if service in SERVICES:
                assert uids == {str(USER)}


async def test_scaling_under_load_loses_nothing(stack: Stack) -> None:
    async with clients(stack):
        for service in ("denoiser", "prepost"):
            for n in (2, 1):
                await asyncio.to_thread(stack.up, **{f"{service.upper()}_REPLICAS": str(n)})
                assert len(stack.containers(service)) == n


@pytest.mark.parametrize("service", ["lora-store", "denoiser", "prepost", "router", "gateway"])
async def test_the_documented_commands_replace_a_service_under_load(stack: Stack, service: str) -> None:
    before = stack.containers(service)
    async with clients(stack):
        await asyncio.to_thread(stack.replace, service)
    after = stack.containers(service)
    assert len(after) == len(before)
    assert not set(after) & set(before)


@pytest.mark.parametrize("command", ["stop", "kill"])
async def test_a_system_that_is_restarted_finds_its_jobs(stack: Stack, command: str) -> None:
    async with door(stack) as http:
        done = await submit(http, edit_form())
        assert (await ended(http, done))["state"] == "completed"
        picture = await painted(http, done)
        under_way = await submit(http, edit_form(num_inference_steps=200, reuse="off"))
        await until_step(http, under_way, 2)
    await asyncio.to_thread(stack.compose, command)
    assert stack.services() == {}
    await asyncio.to_thread(stack.up)
    async with door(stack) as http:
        assert (await painted(http, done) == picture).all()
        assert (await ended(http, under_way))["state"] == "completed"
        assert await completions(http, under_way) == 1


async def test_three_servers_go_on_while_one_is_away(stack: Stack) -> None:
    await asyncio.to_thread(stack.compose, "down", "--timeout", "60")
    stack.files = CLUSTER
    await asyncio.to_thread(stack.up)
    async with clients(stack):
        await asyncio.to_thread(stack.compose, "stop", "nats-2")
        await edit_twice(stack)
        await asyncio.to_thread(stack.up)
        await edit_twice(stack)


def test_it_stops_in_order(stack: Stack) -> None:
    containers = [container for found in stack.services().values() for container in found]
    stack.compose("stop")
    for container in containers:
        state: dict[str, Any] = stack.inspect(container)["State"]
        assert (state["ExitCode"], state["OOMKilled"]) == (0, False), stack.inspect(container)["Name"]
