"""One tenant attacks another with all that it could have learnt: ids, keys, names, claim checks, whole messages.

An attack gets what a guess gets: the same answer, as if there were nothing. The victim notices nothing.
"""

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

import pytest
import pytest_asyncio

from giornata import api_keys
from giornata.api_keys import KeysFile, NatsUser
from giornata.bus import bus
from giornata.bus.bus import Endpoint
from giornata.bus.connection import barrier
from giornata.records import LoraRecords, WebhookRecords
from giornata.wire import codec, subjects
from giornata.wire.errors import NothingFound
from giornata.wire.jobs import BlobRef, Job
from giornata.wire.loras import LoraRecord, LoraState
from giornata.wire.messages import (
    IDEMPOTENCY_HEADER,
    CancelMessage,
    EditMessage,
    MaskMessage,
    MaskParameters,
    MaskReply,
    MaskRequest,
)
from giornata.wire.requests import EditParameters
from giornata.wire.subjects import inbox
from giornata.wire.templates import WebhookRecord, WebhookState
from giornata_gateway.jobs.preparation import HEADER, job_id_of
from tests.fakes.colours import CARD as COLOURS
from tests.fakes.key_files import CREATED
from tests.integration.fake_router import CARD
from tests.integration.gateway.test_a1111 import EDIT
from tests.integration.gateway.test_templates import edit, register
from tests.integration.gateway_fakes import MEMORY_BLOBS, Answer, Stage, open_stage
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
        return await asyncio.wait_for(self.stage.ask(method, path, headers=headers, **options), HUNG_S)

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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(stage_account: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    """What one attack leaves behind, the next one finds."""
    async with open_scene(stage_account, MEMORY_BLOBS, tmp_path_factory.mktemp("scene")) as scene:
        yield scene


async def test_ids_of_others_are_answered_like_guesses(scene: Scene) -> None:
    alice, guess = scene.alice, "x" + secrets.token_hex(8)
    attacks = [
        (method, path, one)
        for one in (alice.job.job_id, alice.running.job_id, job_id_of(alice.tenant, IDEMPOTENCY))
        for method, path in (
            ("GET", "/v1/jobs/{}"), ("DELETE", "/v1/jobs/{}"), ("GET", "/v1/jobs/{}/events"),
            ("GET", "/v1/jobs/{}/image"), ("GET", "/v1/jobs/{}/image?index=0"),
        )
    ]  # fmt: skip
    attacks += [
        (method, path, alice.template_id)
        for method, path in (
            ("GET", "/v1/templates/{}"), ("GET", "/v1/templates/{}?wait_ms=1"), ("DELETE", "/v1/templates/{}"),
        )
    ]  # fmt: skip
    attacks += [
        (method, path, alice.lora_id)
        for method, path in (
            ("GET", "/v1/loras/{}"), ("DELETE", "/v1/loras/{}"), ("PUT", "/v1/loras/{}/pin"),
            ("DELETE", "/v1/loras/{}/pin"),
        )
    ]  # fmt: skip
    attacks += [(method, "/v1/webhooks/{}", alice.job.job_id) for method in ("PUT", "DELETE")]
    for method, path, known in attacks:
        for headers in ({}, {"Last-Event-ID": "1"}, {"If-None-Match": '"x"', "Range": "bytes=0-9"}):
            got = await scene.told(method, path.format(known), headers=headers)
            guessed = await scene.told(method, path.format(guess), headers=headers)
            assert got.status == guessed.status == 404, (method, path, got)
            assert blank(got.text, known) == blank(guessed.text, guess)
            assert got.headers.keys() == guessed.headers.keys()
    seen = (await scene.told("GET", f"/v1/jobs/{alice.job.job_id}", ALICES)).expect(200)
    assert seen.json["state"] == "completed"
    assert not (await scene.stage.router.records.get(alice.running.job_id)).cancel
    assert (await scene.told("GET", f"/v1/templates/{alice.template_id}", ALICES)).status == 200
    assert (await scene.told("GET", f"/v1/loras/{alice.lora_id}", ALICES)).status == 200
    [hook] = (await scene.told("GET", "/v1/webhooks", ALICES)).json["data"]
    assert (hook["id"], hook["state"]) == (alice.job.job_id, "dead")


async def test_lists_and_open_pages_tell_nothing_of_others(scene: Scene) -> None:
    alice = scene.alice
    hidden = {
        alice.job.job_id, alice.running.job_id, alice.template_id, alice.lora_id, alice.tenant, WORDS, RECEIVER,
    }  # fmt: skip
    for path in (
        "/v1/templates", f"/v1/templates?after={alice.template_id}", "/v1/loras",
        f"/v1/loras?after={alice.lora_id}", "/v1/webhooks", f"/v1/webhooks?after={alice.job.job_id}",
        "/sdapi/v1/progress", "/sdapi/v1/loras", "/v1/fleet", "/v1/models", "/metrics", "/healthz", "/readyz",
    ):  # fmt: skip
        text = (await scene.told("GET", path)).text
        told = {word for word in hidden if word in text} - (
            {path.partition("=")[2]} if "=" in path else set()
        )
        assert not told, path


async def test_templates_and_adapters_of_others_are_not_edited_with(scene: Scene) -> None:
    submitted = set(scene.stage.router.submitted)
    loras = json.dumps([{"id": scene.alice.lora_id}])
    for image, code, fields in (
        (b"picture", "lora_not_found", {"loras": loras}),
        (None, "template_not_found", {"template_id": scene.alice.template_id}),
    ):
        answer = await edit(scene.stage, bearer(MALLORYS), image, **fields)
        assert answer.code == (404, code)
        assert WORDS not in json.dumps(answer.json)
    assert scene.stage.router.submitted == submitted


async def test_an_idempotency_key_of_another_leads_to_a_job_of_ones_own(scene: Scene) -> None:
    scene.stage.router.hold = None
    for prompt in (
        WORDS,
        "another",
    ):  # the same edit, to hear of its end; another one, to hear of a difference
        headers = bearer(MALLORYS) | {HEADER: f"{IDEMPOTENCY}" if prompt == WORDS else f"{IDEMPOTENCY}0"}
        form = scene.stage.form(prompt=prompt)
        text = (await scene.told("POST", "/v1/images/edits", data=form, headers=headers)).expect(200).text
        job_id = json.loads(text)["giornata"]["job_id"]
        assert scene.stage.router.jobs[job_id].tenant == scene.mallory
    assert (await scene.stage.router.records.get(scene.alice.job.job_id)).job == scene.alice.job


async def test_claim_checks_of_others_open_nothing(scene: Scene) -> None:
    image, mallory = scene.alice.job.image, scene.mallory
    assert image is not None
    finished = (await scene.stage.router.records.get(scene.alice.job.job_id)).rows[0].image
    assert finished is not None
    scene.stage.router.masks = COLOURS
    await scene.stage.router.announce()
    submitted = set(scene.stage.router.submitted)
    for key in (
        image.key, finished.key, f"{mallory}/../{image.key}", f"{mallory}/{image.key}", f"./{image.key}",
        f"{mallory}/../../giornata:{image.key}", f"{mallory}\0/{image.key}", f"{mallory}/", "", f"{image.key}/../x",
    ):  # fmt: skip
        stolen = BlobRef(key=key, size_bytes=image.size_bytes, sha256=image.sha256)
        for name, value in (
            ("image", stolen),
            ("mask", stolen),
            ("reference", (stolen,)),
            ("control_image", (stolen,)),
        ):
            answer = await scene.over_nats(
                subjects.EDIT, message(MALLORYS, **{name: value}), f"{scene.mallorys_inbox}.a", {}
            )
            assert answer["code"] in {"invalid_field", "bad_request"}, (key, name, answer)
        words = MaskMessage(parameters=MaskParameters(prompt=WORDS), image=stolen, api_key=MALLORYS)
        answer = await scene.over_nats(subjects.MASK, codec.encode(words), f"{scene.mallorys_inbox}.a", {})
        assert (answer["code"], answer["field"]) == ("invalid_field", "image"), (key, answer)
    assert scene.stage.router.submitted == submitted
    assert await scene.stage.router.blobs.has(image), "what is refused is not forgotten"


async def test_a_message_that_was_heard_is_not_answered_elsewhere(scene: Scene) -> None:
    """Its API key is Alice's: the answer may go to her inboxes alone, and so may its progress."""
    submitted = set(scene.stage.router.submitted)
    for changes, reply in (
        ({}, f"{scene.mallorys_inbox}.a"),
        ({}, f"{scene.alice.inbox}x.a"),
        ({"progress": f"{scene.mallorys_inbox}.a"}, f"{scene.alice.inbox}.a"),
        ({"progress": f"{scene.alice.inbox}.>"}, f"{scene.alice.inbox}.a"),
    ):
        answer = await scene.over_nats(subjects.EDIT, message(ALICES, **changes), reply, {})
        assert (answer["code"], answer["field"]) == ("invalid_field", "progress" if changes else "reply")
    words = MaskMessage(parameters=MaskParameters(prompt=WORDS), image=b"picture", api_key=ALICES)
    cancel = CancelMessage(job_id=scene.alice.running.job_id, api_key=ALICES)
    for subject, heard in ((subjects.MASK, words), (subjects.EDIT_CANCEL, cancel)):
        answer = await scene.over_nats(subject, codec.encode(heard), f"{scene.mallorys_inbox}.a", {})
        assert (answer["code"], answer["field"]) == ("invalid_field", "reply")
    assert not (await scene.stage.router.records.get(scene.alice.running.job_id)).cancel
    assert scene.stage.router.submitted == submitted


async def test_ids_and_keys_of_others_are_nothing_over_nats(scene: Scene) -> None:
    reply = f"{scene.mallorys_inbox}.a"
    for job_id in (scene.alice.running.job_id, scene.alice.job.job_id, "job_" + "x" * 32):
        asked = codec.encode(CancelMessage(job_id=job_id, api_key=MALLORYS))
        answer = await scene.over_nats(subjects.EDIT_CANCEL, asked, reply, {})
        assert (answer["code"], answer["received"]) == ("job_not_found", job_id)
    assert not (await scene.stage.router.records.get(scene.alice.running.job_id)).cancel
    template = message(MALLORYS, image=None, template_id=scene.alice.template_id)
    assert (await scene.over_nats(subjects.EDIT, template, reply, {}))["code"] == "template_not_found"
    scene.stage.router.hold = None
    headers = {IDEMPOTENCY_HEADER: ANOTHER}
    answer = await scene.over_nats(subjects.EDIT, message(MALLORYS), reply, headers)
    assert scene.stage.router.jobs[answer["job_id"]].tenant == scene.mallory


async def test_a_tenant_without_keys_of_its_own_is_nobody(scene: Scene) -> None:
    for key in (
        "",
        ALICES.upper(),
        ALICES[:-1],
        f"{ALICES} ",
        f"{ALICES},{MALLORYS}",
        scene.alice.tenant,
        "*",
    ):
        assert (await scene.told("GET", f"/v1/jobs/{scene.alice.job.job_id}", key)).status == (
            200 if key.strip() == ALICES else 401
        )


async def test_words_find_nothing_in_a_template_of_another(scene: Scene) -> None:
    stage, asked = scene.stage, list[MaskRequest]()

    async def look(request: MaskRequest) -> MaskReply:
        asked.append(request)
        raise NothingFound

    stage.router.masks, stage.router.hold = COLOURS, None
    finding = Endpoint(subjects.prepost("mask", CARD.name), MaskRequest, look)
    async with stage.router.bus.serve("prepost", finding, instance="masks"):
        await stage.router.announce()
        told = {"template_id": scene.alice.template_id, "mask_prompt": "the left shoe"}
        for more in ({}, {"auto_edit": "true"}):
            answer = await edit(stage, bearer(MALLORYS), None, **told, **more)
            assert answer.code == (404, "template_not_found")
        parameters = EditParameters(prompt="x", mask_prompt="the left shoe")
        sent = message(MALLORYS, image=None, template_id=scene.alice.template_id, parameters=parameters)
        answer = await scene.over_nats(subjects.EDIT, sent, f"{scene.mallorys_inbox}.a", {})
        assert answer["code"] == "template_not_found"
        assert asked == []
        answer = await edit(stage, bearer(ALICES), None, **told)
        assert (answer.error["code"], len(asked)) == ("nothing_found", 1), "its owner's words are looked for"


async def test_a_prompt_of_a1111_names_no_lora_of_another(scene: Scene) -> None:
    answers = []
    for name in (f"lora_{secrets.token_hex(16)}", scene.alice.lora_id, WORDS, f"{WORDS}.safetensors"):
        asked = EDIT | {"prompt": f"a <lora:{name}:1> star"}
        text = (await scene.told("POST", "/sdapi/v1/img2img", json=asked)).expect(404).text
        answers.append(blank(text, name))
    assert all(answer == answers[0] for answer in answers)
