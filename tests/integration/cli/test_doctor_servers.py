"""The doctor against servers that are as they should be, and against some that are not."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio

from giornata_tools.cli import doctor
from giornata_tools.cli import doctor_checks as checks
from giornata_tools.cli.doctor_checks import CheckStatus
from tests.integration.gateway_fakes import Stage
from tests.integration.nats_server import NatsServer
from tests.present import present

PASSWORD = "open-sesame"  # noqa: S105 - it is to be looked for in what is shown


@contextlib.contextmanager
def nats_server(folder: Path, config: str) -> Iterator[int]:
    """A server with `config`; its port."""
    path = folder / "other.conf"
    path.write_text(f'listen: "127.0.0.1:-1"\n{config}\n')
    command = [str(Path(sys.executable).with_name("nats-server")), "-c", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        text = ""
        while "Server is ready" not in text:
            line = present(process.stderr).readline()
            assert line, text
            text += line
        found = present(re.search(r"Listening for client connections on 127\.0\.0\.1:(\d+)", text))
        try:
            yield int(found[1])
        finally:
            process.kill()


async def test_nats_as_it_should_be(nats_url: str) -> None:
    found = await checks.nats_server(nats_url)
    assert (found.verdict, "max_payload 8 MiB" in found.sentence) == (CheckStatus.OK, True), found


async def test_none_is_named() -> None:
    assert (await checks.nats_server(None)).verdict is CheckStatus.OK
    assert (await checks.blob_store(None)).verdict is CheckStatus.OK


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("max_payload: 8MB", "has no JetStream"),
        ('max_payload: 1MB\njetstream {{ store_dir: "{folder}" }}', "max_payload of the server"),
    ],
)
async def test_nats_that_is_set_up_otherwise(tmp_path: Path, config: str, told: str) -> None:
    with nats_server(tmp_path, config.format(folder=tmp_path)) as port:
        found = await checks.nats_server(f"nats://127.0.0.1:{port}")
    assert (found.verdict, told in found.sentence) == (CheckStatus.FAIL, True), found
    assert "deploy/nats.conf" in (found.remedy or "")


@pytest.mark.usefixtures("impatient")
async def test_nats_that_is_gone_or_does_not_let_us_in(private_nats: NatsServer, tmp_path: Path) -> None:
    config = f'authorization {{ user: me, password: "{PASSWORD}" }}\njetstream {{ store_dir: "{tmp_path}" }}'
    with nats_server(tmp_path, f"max_payload: 8MB\n{config}") as port:
        assert (await checks.nats_server(f"nats://me:{PASSWORD}@127.0.0.1:{port}")).verdict is CheckStatus.OK
        found = await checks.nats_server(f"nats://me:not-{PASSWORD}@127.0.0.1:{port}")
    assert found.verdict is CheckStatus.FAIL
    assert PASSWORD not in f"{found.sentence} {found.remedy}"
    private_nats.kill()
    assert (await checks.nats_server(private_nats.url)).verdict is CheckStatus.FAIL


async def test_a_blob_store_is_asked_for_its_settings_and_may_have_a_password(
    private_redis: tuple[str, Callable[[], None]],
) -> None:
    url, stop = private_redis
    async with settings(url, **{"maxmemory-policy": "allkeys-lru"}):
        found = await checks.blob_store(url)
    assert (found.verdict, "allkeys-lru" in found.sentence) == (CheckStatus.FAIL, True)
    async with settings(url, **{"maxmemory-policy": "noeviction"}):
        found = await checks.blob_store(url)
    assert (found.verdict, "appendonly yes" in (found.remedy or "")) == (CheckStatus.WARN, True)
    async with settings(url, requirepass=PASSWORD):
        assert "does not let us in" in (await checks.blob_store(url)).sentence
        wrong = await checks.blob_store(f"{url}?password=not-{PASSWORD}")
        right = await checks.blob_store(f"{url}?password={PASSWORD}")
    assert "does not let us in" in wrong.sentence
    assert PASSWORD not in f"{wrong} {right}"
    assert "does not let us in" not in right.sentence
    stop()
    assert (await checks.blob_store(url)).verdict is CheckStatus.FAIL


async def test_an_address_that_is_none() -> None:
    assert (await checks.blob_store("localhost:6379")).verdict is CheckStatus.FAIL
    assert (await checks.nats_server("127.0.0.1:99999")).verdict is CheckStatus.FAIL


async def test_the_gateway_is_ready_or_says_what_is_missing(stage: Stage) -> None:
    found = await checks.gateway(stage.url, named=False)
    assert (found.verdict, "tiny" in found.sentence) == (CheckStatus.OK, True)
    stage.router.ready = False
    await stage.router.announce()
    found = await checks.gateway(stage.url, named=False)
    assert (found.verdict, "prepost, denoiser" in found.sentence) == (CheckStatus.FAIL, True), found.sentence


async def test_no_gateway_matters_only_where_one_is_named() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert "stopped answering" in (await checks.gateway(f"http://127.0.0.1:{port}", named=True)).sentence
    assert (await checks.gateway(f"http://127.0.0.1:{port}", named=True)).verdict is CheckStatus.FAIL
    assert (await checks.gateway(f"http://127.0.0.1:{port}", named=False)).verdict is CheckStatus.WARN


async def test_the_whole_examination(
    nats_url: str, private_redis: tuple[str, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        checks, "torch", lambda: checks.ok("asked elsewhere")
    )  # seconds, in a process of its own
    around = doctor.CheckedSystem(
        root=Path(__file__).parents[3],
        gateway_url="http://127.0.0.1:1",
        gateway_named=False,
        nats_url=nats_url,
        blobs_url=private_redis[0],
        models=("./nowhere",),
    )
    async with settings(private_redis[0], **{"maxmemory-policy": "allkeys-lru"}):
        findings = await doctor.examine(around)
    assert {name for name, one in findings.items() if one.verdict is CheckStatus.FAIL} == {"Blobs", "Model"}
    assert findings["Services"].verdict is CheckStatus.WARN


async def test_without_a_checkout_only_the_way_to_a_gateway_is_looked_at(stage: Stage) -> None:
    alone = doctor.CheckedSystem(None, stage.url, False, None, None, ())
    findings = {name: one.verdict for name, one in (await doctor.examine(alone)).items()}
    assert findings == dict.fromkeys(
        ("Python", "Distributions", "Packages", "NATS", "Blobs", "Services"), CheckStatus.OK
    )
    gone = dataclasses.replace(alone, gateway_url="http://127.0.0.1:1")
    findings = {name: one.verdict for name, one in (await doctor.examine(gone)).items()}
    assert {name for name, verdict in findings.items() if verdict is CheckStatus.FAIL} == {"Services"}


@asynccontextmanager
async def settings(url: str, **values: str) -> AsyncIterator[None]:
    """The server's settings while inside."""
    async with redis.asyncio.from_url(url) as client:
        for name, value in values.items():
            await client.config_set(name, value)
        if "requirepass" in values:
            await client.auth(values["requirepass"])
        yield
        if "requirepass" in values:
            with contextlib.suppress(redis.exceptions.RedisError):  # it may have been stopped meanwhile
                await client.config_set("requirepass", "")
