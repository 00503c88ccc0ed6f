"""JetStream: streams and their limits, key-value buckets, and consumers that pull or are pushed to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
import pytest
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import (
    APIError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NoStreamResponseError,
    NotFoundError,
)
from nats.js.kv import KV_DEL, KeyValue

from giornata.bus.bus import Bus
from giornata.bus.connection import barrier
from tests.contract.nats_world.conftest import AnyServer
from tests.patience import HUNG_S

QUEUE = StreamConfig(
    name="Q", subjects=["q.*"], retention=RetentionPolicy.WORK_QUEUE, discard=DiscardPolicy.NEW, max_msgs=5
)


async def refusal(call: Awaitable[object]) -> tuple[int | None, int | None, str | None]:
    """What JetStream says no with."""
    with pytest.raises(APIError) as caught:
        await call
    return caught.value.code, caught.value.err_code, caught.value.description


async def becomes(read: Callable[[], Awaitable[Any]], expected: object) -> None:
    """Return when what is read is `expected`; what expires does so without a word."""
    async with asyncio.timeout(HUNG_S):
        while await read() != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_stream_is_made_once_and_says_why_another_is_not(bus: Bus) -> None:
    jetstream, limited = bus.jetstream, StreamConfig(name="S", subjects=["s.>"], max_msgs=3)
    made = await jetstream.add_stream(limited)
    assert (await jetstream.add_stream(limited)).created == made.created
    in_use = "stream name already in use with a different configuration"
    assert await refusal(jetstream.add_stream(limited.evolve(max_msgs=4))) == (400, 10058, in_use)
    overlapping = StreamConfig(name="T", subjects=["s.*"])
    assert (await refusal(jetstream.add_stream(overlapping)))[:2] == (400, 10065)
    large = StreamConfig(name="L", subjects=["l"], max_bytes=30_000_000)
    assert await refusal(jetstream.add_stream(large)) == (
        500,
        10047,
        "insufficient storage resources available",
    )
    large = large.evolve(storage=StorageType.MEMORY)
    assert await refusal(jetstream.add_stream(large)) == (
        500,
        10028,
        "insufficient memory resources available",
    )
    for call in (jetstream.stream_info("N"), jetstream.delete_stream("N"), jetstream.update_stream(name="N")):
        assert await refusal(call) == (404, 10059, "stream not found")
    changed = (await jetstream.update_stream(limited.evolve(max_msgs=2, max_age=60))).config
    assert (changed.max_msgs, changed.max_age, changed.max_bytes, changed.subjects) == (2, 60, -1, ["s.>"])
    assert (await refusal(jetstream.update_stream(limited.evolve(storage=StorageType.MEMORY))))[1] == 10052
    assert [one.config.name for one in await jetstream.streams_info()] == ["S"]
    assert await jetstream.find_stream_name_by_subject("s.b") == "S"
    await jetstream.delete_stream("S")
    with pytest.raises(NoStreamResponseError):
        await jetstream.publish("s.b", b"")


async def test_a_stream_tells_what_it_holds_and_reads_it_by_number_and_subject(bus: Bus) -> None:
    jetstream = bus.jetstream
    empty = (await jetstream.add_stream(name="S", subjects=["s.>"])).state
    assert (empty.messages, empty.first_seq, empty.last_seq) == (0, 0, 0)
    for subject in ("s.a", "s.b", "s.a", "s.c.d"):
        await jetstream.publish(subject, subject.encode(), headers={"Of": subject})
    state = (await jetstream.stream_info("S", subjects_filter="s.*")).state
    assert (state.messages, state.first_seq, state.last_seq) == (4, 1, 4)
    assert state.subjects == {"s.a": 2, "s.b": 1}
    stored = ("s.a", "s.b", "s.a", "s.c.d")
    assert state.bytes == sum(34 + 2 * len(one) + len(f"NATS/1.0\r\nOf: {one}\r\n\r\n") for one in stored)
    last = await jetstream.get_msg("S", subject="s.a")
    assert (last.seq, last.data, last.headers) == (3, b"s.a", {"Of": "s.a"})
    assert (await jetstream.get_msg("S", seq=2)).subject == "s.b"
    assert (await jetstream.get_msg("S", 2, "s.a", next=True)).seq == 3
    with pytest.raises(NotFoundError):
        await jetstream.get_msg("S", 4, "s.a", next=True)
    with pytest.raises(NotFoundError):
        await jetstream.get_msg("S", seq=9)
    assert await jetstream.purge_stream("S", subject="s.a")
    state = (await jetstream.stream_info("S")).state
    assert (state.messages, state.first_seq, state.last_seq) == (2, 2, 4)
    assert await jetstream.delete_msg("S", 2)
    await jetstream.purge_stream("S")
    state = (await jetstream.stream_info("S")).state
    assert (state.messages, state.bytes, state.first_seq, state.last_seq) == (0, 0, 5, 4)


async def test_a_message_of_a_known_id_is_kept_once_within_the_window(bus: Bus, other: Bus) -> None:
    await bus.jetstream.add_stream(name="S", subjects=["s"], duplicate_window=0.3)
    heard = await other.client.subscribe("s")
    await barrier(other.client)
    headers = {"Nats-Msg-Id": "m1"}
    # both leave in one write: a busy machine puts no window between them
    acks = await asyncio.gather(*(bus.jetstream.publish("s", b"", headers=headers) for _ in range(2)))
    assert [(ack.seq, ack.duplicate) for ack in acks] == [(1, None), (1, True)]
    await barrier(other.client)
    assert heard.pending_msgs == 2, "who listens hears every repetition"
    await heard.unsubscribe()

    async def seq() -> int:
        return (await bus.jetstream.publish("s", b"", headers=headers)).seq

    await becomes(seq, 2)


async def test_a_message_is_taken_only_where_its_expectations_hold(bus: Bus) -> None:
    jetstream = bus.jetstream
    await jetstream.add_stream(name="S", subjects=["s.*"])
    await jetstream.publish("s.a", b"")

    async def publish(subject: str, **expected: object) -> object:
        headers = {f"Nats-Expected-{name.replace('_', '-')}": str(value) for name, value in expected.items()}
        return (await jetstream.publish(subject, b"", headers=headers)).seq

    wrong = (400, 10071, "wrong last sequence: 1")
    assert await refusal(publish("s.a", Last_Subject_Sequence=0)) == wrong
    assert await refusal(publish("s.b", Last_Sequence=7)) == wrong
    assert (await refusal(publish("s.a", Stream="T")))[:2] == (400, 10060)
    assert await publish("s.b", Last_Subject_Sequence=0, Last_Sequence=1, Stream="S") == 2
    assert await publish("s.a", Last_Subject_Sequence=1) == 3
    assert (await refusal(jetstream.publish("s.a", b"", msg_ttl=1)))[:2] == (400, 10166)


async def test_a_full_stream_refuses_or_forgets_the_oldest(bus: Bus) -> None:
    jetstream = bus.jetstream
    await jetstream.add_stream(QUEUE)
    for _ in range(5):
        await jetstream.publish("q.a", b"")
    assert await refusal(jetstream.publish("q.b", b"")) == (503, 10077, "maximum messages exceeded")
    await jetstream.add_stream(name="N", subjects=["n.*"], max_bytes=2000, discard=DiscardPolicy.NEW)
    too_large = (503, 10077, "maximum bytes exceeded")
    assert await refusal(jetstream.publish("n.a", bytes(1968))) == too_large
    await jetstream.publish("n.a", bytes(1967))  # the last byte
    assert await refusal(jetstream.publish("n.b", b"")) == too_large
    await jetstream.add_stream(name="O", subjects=["o.*"], max_bytes=2000, storage=StorageType.MEMORY)
    for number in range(3):
        await jetstream.publish(f"o.{number}", bytes(900))
    state = (await jetstream.stream_info("O", subjects_filter=">")).state
    assert (state.messages, state.first_seq, state.subjects) == (2, 2, {"o.1": 1, "o.2": 1})
    assert state.bytes == 2 * (900 + len("o.1") + 16)
    await jetstream.update_stream(name="O", subjects=["o.*"], max_msgs=1, storage=StorageType.MEMORY)
    assert (await jetstream.stream_info("O")).state.first_seq == 3


async def test_a_full_bucket_takes_a_revision_of_the_same_size_and_no_larger_one(bus: Bus) -> None:
    bucket = await bus.jetstream.create_key_value(bucket="B", max_bytes=3000)
    revision = await bucket.create("a", bytes(1000))
    with contextlib.suppress(APIError):
        for number in itertools.count():
            await bucket.create(f"pad{number}", b"")
    assert (await refusal(bucket.update("a", bytes(1001), last=revision)))[1] == 10077
    revision = await bucket.update("a", bytes(1000), last=revision)
    revision = await bucket.update("a", bytes(900), last=revision)
    assert (await bucket.get("a")).revision == revision


async def test_messages_expire_by_the_streams_age_or_a_life_of_their_own(bus: Bus) -> None:
    jetstream = bus.jetstream
    await jetstream.add_stream(name="S", subjects=["s.*"], max_age=0.3)
    await jetstream.publish("s.a", b"")
    await jetstream.add_stream(name="T", subjects=["t.*"], allow_msg_ttl=True)
    await jetstream.publish("t.a", b"", msg_ttl=1)
    await jetstream.publish("t.b", b"")
    await jetstream.publish("t.c", b"", msg_ttl=3600)

    def left(name: str) -> Callable[[], Awaitable[object]]:
        async def read() -> object:
            state = (await jetstream.stream_info(name)).state
            return state.messages, state.first_seq, state.last_seq

        return read

    await becomes(left("S"), (0, 2, 1))
    await becomes(left("T"), (2, 2, 3))


async def test_a_key_is_created_once_and_updated_by_who_knows_its_revision(bus: Bus) -> None:
    bucket = await bus.jetstream.create_key_value(bucket="B", history=1)
    first = await bucket.create("a.b", b"1")
    with pytest.raises(KeyWrongLastSequenceError):
        await bucket.create("a.b", b"2")
    second = await bucket.update("a.b", b"2", last=first)
    with pytest.raises(KeyWrongLastSequenceError):
        await bucket.update("a.b", b"3", last=first)
    entry = await bucket.get("a.b")
    assert (entry.value, entry.revision) == (b"2", second)
    assert await bucket.put("a.c", b"") == second + 1
    assert (await bucket.get("a.c")).value in {None, b""}
    with pytest.raises(KeyWrongLastSequenceError):
        await bucket.update("none", b"", last=second)
    with pytest.raises(KeyNotFoundError) as missing:
        await bucket.get("none")
    assert missing.value.entry is None
    with pytest.raises(APIError):
        await bucket.delete("a.b", last=first)
    await bucket.delete("a.b", last=second)
    with pytest.raises(KeyNotFoundError) as missing:
        await bucket.get("a.b")
    assert (missing.value.op, missing.value.entry and missing.value.entry.revision) == (KV_DEL, second + 2)
    assert await bucket.create("a.b", b"new") == second + 3
    await bucket.purge("a.b")
    info = await bus.jetstream.stream_info("KV_B", subjects_filter="$KV.B.>")
    assert info.state.subjects == {"$KV.B.a.b": 1, "$KV.B.a.c": 1}
    assert (await refusal(bus.jetstream.delete_msg("KV_B", 1)))[1] == 10057
    await bus.jetstream.delete_key_value("B")
    with pytest.raises(NotFoundError):
        await bus.jetstream.key_value("B")


async def seen(watcher: KeyValue.KeyWatcher, count: int) -> list[tuple[str, bytes | None, str | None]]:
    """The next changes that a watcher tells, without the mark that stands somewhere between them."""
    found = list[tuple[str, bytes | None, str | None]]()
    async with asyncio.timeout(HUNG_S):
        async for entry in watcher:
            if entry is not None:
                found.append((entry.key, entry.value, entry.operation))
            if len(found) == count:
                break
    return found


async def test_a_watcher_is_told_the_present_and_every_change(bus: Bus, other: Bus) -> None:
    bucket = await bus.jetstream.create_key_value(bucket="B")
    for key, value in (("a.x", b"0"), ("b.x", b"0"), ("a.x", b"1"), ("a.y", b"2")):
        await bucket.put(key, value)
    watcher = await (await other.jetstream.key_value("B")).watch("a.*")
    assert await seen(watcher, 2) == [("a.x", b"1", None), ("a.y", b"2", None)]
    await bucket.delete("a.x")
    await bucket.put("b.x", b"3")
    await bucket.put("a.z", b"4")
    assert await seen(watcher, 2) == [("a.x", b"", KV_DEL), ("a.z", b"4", None)]
    await watcher.stop()  # type: ignore[no-untyped-call]  # of nats-py


async def test_what_is_in_memory_alone_ends_with_the_server(bus: Bus, server: AnyServer) -> None:
    jetstream, back = bus.jetstream, asyncio.Event()
    await jetstream.add_stream(name="M", subjects=["m"], storage=StorageType.MEMORY)
    kept = await jetstream.add_stream(name="F", subjects=["f"])
    for subject in ("m", "f"):
        await jetstream.publish(subject, subject.encode(), headers={"Nats-Msg-Id": "m1"})
    bus.on_reconnect.append(back.set)
    server.kill()
    server.start()
    await asyncio.wait_for(back.wait(), HUNG_S)
    with pytest.raises(NotFoundError):
        await jetstream.stream_info("M")
    assert (await jetstream.stream_info("F")).created == kept.created
    assert (await jetstream.get_msg("F", seq=1)).data == b"f"
    assert (await jetstream.publish("f", b"f", headers={"Nats-Msg-Id": "m1"})).duplicate


async def consumer(bus: Bus, name: str, subject: str, **more: Any) -> None:
    """A durable consumer of the work queue."""
    options: dict[str, Any] = {
        "ack_policy": AckPolicy.EXPLICIT,
        "ack_wait": 3600.0,
        "max_ack_pending": -1,
    } | more
    config = ConsumerConfig(durable_name=name, filter_subject=subject, **options)
    await bus.jetstream.add_consumer("Q", config)


async def pulling(bus: Bus, name: str, **asked: object) -> Subscription:
    """Ask for messages, which come to the subscription."""
    inbox = bus.client.new_inbox()
    subscription = await bus.client.subscribe(inbox)
    body = json.dumps({"batch": 9} | asked).encode()
    await bus.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.Q.{name}", body, reply=inbox)
    return subscription


async def following(subscription: Subscription) -> Msg:
    return await subscription.next_msg(HUNG_S)


def status_of(message: Msg) -> str | None:
    return (message.headers or {}).get("Status")


async def test_a_pulled_message_is_held_until_it_is_acknowledged_and_then_gone(bus: Bus) -> None:
    await bus.jetstream.add_stream(QUEUE)
    await consumer(bus, "c", "q.a")
    for number in range(2):
        await bus.jetstream.publish("q.a", bytes([number]))
    await bus.jetstream.publish("q.b", b"another's")
    pulled = await pulling(bus, "c", expires=3600 * 10**9)
    first, second = await following(pulled), await following(pulled)
    assert [(one.subject, one.data, one.metadata.num_pending) for one in (first, second)] == [
        ("q.a", b"\0", 1),
        ("q.a", b"\1", 0),
    ]
    info = await bus.jetstream.consumer_info("Q", "c")
    assert info.delivered is not None
    assert (info.num_ack_pending, info.num_pending, info.delivered.stream_seq) == (2, 0, 2)
    for _ in range(2):
        assert (await bus.client.request(first.reply, b"+ACK", timeout=HUNG_S)).data == b""
    assert (await bus.jetstream.consumer_info("Q", "c")).num_ack_pending == 1
    state = (await bus.jetstream.stream_info("Q", subjects_filter=">")).state
    assert (state.messages, state.subjects) == (2, {"q.a": 1, "q.b": 1})
    await bus.jetstream.publish("q.a", b"later")
    assert (await following(pulled)).data == b"later", "the question waits for it"


async def test_a_message_comes_again_if_it_is_not_acknowledged_in_time(bus: Bus) -> None:
    await bus.jetstream.add_stream(QUEUE)
    await consumer(bus, "c", "q.a", ack_wait=0.3)
    await bus.jetstream.publish("q.a", b"it")
    pulled = await pulling(bus, "c", expires=3600 * 10**9)
    tries = [await following(pulled) for _ in range(3)]
    assert [one.metadata.num_delivered for one in tries] == [1, 2, 3]
    assert {one.metadata.sequence.stream for one in tries} == {1}
    assert [one.metadata.sequence.consumer for one in tries] == [1, 2, 3]
    await bus.client.request(tries[2].reply, b"+ACK", timeout=HUNG_S)
    assert (await bus.jetstream.stream_info("Q")).state.messages == 0


async def test_a_message_that_is_handed_back_comes_again_and_one_that_is_ended_does_not(bus: Bus) -> None:
    await bus.jetstream.add_stream(QUEUE)
    await consumer(bus, "c", "q.a", max_deliver=3)
    await bus.jetstream.publish("q.a", b"it")
    await bus.jetstream.publish("q.a", b"other")
    pulled = await pulling(bus, "c", expires=3600 * 10**9)
    first, other = await following(pulled), await following(pulled)
    await other.term()
    await first.in_progress()
    await first.nak()
    second = await following(pulled)
    assert (second.data, second.metadata.num_delivered) == (b"it", 2)
    await second.nak(delay=0.2)
    third = await following(pulled)
    assert (third.data, third.metadata.num_delivered) == (b"it", 3)
    await third.nak()

    async def unacknowledged() -> object:
        return (await bus.jetstream.consumer_info("Q", "c")).num_ack_pending

    await becomes(unacknowledged, 0)
    assert pulled.pending_msgs == 0, "it was delivered as often as may be"
    assert (await bus.jetstream.stream_info("Q")).state.messages == 1


async def test_no_more_is_delivered_than_may_be_unacknowledged(bus: Bus) -> None:
    await bus.jetstream.add_stream(QUEUE)
    await consumer(bus, "c", "q.a", max_ack_pending=2)
    for number in range(3):
        await bus.jetstream.publish("q.a", bytes([number]))
    pulled = await pulling(bus, "c", expires=3600 * 10**9)
    first, _ = await following(pulled), await following(pulled)
    await barrier(bus.client)
    assert pulled.pending_msgs == 0
    await first.ack()
    assert (await following(pulled)).data == b"\2"


async def test_a_work_queue_has_one_consumer_for_a_subject_and_the_next_gets_all_again(bus: Bus) -> None:
    await bus.jetstream.add_stream(QUEUE)
    await consumer(bus, "c1", "q.a")
    await consumer(bus, "c1", "q.a")
    await consumer(bus, "b", "q.b")
    not_unique = (400, 10100, "filtered consumer not unique on workqueue stream")
    assert await refusal(consumer(bus, "c2", "q.a")) == not_unique
    await bus.jetstream.publish("q.a", b"it")
    pulled = await pulling(bus, "c1", expires=3600 * 10**9)
    old = await following(pulled)
    names = await bus.client.request("$JS.API.CONSUMER.NAMES.Q", timeout=HUNG_S)
    assert sorted(json.loads(names.data)["consumers"]) == ["b", "c1"]
    await bus.jetstream.delete_consumer("Q", "c1")
    assert await refusal(bus.jetstream.delete_consumer("Q", "c1")) == (404, 10014, "consumer not found")
    assert await refusal(bus.jetstream.consumer_info("Q", "c1")) == (404, 10014, "consumer not found")
    with pytest.raises(nats.errors.NoRespondersError):
        await bus.client.request(old.reply, b"+ACK", timeout=HUNG_S)
    await consumer(bus, "c2", "q.a")
    again = await following(await pulling(bus, "c2"))
    assert (again.data, again.metadata.num_delivered) == (b"it", 1)
    await pulled.unsubscribe()


async def test_a_pull_that_gets_nothing_says_why(bus: Bus) -> None:
    await bus.jetstream.add_stream(QUEUE)
    await consumer(bus, "c", "q.a")
    assert status_of(await following(await pulling(bus, "c", no_wait=True))) == "404"
    late = await following(await pulling(bus, "c", expires=int(0.2 * 1e9)))
    assert (status_of(late), late.headers and late.headers["Nats-Pending-Messages"]) == ("408", "9")
    assert status_of(await following(await pulling(bus, "nobody"))) == "503"
    waiting = await pulling(bus, "c", expires=3600 * 10**9)
    while not (await bus.jetstream.consumer_info("Q", "c")).num_waiting:
        pass  # a real server takes a pull in beside what it answers
    await bus.jetstream.delete_consumer("Q", "c")
    assert status_of(await following(waiting)) == "409"


async def test_a_pull_that_nobody_listens_to_any_more_takes_no_message(bus: Bus) -> None:
    await bus.jetstream.add_stream(QUEUE)
    await consumer(bus, "c", "q.a")
    gone = await pulling(bus, "c", expires=3600 * 10**9)
    await gone.unsubscribe()
    await barrier(bus.client)
    await bus.jetstream.publish("q.a", b"it")
    found = await following(await pulling(bus, "c", expires=3600 * 10**9))
    assert (found.data, found.metadata.num_delivered) == (b"it", 1)


async def test_a_durable_consumer_outlives_the_server_and_a_waiting_pull_does_not(
    bus: Bus, server: AnyServer
) -> None:
    await bus.jetstream.add_stream(QUEUE)
    await consumer(bus, "c", "q.a", ack_wait=0.5)
    await bus.jetstream.publish("q.a", b"held")
    pulled = await pulling(bus, "c", expires=3600 * 10**9)
    await following(pulled)
    back = asyncio.Event()
    bus.on_reconnect.append(back.set)
    server.kill()
    server.start()
    await asyncio.wait_for(back.wait(), HUNG_S)
    before = pulled.pending_msgs  # where this machine stood still it came again
    await bus.jetstream.publish("q.a", b"new")
    assert (await bus.jetstream.consumer_info("Q", "c")).num_waiting == 0
    renewed = await pulling(bus, "c", expires=3600 * 10**9)
    found = {(await following(renewed)).data for _ in range(2)}
    assert found == {b"held", b"new"}
    assert pulled.pending_msgs == before


async def test_an_ordered_consumer_begins_where_it_is_told_and_follows_also_after_a_loss(
    bus: Bus, other: Bus, server: AnyServer
) -> None:
    await bus.jetstream.add_stream(name="S", subjects=["s.*"])
    for number in range(4):
        await bus.jetstream.publish("s.a" if number % 2 else "s.b", bytes([number]))
    told: asyncio.Queue[Msg] = asyncio.Queue()
    config = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=2)
    subscription = await other.jetstream.subscribe(
        "s.a", stream="S", cb=told.put, ordered_consumer=True, idle_heartbeat=0.2, config=config
    )
    await bus.jetstream.publish("s.b", b"not asked for")
    await bus.jetstream.publish("s.a", b"later")
    async with asyncio.timeout(HUNG_S):
        found = [await told.get() for _ in range(3)]
    assert [(one.metadata.sequence.stream, one.data) for one in found] == [
        (2, b"\1"),
        (4, b"\3"),
        (6, b"later"),
    ]
    # a machine that stands still misses heartbeats, and has more than one consumer
    names = [one.metadata.consumer for one in found]
    counted = [names[:number].count(name) + 1 for number, name in enumerate(names)]
    assert [one.metadata.sequence.consumer for one in found] == counted

    async def is_kept() -> bool:
        with contextlib.suppress(NotFoundError):  # another takes its place
            name = (await subscription.consumer_info()).name
            await asyncio.sleep(1)
            return (await subscription.consumer_info()).name == name
        return False

    await becomes(is_kept, True)  # by heartbeats
    backs = [asyncio.Event(), asyncio.Event()]
    for back, one in zip(backs, (bus, other), strict=True):
        one.on_reconnect.append(back.set)
    server.kill()  # it forgets the consumer
    server.start()
    await asyncio.wait_for(asyncio.gather(*(back.wait() for back in backs)), HUNG_S)
    await bus.jetstream.publish("s.a", b"after a loss")
    async with asyncio.timeout(HUNG_S):
        assert (await told.get()).data == b"after a loss"
    await subscription.unsubscribe()


async def test_a_consumer_that_nobody_listens_to_ends_after_its_time(bus: Bus, other: Bus) -> None:
    await bus.jetstream.add_stream(name="S", subjects=["s"])
    await other.client.subscribe("heard")
    await barrier(other.client)
    for target in ("heard", "unheard"):
        config = ConsumerConfig(deliver_subject=target, inactive_threshold=0.4, ack_policy=AckPolicy.NONE)
        await bus.jetstream.add_consumer("S", config)

    async def targets() -> list[str | None]:
        return [one.config.deliver_subject for one in await bus.jetstream.consumers_info("S")]

    await becomes(targets, ["heard"])


async def test_a_consumer_of_the_last_of_each_subject_tells_no_earlier_ones(bus: Bus) -> None:
    await bus.jetstream.add_stream(name="S", subjects=["s.*"])
    for number, subject in enumerate(("s.a", "s.b", "s.a", "s.a")):
        await bus.jetstream.publish(subject, bytes([number]))
    heard = await bus.client.subscribe("heard")
    config = ConsumerConfig(
        deliver_subject="heard", deliver_policy=DeliverPolicy.LAST_PER_SUBJECT, ack_policy=AckPolicy.NONE
    )
    assert (await refusal(bus.jetstream.add_consumer("S", config)))[:2] == (400, 10094)
    config.filter_subject = "s.*"
    assert (await bus.jetstream.add_consumer("S", config)).num_pending in {0, 2}
    assert [(await following(heard)).data for _ in range(2)] == [b"\1", b"\3"]
    await bus.jetstream.publish("s.b", b"new")
    assert (await following(heard)).data == b"new"
