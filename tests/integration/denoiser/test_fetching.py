"""Where a denoiser takes files of LoRAs from: its machine's host tier, else as if there were none."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from giornata.lora_files import TIER_NAME, WHOLE_FILES
from giornata.wire.errors import LoraNotFound, ServiceUnavailable
from giornata.wire.loras import StoredFile
from giornata_denoiser.loras import LoraStoreFetcher, tier_in
from giornata_denoiser.rows.parts import RowLora
from tests.integration.lora_bench import Store, open_bench
from tests.integration.lora_store.test_host_tier import MB, hearing, options, put


@pytest.fixture
async def bench(nats_url: str, tmp_path: Path) -> AsyncIterator[Store]:
    async with open_bench(nats_url, tmp_path) as opened:
        yield opened


def host(bench: Store) -> Path:
    return bench.folder.parent / "host"


async def fetched(
    fetching: LoraStoreFetcher, file: StoredFile, folder: Path, *, ahead: bool = False
) -> bytes:
    path = folder / "fetched"
    lora = RowLora(digest=file.sha256, size_bytes=file.size_bytes)
    await asyncio.to_thread(fetching, lora, path, ahead=ahead)
    data = path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == file.sha256
    return data


async def test_a_file_comes_by_way_of_the_host_tier(bench: Store, tmp_path: Path) -> None:
    needed, coming = put(bench.folder, 1), put(bench.folder, 2)
    async with hearing(bench) as heard, bench.instance(**options(bench)):
        fetching = LoraStoreFetcher(bench.bus, MB, None, host(bench))
        assert tier_in(host(bench)) == bench.model
        await fetched(fetching, needed, tmp_path)
        await fetched(fetching, coming, tmp_path, ahead=True)
        await heard.holds(needed, coming)
        await heard.until(lambda: heard.told.loads.ahead == 1)
        assert heard.told.loads.demand == 1


async def test_a_damaged_file_of_the_tier_is_brought_again(bench: Store, tmp_path: Path) -> None:
    file = put(bench.folder, 1)
    async with bench.instance(**options(bench)):
        fetching = LoraStoreFetcher(bench.bus, MB, None, host(bench))
        await fetched(fetching, file, tmp_path)
        here = host(bench) / WHOLE_FILES / file.sha256
        here.write_bytes(b"damaged")
        await fetched(fetching, file, tmp_path)
        assert hashlib.sha256(here.read_bytes()).hexdigest() == file.sha256


async def test_what_the_tier_has_no_room_for_comes_from_the_store(bench: Store, tmp_path: Path) -> None:
    file = put(bench.folder, 1, 2 * MB)
    async with bench.instance(**options(bench)):
        await fetched(LoraStoreFetcher(bench.bus, 4 * MB, None, host(bench)), file, tmp_path)


async def test_without_the_store_of_the_tier_another_one_is_asked(bench: Store, tmp_path: Path) -> None:
    file = put(bench.folder, 1)
    async with bench.instance(**options(bench)):
        pass  # its folder stays
    async with bench.instance():
        await fetched(LoraStoreFetcher(bench.bus, MB, None, host(bench)), file, tmp_path)
    assert not (host(bench) / WHOLE_FILES / file.sha256).exists()


async def test_without_a_tier_the_folder_of_the_store_is_read(bench: Store, tmp_path: Path) -> None:
    file = put(bench.folder, 1)
    await fetched(LoraStoreFetcher(bench.bus, MB, bench.folder, host(bench)), file, tmp_path)


async def test_what_no_store_has_is_told(bench: Store, tmp_path: Path) -> None:
    async with bench.instance(**options(bench)):
        with pytest.raises(LoraNotFound):
            await fetched(
                LoraStoreFetcher(bench.bus, MB, None, host(bench)),
                StoredFile(sha256="0" * 64, size_bytes=1),
                tmp_path,
            )


async def test_a_closed_one_fetches_nothing(bench: Store, tmp_path: Path) -> None:
    fetching = LoraStoreFetcher(bench.bus, MB, None, None)
    fetching.close()
    with pytest.raises(ServiceUnavailable):
        await fetched(fetching, put(bench.folder, 1), tmp_path)


@pytest.mark.parametrize("name", ["", "a b", "x" * 200, "../x"])
def test_a_folder_that_tells_no_tier_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / TIER_NAME).write_text(name)
    assert tier_in(tmp_path) is None
    assert tier_in(tmp_path / "none") is None
    assert tier_in(None) is None
