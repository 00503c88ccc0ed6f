"""The desk's tasks, where a tenant forgets a webhook at the worst moment."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

from giornata.wire.errors import WebhookNotFound
from giornata.wire.webhooks import WebhookRecord, WebhookState
from giornata_gateway.config import GatewayConfig
from giornata_gateway.webhooks.desk import WebhookService
from tests.patience import HUNG_S

KEY = "alice.job_1"
HOOK = WebhookRecord(job_id="job_1", tenant="alice", url="https://example.org/", created_s=0, body="{}")
DEAD = HOOK.model_copy(update={"state": WebhookState.DEAD})


def desk_of(records: Any = None) -> WebhookService:
    anything = cast("Any", records)
    return WebhookService(
        GatewayConfig(), anything, anything, anything, payload=lambda _: "", count=lambda _: None
    )


def test_webhooks_of_all_tenants_are_counted_by_state() -> None:
    desk = desk_of()
    desk._hooks = {"alice.job_1": HOOK, "bob.job_2": HOOK, "bob.job_3": DEAD}  # the bucket's news
    assert {state: desk.kept(state) for state in WebhookState} == {"waiting": 2, "dead": 1}
    desk._forgotten("bob.job_3")
    assert desk.kept(WebhookState.DEAD) == 0


async def test_a_webhook_that_is_forgotten_as_it_is_to_be_sent_ends_nothing_else() -> None:
    """Between the choice of a webhook and its task, the news that it was deleted may come."""
    asked = asyncio.Event()

    async def change(*_: object) -> WebhookRecord:
        asked.set()
        raise WebhookNotFound

    anything = cast("Any", SimpleNamespace(change=change))
    desk = desk_of(SimpleNamespace(change=change))
    desk._hooks[KEY] = HOOK  # as the bucket tells of it
    sending = asyncio.ensure_future(desk._send_all(anything))  # what a gateway runs
    asyncio.get_running_loop().call_soon(desk._forgotten, KEY)  # after the choice, before its task
    async with asyncio.timeout(HUNG_S):
        await asyncio.wait(
            {sending, asyncio.ensure_future(asked.wait())}, return_when=asyncio.FIRST_COMPLETED
        )
    assert not sending.done(), "the gateway ends with it"
    sending.cancel()
    with suppress(asyncio.CancelledError):
        await sending
