"""The LoRA store on a real NATS server: uploads, restarts, tenants, deletion, the shared folder."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import secrets
import struct
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import TypeVar

import pytest
from pydantic import BaseModel

from giornata.api_keys import DEFAULT_TENANT
from giornata.deadlines import Deadline
from giornata.lora_files import open_upload, read_pieces
from giornata.wire import subjects
from giornata.wire.errors import (
    GiornataError,
    InternalError,
    InvalidField,
    LoraLimit,
    LoraMismatch,
    LoraNotFound,
    LoraStoreFull,
    LoraTooLarge,
    LoraUnreadable,
    MalformedMessage,
    ServiceUnavailable,
)
from giornata.wire.loras import (
    EVERYONE,
    PIECE_BYTES,
    BeginUpload,
    FinishUpload,
    LoraRecord,
    LoraState,
    LoraStyle,
    NormaliseLora,
    ProfiledLora,
    RemoveLora,
    StoredFile,
    UploadChunk,
    UploadProgress,
)
from giornata.wire.workers import ServiceName, ServiceState
from tests.integration.lora_bench import Store, canonical, lora
from tests.patience import HUNG_MS, HUNG_S

M = TypeVar("M", bound=BaseModel)


def tenant() -> str:
    """One that no other test has."""
    return f"tenant-{secrets.token_hex(4)}"


def file_of(data: bytes) -> StoredFile:
    return StoredFile(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))


async def call(bench: Store, verb: subjects.LoraVerb, request: BaseModel, reply: type[M]) -> M:
    deadline = Deadline.after_ms(HUNG_MS)
    return await bench.bus.call(subjects.lora(verb), request, reply, deadline, limit_bytes=2 << 20)


async def test_an_upload_becomes_a_lora_with_a_canonical_file(bench: Store) -> None:
    data, owner = lora(), tenant()
    async with bench.instance():
        sent = await bench.send(data, owner, "rims")
        ready = await bench.settled(sent)
        assert (ready.state, ready.style, ready.rank, ready.name) == ("ready", LoraStyle.DIFFUSERS, 4, "rims")
        assert ready.source == file_of(data)
        assert ready.canonical == canonical(await bench.asked.get())
        found = b"".join([piece async for piece in read_pieces(bench.bus, file_of(data), 1 << 20)])
        assert found == data
        assert [record.lora_id for record in await bench.records.all_of(owner)] == [ready.lora_id]


async def test_the_same_file_is_the_same_lora_also_at_once_and_another_tenants_is_not(bench: Store) -> None:
    data, owner, other = lora(1), tenant(), tenant()
    async with bench.instance(), bench.instance():
        one, two = await asyncio.gather(bench.send(data, owner), bench.send(data, owner))
        again = await bench.send(data, owner)
        assert one.lora_id == two.lora_id == again.lora_id
        assert (await bench.send(data, other)).lora_id != one.lora_id
        assert len(await bench.records.all_of(owner)) == 1
        await bench.settled(one)
    assert [path.name for path in (bench.folder / "files").iterdir()] == [file_of(data).sha256]
    assert not list((bench.folder / "uploads").iterdir())


async def test_a_restart_in_the_middle_loses_nothing_that_was_acknowledged(bench: Store) -> None:
    data, owner = lora(2), tenant()
    half = len(data) // 2
    begin = BeginUpload(upload_id=f"upload_{secrets.token_hex(4)}", tenant=owner, remaining_ms=HUNG_MS)
    piece = UploadChunk(
        upload_id=begin.upload_id, tenant=owner, offset=0, data=data[:half], remaining_ms=HUNG_MS
    )
    async with bench.instance():
        await call(bench, "begin", begin, UploadProgress)
        await call(bench, "piece", piece, UploadProgress)
    async with bench.instance():
        assert (await bench.records.get(owner, begin.upload_id)).state is LoraState.UPLOADING
        again = await call(bench, "begin", begin, UploadProgress)
        assert again.size_bytes == half
        rest = piece.model_copy(update={"offset": half, "data": data[half:]})
        for _ in range(2):  # the connection may ask twice
            told = await call(bench, "piece", rest, UploadProgress)
            assert told.size_bytes == len(data)
        finish = FinishUpload(
            upload_id=begin.upload_id,
            tenant=owner,
            model=bench.model,
            file=file_of(data),
            remaining_ms=HUNG_MS,
        )
        for _ in range(2):
            made = await call(bench, "finish", finish, LoraRecord)
        assert (await bench.settled(made)).state is LoraState.READY


async def test_a_sender_waits_for_a_store_that_is_restarted(bench: Store) -> None:
    data, owner = lora(3, rank=64), tenant()
    async with bench.instance():
        upload = open_upload(bench.bus, owner)
        sent = await upload.__aenter__()
        await sent.write(data)
    finishing = asyncio.create_task(sent.finish(owner, bench.model, None))
    await asyncio.sleep(0.2)  # no store answers now
    async with bench.instance():
        async with asyncio.timeout(HUNG_S):
            assert (await bench.settled(await finishing)).state is LoraState.READY


async def test_a_tenant_leaves_room_in_the_folder_also_by_growing_uploads_and_deleted_loras(
    bench: Store,
) -> None:
    alice, bob, data = tenant(), tenant(), bytes(PIECE_BYTES)
    async with bench.instance(lora_folder_bytes=8 << 20, lora_scan_s=86400.0), AsyncExitStack() as stack:
        small = await bench.send(lora(4), alice)
        await bench.settled(small)
        one, two = [await stack.enter_async_context(open_upload(bench.bus, alice)) for _ in range(2)]
        for upload in (one, two, one, two, one):  # with the LoRA it is just below three quarters
            await upload.write(data)
        with pytest.raises(LoraLimit) as refused:
            await two.write(data)
        assert "of this tenant's" in str(refused.value.received)
        assert str(8 << 20) in str(refused.value.accepted)
        gone = RemoveLora(lora_id=small.lora_id, tenant=alice, remaining_ms=HUNG_MS)
        await call(bench, "remove", gone, LoraRecord)
        with pytest.raises(LoraLimit):  # edits that have begun may still need its file
            await two.whole()
        other = await stack.enter_async_context(open_upload(bench.bus, bob))
        for _ in range(2):
            await other.write(data)
        with pytest.raises(LoraStoreFull):
            await other.write(data)
        await one.drop()
        assert (await other.whole()).size_bytes == 3 << 20


async def test_without_keys_one_tenant_may_fill_the_folder(bench: Store) -> None:
    async with bench.instance(lora_folder_bytes=4 << 20), open_upload(bench.bus, DEFAULT_TENANT) as upload:
        await upload.write(bytes(4 << 20))
        with pytest.raises(LoraStoreFull):
            await upload.write(bytes(PIECE_BYTES))


async def test_pieces_follow_each_other_and_are_what_was_announced(bench: Store) -> None:
    begin = BeginUpload(upload_id=f"upload_{secrets.token_hex(4)}", remaining_ms=HUNG_MS)
    piece = UploadChunk(upload_id=begin.upload_id, offset=5, data=b"x", remaining_ms=HUNG_MS)
    async with bench.instance(lora_file_bytes=2048):
        with pytest.raises(LoraNotFound):
            await call(bench, "piece", piece, UploadProgress)
        await call(bench, "begin", begin, UploadProgress)
        with pytest.raises(MalformedMessage, match="at most 0"):
            await call(bench, "piece", piece, UploadProgress)
        with pytest.raises(LoraTooLarge, match="2048"):
            await call(
                bench, "piece", piece.model_copy(update={"offset": 0, "data": bytes(4096)}), UploadProgress
            )
        with pytest.raises(MalformedMessage, match="too large"):
            await call(
                bench,
                "piece",
                piece.model_copy(update={"offset": 0, "data": bytes(PIECE_BYTES + 1)}),
                UploadProgress,
            )
        with pytest.raises(MalformedMessage, match="id must match"):
            await call(bench, "begin", begin.model_copy(update={"upload_id": "../x"}), UploadProgress)
        await call(bench, "piece", piece.model_copy(update={"offset": 0}), UploadProgress)
        finish = FinishUpload(
            upload_id=begin.upload_id,
            tenant=tenant(),
            model=bench.model,
            file=file_of(b"y"),
            remaining_ms=HUNG_MS,
        )
        with pytest.raises(InvalidField, match="not the one that was sent"):
            await call(bench, "finish", finish, LoraRecord)


def _header(text: bytes, claim: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if claim is None else claim) + text


X = b'"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
BAD: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "lora_unreadable", "0 bytes"),
    "truncated": (lora()[:-7], "lora_unreadable", "safetensors"),
    "trailing bytes": (lora() + b"x", "lora_unreadable", "safetensors"),
    "a pickle": (pickle.dumps({"x": [1.0] * 9}), "lora_unreadable", "another format, such as a pickle"),
    "no json": (_header(b"{nonsense"), "lora_unreadable", "safetensors"),
    "a huge header": (_header(b" " * 70_000), "lora_too_large", "header"),
    "a header of terabytes": (_header(b"{}", 1 << 42), "lora_unreadable", "header of 4398046511104 bytes"),
    "a name twice": (_header(b"{%s,%s}" % (X, X)) + bytes(4), "lora_unreadable", "'x' is given twice"),
    "no lora": (_header(b"{%s}" % X) + bytes(4), "lora_not_supported", "x"),
    "a rank over the limit": (lora(rank=33), "lora_too_large", "rank 33"),
}


async def test_a_bad_file_is_refused_at_the_door_and_leaves_nothing(bench: Store) -> None:
    owner = tenant()
    async with bench.instance(lora_rank=32, lora_header_bytes=65_536):
        for kind, (data, code, said) in BAD.items():
            with pytest.raises(GiornataError) as raised:
                await bench.send(data, owner)
            assert raised.value.code == code, kind
            assert said in str(raised.value)
            assert await bench.records.all_of(owner) == []
    assert not [path for part in ("files", "uploads") for path in (bench.folder / part).iterdir()]


async def test_what_prepost_says_is_why_it_failed_and_sending_it_again_tries_again(bench: Store) -> None:
    def refused(_: NormaliseLora) -> object:
        raise LoraMismatch(received="double_blocks", accepted="modules of a UNet")

    bench.answer = refused  # type: ignore[assignment]  # it raises
    data, owner = lora(4), tenant()
    async with bench.instance():
        failed = await bench.settled(await bench.send(data, owner))
        assert failed.state is LoraState.FAILED
        assert failed.error is not None
        assert (failed.error.code, failed.error.received) == ("lora_mismatch", "double_blocks")
        bench.answer = canonical
        assert (await bench.settled(await bench.send(data, owner))).state is LoraState.READY


async def test_a_file_that_fails_unexpectedly_twice_is_failed_and_not_tried_for_ever(bench: Store) -> None:
    def surprised(_: NormaliseLora) -> object:
        raise InternalError

    bench.answer = surprised  # type: ignore[assignment]  # it raises
    async with bench.instance():
        failed = await bench.settled(await bench.send(lora(97), tenant()))
        assert failed.state is LoraState.FAILED
        assert failed.error is not None
        assert failed.error.code == "internal_error"
        assert "twice" in failed.error.message
        assert bench.asked.qsize() == 2


async def test_it_waits_for_prepost_and_another_instance_takes_over(bench: Store) -> None:
    def away(_: NormaliseLora) -> object:
        raise ServiceUnavailable("shutting down")

    bench.answer = away  # type: ignore[assignment]  # it raises
    async with bench.instance():
        sent = await bench.send(lora(5), tenant())
        async with asyncio.timeout(HUNG_S):
            for _ in range(2):
                await bench.asked.get()
        assert (await bench.records.get(sent.tenant, sent.lora_id)).state is LoraState.VALIDATING
    bench.answer = canonical
    async with bench.instance():
        assert (await bench.settled(sent)).state is LoraState.READY


async def test_an_instance_that_leaves_lets_go_of_what_prepost_has_not_answered(bench: Store) -> None:
    bench.may_answer.clear()
    async with bench.instance():
        sent = await bench.send(lora(6), tenant())
        await asyncio.wait_for(bench.asked.get(), HUNG_S)
        assert (await bench.records.get(sent.tenant, sent.lora_id)).worker is not None
    left = await bench.records.get(sent.tenant, sent.lora_id)
    assert (left.state, left.worker) == (LoraState.VALIDATING, None)
    bench.may_answer.set()
    async with bench.instance():
        assert (await bench.settled(sent)).state is LoraState.READY


async def test_a_tenant_can_neither_see_nor_remove_anothers(bench: Store) -> None:
    async with bench.instance():
        sent = await bench.send(lora(6), tenant())
        stranger = RemoveLora(lora_id=sent.lora_id, tenant=tenant(), remaining_ms=HUNG_MS)
        with pytest.raises(LoraNotFound):
            await call(bench, "remove", stranger, LoraRecord)
        with pytest.raises(LoraNotFound):
            await bench.records.get(stranger.tenant, sent.lora_id)
        assert (await bench.settled(sent)).state is LoraState.READY


async def test_a_removed_loras_file_stays_for_edits_that_have_begun_and_then_goes(bench: Store) -> None:
    data = lora(7)
    async with bench.instance():
        sent = await bench.settled(await bench.send(data, tenant()))
        remove = RemoveLora(lora_id=sent.lora_id, tenant=sent.tenant, remaining_ms=HUNG_MS)
        await call(bench, "remove", remove, LoraRecord)
        with pytest.raises(LoraNotFound):
            await bench.records.get(sent.tenant, sent.lora_id)
        assert b"".join([piece async for piece in read_pieces(bench.bus, file_of(data), 1 << 20)]) == data
    async with bench.instance():  # it was used just now
        assert (bench.folder / "files" / file_of(data).sha256).exists()
    os.utime(bench.folder / "files" / file_of(data).sha256, (1, 1))
    async with bench.instance():
        assert not (bench.folder / "files" / file_of(data).sha256).exists()


async def test_a_file_that_was_changed_on_disk_is_not_taken_for_the_lora(bench: Store) -> None:
    data = lora(8)
    async with bench.instance():
        await bench.send(data, tenant())
        path = bench.folder / "files" / file_of(data).sha256
        path.write_bytes(data[:-1] + b"\0")
        with pytest.raises(LoraUnreadable, match="damaged"):
            assert [piece async for piece in read_pieces(bench.bus, file_of(data), 1 << 20)]
        with pytest.raises(LoraTooLarge):
            assert [piece async for piece in read_pieces(bench.bus, file_of(data), 16)]


async def _shared(bench: Store, count: int) -> list[LoraRecord]:
    """The shared LoRAs of this test's model, once there are `count` settled ones."""
    async with asyncio.timeout(HUNG_S), bench.records.bucket._watching(f"{EVERYONE}.*") as changes:
        async for _ in changes:
            found = [one for one in await bench.records.all_of(EVERYONE) if one.model == bench.model]
            if len(found) == count and all(one.state.settled for one in found):
                return found
    raise AssertionError("the watcher ended")


