"""``/v1/templates`` and edits by template, in front of a scripted router."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from giornata.wire import subjects, templates
from giornata.wire.errors import ImageUnreadable, ServiceUnavailable
from giornata.wire.messages import RemoveTemplate
from giornata.wire.requests import Reuse
from giornata.wire.templates import TemplateRecord, TemplateState
from tests.fakes.key_files import write_keys
from tests.integration.gateway_fakes import Answer, Opening, Stage, multipart, open_stage
from tests.patience import HUNG_S
from tests.present import present

ALICE = {"Authorization": "Bearer sk-alice-123"}
BOB = {"Authorization": "Bearer sk-robert-12"}


def keys(folder: Path) -> Path:
    """Keys of two tenants that no other test has."""
    alice, bob = (f"{name}-{secrets.token_hex(4)}" for name in ("alice", "bob"))
    return write_keys(folder, {"sk-alice-123": alice, "sk-robert-12": bob})


async def register(
    stage: Stage, image: bytes | None = None, headers: dict[str, str] | None = None, /, **fields: str
) -> Answer:
    form = multipart(("image", secrets.token_bytes(16) if image is None else image), **fields)
    return await stage.post("/v1/templates", data=form, headers=headers)


async def get(stage: Stage, path: str, headers: dict[str, str] | None = None) -> Answer:
    return await stage.get(f"/v1/templates{path}", headers=headers)


async def edit(
    stage: Stage, headers: dict[str, str] | None = None, image: bytes | None = None, /, **fields: str
) -> Answer:
    return await stage.post("/v1/images/edits", data=stage.form(image, None, **fields), headers=headers)


def finished(record: TemplateRecord) -> TemplateRecord:
    return templates.ready(record, "fake-denoiser", "t", 512)


async def test_a_registration_is_waited_for_until_it_is_recorded(stage: Stage) -> None:
    status, told = (await register(stage, size="128x96")).told
    assert (status, told["state"], told["model"], told["size"]) == (202, "recording", "tiny", "128x96")
    assert told["expires_at"] - told["created_at"] == stage.config.template_ttl_s
    assert (await get(stage, f"/{told['id']}?wait_ms=1")).json["state"] == "recording"
    waiting = asyncio.create_task(get(stage, f"/{told['id']}?wait_ms=20000"))
    await asyncio.sleep(0)
    await stage.router.change_template(stage.router.registered[-1], finished)
    told = (await waiting).expect(200).json
    assert (told["state"], told["bytes"]) == ("ready", 512)


async def test_the_same_picture_again_is_the_same_template(stage: Stage) -> None:
    image = secrets.token_bytes(16)
    first, again = [(await register(stage, image)).json for _ in range(2)]
    assert first["id"] == again["id"]
    assert (await register(stage, image, size="128x96")).json["id"] != first["id"]


async def test_what_the_router_refuses_is_not_kept(opening: Opening) -> None:
    async with opening(submit_window_s=0.01) as stage:
        stage.router.template_refusal = ImageUnreadable()
        image = secrets.token_bytes(16)
        assert (await register(stage, image)).code == (400, "image_unreadable")
        stage.router.template_refusal = None
        told = (await register(stage, image)).expect(202).json
        kept = stage.router.registered[-1]
        stage.router.template_refusal = ServiceUnavailable()
        assert (await register(stage, image)).code == (503, "service_unavailable")
        assert (await get(stage, f"/{told['id']}")).status == 200, "what was kept before stays"
        assert await stage.router.blobs.has(kept.image)


async def test_an_edit_by_template_has_its_picture_and_reuses(stage: Stage) -> None:
    image = secrets.token_bytes(16)
    told = (await register(stage, image, size="128x96")).json
    answer = (await edit(stage, template_id=told["id"])).expect(200).json
    job = (await stage.record()).job
    assert (job.template_id, job.parameters.reuse, job.parameters.size) == (told["id"], "auto", "128x96")
    assert await stage.router.blobs.get(present(job.image)) == image
    assert answer["giornata"]["template"] == ["off"]  # the fake says nothing else
    await edit(stage, template_id=told["id"], reuse="strict")
    assert (await stage.record()).job.parameters.reuse is Reuse.STRICT


async def test_edits_that_do_not_fit_their_template_are_refused_by_name(stage: Stage) -> None:
    told = (await register(stage, size="128x96")).json
    for fields in ({"size": "256x192"}, {"model": "other"}, {"padding_mask_crop": "8"}):
        answer = await edit(stage, template_id=told["id"], **fields)
        assert answer.code == (400, "template_mismatch")
        assert answer.error["param"] in fields
    answer = await edit(stage, None, b"x", template_id=told["id"])
    assert answer.refusal == (400, "invalid_field", "template_id")
    assert (await edit(stage)).refusal == (400, "invalid_field", "image")


async def test_lists_are_whole_and_leave_no_consumer_behind(stage: Stage) -> None:
    mine = {(await register(stage)).json["id"] for _ in range(3)}
    before = await stage.router.bus.jetstream.stream_info(f"KV_{subjects.TEMPLATES}")
    lists = await asyncio.gather(*(get(stage, "") for _ in range(20)))
    assert all(mine <= {view["id"] for view in told.json["data"]} for told in lists)
    after = await stage.router.bus.jetstream.stream_info(f"KV_{subjects.TEMPLATES}")
    assert after.state.consumer_count == before.state.consumer_count


async def test_a_deleted_template_is_forgotten_by_all_and_its_edits_end(stage: Stage) -> None:
    heard: asyncio.Queue[RemoveTemplate] = asyncio.Queue()
    told = (await register(stage)).json
    running = await stage.begin(edit(stage, template_id=told["id"]))
    waiting = asyncio.create_task(get(stage, f"/{told['id']}?wait_ms=20000"))
    async with stage.router.bus.listen(subjects.TEMPLATE_REMOVED, RemoveTemplate, heard.put_nowait):
        answer = (await stage.ask("DELETE", f"/v1/templates/{told['id']}")).expect(200)
        assert answer.json == {"id": told["id"], "object": "template", "deleted": True}
        removal = await asyncio.wait_for(heard.get(), HUNG_S)
    assert removal == RemoveTemplate(tenant="default", template_key="t")
    assert (await waiting).status == 404
    assert (await get(stage, f"/{told['id']}")).status == 404
    assert (await stage.ask("DELETE", f"/v1/templates/{told['id']}")).status == 404
    stage.router.go_on()
    assert (await running).status == 200
    edited = present((await stage.record()).job.image)
    assert await stage.router.blobs.get(edited)
    assert (await register(stage)).status == 202


async def test_a_template_ends_with_its_time_and_its_picture(stage: Stage) -> None:
    expired, lost = [(await register(stage)).json["id"] for _ in range(2)]
    first, second = stage.router.registered[-2:]
    await stage.router.change_template(first, lambda record: record.model_copy(update={"expires_s": 1}))
    assert (await get(stage, f"/{expired}")).status == 404
    assert (await edit(stage, template_id=expired)).status == 404
    assert expired not in {view["id"] for view in (await get(stage, "?limit=100")).json["data"]}
    await stage.router.blobs.delete(second.image)
    answer = await edit(stage, template_id=lost)
    assert (answer.status, answer.error["accepted"]) == (404, "register it again")


async def test_a_use_renews_a_template(stage: Stage) -> None:
    told = (await register(stage)).json
    record = stage.router.registered[-1]
    life_s = stage.config.template_ttl_s
    await stage.router.change_template(
        record, lambda known: known.model_copy(update={"expires_s": known.expires_s - life_s // 2})
    )
    assert (await edit(stage, template_id=told["id"])).status == 200
    assert (await get(stage, f"/{told['id']}")).json["expires_at"] >= told["expires_at"]


async def test_queries_are_read_by_name(stage: Stage) -> None:
    for path in ("?limit=101", "?page=2", "?after=none", "/template_1?wait_ms=60001", "/t?x=1"):
        told = await get(stage, path)
        assert (told.status, told.error["type"]) == (400, "invalid_request_error"), path


async def test_a_failure_is_told_with_its_code(stage: Stage) -> None:
    told = (await register(stage)).json
    error = ImageUnreadable().body()
    await stage.router.change_template(
        stage.router.registered[-1], lambda record: templates.failed(record, "fake-denoiser", error)
    )
    failed = (await get(stage, f"/{told['id']}?wait_ms=1000")).json
    assert (failed["state"], failed["error"]["code"]) == (TemplateState.FAILED, "image_unreadable")
    assert (await edit(stage, template_id=told["id"])).status == 200


async def test_templates_of_one_tenant_leave_room_and_deleted_ones_count_no_more(
    nats_account: str, redis_url: str, tmp_path: Path
) -> None:
    """In an account of its own: those of other tests' tenants would count, too."""
    options = {"max_template_bytes": 400_000, "api_keys_file": keys(tmp_path)}
    async with open_stage(nats_account, redis_url, tmp_path, **options) as stage:
        for _ in range(3):
            kept = (await register(stage, secrets.token_bytes(90_000), ALICE)).expect(202).json
        told = await register(stage, secrets.token_bytes(90_000), ALICE)
        assert told.code == (409, "template_limit")
        assert "beside 270000 of this tenant's" in told.error["received"]
        assert (await register(stage, secrets.token_bytes(90_000), BOB)).status == 202
        assert (await stage.ask("DELETE", f"/v1/templates/{kept['id']}", headers=ALICE)).status == 200
        assert (await register(stage, secrets.token_bytes(1_000), ALICE)).status == 202


async def test_a_tenant_has_so_many_templates_and_no_more(opening: Opening, tmp_path: Path) -> None:
    async with opening(max_templates=1, api_keys_file=keys(tmp_path)) as stage:
        image = secrets.token_bytes(16)
        kept = (await register(stage, image, ALICE)).expect(202).json
        told = await register(stage, None, ALICE)
        assert told.code == (409, "template_limit")
        assert told.error["accepted"].startswith("at most 1;")
        assert (await register(stage, image, ALICE)).status == 202, "it renews its own"
        assert (await register(stage, None, BOB)).status == 202, "it has its own number"
        assert (await stage.ask("DELETE", f"/v1/templates/{kept['id']}", headers=ALICE)).status == 200
        assert (await register(stage, None, ALICE)).status == 202
