"""Template runs: one run counts at a time, and nothing that fails there ends an edit or the worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from safetensors import SafetensorError

from giornata import tensors
from giornata.wire.jobs import BlobRef
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.present import present
from tests.unit.denoiser.attempts.test_attempt import INSPECTION
from tests.unit.denoiser.engine.test_masked import OF
from tests.unit.denoiser.templates.desk import CHECKPOINT, desk


@pytest.mark.parametrize("error", [RuntimeError("broken"), MemoryError()])
async def test_a_template_that_cannot_be_kept_ends_its_run_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with desk() as made:

        def broken(_: object) -> None:
            raise error

        monkeypatch.setattr(made.store, "put", broken)
        assert (await made.ask()).recording is None
        made.finish(await made.submitted(1))
        assert await made.told(1) == [("report", "template_1", "internal_error")]
        assert made.runs.counters().failed == 1


async def test_a_full_disk_leaves_the_template_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path) as made:

        def full(*_: object, **__: object) -> None:
            raise SafetensorError("I/O error: No space left on device (os error 28)")

        monkeypatch.setattr("giornata_denoiser.templates.store.save_file", full)
        await made.ask()
        made.finish(await made.submitted(1))
        assert (await made.told(1))[0][0] == "report"
        assert (await made.ask()).recording is not None


async def test_a_run_that_was_removed_while_it_fetched_begins_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next edit begins another of the same name: one row is submitted, and one run ends."""
    async with desk() as made:
        go_on = asyncio.Event()
        get, fetches = made.blobs.get, 0

        async def slow(ref: BlobRef) -> bytes:
            nonlocal fetches
            fetches += 1
            await go_on.wait()
            return await get(ref)

        monkeypatch.setattr(made.blobs, "get", slow)
        await made.ask()
        await asyncio.sleep(0)
        made.remove()
        await made.ask()
        await asyncio.sleep(0)
        assert fetches == 2
        go_on.set()
        row = await made.submitted(1)
        await asyncio.sleep(0.05)
        assert made.engine.submitted == [row]
        made.finish(row)
        told = await made.told(2)
        assert told[0] == ("report", "template_1", "template_not_found")
        assert (await made.ask()).recording is not None
        assert made.runs.counters().recorded == 1


async def test_a_void_run_neither_ends_nor_cancels_the_one_that_counts() -> None:
    async with desk() as made:
        await made.ask()
        first = await made.submitted(1)
        made.remove()
        assert len(made.engine.batch) == 0
        await made.ask()
        second = await made.submitted(2)
        assert (first.key.job_id, first.key != second.key) == (second.key.job_id, True)
        made.finish(first)  # it was computed meanwhile
        await asyncio.sleep(0.05)
        assert made.runs.counters().recorded == 0
        assert len(made.engine.batch) == 1
        made.finish(second)
        await made.told(2)
        assert (made.runs.counters().recorded, made.runs.counters().failed) == (1, 1)


async def test_a_row_that_is_not_taken_ends_its_run_and_not_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with desk() as made:

        def refuse(_: object) -> bool:
            raise ValueError("row is in the batch already")

        monkeypatch.setattr(made.engine, "submit", refuse)
        await made.ask()
        assert await made.told(1) == [("report", "template_1", "internal_error")]


async def test_a_picture_that_nothing_holds_is_never_recorded() -> None:
    async with desk(template_memory_mb=0) as made:
        for _ in range(4):
            assert (await made.ask()).recording is None
        await asyncio.sleep(0.05)
        assert made.engine.submitted == []


async def test_a_picture_larger_than_memory_is_recorded_once_and_smaller() -> None:
    tokens = 1024  # of 4 blocks, 2 parts and 7 levels of float32: 14 MiB
    async with desk(template_memory_mb=3, template_bits=0, template_levels=7) as made:
        text, conditioning = tiny_flux.inputs(OF, Spec(grid=(32, 32)))
        refs = [
            await made.blobs.put(name, tensors.pack(data), 60)
            for name, data in (("a", text), ("b", conditioning))
        ]
        large = INSPECTION.model_copy(
            update={
                "tokens": tokens,
                "model_height": 32 * CHECKPOINT.card.pixel_multiple,
                "model_width": 32 * CHECKPOINT.card.pixel_multiple,
            }
        )
        request = made.edit(*refs).model_copy(update={"inspection": large})
        await made.ask(request)
        row = await made.submitted(1)
        assert (row.steps, present(row.records).first_block) == (4, 3)
        made.finish(row)
        await made.told(1)
        for _ in range(3):
            assert (await made.ask(request)).recording is not None
        assert made.engine.submitted == [row]


async def test_whatever_fails_in_reading_a_template_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk(template_policy="off") as made:

        def broken(_: str) -> None:
            raise RuntimeError("CUDA error")

        monkeypatch.setattr(made.store, "find", broken)
        assert (await made.ask()).recording is None
