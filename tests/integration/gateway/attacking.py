"""Alice, who has something of each kind, and Mallory, who has learnt of all of it, before one gateway."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from giornata import api_keys
from giornata.api_keys import KeysFile, NatsUser
from giornata.bus import bus
from giornata.bus.connection import barrier
from giornata.records import LoraRecords, WebhookRecords
from giornata.wire import codec
from giornata.wire.jobs import Job
from giornata.wire.loras import LoraRecord, LoraState
from giornata.wire.messages import EditMessage
from giornata.wire.requests import EditParameters
from giornata.wire.subjects import inbox
from giornata.wire.templates import WebhookRecord, WebhookState
from giornata_gateway.jobs.preparation import HEADER
from tests.fakes.key_files import CREATED
from tests.integration.gateway.test_templates import register
from tests.integration.gateway_fakes import Answer, Stage, open_stage
from tests.patience import HUNG_S

ALICES, MALLORYS = "sk-alice-1234567", "sk-mallory-12345"
WORDS = "the merger with Umbrella"
IDEMPOTENCY, ANOTHER = "order-4711", "order-4712"
"""As applications that do not heed the advice choose them; Mallory guesses them."""
RECEIVER = "hooks-of-alice-and-nobody-else"
BCRYPT = "$2b$10$" + "a" * 53


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@dataclass
class Victim:
    """All that Alice has, and that Mallory has learnt of."""

    tenant: str
    job: Job
    """Finished, under an idempotency key."""
    running: Job
    """Under another key."""
    template_id: str
    lora_id: str
    inbox: str


@dataclass
class Scene:
    """Alice and Mallory before one gateway."""

    stage: Stage
    alice: Victim
    mallory: str
    """Her tenant."""
    mallorys_inbox: str

    async def told(self, method: str, path: str, key: str = MALLORYS, **options: Any) -> Answer:
        headers = bearer(key) | options.pop("headers", {})
        async with asyncio.timeout(HUNG_S):
            return await self.stage.ask(method, path, headers=headers, **options)

    async def over_nats(self, subject: str, data: bytes, reply: str, headers: dict[str, str]) -> Any:
        """The answer that comes to an inbox; the server of this test lets every client ask, and to any inbox."""
        heard: asyncio.Queue[Any] = asyncio.Queue()
        async with bus.connect(self.stage.config.nats_url, "mallory") as connected:

            async def hear(message: Any) -> None:
                heard.put_nowait(message)

            await connected.client.subscribe(reply, cb=hear)
            await barrier(connected.client)
            await connected.client.publish(subject, data, reply=reply, headers=headers)
            async with asyncio.timeout(HUNG_S):
                return codec.unpack((await heard.get()).data)


@asynccontextmanager
async def open_scene(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Scene]:
    """Alice has something of each kind; Mallory has a key."""
    alice, mallory = (f"{name}-{secrets.token_hex(4)}" for name in ("alice", "mallory"))
    file = KeysFile()
    for key, tenant in ((ALICES, alice), (MALLORYS, mallory)):
        file = api_keys.with_key(file, key, tenant, CREATED, NatsUser(name=tenant, bcrypt=BCRYPT))
    (tmp_path / "keys.json").write_text(api_keys.render(file))
    async with open_stage(nats_url, redis_url, tmp_path, api_keys_file=tmp_path / "keys.json") as stage:
        finished = await _job(stage, IDEMPOTENCY)
        stage.router.hold = hold = asyncio.Event()
        running = await _job(stage, ANOTHER, wait=False)
        await stage.router.held.wait()
        template = (await register(stage, b"Alice's picture", bearer(ALICES))).json
        lora = LoraRecord(
            lora_id=f"lora_{secrets.token_hex(16)}",
            tenant=alice,
            created_s=int(time.time()),
            state=LoraState.READY,
            model="tiny",
            name=WORDS,
        )
        await (await LoraRecords.open(stage.router.bus.jetstream)).create(lora)
        hook = WebhookRecord(
            job_id=finished.job_id,
            tenant=alice,
            url=f"https://example.org/{RECEIVER}",
            created_s=int(time.time()),
            state=WebhookState.DEAD,
        )
        await (await WebhookRecords.open(stage.router.bus.jetstream)).create(hook)
        victim = Victim(alice, finished, running, template["id"], lora.lora_id, inbox(file.keys[0].user))
        yield Scene(stage, victim, mallory, inbox(file.keys[1].user))
        hold.set()


async def _job(stage: Stage, key: str, *, wait: bool = True) -> Job:
    """One of Alice's."""
    stage.router.ended.clear()
    headers = bearer(ALICES) | {HEADER: key}
    form = stage.form(prompt=WORDS)
    job_id = (await stage.post("/v1/jobs", data=form, headers=headers)).json["id"]
    if wait:
        await stage.router.ended.wait()
    return stage.router.jobs[job_id]


def blank(body: str, name: str) -> Any:
    told = json.loads(body.replace(name, ""))
    told["error"].pop("job_id", None)  # it repeats the name
    return told


def message(key: str, **changes: Any) -> bytes:
    asked = EditMessage(parameters=EditParameters(prompt="x"), image=b"picture", api_key=key)
    return codec.encode(asked.model_copy(update=changes))
