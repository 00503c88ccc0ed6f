"""A real server with the users' rights: what each may do, what each may not, and how a refusal is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import giornata.client
from giornata.bus import bus as buses
from giornata.bus import streams
from giornata.bus.bus import Bus, Endpoint
from giornata.bus.connection import RefusedError, barrier
from giornata.deadlines import Deadline
from giornata.nats_users import password_file
from giornata.probe import is_ready
from giornata.records import TemplateRecords, WebhookRecords
from giornata.wire import codec, subjects
from giornata.wire.errors import NotPermitted, ServiceUnavailable
from giornata.wire.jobs import JobState
from giornata.wire.messages import CancelMessage, CancelRows, DoneEvent, EventKind, JobAck, SubmitRequest
from giornata.wire.subjects import RECORDS, NatsRole
from giornata.wire.templates import WebhookRecord
from giornata.wire.workers import ServiceName, ServiceState
from giornata_tools.cli import doctor_checks as checks
from giornata_tools.cli.doctor_checks import CheckStatus
from tests.fakes.fleet import FakePrepost
from tests.integration.nats_server import NatsServer, refused
from tests.integration.router.bench import make_job
from tests.patience import HUNG_MS, HUNG_S

Guarded = tuple[NatsServer, Path]
Connect = Callable[[NatsRole], Any]

GATEWAY, ROUTER, DENOISER, PREPOST, CONTROLNET, LORA_STORE, APPLICATION, PROFILER, OBSERVER, OPERATOR = (
    NatsRole
)
KEEPERS = {GATEWAY, ROUTER, DENOISER}

PUBLISHERS: dict[str, set[NatsRole]] = {
    subjects.EDIT: {APPLICATION},
    subjects.EDIT_PROBE: {PROFILER},
    subjects.MASK: {APPLICATION},
    subjects.EDIT_CANCEL: {APPLICATION},
    subjects.SUBMIT: {GATEWAY},
    subjects.TEMPLATE: {GATEWAY},
    subjects.TEMPLATE_REMOVED: {GATEWAY},
    subjects.cancel("j"): {GATEWAY},
    subjects.jobs("interactive"): {ROUTER},
    subjects.prepost("inspect", "m"): set(),
    subjects.prepost_at("i", "inspect"): {ROUTER},
    subjects.worker("w", "run"): {ROUTER},
    subjects.worker("w", "cancel"): {ROUTER},
    subjects.worker("w", "record"): {ROUTER},
    subjects.worker("w", "prefetch"): {ROUTER},
    subjects.controlnet("i", "open"): {DENOISER},
    subjects.controlnet("i", "close"): {DENOISER},
    "giornata.controlnet.i.step": set(),
    subjects.lora("begin"): {GATEWAY, PREPOST},
    subjects.lora("finish"): {GATEWAY},
    subjects.lora("remove"): {GATEWAY},
    subjects.lora("keep"): {PREPOST},
    subjects.lora("read"): {PREPOST, DENOISER},
    subjects.lora("profiled"): {PROFILER},
    subjects.prepost("adapter", "m"): {LORA_STORE},
    subjects.prepost("mask", "m"): {GATEWAY},
    subjects.lora("pin"): {GATEWAY},
    subjects.bring("h"): {DENOISER},
    subjects.tier("i"): {ROUTER},
    "$KV.giornata-loras.t.id": {LORA_STORE},
    "$KV.giornata-wanted.h.main": {ROUTER},
    "$JS.API.CONSUMER.CREATE.KV_giornata-wanted": {LORA_STORE},
    "$JS.API.STREAM.UPDATE.KV_giornata-wanted": {ROUTER},
    "$JS.API.STREAM.DELETE.KV_giornata-wanted": set(),
    "$JS.API.STREAM.PURGE.KV_giornata-wanted": set(),
    "$JS.API.STREAM.MSG.GET.KV_giornata-loras": {GATEWAY, LORA_STORE, PROFILER, ROUTER},
    "$JS.API.CONSUMER.CREATE.KV_giornata-loras": {GATEWAY, LORA_STORE, PROFILER, ROUTER},
    subjects.event("g", "j", EventKind.STATE): {ROUTER},
    subjects.event("g", "j", EventKind.DONE): {ROUTER},
    subjects.event("g", "j", EventKind.STEP): {DENOISER},
    subjects.event("g", "j", EventKind.PREVIEW): {DENOISER},
    subjects.event("g", "j", EventKind.DENOISED): {DENOISER},
    **{subjects.telemetry(service, "i"): {NatsRole(service)} for service in ServiceName},
    "$KV.giornata-jobs.j": KEEPERS,
    "$KV.giornata-templates.t.id": KEEPERS,
    "$KV.giornata-leases.router": {ROUTER},
    "$KV.giornata-quarantine.j": {ROUTER, OPERATOR},
    "$JS.API.STREAM.MSG.GET.KV_giornata-quarantine": {OPERATOR},
    "$JS.API.STREAM.MSG.GET.KV_giornata-jobs": KEEPERS,
    "$JS.API.STREAM.CREATE.KV_giornata-jobs": {ROUTER, DENOISER},
    "$JS.API.STREAM.CREATE.KV_giornata-templates": KEEPERS | {LORA_STORE},
    "$JS.API.STREAM.NAMES": set(),
    f"{subjects.SUBMIT}.b": set(),
    "$KV.giornata-jobs-b.j": set(),
    "$JS.API.STREAM.CREATE.GIORNATA_JOBS": {ROUTER},
    "$JS.API.STREAM.UPDATE.GIORNATA_EVENTS": {ROUTER},
    "$JS.API.STREAM.DELETE.GIORNATA_JOBS": set(),
    "$JS.API.STREAM.PURGE.KV_giornata-jobs": set(),
    "$JS.API.CONSUMER.MSG.NEXT.GIORNATA_JOBS.router-batch-7": {ROUTER},
    "$JS.API.CONSUMER.DELETE.GIORNATA_JOBS.router-batch-7": {ROUTER},
    "$JS.API.CONSUMER.DELETE.GIORNATA_EVENTS.other": set(),
    "$JS.API.CONSUMER.CREATE.GIORNATA_EVENTS": {GATEWAY},
    "$JS.API.CONSUMER.CREATE.KV_giornata-jobs": set(),
    "$SRV.PING": {OBSERVER},
    "_INBOX.a.b": {GATEWAY},
    "_INBOX_gateway.a.b": {ROUTER, PREPOST, LORA_STORE},
    "_INBOX_profiler.a.b": {GATEWAY, LORA_STORE},
    "_INBOX_lora-store.a.b": {PREPOST},
    "_INBOX_router.a.b": {PREPOST, DENOISER, LORA_STORE},
    "_INBOX_denoiser.a.b": {CONTROLNET, LORA_STORE},
    "anything": set(),
}
SUBSCRIBERS: dict[str, set[NatsRole]] = {
    subjects.EDIT: {GATEWAY},
    subjects.EDIT_PROBE: {GATEWAY},
    subjects.SUBMIT: {ROUTER},
    subjects.ALL_EVENTS: set(),
    subjects.events_of_gateway("g", EventKind.DONE): {GATEWAY},
    subjects.events_of_job("j"): set(),
    subjects.events_of_kind(EventKind.DENOISED): {ROUTER},
    subjects.ALL_CANCELS: {ROUTER, DENOISER},
    subjects.ALL_JOBS: set(),
    subjects.ALL_TELEMETRY: {ROUTER, OBSERVER},
    subjects.SUMMARY: {GATEWAY, PROFILER},
    f"{subjects.SUMMARY}.*": set(),
    f"{subjects.SUBMIT}.*": set(),
    subjects.FLEET: {ROUTER},
    subjects.steps_of_job("j"): {GATEWAY},
    subjects.worker("w", "run"): {DENOISER},
    subjects.prepost("mask", "m"): {PREPOST},
    subjects.prepost_at("i", "encode"): {PREPOST},
    subjects.controlnet("i", "open"): {CONTROLNET},
    subjects.telemetry_of(ServiceName.CONTROLNET): {ROUTER, DENOISER, CONTROLNET, OBSERVER},
    subjects.lora("piece"): {LORA_STORE},
    "$SRV.PING": {GATEWAY, PREPOST, CONTROLNET, LORA_STORE},
    "$KV.giornata-jobs.>": set(),
    "_INBOX.>": {APPLICATION},
    "_INBOX_router.>": {ROUTER},
    ">": set(),
}


@pytest.fixture
async def connect(guarded_nats: Guarded) -> AsyncIterator[Connect]:
    """Connects as a user with its own password."""
    server, users = guarded_nats
    async with AsyncExitStack() as stack:

        def connected(user: NatsRole) -> Any:
            return stack.enter_async_context(
                buses.connect(server.url, f"test-{user}", user=user, password_file=password_file(users, user))
            )

        yield connected


@pytest.mark.parametrize("user", list(NatsRole))
async def test_each_may_do_what_its_service_does_and_nothing_else(connect: Connect, user: NatsRole) -> None:
    bus: Bus = await connect(user)
    with capture_logs() as logs:
        for subject in PUBLISHERS:
            await bus.client.publish(subject, b"")
        for subject in SUBSCRIBERS:
            await bus.client.subscribe(subject)
        await barrier(bus.client)
    told = {(log["act"], log["subject"]) for log in logs if log["event"] == "nats_refused"}
    expected = {("publish", s.lower()) for s, users in PUBLISHERS.items() if user not in users}
    expected |= {("subscription", s.lower()) for s, users in SUBSCRIBERS.items() if user not in users}
    assert told == expected


async def test_a_refused_request_fails_at_once_and_is_logged(connect: Connect) -> None:
    prepost: Bus = await connect(PREPOST)
    request = SubmitRequest(job=make_job(), remaining_ms=2 * HUNG_MS)
    with capture_logs() as logs, pytest.raises(NotPermitted, match=r"giornata\.router\.submit"):
        async with asyncio.timeout(HUNG_S):  # not by its own time limit
            await prepost.call(subjects.SUBMIT, request, JobAck, Deadline.after_ms(2 * HUNG_MS))
    assert {log["event"] for log in logs} == {"nats_refused"}
    with pytest.raises(RefusedError):
        await streams.ensure(prepost.jetstream, replicas=1, events_ttl_s=60)


async def test_a_refused_subscription_ends_a_service_at_its_start(connect: Connect) -> None:
    prepost: Bus = await connect(PREPOST)

    async def answer(_request: CancelRows) -> JobAck:
        raise AssertionError("must not be called")

    endpoint = Endpoint(subjects.SUBMIT, CancelRows, answer)
    for entered in (prepost.answer(endpoint), prepost.serve("prepost", endpoint, instance="i")):
        with pytest.RaisesGroup(NotPermitted):  # the task group's, which runtime.start takes apart
            await _enter(entered)
    with pytest.raises(NotPermitted):
        await _enter(prepost.listen(subjects.ALL_EVENTS, DoneEvent, lambda _: None))
    await _enter(prepost.listen(subjects.telemetry_of(ServiceName.PREPOST), ServiceState, lambda _: None))


async def _enter(entered: AbstractAsyncContextManager[object]) -> None:
    async with entered:
        pass


async def _ensured(connect: Connect) -> None:
    router: Bus = await connect(ROUTER)
    await streams.ensure(router.jetstream, replicas=1, events_ttl_s=60)


async def test_an_answer_that_would_write_a_record_is_not_given(
    guarded_nats: Guarded, connect: Connect
) -> None:
    """The asker names where the answer goes: were it a subject of JetStream, the gateway would write for it."""
    gateway: Bus = await connect(GATEWAY)
    await _ensured(connect)
    records = await gateway.jetstream.key_value(RECORDS)
    revision = await records.put("job_x", b"kept")
    heard = asyncio.Event()

    async def cancel(message: CancelMessage) -> JobAck:
        heard.set()
        return JobAck(job_id=message.job_id)

    server, _ = guarded_nats
    async with (
        gateway.serve("gateway", Endpoint(subjects.EDIT_CANCEL, CancelMessage, cancel), instance="i"),
        buses.connect(server.url, "application") as application,
    ):
        message = codec.encode(CancelMessage(job_id="job_x"))
        with capture_logs() as logs:
            await application.client.publish(subjects.EDIT_CANCEL, message, reply="$KV.giornata-jobs.job_x")
            answer = await application.call(
                subjects.EDIT_CANCEL, CancelMessage(job_id="j"), JobAck, Deadline.after_ms(HUNG_MS)
            )
    assert answer.job_id == "j"
    assert "answer_refused" in {log["event"] for log in logs}
    entry = await records.get("job_x")
    assert (entry.revision, entry.value) == (revision, b"kept")


async def test_templates_are_watched_and_events_replayed_by_the_gateway(connect: Connect) -> None:
    gateway: Bus = await connect(GATEWAY)
    await _ensured(connect)
    with capture_logs() as logs:
        assert await (await TemplateRecords.open(gateway.jetstream)).all_of("default") == []
        subscription = await gateway.jetstream.subscribe(
            subjects.events_of_job("j"), stream=subjects.EVENTS, ordered_consumer=True, idle_heartbeat=1
        )
        router: Bus = await connect(ROUTER)
        event = DoneEvent(job_id="j", state=JobState.COMPLETED, error=None, stage_ms={})  # type: ignore[arg-type]  # pydantic makes it
        for _ in range(2000):  # flow control sets in
            await router.publish(subjects.event("g", "j", EventKind.DONE), event)
        for _ in range(2000):
            await subscription.next_msg(timeout=HUNG_S)
        await subscription.unsubscribe()
    assert [log for log in logs if log["event"] == "nats_refused"] == []


async def test_webhooks_are_followed_changed_and_forgotten_by_the_gateway(connect: Connect) -> None:
    hook = WebhookRecord(job_id="job_1", tenant="default", url="https://example.org/", created_s=1)
    gateway: Bus = await connect(GATEWAY)
    await _ensured(connect)
    with capture_logs() as logs:
        records = await WebhookRecords.open(gateway.jetstream)
        assert await records.create(hook)
        async with asyncio.timeout(HUNG_S), aclosing(records.bucket.changes(">")) as changes:
            assert (await anext(changes))[1] == hook
            sent = await records.change(
                "default", "job_1", lambda now: now.model_copy(update={"attempts": 1})
            )
            assert await records.all_of("default") == [sent]
            await records.delete(sent)
            assert [(await anext(changes))[1] for _ in range(2)] == [sent, None]
        done = subjects.events_of_kind(EventKind.DONE)
        async with gateway.listen(done, DoneEvent, lambda _: None):
            await barrier(gateway.client)  # of every gateway's jobs
    assert [log for log in logs if log["event"] == "nats_refused"] == []


async def test_who_brings_no_password_is_an_application(guarded_nats: Guarded) -> None:
    server, users = guarded_nats
    application = password_file(users, APPLICATION).read_text().strip()
    for url in (server.url, server.url.replace("://", f"://application:{application}@")):
        async with giornata.client.connect(url) as client:
            with pytest.raises(
                ServiceUnavailable, match=r"giornata\.edit\.cancel"
            ):  # asked, and nobody there
                await client.cancel("j")
        found = await checks.nats_server(url)
        assert (found.verdict, "application" in found.sentence) == (CheckStatus.OK, True), found


async def test_a_wrong_password_is_told(guarded_nats: Guarded, tmp_path: Path) -> None:
    server, _ = guarded_nats
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    for path, told in ((wrong, "does not let us in"), (tmp_path / "missing", "cannot be read")):
        assert told in await refused(server.url, user=GATEWAY, password_file=path)


async def test_an_observer_and_the_health_check_find_a_service(
    guarded_nats: Guarded, connect: Connect
) -> None:
    server, users = guarded_nats
    prepost, observer = [await connect(user) for user in (PREPOST, OBSERVER)]
    async with FakePrepost(prepost).run():
        assert await is_ready(server.url, ServiceName.PREPOST, 10, password_file(users, PREPOST))
        answer = await observer.client.request("$SRV.PING.giornata-prepost", b"", timeout=HUNG_S)
    assert b'"giornata-prepost"' in answer.data