async def test_the_shared_folder_is_read_and_nothing_outside_it(bench: Store, tmp_path: Path) -> None:
    shared, secret = tmp_path / "shared", tmp_path / "secret.safetensors"
    folder = shared / bench.model
    folder.mkdir(parents=True)
    secret.write_bytes(lora(9))
    (folder / "link.safetensors").symlink_to(secret)
    (shared / "linked").symlink_to(tmp_path)
    (folder / "..safetensors").write_bytes(lora(10))
    (folder / "strange name.safetensors").write_bytes(lora(11))
    (folder / "good.safetensors").write_bytes(lora(12))
    (folder / "bad.safetensors").write_bytes(b"junk")
    async with bench.instance(lora_shared_folder=shared):
        good, bad = sorted(await _shared(bench, 2), key=lambda one: str(one.name), reverse=True)
        assert (good.name, good.state, good.source) == ("good", "ready", file_of(lora(12)))
        assert bad.error is not None
        assert (bad.name, bad.state, bad.error.code) == ("bad", "failed", "lora_unreadable")
        (folder / "bad.safetensors").unlink()
        await _shared(bench, 1)
    (folder / "good.safetensors").unlink()
    async with bench.instance(lora_shared_folder=shared):
        await _shared(bench, 0)


async def test_files_of_the_shared_folder_count_as_unfinished_from_the_first_telemetry_on(
    bench: Store, tmp_path: Path
) -> None:
    folder = tmp_path / "shared" / bench.model
    folder.mkdir(parents=True)
    (folder / "good.safetensors").write_bytes(lora(22))
    bench.may_answer.clear()
    told: asyncio.Queue[int] = asyncio.Queue()

    def hear(state: ServiceState) -> None:
        if state.loras is not None:
            told.put_nowait(state.loras.validating)

    async with (
        asyncio.timeout(HUNG_S),
        bench.bus.listen(subjects.telemetry_of(ServiceName.LORA_STORE), ServiceState, hear),
        bench.instance(lora_shared_folder=folder.parent),
    ):
        await bench.asked.get()
        counts = {told.get_nowait() for _ in range(told.qsize())}
        assert counts == {1}
        bench.may_answer.set()
        assert [one.state for one in await _shared(bench, 1)] == [LoraState.READY]


