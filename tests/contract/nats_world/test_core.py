"""Core NATS: requests, queue groups, headers, draining, refusals, and connections that are lost and come back."""

from __future__ import annotations

import asyncio

import nats.errors
import pytest
from nats.aio.msg import Msg
from nats.micro import add_service

from giornata.bus.bus import Bus
from giornata.bus.connection import LostError, barrier, drain
from tests.contract.nats_world.conftest import AnyServer
from tests.fakes.nats_world.subjects import covers, overlap
from tests.patience import HUNG_S


async def echo(message: Msg) -> None:
    await message._client.publish(message.reply, message.data, headers=message.headers)


async def test_a_request_is_answered_with_its_headers(bus: Bus, other: Bus) -> None:
    await other.client.subscribe("echo", cb=echo)
    await barrier(other.client)
    answer = await bus.client.request(
        "echo", b"\r\nbytes\0", timeout=HUNG_S, headers={"One": "1", "Two": "a b"}
    )
    assert (answer.data, answer.headers) == (b"\r\nbytes\0", {"One": "1", "Two": "a b"})
    assert (await bus.client.request("echo", b"", timeout=HUNG_S)).headers is None


async def test_nobody_there_and_nobody_answering_are_told_apart(bus: Bus, other: Bus) -> None:
    with pytest.raises(nats.errors.NoRespondersError):
        await bus.client.request("silent", timeout=HUNG_S)
    subscription = await other.client.subscribe("silent")
    await barrier(other.client)
    with pytest.raises(nats.errors.TimeoutError):
        await bus.client.request("silent", timeout=0.05)
    await subscription.unsubscribe()
    await barrier(other.client)
    with pytest.raises(nats.errors.NoRespondersError):
        await bus.client.request("silent", timeout=HUNG_S)


async def test_everybody_hears_a_message_and_one_of_each_queue_group(bus: Bus, other: Bus) -> None:
    heard = {name: list[bytes]() for name in ("plain", "wild", "group-a", "group-b", "elsewhere")}

    def hear(name: str) -> object:
        async def receive(message: Msg) -> None:
            heard[name].append(message.data)

        return receive

    for name, pattern, queue in (
        ("plain", "news.one", ""),
        ("wild", "news.>", ""),
        ("group-a", "news.*", "group"),
        ("group-b", "news.one", "group"),
        ("elsewhere", "news", ""),
    ):
        await other.client.subscribe(pattern, queue, cb=hear(name))  # type: ignore[arg-type]  # a callback
    await barrier(other.client)
    for number in range(40):
        await bus.client.publish("news.one", bytes([number]))
    await barrier(bus.client)
    await barrier(other.client)
    everything = [bytes([number]) for number in range(40)]
    assert heard["plain"] == heard["wild"] == sorted(heard["group-a"] + heard["group-b"]) == everything
    assert heard["group-a"]
    assert heard["group-b"]
    assert heard["elsewhere"] == []


async def test_a_subscription_ends_after_as_many_messages_as_it_asked_for(bus: Bus) -> None:
    subscription = await bus.client.subscribe("few")
    await subscription.unsubscribe(limit=2)
    for number in range(3):
        await bus.client.publish("few", bytes([number]))
    await barrier(bus.client)
    assert [(await subscription.next_msg(HUNG_S)).data for _ in range(2)] == [b"\0", b"\1"]
    with pytest.raises(nats.errors.NoRespondersError):
        await bus.client.request("few", timeout=HUNG_S)


async def test_draining_takes_in_what_was_delivered_and_no_more(bus: Bus, other: Bus) -> None:
    heard, hold = list[bytes](), asyncio.Event()

    async def receive(message: Msg) -> None:
        await hold.wait()
        heard.append(message.data)

    subscription = await other.client.subscribe("work", cb=receive)
    await barrier(other.client)
    for number in range(20):
        await bus.client.publish("work", bytes([number]))
    await barrier(bus.client)
    leaving = asyncio.create_task(drain(other.client, subscription))
    await asyncio.sleep(0)
    await barrier(other.client)
    hold.set()
    await leaving
    assert heard == [bytes([number]) for number in range(20)]
    with pytest.raises(nats.errors.NoRespondersError):
        await bus.client.request("work", timeout=HUNG_S)


