"""What processes of a host state of a GPU's memory: seen by the others, and gone with the process."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from giornata.gpus import DeviceLedger, GpuMemoryClaim
from giornata.wire.errors import Failed
from tests.forked_processes import FORKS, TorchProcess
from tests.patience import HUNG_S


def state(folder: Path, size_bytes: int, pipe: Connection) -> None:
    """State so many bytes until this process ends."""
    ledger = DeviceLedger(folder, "GPU-a", "prepost")
    ledger.state(size_bytes)
    pipe.send(None)
    with suppress(EOFError):
        pipe.recv()


def process(folder: Path, size_bytes: int) -> tuple[TorchProcess, Connection]:
    """Another process that has stated so many bytes; it ends when its pipe is closed."""
    here, there = FORKS.Pipe()
    started = TorchProcess(target=state, args=(folder, size_bytes, there), daemon=True)
    started.start()
    there.close()
    here.recv()
    return started, here


def test_a_statement_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    mine = DeviceLedger(tmp_path / "ledger", "GPU-a", "denoiser")
    mine.state(5)
    (killed, _), (ends, pipe) = process(tmp_path / "ledger", 7), process(tmp_path / "ledger", 11)
    assert sorted(mine.others()) == [
        GpuMemoryClaim("GPU-a", "prepost", 7),
        GpuMemoryClaim("GPU-a", "prepost", 11),
    ]
    assert mine.others_bytes() == 18
    killed.kill()
    killed.join(HUNG_S)
    assert mine.others_bytes() == 11
    pipe.close()
    ends.join(HUNG_S)
    assert mine.others() == []
    assert len(list((tmp_path / "ledger").iterdir())) == 1, "the files of the dead are removed"


def test_processes_see_each_other_and_sum_up_their_own_gpu_alone(tmp_path: Path) -> None:
    one, same, other = (
        DeviceLedger(tmp_path, gpu, service)
        for gpu, service in (("GPU-a", "denoiser"), ("GPU-a", "prepost"), ("GPU-b", "denoiser"))
    )
    assert one.others_bytes() == 0, "a process that has stated nothing yet needs nothing"
    for ledger, size_bytes in ((one, 1), (same, 10**11), (other, 100)):
        ledger.state(size_bytes)
    same.state(20)
    assert (one.others_bytes(), same.others_bytes(), other.others_bytes()) == (20, 1, 0)
    assert len(other.others()) == 2


def test_without_a_folder_or_a_gpu_nothing_is_stated(tmp_path: Path) -> None:
    for alone in (
        DeviceLedger(),
        DeviceLedger(None, "GPU-a", "denoiser"),
        DeviceLedger(tmp_path, None, "prepost"),
    ):
        alone.state(5)
        assert (alone.folder, alone.others(), alone.others_bytes()) == (None, [], 0)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Failed, match=r"No memory can be stated in .*file"):
        DeviceLedger(tmp_path / "file", "GPU-a", "denoiser")
