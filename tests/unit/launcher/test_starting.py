"""What `giornata up` looks at before it starts, and what it waits for before it says that it is ready."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any, cast

import pytest

from giornata.wire.loras import LoraCounters
from giornata.wire.subjects import NatsRole
from giornata.wire.workers import ServiceName, ServiceState
from giornata_tools.checkout import STATE
from giornata_tools.launcher.models import StackModel
from giornata_tools.launcher.plan import StackPlan
from giornata_tools.launcher.process import LaunchError
from giornata_tools.launcher.servers import check_port
from giornata_tools.launcher.stack import Stack, running
from giornata_tools.launcher.up import addresses, connection
from tests.patience import HUNG_S


class Ready(Stack):
    """A stack whose gateway has told its address."""

    @property
    def urls(self) -> list[str]:
        return ["http://127.0.0.1:4711"]


def stack(state: Path = STATE) -> Stack:
    made = Ready(
        StackPlan(state, state / "logs", (StackModel("/m", "tiny"),)),
        cast("Any", None),
        cast("Any", None),
        print,
    )
    made.nats_url, made.blobs_url = "nats://127.0.0.1:4712", "unix:///v"
    return made


def told(validating: int, instance: str = "lora-store-1") -> ServiceState:
    return ServiceState(
        service=ServiceName.LORA_STORE,
        instance=instance,
        ready=True,
        host="h",
        version="0",
        loras=LoraCounters(stored_bytes=0, limit_bytes=1, validating=validating),
    )


def test_a_taken_port_is_refused_in_words_and_a_free_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"^Port {port} of 127\.0\.0\.1 is taken .* --port 0\.$"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", 0)


def test_a_port_that_nothing_can_listen_on_is_refused_with_the_reason() -> None:
    with pytest.raises(LaunchError, match="no place to listen"):
        check_port("203.0.113.1", 8000)


async def test_a_taken_port_ends_the_start_before_any_server_runs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        plan = StackPlan(
            tmp_path / "s", tmp_path / "l", (StackModel("/m", "tiny"),), port=taken.getsockname()[1]
        )
        with pytest.raises(LaunchError, match="is taken"):
            async with running(plan):
                pass
    assert not (tmp_path / "s" / "nats").exists()


async def test_it_waits_for_loras_that_are_being_checked() -> None:
    made = stack()
    made.watch.hear(told(2))
    waiting = asyncio.ensure_future(made.unchecked_loras(HUNG_S))
    await asyncio.sleep(0)
    assert not waiting.done()
    made.watch.hear(told(0, "lora-store-2"))
    await asyncio.sleep(0)
    assert not waiting.done(), "another store still checks"
    made.watch.hear(told(0))
    assert await waiting == 0


async def test_loras_that_take_longer_are_counted() -> None:
    made = stack()
    made.watch.hear(told(2))
    assert await made.unchecked_loras(0) == 2
    assert "LoRAs still being checked: 2." in addresses(made, 2)
    assert "checked" not in addresses(made)


def test_what_it_says_names_the_state_folder_where_commands_need_it(tmp_path: Path) -> None:
    assert "--state" not in addresses(stack())
    assert f"--state {tmp_path}" in addresses(stack(tmp_path))


def test_the_connection_names_password_files_of_embedded_servers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stack()
    assert connection(made).password_files == {}
    monkeypatch.setattr(made, "nats_password_file", lambda user: tmp_path / user)
    found = connection(made)
    assert (found.url, found.nats_url, found.blobs_url) == (made.url, made.nats_url, made.blobs_url)
    assert found.password_file(NatsRole.OBSERVER) == tmp_path / "observer"
    assert found.password_file(NatsRole.APPLICATION) is None
