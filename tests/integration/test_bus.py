"""The NATS edge against a real server: errors keep their class, handlers run side by side, draining loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.aio.transport import TcpTransport

from giornata.bus import bus as buses
from giornata.bus.bus import Bus, Endpoint, UnansweredError
from giornata.bus.connection import LostError, barrier
from giornata.deadlines import Deadline
from giornata.wire import codec, subjects
from giornata.wire.errors import (
    DeadlineExceeded,
    InternalError,
    MalformedMessage,
    MaskEmpty,
    ServiceUnavailable,
)
from giornata.wire.loras import ReadFile
from giornata.wire.messages import CancelRows, JobAck, JobEstimateRequest
from giornata.wire.workers import ServiceName
from tests.fakes.nats_world.server import MemoryNatsServer
from tests.integration.nats_server import NatsServer
from tests.patience import HUNG_MS, HUNG_S

SUBJECT = subjects.controlnet("test", "open")
OTHER = ReadFile(sha256="a", offset=0, size_bytes=1, remaining_ms=1)
"""Not what an endpoint of these tests takes."""


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with buses.connect(nats_url, "test") as connected:
        yield connected


def endpoint(handler: object) -> Endpoint:
    return Endpoint(SUBJECT, CancelRows, handler)  # type: ignore[arg-type]  # handlers of several shapes


async def echo(request: CancelRows) -> JobAck:
    return JobAck(job_id=request.job_id)


async def ask(bus: Bus, job_id: str = "j", ms: float = HUNG_MS) -> JobAck:
    return await bus.call(SUBJECT, CancelRows(job_id=job_id, attempt=1), JobAck, Deadline.after_ms(ms))


async def test_requests_are_handled_side_by_side(bus: Bus) -> None:
    together = asyncio.Barrier(8)

    async def handler(request: CancelRows) -> JobAck:
        await together.wait()  # passes only when all eight are being handled
        return JobAck(job_id=request.job_id)

    async with bus.serve("test", endpoint(handler), instance="i"):
        replies = await asyncio.gather(*(ask(bus, f"j{i}") for i in range(8)))
    assert [reply.job_id for reply in replies] == [f"j{i}" for i in range(8)]


async def test_an_error_is_raised_as_the_same_class_with_all_it_says(bus: Bus) -> None:
    async def handler(_request: CancelRows) -> JobAck:
        raise MaskEmpty(field="mask", received="0 px", accepted="at least one")

    async with bus.serve("test", endpoint(handler), instance="i"):
        with pytest.raises(MaskEmpty) as caught:
            await ask(bus)
    assert (caught.value.field, caught.value.received, caught.value.accepted) == (
        "mask",
        "0 px",
        "at least one",
    )


@pytest.mark.parametrize("error", [ValueError("secret"), TimeoutError("secret")])
async def test_an_unexpected_error_is_answered_without_its_text(bus: Bus, error: Exception) -> None:
    """A handler's own timeout is not the request's."""

    async def handler(_request: CancelRows) -> JobAck:
        raise error

    async with bus.serve("test", endpoint(handler), instance="i"):
        with pytest.raises(InternalError) as caught:
            await ask(bus)
    assert "secret" not in str(caught.value)


async def test_a_malformed_request_is_answered_with_what_is_missing(bus: Bus) -> None:
    async def handler(_request: CancelRows) -> JobAck:
        raise AssertionError("must not be called")

    async with bus.serve("test", endpoint(handler), instance="i"):
        with pytest.raises(MalformedMessage, match="job_id"):
            await bus.call(SUBJECT, OTHER, JobAck, Deadline.after_ms(HUNG_MS))


async def test_nobody_there_and_nobody_answering_are_told_apart(bus: Bus) -> None:
    with pytest.raises(ServiceUnavailable):
        await ask(bus)

    async def handler(_request: CancelRows) -> JobAck:
        await asyncio.sleep(60)
        raise AssertionError

    async with bus.answer(endpoint(handler)):
        task = asyncio.create_task(ask(bus, ms=100))
        with pytest.raises(DeadlineExceeded):
            await task
        with pytest.raises(DeadlineExceeded):
            await ask(bus, ms=0)
        for handling in asyncio.all_tasks():
            if handling.get_name() == SUBJECT:
                handling.cancel()


async def test_what_was_lost_with_the_connection_is_asked_again(private_nats: NatsServer) -> None:
    asked: asyncio.Queue[str] = asyncio.Queue()
    never: asyncio.Future[JobAck] = asyncio.get_running_loop().create_future()
    answers = iter([never])

    async def handler(request: CancelRows) -> JobAck:
        asked.put_nowait(request.job_id)
        first = next(answers, None)
        return JobAck(job_id=request.job_id) if first is None else await first

    async with (
        buses.connect(private_nats.url, "asker") as one,
        buses.connect(private_nats.url, "answerer") as other,
        other.answer(endpoint(handler)),
        asyncio.timeout(HUNG_S),
    ):
        asking = asyncio.create_task(ask(one, ms=600_000))
        await asked.get()
        private_nats.kill()
        private_nats.start()
        assert (await asking).job_id == await asked.get() == "j"
        never.cancel()


@pytest.mark.world
async def test_attempts_that_a_server_does_not_greet_leave_no_connection(
    memory_nats: MemoryNatsServer,
) -> None:
    async with buses.connect(memory_nats.url, "test") as bus:
        memory_nats.kill()
        memory_nats.start()
        with memory_nats.frozen():
            await asyncio.sleep(30)
            assert not bus.client.is_connected
        await asyncio.sleep(30)
        await bus.client.in_force()
        assert memory_nats.open_connections == 1


@pytest.mark.parametrize("answered", [True, False])
async def test_a_cancellation_that_comes_with_the_answer_is_heeded(bus: Bus, *, answered: bool) -> None:
    """wait_for of Python 3.11 loses such a cancellation, and its caller goes on."""
    went_on = asyncio.Event()

    async def handler(request: CancelRows) -> JobAck:
        [future] = bus.client._asked[SUBJECT.lower()]  # the answer, before its asker knows of it
        future.add_done_callback(lambda _: asking.cancel())
        if not answered:
            future.set_exception(LostError())
        return JobAck(job_id=request.job_id)

    async def ask_and_go_on() -> None:
        async with asyncio.timeout(HUNG_S):
            await bus.client.request(SUBJECT, codec.encode(CancelRows(job_id="j", attempt=1)), timeout=HUNG_S)
        went_on.set()

    async with bus.answer(endpoint(handler)):
        asking = asyncio.create_task(ask_and_go_on())
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert not went_on.is_set()


async def test_an_attempt_to_connect_that_is_refused_as_it_is_cancelled_is_the_last(
    private_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client was closed, and tried every second to connect until its process ended."""
    trying, refused = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def connect(*_: object, **__: object) -> None:
        trying.set()
        await asyncio.wait_for(refused, HUNG_S)

    async with asyncio.timeout(HUNG_S), buses.connect(private_nats.url, "test") as bus:
        monkeypatch.setattr(TcpTransport, "connect", connect)
        private_nats.kill()
        await trying.wait()
        attempts = bus.client._reconnection_task
        assert attempts is not None
        refused.set_exception(ConnectionRefusedError())
        attempts.cancel()
        await asyncio.wait([attempts])


