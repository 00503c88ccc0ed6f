"""Telemetry: regular, not silenced by a mistake, and with a last word."""

from __future__ import annotations

import asyncio

import pytest
from click.testing import CliRunner

from giornata import probe
from giornata.bus import bus as buses
from giornata.bus.bus import RETOLD_S, TelemetryDeduplicator, telemetry
from giornata.wire import subjects
from giornata.wire.workers import ServiceName, ServiceState, Tier, WorkerState
from tests.patience import HUNG_S
from tests.unit.test_fleet import state


@pytest.mark.world
async def test_it_goes_on_after_a_failure_and_says_that_it_leaves(nats_account: str) -> None:
    heard: asyncio.Queue[ServiceState] = asyncio.Queue()
    reports = 0

    def report() -> ServiceState:
        nonlocal reports
        reports += 1
        if reports == 2:
            raise RuntimeError("a mistake in one report")
        return state(ServiceName.LORA_STORE, "telemetry-test")

    subject = subjects.telemetry(ServiceName.LORA_STORE, "telemetry-test")
    async with (
        buses.connect(nats_account, "test") as bus,
        bus.listen(subject, ServiceState, heard.put_nowait),
        asyncio.timeout(HUNG_S),
    ):
        async with telemetry(bus, 20, report):
            told = [await heard.get() for _ in range(3)]
        assert all(each.ready and not each.draining for each in told)
        last = told[-1]
        while not last.draining:
            last = await heard.get()
        assert not last.ready
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "telemetry"]


@pytest.mark.world
async def test_a_failure_at_the_end_does_not_hide_why_it_ended(nats_account: str) -> None:
    def report() -> ServiceState:
        raise RuntimeError("a mistake in every report")

    async with buses.connect(nats_account, "test") as bus:
        with pytest.raises(ValueError, match="the reason"):
            async with telemetry(bus, 20, report):
                raise ValueError("the reason")


@pytest.mark.world
@pytest.mark.parametrize(
    ("changes", "ready"),
    [
        ({}, True),
        ({"active": False}, True),
        ({"ready": False}, False),
        ({"draining": True}, False),
        ({"host": "elsewhere"}, False),
    ],
    ids=["ready", "standing by", "loading", "draining", "another host"],
)
async def test_the_probe_sees_what_the_fleet_sees(
    nats_account: str, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], ready: bool
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    told = state(ServiceName.CONTROLNET, "probed", host="here").model_copy(update=changes)
    async with buses.connect(nats_account, "test") as bus, telemetry(bus, 20, lambda: told):
        assert await probe.is_ready(nats_account, ServiceName.CONTROLNET, 2) is ready


def test_the_probe_says_in_a_sentence_what_it_lacks(nats_url: str) -> None:
    for url, sentence in (
        (nats_url, "No lora-store on this host"),
        ("nats://127.0.0.1:1", "GIORNATA_NATS_URL"),
    ):
        for timeout_s in ("0.5", "30"):  # a server that stands still for so long is as one that is not there
            arguments = ["lora-store", "--timeout", timeout_s]
            result = CliRunner().invoke(probe.main, arguments, env={"GIORNATA_NATS_URL": url})
            assert result.exit_code == 1
            if sentence in result.stderr:
                break
        assert sentence in result.stderr


def busy(*ids: str) -> ServiceState:
    told = WorkerState(capacity_rows=8, capacity_tokens=1, resident={Tier.MEMORY: ids})
    return state(ServiceName.DENOISER, "d1", worker=told)


def told_by(
    sparing: TelemetryDeduplicator, worker: ServiceState, now: float
) -> dict[Tier, tuple[str, ...]] | None:
    spared = sparing.spared(worker, now).worker
    assert spared is not None
    return spared.resident


def test_recordings_are_told_when_they_change_and_now_and_then() -> None:
    sparing = TelemetryDeduplicator()
    assert told_by(sparing, busy("a", "b"), 0.0) == {Tier.MEMORY: ("a", "b")}
    assert told_by(sparing, busy("b", "a"), 0.25) is None, "the order of their use is no news"
    assert told_by(sparing, busy("b"), 0.5) == {Tier.MEMORY: ("b",)}
    assert told_by(sparing, busy("b"), RETOLD_S) is None, "told half a second later than at the start"
    assert told_by(sparing, busy("b"), 0.5 + RETOLD_S) == {Tier.MEMORY: ("b",)}
    assert sparing.spared(state(ServiceName.PREPOST, "p1"), 9.0) == state(ServiceName.PREPOST, "p1")
