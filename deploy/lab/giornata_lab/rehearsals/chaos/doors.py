"""Clients of both doors that do what a client should: ask again, at any gateway, by the same key."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final

import aiohttp
import nats.errors

from giornata.client import Client, Edit
from giornata.wire.errors import DeadlineExceeded, GiornataError, Overloaded
from giornata.wire.jobs import JobState, Priority
from giornata_lab.rehearsals.chaos.edits import EditVariant, Outcome
from giornata_lab.rehearsals.chaos.look import Records
from giornata_tools.clients.http import events

HEARTBEAT_S: Final = 15.0
"""How often gateways comment on a quiet stream."""
ASK_S: Final = 20.0
"""How long one request is waited for: longer than a gateway looks for a router, shorter than patience."""
SILENCE_S: Final = 4 * HEARTBEAT_S
PAUSE_S: Final = 0.25
"""Before the same is asked again, elsewhere."""
MAX_PAUSE_S: Final = 2.0
"""The longest that a Retry-After is heeded: a run has to come to its end."""
AGAIN: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
FINAL_EVENTS: Final = ("image_edit.completed", "error")
_FAILURES: Final = (aiohttp.ClientError, TimeoutError)

Urls = Callable[[], list[str]]
"""Addresses of the gateways that live at the moment."""


class RestClient:
    """Edits as asynchronous jobs. Make it with :meth:`opened`."""

    def __init__(self, urls: Urls, session: aiohttp.ClientSession) -> None:
        self._urls = urls
        self._session = session
        self._turn = itertools.count()

    @classmethod
    @asynccontextmanager
    async def opened(cls, urls: Urls) -> AsyncIterator[RestClient]:
        """Connections are kept while inside."""
        async with aiohttp.ClientSession() as session:
            yield cls(urls, session)

    async def carry(self, variant: EditVariant, outcome: Outcome) -> None:
        """An edit from its submission to its end; its pictures are fetched by :meth:`fetch`."""
        await self._submit(variant, outcome)
        await self._follow(outcome)

    async def fetch(self, outcome: Outcome) -> None:
        """The finished pictures."""
        count = outcome.record.pictures if outcome.record else 0
        for index in range(count):
            status, data = await self._asked(outcome, f"/v1/jobs/{outcome.edit.job_id}/image?index={index}")
            if status == HTTPStatus.OK:
                outcome.pictures.append(data)
            else:
                outcome.flaws.append(f"picture {index} is answered by {status}: {data[:200]!r}")

    async def _submit(self, variant: EditVariant, outcome: Outcome) -> None:
        """Until the job is accepted: by 202, also of a submission that an earlier gateway has accepted silently."""
        while not outcome.accepted:
            outcome.tries += 1
            answer = await self._answer(
                outcome,
                "POST",
                "/v1/jobs",
                data=_form(variant),
                headers={"Idempotency-Key": outcome.edit.key},
            )
            if answer is None:
                continue
            status, data = answer
            if status == HTTPStatus.ACCEPTED:
                outcome.accepted = True
                outcome.job_ids.add(json.loads(data)["id"])
            else:
                outcome.unexpected.append(f"submission: {status} {data[:300]!r}")
                await asyncio.sleep(PAUSE_S)

    async def _follow(self, outcome: Outcome) -> None:
        """Read the job's events until its status is terminal."""
        path = f"/v1/jobs/{outcome.edit.job_id}"
        while True:
            told = await self._events(outcome, f"{path}/events")
            status, data = await self._asked(outcome, path)
            if status != HTTPStatus.OK:
                outcome.unexpected.append(f"status: {status} {data[:300]!r}")
            elif JobState(json.loads(data)["state"]).terminal:
                outcome.ends = told
                return

    async def _events(self, outcome: Outcome, path: str) -> list[str]:
        """Types of the final events that a stream told; empty where it broke."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ASK_S, sock_read=SILENCE_S)
        try:
            async with self._session.get(await self._url() + path, timeout=timeout) as answer:
                if answer.status != HTTPStatus.OK:
                    await self._pause(outcome, answer, await answer.read())
                    return []
                return [event.kind async for event in events(answer.content) if event.kind in FINAL_EVENTS]
        except _FAILURES as error:
            outcome.again[type(error).__name__] += 1
            await asyncio.sleep(PAUSE_S)
            return []

    async def _asked(self, outcome: Outcome, path: str) -> tuple[int, bytes]:
        while (answer := await self._answer(outcome, "GET", path)) is None:
            pass
        return answer

    async def _answer(
        self, outcome: Outcome, method: str, path: str, **options: Any
    ) -> tuple[int, bytes] | None:
        """Status and body; None where another try is due, after a pause."""
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        try:
            async with self._session.request(
                method, await self._url() + path, timeout=timeout, **options
            ) as answer:
                data = await answer.read()
                if answer.status not in AGAIN:
                    return answer.status, data
                await self._pause(outcome, answer, data)
        except _FAILURES as error:
            outcome.again[type(error).__name__] += 1
            await asyncio.sleep(PAUSE_S)
        return None

    async def _pause(self, outcome: Outcome, answer: aiohttp.ClientResponse, data: bytes) -> None:
        """After a refusal, as long as it asks for."""
        try:
            code = json.loads(data)["error"]["code"]
        except (ValueError, KeyError):
            code = str(answer.status)
        outcome.again[code] += 1
        await asyncio.sleep(min(float(answer.headers.get("Retry-After", PAUSE_S)), MAX_PAUSE_S))

    async def _url(self) -> str:
        """The gateways in turn; while none lives, wait."""
        while not (urls := self._urls()):  # noqa: ASYNC110 - a client is told nothing
            await asyncio.sleep(PAUSE_S)
        return urls[next(self._turn) % len(urls)]


def _form(variant: EditVariant) -> aiohttp.FormData:
    form = aiohttp.FormData()
    form.add_field("image", variant.image, filename="image.png", content_type="image/png")
    form.add_field("mask", variant.mask, filename="mask.png", content_type="image/png")
    for name, value in variant.fields.items():
        form.add_field(name, str(value))
    return form


ANSWER_S: Final = 20.0
"""How long acceptance, and then the answer, is waited for before the same is asked again."""


async def carry_over_nats(
    client: Client, records: Records, variant: EditVariant, outcome: Outcome, budget_s: float
) -> None:
    """An edit from its submission to its end, as the job's record tells it.

    Args:
        client: of the door.
        records: of all jobs.
        variant: what is asked for.
        outcome: is told what happens.
        budget_s: of the job.
    """
    while True:
        outcome.tries += 1
        pause_s = PAUSE_S
        try:
            edit = await _begun(client, variant, outcome, budget_s)
            async with asyncio.timeout(ANSWER_S):
                result = await edit
            outcome.pictures = [picture.data for picture in result.pictures]
        except Overloaded as error:
            outcome.again[error.code] += 1
            pause_s = min(error.retry_after_s or PAUSE_S, MAX_PAUSE_S)
        except (TimeoutError, DeadlineExceeded, nats.errors.Error) as error:
            outcome.again[type(error).__name__] += 1
        except GiornataError as error:
            if not await _ended(records, outcome):
                outcome.unexpected.append(f"nats: {error.code} {error}")
        if outcome.accepted and await _ended(records, outcome):
            return
        await asyncio.sleep(pause_s)


async def _begun(client: Client, variant: EditVariant, outcome: Outcome, budget_s: float) -> Edit:
    fields = dict(variant.fields)
    async with asyncio.timeout(ANSWER_S):
        edit = await client.edit(
            prompt=str(fields.pop("prompt")),
            image=variant.image,
            mask=variant.mask,
            timeout_s=budget_s,
            priority=Priority.BATCH,
            idempotency_key=outcome.edit.key,
            **fields,
        )
    outcome.accepted = True
    outcome.job_ids.add(edit.job_id)
    return edit


async def _ended(records: Records, outcome: Outcome) -> bool:
    """Return whether the record is terminal. What nobody has recorded was not accepted."""
    found = await records.of(outcome.edit.job_id)
    if found is None or not found.state.terminal:
        return False
    outcome.accepted = True
    outcome.record = found
    return True