async def test_one_that_was_cancelled_may_ask_while_it_puts_things_in_order(bus: Bus) -> None:
    async def leave() -> JobAck:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return await ask(bus)
        raise AssertionError

    async with bus.answer(endpoint(echo)):
        leaving = asyncio.create_task(leave())
        await asyncio.sleep(0)
        leaving.cancel()
        assert (await leaving).job_id


async def test_a_request_to_jetstream_fails_with_its_connection(private_nats: NatsServer) -> None:
    """It may have been carried out; whoever asked reads what there is before it asks again."""
    async with buses.connect(private_nats.url, "asker") as bus:
        subscription = await bus.client.subscribe("$JS.API.NOBODY")  # takes the request, and says nothing
        asking = asyncio.create_task(bus.client.request("$JS.API.NOBODY", b"", timeout=600))
        async with asyncio.timeout(HUNG_S):
            await subscription.next_msg(timeout=None)
            private_nats.kill()
            with pytest.raises(LostError):
                await asking


async def test_a_handler_ends_when_its_request_has_no_time_left(bus: Bus) -> None:
    ended = asyncio.Event()

    async def handler(_request: JobEstimateRequest) -> JobAck:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        raise AssertionError

    async with bus.serve("test", Endpoint(SUBJECT, JobEstimateRequest, handler), instance="i"):
        request = JobEstimateRequest(job_id="j", remaining_ms=50)
        with pytest.raises(DeadlineExceeded):
            await bus.call(SUBJECT, request, JobAck, Deadline.after_ms(HUNG_MS))
        assert ended.is_set()


async def test_leaving_answers_every_request_that_was_delivered(bus: Bus, nats_url: str) -> None:
    begun = asyncio.Event()
    finish = asyncio.Event()

    async def handler(request: CancelRows) -> JobAck:
        begun.set()
        await finish.wait()
        return JobAck(job_id=request.job_id)

    async with buses.connect(nats_url, "other") as other:
        async with other.serve("test", endpoint(handler), instance="i"):
            asked = [asyncio.create_task(ask(bus, f"j{i}")) for i in range(20)]
            await begun.wait()
            await barrier(bus.client)
            await barrier(other.client)
            asyncio.get_running_loop().call_later(0.1, finish.set)
        replies = await asyncio.gather(*asked)
    assert len(replies) == 20


