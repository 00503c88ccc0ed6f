"""The LoRA store's folder, which several instances share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from giornata_lora_store.files import LoraFiles


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
