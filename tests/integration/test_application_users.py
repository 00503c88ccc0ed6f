"""Applications with users of their own, made and revoked by ``giornata keys`` while everything runs."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

import giornata.client
from giornata.blobs import RedisBlobs
from giornata.bus import bus as buses
from giornata.bus import streams
from giornata.bus.bus import Bus
from giornata.bus.connection import barrier
from giornata.config import new_instance
from giornata.nats_users import USERS_CONF, password_file, read_keys, reload_servers, write_users
from giornata.records import JobRecordStore
from giornata.wire.errors import GiornataError, NotPermitted, Unauthorized
from giornata.wire.messages import (
    FinishReply,
    FinishRequest,
)
from giornata.wire.subjects import RELOADER, NatsRole
from giornata_gateway import service
from giornata_gateway.config import GatewayConfig
from tests import forked_programs
from tests.fakes.denoiser import FakeDenoiser
from tests.fakes.fleet import FakePrepost
from tests.integration.nats_server import NatsServer, nats_cluster, refused
from tests.integration.router.bench import running_router
from tests.patience import HUNG_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
PICTURE = b"the finished picture"


@dataclass(frozen=True)
class Application:
    """What ``giornata keys add`` has printed."""

    url: str
    key: str


@dataclass
class Operator:
    """Runs ``giornata keys`` beside the servers."""

    nats_url: str
    users: Path
    keys: Path

    async def run(self, verb: str, *words: str) -> tuple[int, str, str]:
        said = {
            "GIORNATA_API_KEYS_FILE": str(self.keys), "GIORNATA_NATS_USERS": str(self.users),
            "GIORNATA_NATS_URL": self.nats_url, "COLUMNS": "120",
        }  # fmt: skip
        done = await forked_programs.run(
            sys.executable, "-m", "giornata_tools.cli", "keys", verb, *words, env={**os.environ, **said}
        )
        return done.status, done.out.decode(), done.err

    async def add(self, name: str, *, servers: int = 1) -> Application:
        status, out, err = await self.run("add", name)
        assert (status, f"taken it: {servers}." in err) == (0, True), err
        printed = dict(line.split("=", 1) for line in out.splitlines())
        assert printed.keys() == {"GIORNATA_NATS_URL", "GIORNATA_API_KEY"}
        return Application(printed["GIORNATA_NATS_URL"], printed["GIORNATA_API_KEY"])


class Prepost(FakePrepost):
    """Finishes pictures that are in the blob store."""

    def __init__(self, bus: Bus, blobs: RedisBlobs) -> None:
        super().__init__(bus)
        self._blobs = blobs

    async def _finish(self, request: FinishRequest) -> FinishReply:
        done = await super()._finish(request)
        image = await self._blobs.put(f"{request.job.tenant}/{request.job.job_id}/picture", PICTURE, HUNG_S)
        return done.model_copy(update={"image": image})


@dataclass
class System:
    """All services, each with its own rights."""

    operator: Operator
    shop: Application
    press: Application
    prepost: Prepost
    stop: asyncio.Event = field(default_factory=asyncio.Event)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """A gateway, a router and fakes behind them; the applications ``shop`` and ``press`` are known already."""
    folder = tmp_path_factory.mktemp("system")
    write_users(folder / "users", anonymous=NatsRole.APPLICATION)
    server, users = NatsServer(folder, f'include "users/{USERS_CONF}"'), folder / "users"
    server.start()
    patch = pytest.MonkeyPatch()
    patch.setattr("giornata_gateway.admission.LOOK_S", 0.0)
    operator = Operator(server.url, users, folder / "keys.json")
    shop, press = [await operator.add(name) for name in ("shop", "press")]
    async with AsyncExitStack() as stack:
        stack.callback(server.kill)
        stack.callback(patch.undo)
        front, behind, worker = [
            await stack.enter_async_context(
                buses.connect(server.url, f"test-{user}", user=user, password_file=password_file(users, user))
            )
            for user in (NatsRole.GATEWAY, NatsRole.PREPOST, NatsRole.DENOISER)
        ]
        blobs = await stack.enter_async_context(RedisBlobs.open(redis_url))
        await streams.ensure(worker.jetstream, replicas=1, events_ttl_s=60)
        prepost = Prepost(behind, blobs)
        denoiser = FakeDenoiser(worker, await JobRecordStore.open(worker.jetstream), "d1")
        system = System(operator, shop, press, prepost)
        config = GatewayConfig(
            nats_url=server.url,
            blobs_url=redis_url,
            instance=new_instance("gateway"),
            port=0,
            telemetry_hz=20,
            api_keys_file=operator.keys,
        )
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        router = running_router(server.url, "r1", password_file=password_file(users, NatsRole.ROUTER))
        for entered in (router, prepost.run(), denoiser.run()):
            await stack.enter_async_context(entered)
        tasks.create_task(service.serve(config, front, blobs, system.stop))
        stack.callback(system.stop.set)
        await _open(shop)
        yield system


async def _open(application: Application) -> None:
    """Return when the whole system carries out edits."""
    async with (
        asyncio.timeout(HUNG_S),
        giornata.client.connect(application.url, api_key=application.key) as client,
    ):
        while True:
            try:
                await (await client.edit(image=b"picture", prompt="a star"))
            except GiornataError:
                await asyncio.sleep(0.1)  # services that come up do not announce it to applications
            else:
                return


def unused(name: str) -> str:
    """A name for an application that stays: the same test may run again beside the same servers."""
    return f"{name}-{secrets.token_hex(3)}"


async def _edited(application: Application) -> bytes:
    async with giornata.client.connect(application.url, api_key=application.key) as client:
        return (await (await client.edit(image=b"picture", prompt="a star"))).pictures[0].data


async def test_an_application_that_is_added_while_all_runs_edits_as_its_own_user(system: System) -> None:
    with capture_logs() as logs:
        name = unused("office")
        office = await system.operator.add(name)
        async with giornata.client.connect(office.url, api_key=office.key) as client:
            edit = await client.edit(image=b"picture", prompt="a star")
            told = [progress async for progress in edit]
            assert (await edit).pictures[0].data == PICTURE
            await client.cancel(edit.job_id)
    assert told
    assert [log for log in logs if log["event"] in {"nats_refused", "answer_refused"}] == []
    status, listed, _ = await system.operator.run("list")
    assert status == 0
    for known in ("shop", name):
        assert f"app.{known}" in listed
    held = system.operator.keys.read_text() + (system.operator.users / "server" / "users.conf").read_text()
    for secret in (office.key, office.url.partition(f"app.{name}:")[2].partition("@")[0]):
        assert len(secret) > 40
        assert secret not in held, "hashes alone are at rest"


async def test_no_application_hears_or_writes_what_is_anothers(system: System) -> None:
    heard = (
        "_INBOX.>", "_INBOX_app.press.>", "_INBOX_app.*.>", "_INBOX_app.>", "_INBOX_gateway.>", "giornata.>",
        "giornata.edit", "giornata.event.>", "giornata.telemetry.>", "$SYS.>", ">", "*.press.>",
    )  # fmt: skip
    told = (
        "_INBOX_app.press.x.reply",
        "_INBOX.x",
        "$SYS.REQ.SERVER.PING",
        "$SRV.PING",
        "giornata.router.submit",
    )
    async with buses.connect(system.shop.url, "shop") as shop:
        with capture_logs() as logs:
            for subject in heard:
                await shop.client.subscribe(subject)
            for subject in told:
                await shop.client.publish(subject, b"")
            await shop.client.subscribe("_INBOX_app.shop.>")
            await barrier(shop.client)
    refused = {(log["act"], log["subject"]) for log in logs if log["event"] == "nats_refused"}
    assert refused == {("subscription", s.lower()) for s in heard} | {("publish", s.lower()) for s in told}


async def test_a_revoked_application_is_cut_off_and_others_go_on(system: System) -> None:
    press, gone = system.press, await system.operator.add("gone")
    cut, kept = asyncio.Event(), asyncio.Event()
    async with (
        buses.connect(gone.url, "gone") as revoked,
        giornata.client.connect(press.url, api_key=press.key) as client,
    ):
        revoked.client._disconnected_cb = _setting(cut)
        client._bus.client._disconnected_cb = _setting(kept)
        status, _, err = await system.operator.run("revoke", "app.gone")
        assert (status, "taken it: 1." in err) == (0, True), err
        await asyncio.wait_for(cut.wait(), HUNG_S)
        assert (await (await client.edit(image=b"picture", prompt="a star"))).pictures[0].data == PICTURE
        assert not kept.is_set(), "the other's connection stayed open"
        await revoked.client.close()
    assert "does not let us in" in await refused(gone.url)
    async with giornata.client.connect(press.url, api_key=gone.key) as client:
        with pytest.raises(Unauthorized):
            await client.edit(image=b"picture", prompt="a star")
    known = read_keys(system.operator.keys).passwords.keys()
    assert known >= {"app.shop", "app.press"}
    assert "app.gone" not in known


def _setting(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    async def told() -> None:
        event.set()

    return told


async def test_a_client_with_the_wrong_inbox_is_told_at_once(system: System) -> None:
    url = system.shop.url.replace("app.shop:", "application:")
    application = password_file(system.operator.users, NatsRole.APPLICATION).read_text().strip()
    async with buses.connect(system.shop.url, "shop") as shop:
        shop.client._inbox_prefix = bytearray(b"_INBOX")
        wrong = giornata.client.Client(shop, None, system.shop.key, "shop")
        with pytest.raises(NotPermitted, match="giornata keys add"):
            async with wrong.listening():
                pass
    assert application not in url
    assert "does not let us in" in await refused(url)


async def test_an_application_without_a_password_goes_on_beside_others(system: System) -> None:
    """Its key is of the HTTP door alone; answers go to the inboxes that all without a password share."""
    status, key, _ = await system.operator.run("create", "--tenant", "alice")
    assert status == 0
    bare = Application(system.operator.nats_url, key.strip())
    assert await _edited(bare) == PICTURE
    await system.operator.add(unused("later"))
    assert await _edited(bare) == PICTURE


async def test_servers_that_do_not_take_a_change_are_told(
    guarded_nats: tuple[NatsServer, Path], tmp_path: Path
) -> None:
    server, users = guarded_nats
    operator = Operator(server.url, users, tmp_path / "keys.json")
    (users / "server").joinpath("broken.conf").write_text("port: {")
    config = tmp_path / "nats.conf"
    config.write_text(config.read_text() + 'include "users/server/broken.conf"\n')
    status, out, err = await operator.run("add", "shop")
    assert (status, "did not take the new configuration" in err) == (1, True), err
    assert out.count("gio_") == 1, "the key is there, and is shown"
    assert out.split("gio_")[1][:20] not in err
    server.kill()
    status, _, err = await operator.run("revoke", "app.shop")
    assert (status, "No NATS server answers" in err) == (1, True), err
    assert read_keys(operator.keys).keys == ()


async def test_every_server_of_a_cluster_takes_a_change(tmp_path: Path) -> None:
    with nats_cluster(tmp_path) as cluster:
        first, *_, last = cluster.servers.values()
        while await reload_servers(first.url, password_file(cluster.users, RELOADER)) < len(cluster.servers):
            continue  # they have not found each other yet
        operator = Operator(first.url, cluster.users, tmp_path / "keys.json")
        shop = await operator.add("shop", servers=3)
        cut = asyncio.Event()
        async with buses.connect(shop.url.rpartition("@")[0] + "@" + last.url.rpartition("/")[2], "s") as bus:
            bus.client._disconnected_cb = _setting(cut)
            status, _, err = await operator.run("revoke", "app.shop")
            assert (status, "taken it: 3." in err) == (0, True), err
            await asyncio.wait_for(cut.wait(), HUNG_S)
