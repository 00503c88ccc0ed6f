"""The edits of a run, few different ones asked for again and again by clients that ask again at any gateway."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from itertools import zip_longest
from typing import Any, Final

import aiohttp
import nats.errors
import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from giornata.client import Client, Edit
from giornata.wire.errors import DeadlineExceeded, GiornataError, Overloaded
from giornata.wire.jobs import JobState, Priority
from giornata.wire.requests import Reuse
from giornata_gateway.jobs.preparation import job_id_of
from giornata_lab.loadgen.driver import generated, mask, mask_file
from giornata_lab.loadgen.workload import MaskShape
from giornata_lab.rehearsals.chaos.look import OutcomeRecord, Records
from giornata_tools.clients.http import events

Pixels = NDArray[np.uint8]

WIDTH: Final = 128
HEIGHT: Final = 96
VARIANTS: Final = 12
TENANT: Final = "default"
"""Tenant of requests without an API key."""
NATS_SHARE: Final = 0.25
"""Share of edits that come over NATS."""
TOLERANCE: Final = 2
"""How far, of 255, a picture that was computed in full may be from the same one of a quiet time: other rows of its
batch change the order of sums."""


class Door(StrEnum):
    """How an edit comes."""

    REST = "rest"
    NATS = "nats"


@dataclass(frozen=True)
class EditVariant:
    """A picture, a mask, and what is asked for."""

    image: bytes
    mask: bytes
    original: Pixels
    """(height, width, 3)."""
    repainted: NDArray[np.bool_]
    """(height, width)."""
    fields: dict[str, Any]
    """Fields of the request, which asks for `n` pictures."""

    @property
    def pictures(self) -> int:
        """Return how many are asked for."""
        return int(self.fields["n"])

    @property
    def reproducible(self) -> bool:
        """Return whether the same pixels come whatever was computed before."""
        return Reuse(self.fields["reuse"]) is Reuse.OFF


@dataclass(frozen=True)
class ChaosEdit:
    """One of the run's edits."""

    number: int
    key: str
    """Its idempotency key."""
    door: Door
    variant: int

    @property
    def job_id(self) -> str:
        """Id of the job that its key leads to."""
        return job_id_of(TENANT, self.key)


def variants() -> tuple[EditVariant, ...]:
    """The different edits: steps, masks and numbers of pictures vary, every second one may reuse."""
    made = []
    for i in range(VARIANTS):
        image = generated(WIDTH, HEIGHT, i // 2)
        marked = mask(WIDTH, HEIGHT, 0.05 + 0.04 * i, MaskShape.SQUARE, i)
        fields: dict[str, Any] = {
            "prompt": f"a red hat {i % 4}",
            "num_inference_steps": 4 + 3 * (i % 6),
            "seed": i,
            "n": 2 if i % 6 == 5 else 1,
            "mask_blur": 0,
            "reuse": Reuse.OFF if i % 2 else Reuse.AUTO,
            "output_format": "png",
        }
        made.append(
            EditVariant(image, mask_file(marked), np.asarray(Image.open(io.BytesIO(image))), marked, fields)
        )
    return tuple(made)


def edits(seed: int, n: int) -> list[ChaosEdit]:
    """`n` edits with keys of their own."""
    chance = random.Random(seed)  # noqa: S311 - a workload, no secret
    return [
        ChaosEdit(
            number=i,
            key=f"chaos-{seed}-{i}",
            door=Door.NATS if chance.random() < NATS_SHARE else Door.REST,
            variant=chance.randrange(VARIANTS),
        )
        for i in range(n)
    ]


def flaw(variant: EditVariant, picture: bytes, reference: Pixels | None) -> str | None:
    """Return what is wrong with a picture; None if nothing is.

    Args:
        variant: what was asked for.
        picture: a file.
        reference: the same picture, painted in a quiet time, where it is to be the same.
    """
    try:
        painted = pixels(picture)
    except (UnidentifiedImageError, OSError) as error:
        return f"it is no picture: {error}"
    if painted.shape != variant.original.shape:
        return f"its shape is {painted.shape} and not {variant.original.shape}"
    if not np.array_equal(painted[~variant.repainted], variant.original[~variant.repainted]):
        return "pixels outside the mask changed"
    if reference is not None:
        off = int(np.abs(painted.astype(np.int16) - reference).max())
        if off > TOLERANCE:
            return f"it differs by {off} from the one that was painted in a quiet time"
    return None


def pixels(picture: bytes) -> Pixels:
    """A picture file as (height, width, 3) uint8."""
    with Image.open(io.BytesIO(picture)) as opened:
        return np.asarray(opened)


@dataclass
class Outcome:
    """Grows while the client works."""

    edit: ChaosEdit
    accepted: bool = False
    tries: int = 0
    """Submissions, the accepted one included."""
    again: Counter[str] = field(default_factory=Counter)
    """Why something was asked for again, by code or kind of error."""
    unexpected: list[str] = field(default_factory=list)
    """Answers that no fault excuses."""
    job_ids: set[str] = field(default_factory=set)
    """That the doors have told."""
    record: OutcomeRecord | None = None
    """When the client knew of the end."""
    pictures: list[bytes] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)
    """What is wrong with its pictures."""
    ends: list[str] = field(default_factory=list)
    """Final events of the stream that told the end, by type; only REST."""
    latency_s: float = 0.0
    """From the first submission until the pictures were there."""
    gave_up: str | None = None
    """What its client was still waiting for at its limit."""

    def summary(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "number": self.edit.number,
            "job": self.edit.job_id,
            "door": self.edit.door,
            "state": self.record.state if self.record else None,
            "code": self.record.code if self.record else None,
            "attempt": self.record.attempt if self.record else None,
            "tries": self.tries,
            "again": dict(self.again),
            "latency_s": round(self.latency_s, 3),
        }


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


