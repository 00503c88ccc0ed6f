"""``/v1/loras`` in front of a real LoRA store; prepost's answer is scripted."""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from giornata.bus import bus
from giornata.bus.bus import Endpoint
from giornata.deadlines import Deadline
from giornata.records import LoraRecords
from giornata.wire import subjects
from giornata.wire.adapters import AskedLora
from giornata.wire.errors import InvalidField, LoraNotFound
from giornata.wire.loras import EVERYONE, LoraRecord, NormaliseLora, ProfiledLora
from giornata.wire.messages import EditReply, ProbeMessage
from giornata.wire.requests import EditParameters
from giornata.wire.subjects import NatsRole
from tests.fakes.key_files import write_keys
from tests.integration.fake_router import CARD
from tests.integration.gateway_fakes import MEMORY_BLOBS, Answer, Opening, Stage, open_stage
from tests.integration.lora_bench import canonical, lora, open_bench
from tests.patience import HUNG_MS

ALICE: dict[str, str] = {}
BOB: dict[str, str] = {}
"""Headers of two tenants whom no other test has; :func:`doors` writes them."""
TENANTS = 640


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(stage_account: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """A gateway with the keys of many tenants, two LoRAs each, and a store."""
    folder = tmp_path_factory.mktemp("loras")
    keys = write_keys(folder, {f"sk-tenant-{n}": f"tenant-{n}" for n in range(TENANTS)})

    async def normalise(request: NormaliseLora) -> Any:
        return canonical(request).model_copy(update={"model_digest": CARD.digest})

    prepost = Endpoint(subjects.prepost("adapter", "tiny"), NormaliseLora, normalise)
    async with (
        open_bench(stage_account, folder) as bench,
        bench.bus.serve("prepost", prepost, instance="tiny"),
        bench.instance(lora_file_bytes=4 << 20, lora_host_folder=folder / "host", lora_host_name=bench.model),
        open_stage(
            stage_account, MEMORY_BLOBS, folder, api_keys_file=keys, max_loras=2, max_pinned_loras=1
        ) as stage,
    ):
        yield stage


FRESH = count()


@pytest_asyncio.fixture(loop_scope="module")
async def doors(house: Stage) -> Stage:
    """The gateway for two fresh tenants."""
    for headers in (ALICE, BOB):
        headers["Authorization"] = f"Bearer sk-tenant-{next(FRESH) % TENANTS}"
    await house.router.reset()
    await house.router.announce()
    return house


async def upload(
    stage: Stage, data: bytes | None, headers: dict[str, str] = ALICE, /, **fields: str
) -> Answer:
    form = aiohttp.FormData(default_to_multipart=True)
    if data is not None:
        form.add_field("file", io.BytesIO(data), filename="rims.safetensors")
    for name, value in fields.items():
        form.add_field(name, value)
    return await stage.post("/v1/loras", data=form, headers=headers)


async def ask(stage: Stage, method: str, path: str, headers: dict[str, str] = ALICE) -> Answer:
    return await stage.ask(method, f"/v1/loras{path}", headers=headers)


async def test_a_lora_is_uploaded_awaited_listed_and_deleted(doors: Stage) -> None:
    status, told = (await upload(doors, lora(20), model="tiny", name="dark rims")).told
    assert (status, told["object"], told["model"], told["name"]) == (202, "lora", "tiny", "dark rims")
    status, ready = (await ask(doors, "GET", f"/{told['id']}?wait_ms=60000")).told
    assert (status, ready["state"], ready["style"], ready["rank"], ready["modules"]) == (
        200,
        "ready",
        "diffusers",
        4,
        1,
    )
    assert not ready["shared"]
    second = (await upload(doors, lora(21))).json
    assert second["name"] == "rims"
    page = (await ask(doors, "GET", "?limit=1")).json
    assert (len(page["data"]), page["has_more"]) == (1, True)
    rest = (await ask(doors, "GET", f"?limit=1&after={page['data'][0]['id']}")).json
    assert {page["data"][0]["id"], rest["data"][0]["id"]} == {told["id"], second["id"]}
    assert not rest["has_more"]
    assert (await upload(doors, lora(22))).code == (409, "lora_limit")
    assert (await ask(doors, "DELETE", f"/{told['id']}")).told == (
        200,
        {"id": told["id"], "object": "lora", "deleted": True},
    )
    assert (await ask(doors, "GET", f"/{told['id']}")).code == (404, "lora_not_found")


async def test_a_file_of_several_pieces_arrives_whole(doors: Stage) -> None:
    data = lora(23, rank=500) + b""
    big = lora(24, rank=16_000)
    assert len(big) > 2 << 20
    told = await upload(doors, data)
    assert (told.status, told.json["bytes"]) == (202, len(data))
    assert (await upload(doors, big)).code == (413, "lora_too_large")
    assert (await upload(doors, bytes(5 << 20))).code == (413, "lora_too_large")
    page = (await ask(doors, "GET", "")).json
    assert [one["id"] for one in page["data"]] == [told.json["id"]]


@pytest.mark.parametrize(
    ("data", "fields", "status", "code"),
    [
        (b"junk", {}, 400, "lora_unreadable"),
        (None, {"model": "tiny"}, 400, "invalid_field"),
        (lora(26), {"model": "nobody"}, 404, "model_not_found"),
        (lora(26), {"alpha": "1"}, 400, "unknown_field"),
        (lora(26), {"name": "a\nb"}, 400, "invalid_field"),
    ],
)
async def test_what_cannot_be_a_lora_is_refused_with_a_code(
    doors: Stage, data: bytes | None, fields: dict[str, str], status: int, code: str
) -> None:
    assert (await upload(doors, data, **fields)).code == (status, code)
    assert (await ask(doors, "GET", "")).json["data"] == []


async def ready(stage: Stage, data: bytes, headers: dict[str, str] = ALICE) -> str:
    """The id of an uploaded LoRA, once it may be used."""
    told = (await upload(stage, data, headers)).json
    now = (await ask(stage, "GET", f"/{told['id']}?wait_ms=60000", headers)).json
    assert now["state"] == "ready"
    return str(now["id"])


async def edit(
    stage: Stage, loras: object, headers: dict[str, str] = ALICE, path: str = "/v1/images/edits"
) -> Answer:
    form = stage.form(loras=json.dumps(loras))
    return await stage.post(path, data=form, headers=headers)


async def test_an_edit_names_loras_and_its_job_keeps_what_they_are(doors: Stage) -> None:
    first, second = [await ready(doors, lora(seed)) for seed in (30, 31)]
    asked = [{"id": second, "scale": -0.5}, {"id": first}]
    (await edit(doors, asked)).expect(200)
    job = (await doors.record()).job
    assert [(use.lora_id, use.scale, use.sha256, use.rank) for use in job.loras] == [
        (second, -0.5, "0" * 64, 4),
        (first, 1.0, "0" * 64, 4),
    ]
    told = (await edit(doors, asked, path="/v1/jobs")).expect(202).json
    assert told["loras"] == [{"id": second, "scale": -0.5}, {"id": first, "scale": 1.0}]


async def test_a_lora_that_cannot_be_used_is_refused_before_there_is_a_job(doors: Stage) -> None:
    own, anothers = await ready(doors, lora(32)), await ready(doors, lora(32), BOB)
    unknown = f"lora_{'0' * 32}"
    for wrong in (unknown, anothers):
        answer = await edit(doors, [{"id": own}, {"id": wrong}])
        error = answer.error
        assert (answer.status, error["code"], error["param"], error["received"]) == (
            404,
            "lora_not_found",
            "loras",
            wrong,
        )
    answer = await doors.post("/v1/images/edits", data=doors.form(loras="lora_x"), headers=ALICE)
    assert answer.code == (400, "invalid_field")
    assert not doors.router.jobs


async def test_a_deleted_lora_ends_no_job_that_named_it(doors: Stage) -> None:
    name = await ready(doors, lora(33))
    assert (await edit(doors, [{"id": name}])).status == 200
    assert (await ask(doors, "DELETE", f"/{name}")).status == 200
    assert (await edit(doors, [{"id": name}])).status == 404
    assert (await doors.record()).job.loras[0].lora_id == name


async def test_a_probe_is_an_edit_with_the_loras_of_the_tenant_that_it_names(doors: Stage) -> None:
    told = (await upload(doors, lora(26), model="tiny")).json
    ready = (await ask(doors, "GET", f"/{told['id']}?wait_ms=60000")).json
    assert ready["joins_within"] is None
    record = await doors.router.bus.jetstream.key_value("giornata-loras")
    (key,) = [key for key in await record.keys() if key.endswith(told["id"])]
    alice = key.partition(".")[0]
    asked = EditParameters(prompt="a hat", loras=(AskedLora(id=told["id"]),), lora_join=0.5)
    probe = ProbeMessage(parameters=asked, image=b"picture", tenant=alice, remaining_ms=HUNG_MS)
    async with bus.connect(doors.config.nats_url, "profiler", user=NatsRole.PROFILER) as profiler:
        await profiler.call(subjects.EDIT_PROBE, probe, EditReply, Deadline.after_ms(HUNG_MS))
        job = (await doors.record()).job
        assert (job.tenant, job.loras[0].lora_id, job.loras[0].joins_within) == (alice, told["id"], 0.5)
        stranger = probe.model_copy(update={"tenant": "stranger"})
        with pytest.raises(LoraNotFound):
            await profiler.call(subjects.EDIT_PROBE, stranger, EditReply, Deadline.after_ms(HUNG_MS))
        file = job.loras[0].sha256
        share = ProfiledLora(
            lora_id=told["id"],
            tenant=alice,
            sha256=file,
            model_digest=CARD.digest,
            joins_within=0.25,
            remaining_ms=HUNG_MS,
        )
        await profiler.call(subjects.lora("profiled"), share, LoraRecord, Deadline.after_ms(HUNG_MS))
    ready = (await ask(doors, "GET", f"/{told['id']}")).json
    assert ready["joins_within"] == 0.25
    async with bus.connect(doors.config.nats_url, "stranger") as other:  # an application's inbox
        with pytest.raises(InvalidField):
            await other.call(subjects.EDIT_PROBE, probe, EditReply, Deadline.after_ms(HUNG_MS))


async def test_a_lora_is_pinned_and_unpinned_by_its_tenant(doors: Stage) -> None:
    told = (await upload(doors, lora(40))).json
    ready = (await ask(doors, "GET", f"/{told['id']}?wait_ms=60000")).json
    assert not ready["pinned"]
    pinned = await ask(doors, "PUT", f"/{told['id']}/pin")
    assert (pinned.status, pinned.json["pinned"]) == (200, True)
    assert (await ask(doors, "PUT", f"/{told['id']}/pin")).status == 200  # it may be asked again
    assert (await ask(doors, "PUT", f"/{told['id']}/pin", BOB)).code == (404, "lora_not_found")
    second = (await upload(doors, lora(41))).json
    await ask(doors, "GET", f"/{second['id']}?wait_ms=60000")
    assert (await ask(doors, "PUT", f"/{second['id']}/pin")).code == (409, "lora_limit")
    unpinned = await ask(doors, "DELETE", f"/{told['id']}/pin")
    assert (unpinned.status, unpinned.json["pinned"]) == (200, False)
    assert (await ask(doors, "PUT", f"/{second['id']}/pin")).status == 200


@pytest.mark.parametrize(("method", "path"), [("PUT", "/pin"), ("DELETE", "/pin"), ("DELETE", "")])
async def test_a_lora_that_everyone_may_use_is_nobodys_to_change(
    doors: Stage, method: str, path: str
) -> None:
    own = (await upload(doors, lora(45))).json["id"]
    assert (await ask(doors, "GET", f"/{own}?wait_ms=60000")).json["state"] == "ready"
    records = await LoraRecords.open(doors.router.bus.jetstream)
    [known] = [record for record in await records.all() if record.lora_id == own]
    shipped = known.model_copy(update={"tenant": EVERYONE, "lora_id": f"lora_{secrets.token_hex(16)}"})
    await records.create(shipped)
    try:
        refused = await ask(doors, method, f"/{shipped.lora_id}{path}")
        assert await records.get(EVERYONE, shipped.lora_id) == shipped
    finally:
        await records.delete(shipped)
    assert refused.code == (404, "lora_not_found")
    assert "this one is everyone's" in refused.error["accepted"]


async def test_a_store_that_is_away_is_not_the_clients_slowness(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is here; its pace was counted while the store was waited for, and the client got 408."""
    monkeypatch.setattr("giornata.lora_files.RESTART_S", 1.5)
    async with opening(head_s=0.5) as stage:
        answer = await upload(stage, lora(), {}, model=CARD.name)
    assert (answer.status, answer.error["code"]) == (503, "service_unavailable")
