"""The folder that instances share, loads of a host tier that can wait, and when LoRAs are validated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from giornata.wire.errors import ServiceUnavailable
from giornata.wire.loras import CanonicalLora, LoraRecord, LoraState, NormaliseLora, StoredFile
from giornata.wire.workers import ServiceName, ServiceState
from giornata_lora_store.files import LoraFiles
from giornata_lora_store.host_tier import FileLoad, HostTierFolder, HostTierLoader
from giornata_lora_store.validation import LoraValidator
from tests.fakes import virtual_time
from tests.patience import HUNG_S


@pytest.mark.parametrize("failed", [None, OSError("the store is away")])
def test_a_planned_load_goes_on_as_soon_as_no_job_waits_for_another(
    tmp_path: Path, failed: OSError | None
) -> None:
    async def main() -> float:
        async with asyncio.TaskGroup() as tasks:
            tier = HostTierFolder(tmp_path, "t", 1 << 20)
            desk = HostTierLoader(tasks, tier, cast("LoraFiles", None), 1e9)
            planned, urgent = FileLoad("p", "plan"), FileLoad("u", "demand")
            desk._loads |= {"p": planned, "u": urgent}
            paced = tasks.create_task(desk._paced(planned))
            for _ in range(3):
                await asyncio.sleep(0)
            assert not paced.done(), "a job waits for the other one"
            desk._end(urgent, failed)
            await paced
            assert [*desk._loads] == ["p"]
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == 0.0, "it is woken, and does not wait for its time"


def test_instances_that_check_one_folder_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """In containers all of them are process 1, so that the process's number tells them not apart."""
    instances = [LoraFiles(tmp_path, file_bytes=1 << 20, total_bytes=1 << 20) for _ in range(4)]
    with ThreadPoolExecutor(len(instances)) as threads:
        checks = [threads.submit(files.check) for _ in range(200) for files in instances]
    for check in checks:
        check.result()
    assert not instances[0].sizes()


def test_a_folder_that_was_removed_fails_its_check(tmp_path: Path) -> None:
    files = LoraFiles(tmp_path, file_bytes=1 << 20, total_bytes=1 << 20)
    (tmp_path / "uploads").rmdir()
    with pytest.raises(FileNotFoundError):
        files.check()


# When LoRAs are validated: tenants take turns, and a prepost that comes is asked at once, not a pause later.


FILE = StoredFile(sha256="0" * 64, size_bytes=1)
RECORD = LoraRecord(
    lora_id="lora_1", tenant="default", created_s=0, state=LoraState.VALIDATING, model="m", source=FILE
)
NEVER_S = 1e6
"""The pause before everything is tried again, longer than the test."""


class Prepost:
    """A bus and records at once: prepost answers when it is there."""

    def __init__(self) -> None:
        self.record = RECORD
        self.is_there = False
        self.asked: asyncio.Queue[None] = asyncio.Queue()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.released = asyncio.Event()
        self.settled = asyncio.Event()

    async def call(self, _: str, request: NormaliseLora, *__: Any) -> CanonicalLora:
        was_there = self.is_there
        self.asked.put_nowait(None)
        await self.may_answer.wait()
        if not was_there:
            raise ServiceUnavailable("nobody answers")
        return CanonicalLora(file=request.lora.source or FILE, model_digest="d", rank=4, modules=1)

    async def change(self, _: str, __: str, change: Callable[[LoraRecord], LoraRecord | None]) -> LoraRecord:
        worker = self.record.worker
        self.record = change(self.record) or self.record
        if worker and self.record.worker is None:
            self.released.set()
        if self.record.state.settled:
            self.settled.set()
        return self.record


def told(*, ready: bool, instance: str = "prepost-1") -> ServiceState:
    return ServiceState(service=ServiceName.PREPOST, instance=instance, ready=ready, host="h", version="0")


@asynccontextmanager
async def validating(prepost: Any) -> AsyncIterator[LoraValidator]:
    """A validation at work on the record."""
    validation = LoraValidator(prepost, prepost, instance="lora-store-1", limit_s=60)
    running = asyncio.create_task(validation.run(NEVER_S))
    validation.add(RECORD)
    try:
        async with asyncio.timeout(HUNG_S):
            yield validation
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_prepost_that_becomes_ready_is_asked_for_what_waits() -> None:
    prepost = Prepost()
    async with validating(prepost) as validation:
        await prepost.asked.get()
        await prepost.released.wait()
        validation.hear(told(ready=False))
        assert validation.pending == 1
        prepost.is_there = True
        validation.hear(told(ready=True))
        await prepost.settled.wait()
        assert prepost.record.state is LoraState.READY


async def test_a_prepost_that_comes_while_another_fails_to_answer_is_asked_too() -> None:
    prepost = Prepost()
    prepost.may_answer.clear()
    async with validating(prepost) as validation:
        await prepost.asked.get()
        prepost.is_there = True
        validation.hear(told(ready=True))
        prepost.may_answer.set()
        await prepost.settled.wait()


async def test_a_prepost_that_is_ready_as_before_is_no_reason_to_ask_again() -> None:
    prepost = Prepost()
    async with validating(prepost) as validation:
        await prepost.released.wait()
        validation.hear(told(ready=True))
        await prepost.asked.get()
        await prepost.asked.get()
        for _ in range(3):
            validation.hear(told(ready=True))
        prepost.is_there = True
        validation.hear(told(ready=True, instance="prepost-2"))
        await prepost.settled.wait()
        assert prepost.asked.qsize() == 1


class SlowPrepost:
    """A bus and records at once: every LoRA is with prepost until the test lets it end."""

    def __init__(self, *records: LoraRecord) -> None:
        self.records = {record.lora_id: record for record in records}
        self.asked: asyncio.Queue[str] = asyncio.Queue()
        self.ends = {record.lora_id: asyncio.Event() for record in records}

    async def call(self, _: str, request: NormaliseLora, *__: Any) -> CanonicalLora:
        self.asked.put_nowait(request.lora.lora_id)
        await self.ends[request.lora.lora_id].wait()
        return CanonicalLora(file=FILE, model_digest="d", rank=4, modules=1)

    async def change(
        self, _: str, lora_id: str, change: Callable[[LoraRecord], LoraRecord | None]
    ) -> LoraRecord:
        record = self.records[lora_id] = change(self.records[lora_id]) or self.records[lora_id]
        return record

    async def end(self, lora_id: str) -> str:
        """Let one end; the one that is asked for then."""
        self.ends[lora_id].set()
        return await self.asked.get()


async def test_a_tenant_waits_behind_one_lora_of_another_at_most_and_all_take_turns() -> None:
    ids = ["alice-1", "alice-2", "alice-3", "bob-1", "bob-2", "carol-1"]
    records = [
        RECORD.model_copy(update={"lora_id": lora_id, "tenant": lora_id.partition("-")[0]}) for lora_id in ids
    ]
    prepost: Any = SlowPrepost(*records)
    validation = LoraValidator(prepost, prepost, instance="lora-store-1", limit_s=60)
    for record in records[:3]:
        validation.add(record)
    running = asyncio.create_task(validation.run(NEVER_S))
    try:
        async with asyncio.timeout(HUNG_S):
            assert await prepost.asked.get() == "alice-1"
            for record in records[3:]:
                validation.add(record)
            assert await prepost.asked.get() == "bob-1"
            assert await prepost.end("alice-1") == "carol-1"
            assert await prepost.end("bob-1") == "alice-2"
            assert await prepost.end("alice-2") == "bob-2"
            assert await prepost.end("bob-2") == "alice-3"
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert not prepost.asked.qsize()