AT_ONCE: Final = 8
"""Edits that are in progress at a time, at most."""
BUDGET_S: Final = 300.0
"""Budget of a job, from its acceptance on: longer than any outage here."""
LIMIT_S: Final = BUDGET_S + 60.0
"""After this its client gives an edit up, which no fault excuses."""


class Pace:
    """How many edits have been begun and ended, and how many may be begun: so that there is load for every fault."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self._allowed = 0
        self._news = asyncio.Condition()

    @property
    def in_progress(self) -> int:
        """Edits."""
        return self.begun - self.ended

    async def allow(self, edits: int) -> None:
        """So many may be begun in all."""
        async with self._news:
            self._allowed = max(self._allowed, edits)
            self._news.notify_all()

    async def begin(self) -> None:
        """Wait until one more may be begun."""
        async with self._news:
            await self._news.wait_for(lambda: self.begun < self._allowed)
            self.begun += 1
            self._news.notify_all()

    async def end(self) -> None:
        """One has ended."""
        async with self._news:
            self.ended += 1
            self._news.notify_all()

    async def reached(self, edits: int, in_progress: int) -> None:
        """Wait until so many have been begun, and of all no more than `in_progress` have not ended."""
        async with self._news:
            await self._news.wait_for(lambda: self.begun >= edits and self.in_progress <= in_progress)


class Load:
    """Carries edits through both doors.

    Args:
        variants: what is asked for.
        rest: client of the REST door.
        nats: client of the NATS door.
        records: of all jobs.
    """

    def __init__(
        self, variants: Sequence[EditVariant], rest: RestClient, nats: Client, records: Records
    ) -> None:
        self._variants = variants
        self._rest = rest
        self._nats = nats
        self._records = records
        self._references: dict[int, list[Pixels]] = {}
        """By variant, of those that are to come out alike."""
        self.pace = Pace()
        self.outcomes: list[Outcome] = []

    def refer(self, outcome: Outcome, painted: list[Pixels]) -> None:
        """From now on pictures of a reproducible variant are to be like these."""
        if self._variants[outcome.edit.variant].reproducible:
            self._references[outcome.edit.variant] = painted

    async def carry_out(self, edits: Sequence[ChaosEdit]) -> None:
        """Every edit to its end, :data:`AT_ONCE` at a time, as :attr:`pace` allows."""
        waiting = iter(edits)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self._work(waiting))

    async def _work(self, waiting: Iterator[ChaosEdit]) -> None:
        for edit in waiting:
            await self.pace.begin()
            self.outcomes.append(await self.carry(edit))
            await self.pace.end()

    async def carry(self, edit: ChaosEdit) -> Outcome:
        """One edit to its end, or to the end of its client's patience."""
        outcome = Outcome(edit)
        variant = self._variants[edit.variant]
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._carry(variant, outcome)
        except TimeoutError:
            outcome.gave_up = "its end" if outcome.accepted else "its acceptance"
        outcome.latency_s = time.monotonic() - began_s
        references = self._references.get(edit.variant, [])
        for picture, reference in zip_longest(outcome.pictures, references[: len(outcome.pictures)]):
            wrong = await asyncio.to_thread(flaw, variant, picture, reference)
            outcome.flaws += [wrong] if wrong else []
        if outcome.record and outcome.record.pictures != len(outcome.pictures):
            outcome.flaws.append(f"{len(outcome.pictures)} pictures of {outcome.record.pictures} were got")
        return outcome

    async def _carry(self, variant: EditVariant, outcome: Outcome) -> None:
        if outcome.edit.door is Door.NATS:
            await carry_over_nats(self._nats, self._records, variant, outcome, BUDGET_S)
        else:
            await self._rest.carry(variant, outcome)
            outcome.record = await self._records.of(outcome.edit.job_id)
        if not outcome.pictures:  # over NATS, where the answer was lost and the record told the end
            await self._rest.fetch(outcome)