def profiled(record: LoraRecord, share: float, **changed: str) -> ProfiledLora:
    assert record.canonical is not None
    told = ProfiledLora(
        lora_id=record.lora_id,
        tenant=record.tenant,
        sha256=record.canonical.file.sha256,
        model_digest=record.canonical.model_digest,
        joins_within=share,
        remaining_ms=HUNG_MS,
    )
    return told.model_copy(update=changed)


async def test_a_share_is_kept_for_this_file_and_checkpoint_and_brings_no_deleted_lora_back(
    bench: Store,
) -> None:
    async with bench.instance():
        ready = await bench.settled(await bench.send(lora(), tenant()))
        assert ready.joins_within is None
        for share in (0.25, 0.25, 0.0):
            told = await call(bench, "profiled", profiled(ready, share), LoraRecord)
            assert told.joins_within == share
            assert await bench.records.get(ready.tenant, ready.lora_id) == told
        for changed in ({"sha256": "f" * 64}, {"model_digest": "other"}):
            with pytest.raises(LoraMismatch, match=next(iter(changed.values()))[:5]):
                await call(bench, "profiled", profiled(ready, 0.25, **changed), LoraRecord)
        for share in (-0.1, 1.0, float("nan")):
            with pytest.raises(InvalidField, match="0 to below 1"):
                await call(bench, "profiled", profiled(ready, share), LoraRecord)
        assert (await bench.records.get(ready.tenant, ready.lora_id)).joins_within == 0.0
        await call(bench, "remove", RemoveLora(**owned(ready), remaining_ms=HUNG_MS), LoraRecord)
        with pytest.raises(LoraNotFound):
            await call(bench, "profiled", profiled(ready, 0.25), LoraRecord)
        with pytest.raises(LoraNotFound):
            await bench.records.get(ready.tenant, ready.lora_id)
        again = await bench.settled(await bench.send(lora(), ready.tenant))
        assert (again.lora_id, again.joins_within) == (ready.lora_id, None)


def owned(record: LoraRecord) -> dict[str, str]:
    return {"lora_id": record.lora_id, "tenant": record.tenant}


async def test_changes_of_records_are_told_the_present_ones_first(bench: Store) -> None:
    async with bench.instance(), asyncio.timeout(HUNG_S):
        ready = await bench.settled(await bench.send(lora(), tenant()))
        key = f"{ready.tenant}.{ready.lora_id}"
        async with aclosing(bench.records.bucket.changes(key)) as changes:
            assert await anext(changes) == (key, ready)
            told = await call(bench, "profiled", profiled(ready, 0.5), LoraRecord)
            assert await anext(changes) == (key, told)
            await call(bench, "remove", RemoveLora(**owned(ready), remaining_ms=HUNG_MS), LoraRecord)
            assert await anext(changes) == (key, None)
