"""Loads of a host tier that can wait: held while a job waits for another one, and woken when that has ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from giornata_lora_store.files import LoraFiles
from giornata_lora_store.host_tier import FileLoad, HostTierFolder, HostTierLoader
from tests.fakes import virtual_time


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