async def test_a_message_above_the_servers_limit_is_refused_and_one_at_it_is_not(bus: Bus) -> None:
    limit = bus.client.max_payload
    subscription = await bus.client.subscribe("large")
    await bus.client.publish("large", bytes(limit))
    assert len((await subscription.next_msg(HUNG_S)).data) == limit
    with pytest.raises(nats.errors.MaxPayloadError):
        await bus.client.publish("large", bytes(limit + 1))
    bus.client._max_payload = limit + 1
    closed = asyncio.Event()

    async def hear_end() -> None:
        closed.set()

    bus.client._closed_cb = hear_end
    await bus.client.publish("large", bytes(limit + 1))
    await asyncio.wait_for(closed.wait(), HUNG_S)


async def test_a_micro_service_is_found_by_its_name_and_asked(bus: Bus, other: Bus) -> None:
    service = await add_service(other.client, name="echoes", version="1.0.0", metadata={"instance": "i"})

    async def handle(request: object) -> None:
        await request.respond(request.data)  # type: ignore[attr-defined]  # of nats.micro

    await service.add_endpoint(name="echo", subject="echoes.echo", handler=handle)
    await barrier(other.client)
    assert b'"instance": "i"' in (await bus.client.request("$SRV.INFO.echoes", timeout=HUNG_S)).data
    assert (await bus.client.request("echoes.echo", b"x", timeout=HUNG_S)).data == b"x"
    await service.stop()


async def test_a_lost_connection_fails_its_requests_and_comes_back_with_its_subscriptions(
    bus: Bus, other: Bus, server: AnyServer
) -> None:
    silent = await other.client.subscribe("silent")
    await other.client.subscribe("echo", cb=echo)
    await barrier(other.client)
    backs = [asyncio.Event(), asyncio.Event()]
    bus.on_reconnect.append(backs[0].set)
    other.on_reconnect.append(backs[1].set)
    asking = asyncio.create_task(bus.client.request("silent", timeout=HUNG_S))
    await barrier(bus.client)
    server.kill()
    with pytest.raises(LostError):
        await asking
    assert not bus.client.is_connected
    server.start()
    await asyncio.wait_for(asyncio.gather(*(back.wait() for back in backs)), HUNG_S)
    assert (await bus.client.request("echo", b"again", timeout=HUNG_S)).data == b"again"
    await silent.unsubscribe()


async def flushed_for_ever(bus: Bus) -> None:
    while True:
        await bus.client.flush(timeout=0.2)  # type: ignore[arg-type]  # the library takes fractions, too


async def test_a_server_that_stands_still_says_nothing_and_loses_nothing(
    bus: Bus, other: Bus, server: AnyServer
) -> None:
    await other.client.subscribe("echo", cb=echo)
    await barrier(other.client)
    with server.frozen():
        with pytest.raises(nats.errors.TimeoutError):
            await flushed_for_ever(bus)  # a process stops a moment after it is told to
        asking = asyncio.create_task(bus.client.request("echo", b"late", timeout=HUNG_S))
        with pytest.raises(nats.errors.TimeoutError):
            await flushed_for_ever(bus)
        assert bus.client.is_connected
        assert not asking.done()
    assert (await asking).data == b"late"


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("a.b", "a.c", False),
    ],
)
async def test_patterns_cover_what_the_server_says_they_cover(
    bus: Bus, pattern: str, subject: str, expected: bool
) -> None:
    subscription = await bus.client.subscribe(pattern)
    await bus.client.publish(subject, b"it")
    await barrier(bus.client)
    assert subscription.pending_msgs == expected == covers(pattern, subject)
    await subscription.unsubscribe()
    assert overlap(pattern, subject) == expected
