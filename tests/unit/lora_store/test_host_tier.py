"""The folder that instances share, and loads of a host tier that can wait."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
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
