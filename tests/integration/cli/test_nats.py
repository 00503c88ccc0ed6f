"""The command line's NATS door: pictures, refusals, and an edit that is given up before and after it is accepted."""

from __future__ import annotations

import asyncio

import pytest

from giornata.bus import bus
from giornata.bus.connection import barrier
from giornata.wire import subjects
from giornata_tools.clients import nats
from giornata_tools.clients.edits import EditCall, EditProgress, EditStopped, Preview, RequestRefused
from giornata_tools.clients.nats import open_nats
from tests.integration.gateway_fakes import Stage
from tests.integration.nats_server import NatsServer
from tests.patience import HUNG_S

ORDER = EditCall(b"picture", b"mask", {"prompt": "a hat", "n": 2, "seed": 5})


def unheard(told: EditProgress | Preview) -> None:
    """Nobody listens."""


async def test_an_edit_tells_its_states_and_brings_its_pictures(stage: Stage, nats_url: str) -> None:
    heard: list[EditProgress | Preview] = []
    async with open_nats(nats_url, None, None, "default", 20) as door:
        outcome = await door.edit(ORDER, heard.append)
    assert [picture.seed for picture in outcome.pictures] == [5, 6]
    assert outcome.job_id == (await stage.record()).job.job_id
    assert isinstance(heard[0], EditProgress)
    assert heard[0].state == "queued"


async def test_a_refusal_keeps_its_code(stage: Stage, nats_url: str) -> None:
    order = EditCall(b"picture", None, {"prompt": "a hat", "model": "unheard-of"})
    async with open_nats(nats_url, None, None, "default", 20) as door:
        with pytest.raises(RequestRefused) as raised:
            await door.edit(order, unheard)
    assert raised.value.body.code == "model_not_found"


async def test_an_edit_that_is_given_up_while_it_runs(stage: Stage, nats_url: str) -> None:
    stage.router.hold = asyncio.Event()
    heard = asyncio.Event()
    async with open_nats(nats_url, None, None, "default", 20) as door:
        editing = asyncio.ensure_future(door.edit(ORDER, lambda told: heard.set()))
        await heard.wait()
        editing.cancel()
        with pytest.raises(EditStopped, match="Cancelled job "):
            await editing
    assert (await stage.record()).cancel


async def test_an_edit_that_is_given_up_as_soon_as_it_is_sent(stage: Stage, nats_url: str) -> None:
    stage.router.hold = asyncio.Event()
    async with bus.connect(nats_url, "observer") as observer:
        sent = await observer.client.subscribe(subjects.EDIT)
        await barrier(observer.client)
        async with open_nats(nats_url, None, None, "default", 20) as door:
            editing = asyncio.ensure_future(door.edit(ORDER, unheard))
            await sent.next_msg(HUNG_S)
            editing.cancel()
            with pytest.raises(EditStopped, match="Cancelled job "):
                await editing
    assert (await stage.record()).cancel


async def test_a_gateway_that_never_accepts_is_not_waited_for_long(
    nats_account: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats, "CANCEL_S", 0.1)
    async with bus.connect(nats_account, "silent") as silent:
        sent = await silent.client.subscribe(subjects.EDIT)
        await barrier(silent.client)
        async with open_nats(nats_account, None, None, "default", 20) as door:
            editing = asyncio.ensure_future(door.edit(ORDER, unheard))
            await sent.next_msg(HUNG_S)
            editing.cancel()
            with pytest.raises(EditStopped, match="has not confirmed that the edit is cancelled"):
                await editing


@pytest.mark.usefixtures("impatient")
async def test_no_gateway_and_no_server(private_nats: NatsServer) -> None:
    async with open_nats(private_nats.url, None, None, "default", 20) as door:
        with pytest.raises(RequestRefused) as raised:
            await door.edit(ORDER, unheard)
    assert raised.value.body.code == "service_unavailable"
    private_nats.kill()
    with pytest.raises(RequestRefused):
        async with asyncio.timeout(HUNG_S), open_nats(private_nats.url, None, None, "default", 20):
            raise AssertionError("there is no server")