async def test_an_endpoint_answers_from_the_moment_it_is_entered_and_to_the_moment_it_is_left(
    bus: Bus, nats_url: str
) -> None:
    """The library's flush overtakes commands that are still to be written; one in twenty requests was lost."""
    async with buses.connect(nats_url, "other") as other:
        for i in range(100):
            async with other.answer(endpoint(echo)):
                asked = asyncio.create_task(ask(bus, f"j{i}"))
                assert (await ask(bus, f"k{i}")).job_id == f"k{i}"
                await barrier(bus.client)  # else the server may hear of the end before it takes the other one
            assert (await asked).job_id == f"j{i}"


async def test_a_malformed_message_does_not_end_a_subscription(bus: Bus) -> None:
    heard: asyncio.Queue[CancelRows] = asyncio.Queue()
    async with bus.listen("giornata.cancel.*", CancelRows, heard.put_nowait):
        await bus.client.publish("giornata.cancel.x", b"\xc1")
        await bus.publish("giornata.cancel.x", CancelRows(job_id="after", attempt=1))
        assert (await asyncio.wait_for(heard.get(), HUNG_S)).job_id == "after"


async def test_a_pong_for_which_no_one_waits_any_more_ends_no_connection(bus: Bus) -> None:
    """A flush that timed out leaves its PING behind; at the late PONG the library would stop to read."""
    given_up = asyncio.get_running_loop().create_future()
    given_up.cancel()
    await bus.client._send_ping(given_up)
    await bus.client.flush(timeout=HUNG_S)


async def test_no_server_is_a_plain_sentence() -> None:
    with pytest.raises(ServiceUnavailable, match="GIORNATA_NATS_URL"):
        async with buses.connect("nats://127.0.0.1:1", "test", timeout_s=0.5):
            pass


async def test_a_reply_above_the_servers_limit_is_an_error_not_a_lost_connection(bus: Bus) -> None:
    async def handler(request: CancelRows) -> JobAck:
        return JobAck(job_id="x" * (9 << 20))

    async with bus.serve("test", Endpoint(SUBJECT, CancelRows, handler, limit_bytes=16 << 20), instance="i"):
        with pytest.raises(Exception, match="larger than the NATS server accepts"):
            await ask(bus)
    assert bus.client.is_connected


async def test_a_cancelled_connect_leaves_nothing_behind() -> None:
    before = asyncio.all_tasks()

    async def connect() -> None:
        async with buses.connect("nats://127.0.0.1:1", "test"):
            raise AssertionError

    task = asyncio.create_task(connect())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before


async def test_leaving_without_a_server_ends_soon_and_quietly(private_nats: NatsServer) -> None:
    async with (
        asyncio.timeout(HUNG_S),
        buses.connect(private_nats.url, "test") as bus,
        bus.answer(endpoint(echo)),
        bus.serve("test", Endpoint(subjects.controlnet("other", "open"), CancelRows, echo), instance="i"),
        bus.listen("giornata.cancel.*", CancelRows, lambda _: None),
    ):
        private_nats.kill()
        while bus.client.is_connected:  # noqa: ASYNC110 - nobody tells a test that it has noticed
            await asyncio.sleep(0.05)
    with pytest.raises(ServiceUnavailable):
        await ask(bus)


def test_a_text_of_a_user_never_becomes_a_subject() -> None:
    for text in ("a.b", "a b", ">", "*", "", "ü", "x" * 97):
        with pytest.raises(ValueError, match="an id must match"):
            subjects.cancel(text)
    assert subjects.telemetry(ServiceName.LORA_STORE, "i-1") == "giornata.telemetry.lora-store.i-1"


async def test_a_listener_has_caught_up_when_all_that_was_sent_before_is_handled(
    bus: Bus, nats_url: str
) -> None:
    heard: list[str] = []
    subject = subjects.cancel("caught-up")
    async with (
        buses.connect(nats_url, "other") as other,
        bus.listen(subject, CancelRows, lambda message: heard.append(message.job_id)) as listening,
    ):
        await listening.caught_up()
        for count in range(1, 4):
            for number in range(1000):
                await other.publish(subject, CancelRows(job_id=str(number), attempt=1))
            await other.client.publish(subject, b"not a message")
            await barrier(other.client)
            await listening.caught_up()
            assert len(heard) == count * 1000


async def test_waiting_to_catch_up_ends_with_the_connection(private_nats: NatsServer) -> None:
    async with (
        buses.connect(private_nats.url, "one") as bus,
        bus.listen(subjects.ALL_CANCELS, CancelRows, lambda _: None) as listening,
    ):
        await listening.caught_up()
        private_nats.kill()
        with pytest.raises(LostError):
            await asyncio.wait_for(listening.caught_up(), HUNG_S)
        private_nats.start()


async def test_what_is_not_ours_to_answer_is_not_answered(bus: Bus) -> None:
    async def handler(_request: CancelRows) -> JobAck:
        raise UnansweredError

    async with bus.answer(endpoint(handler)):
        with pytest.raises(DeadlineExceeded):
            await ask(bus, ms=200)
