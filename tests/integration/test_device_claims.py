"""A GPU for each replica, and what processes state of its memory; on GPUs that are told to them and do not exist."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from giornata.checkpoints import DeviceConfig
from giornata.gpus import (
    DEVICES,
    VISIBLE,
    DeviceLedger,
    GpuMemoryClaim,
    claim_gpus,
    gpus_of,
    host_device,
    lock_gpus,
    see_alone,
    visible_alone,
    visible_gpus,
)
from giornata.scratch import exclusive_lock
from giornata.wire.errors import Failed, NoFreeDevice
from giornata.wire.workers import HostDevice, ServiceName
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.pool.messages import RankSetup
from giornata_denoiser.pool.ranks import LocalRankProcess, start_ranks
from tests.forked_processes import FORKS, TorchProcess
from tests.patience import HUNG_S

GPUS = tuple(HostDevice(device=f"cuda:{index}", id=f"GPU-{index}a") for index in range(3))


async def two() -> tuple[HostDevice, ...]:
    return GPUS[:2]


def claim(folder: Path, name: str, pipe: Connection) -> None:
    """Claim as a service does, tell what was found, and keep it until this process ends."""

    async def claims() -> None:
        async with claim_gpus(ServiceName.DENOISER, name, folder, 1, seen=two) as mine:
            pipe.send(([gpu.device for gpu in mine], os.environ.get(VISIBLE)))
            pipe.recv()

    try:
        asyncio.run(claims())
    except NoFreeDevice as error:
        pipe.send(str(error))


class Replica:
    """A process that claims."""

    def __init__(self, folder: Path, name: str) -> None:
        self._pipe, there = FORKS.Pipe()
        self.process = FORKS.Process(target=claim, args=(folder, name, there), daemon=True)
        self.process.start()
        there.close()

    def told(self) -> Any:
        """Its GPUs, and what it lets CUDA see; or why it has none."""
        return self._pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join(HUNG_S)


def test_replicas_that_start_together_have_a_gpu_each_and_a_killed_ones_goes_to_the_next(
    tmp_path: Path,
) -> None:
    replicas = [Replica(tmp_path, f"d{number}") for number in range(2)]
    told = [replica.told() for replica in replicas]
    assert sorted(devices for devices, _ in told) == [[gpu.device] for gpu in GPUS[:2]]
    ids = {gpu.device: gpu.id for gpu in GPUS}
    assert all(visible == ids[devices[0]] for devices, visible in told), "CUDA sees no other"
    replicas.append(Replica(tmp_path, "another"))
    refused = replicas[-1].told()
    assert "Received: 1 wanted, 0 of 2 free." in refused
    assert all(f"{devices[0]} by d{number}" in refused for number, (devices, _) in enumerate(told))
    replicas[0].end()
    replicas.append(Replica(tmp_path, "successor"))
    assert replicas[-1].told() == told[0]
    for replica in replicas:
        replica.end()


@pytest.mark.parametrize(("device", "wanted"), [("cuda", 1), ("auto", 1), ("cuda:3", 0), ("cpu", 0)])
def test_a_replica_with_a_device_by_number_claims_nothing(device: str, wanted: int) -> None:
    assert DeviceConfig(device=device).gpus_wanted == wanted


def test_services_do_not_stand_in_each_others_way(tmp_path: Path) -> None:
    with (
        lock_gpus(tmp_path, "denoiser", "d1", GPUS[:1], 1) as first,
        lock_gpus(tmp_path, "prepost", "p1", GPUS[:1], 1) as other,
    ):
        assert first == other == GPUS[:1]


def test_what_cannot_be_claimed_whole_is_left_to_others(tmp_path: Path) -> None:
    with lock_gpus(tmp_path, "denoiser", "d1", GPUS[:2], 1):
        with pytest.raises(NoFreeDevice), lock_gpus(tmp_path, "denoiser", "d2", GPUS[:2], 2):
            pass
        with lock_gpus(tmp_path, "denoiser", "d3", GPUS[:2], 1) as found:
            assert found == GPUS[1:2]


def test_of_two_that_want_several_one_looks_first(tmp_path: Path) -> None:
    claimed = threading.Event()

    def claim() -> None:
        with lock_gpus(tmp_path, "denoiser", "d1", GPUS, 2):
            claimed.set()

    thread = threading.Thread(target=claim)
    with exclusive_lock(tmp_path):
        thread.start()
        assert not claimed.wait(0.1)
    thread.join(HUNG_S)
    assert claimed.is_set()


def test_a_folder_is_made_for_this_user_alone_and_an_unfit_one_is_told(tmp_path: Path) -> None:
    with lock_gpus(tmp_path / "a" / "b", "denoiser", "d1", GPUS, 1):
        assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    with (
        pytest.raises(Failed, match="No GPU can be claimed in"),
        lock_gpus(tmp_path / "file", "denoiser", "d1", GPUS, 1),
    ):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_of_a_pool_see_what_their_leader_has_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each its own, before it has loaded torch; there it is the first one."""
    monkeypatch.setenv(VISIBLE, "GPU-3a,GPU-5a")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    told = dict[int, tuple[str, bytes]]()

    class Started(LocalRankProcess):
        def __init__(self, opening: RankSetup, visible: str | None = None) -> None:
            super().__init__(cast("RankSetup", None), visible)
            while not (environ := Path(f"/proc/{self.pid}/environ").read_bytes()):
                time.sleep(0.01)  # Popen returns a moment before the new program's stack is set up
            told[opening.me] = opening.config.device, environ

    monkeypatch.setattr("giornata_denoiser.pool.ranks.LocalRankProcess", Started)
    ranks = start_ranks(DenoiserConfig(model="m", devices="cuda:0,cuda:1"))
    ranks.close(within_s=0.0)
    for me, shown in enumerate(("GPU-3a", "GPU-5a")):
        assert told[me][0] == "cuda:0"
        assert f"{VISIBLE}={shown}".encode() in told[me][1].split(b"\0")


async def test_gpus_are_told_by_a_process_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (tmp_path / "giornata").mkdir()
    (tmp_path / "giornata" / "__init__.py").touch()
    (tmp_path / "giornata" / "gpus.py").write_text(f"print({DEVICES.dump_json(GPUS).decode()!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert await visible_gpus() == GPUS


async def test_a_torch_that_fails_is_no_machine_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (tmp_path / "torch.py").write_text("raise ImportError('libcuda.so.1 is damaged')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        Failed, match=r"torch could not tell the GPUs of this host: .*libcuda\.so\.1 is damaged"
    ):
        await visible_gpus()


async def test_a_torch_for_the_cpu_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unasked(*_: str, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr("asyncio.create_subprocess_exec", unasked)
    assert await visible_gpus() == ()


async def test_nothing_changes_on_a_cpu_or_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)

    async def none() -> tuple[HostDevice, ...]:
        return ()

    async def unasked() -> tuple[HostDevice, ...]:
        raise AssertionError

    for folder, wanted, seen in ((tmp_path / "c", 1, none), (None, 1, unasked), (tmp_path / "c", 0, unasked)):
        async with claim_gpus(ServiceName.DENOISER, "d1", folder, wanted, seen=seen) as found:
            assert found == ()
    assert not (tmp_path / "c").exists()
    assert VISIBLE not in os.environ


class Driver:
    """CUDA on a machine with two GPUs, as torch asks it: what it shows is settled when it is first asked.

    Until then torch counts by NVML, where that is, which follows the variable.
    """

    def __init__(self, *, nvml: bool = True) -> None:
        self.nvml = nvml
        self.shown: list[str] = []

    def ask(self) -> list[str]:
        self.shown = self.shown or self.visible()
        return self.shown

    def visible(self) -> list[str]:
        ids = [gpu.id for gpu in GPUS[:2]]
        named = os.environ.get(VISIBLE, ",".join(ids)).split(",")
        return [ids[int(name)] if name.isdigit() else name for name in named if name]

    def count(self) -> int:
        return len(self.visible() if self.nvml else self.ask())

    def properties(self, device: torch.device) -> SimpleNamespace:
        self.nvml = False  # torch has asked CUDA itself
        return SimpleNamespace(uuid=self.ask()[device.index or 0].removeprefix("GPU-"))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """What CUDA tells on a machine with two GPUs, in a process that has not asked it before."""
    driver = Driver()
    monkeypatch.setenv(VISIBLE, "GPU-0a,GPU-1a")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", driver.count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", driver.properties)
    return driver


def name_of(device: torch.device) -> HostDevice:
    return HostDevice(
        device=f"cuda:{device.index or 0}", id=os.environ[VISIBLE].split(",")[device.index or 0]
    )


async def gpus_told(
    config: DeviceConfig, named: Callable[[torch.device], HostDevice] = name_of
) -> tuple[HostDevice, ...]:
    async def seen() -> tuple[HostDevice, ...]:
        return GPUS[:2]

    async with gpus_of(ServiceName.DENOISER, config, seen=seen, named=named) as (_, found):
        return found


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("device", "told"), [("auto", GPUS[:1]), ("cuda", GPUS[:1]), ("cuda:1", GPUS[1:2]), ("cpu", ())]
)
async def test_the_gpu_that_an_instance_uses_is_told_where_none_is_claimed(
    device: str, told: tuple[HostDevice, ...]
) -> None:
    assert await gpus_told(DeviceConfig(device=device)) == told


@pytest.mark.usefixtures("two_gpus")
async def test_a_process_sees_the_gpu_alone_that_it_is_told_by_number() -> None:
    """Events and Triton's launches go to a thread's current device: to the first one that the process sees."""
    config = DeviceConfig(device="cuda:1")
    async with gpus_of(ServiceName.DENOISER, config, named=name_of) as (own, _):
        assert (own.torch_device(), os.environ[VISIBLE]) == (torch.device("cuda:0"), "GPU-1a")
    pool = DenoiserConfig(model="m", device="cuda:1", devices="cuda:0,cuda:1")
    os.environ[VISIBLE] = "GPU-0a,GPU-1a"
    async with gpus_of(ServiceName.DENOISER, pool) as (own, _):
        assert (own, os.environ[VISIBLE]) == (pool, "GPU-0a,GPU-1a"), "a leader shows each rank its own"


@pytest.mark.parametrize(
    ("visible", "first", "second"),
    [(None, "0", "1"), ("3,1", "3", "1"), ("GPU-3a, GPU-5a", "GPU-3a", "GPU-5a"), ("7", "7", "")],
)
def test_a_number_counts_the_gpus_that_are_shown(visible: str | None, first: str, second: str) -> None:
    assert [visible_alone(f"cuda:{index}", visible) for index in range(2)] == [first, second]


@pytest.mark.parametrize("visible", [None, "0,1", "GPU-0a,GPU-1a"])
def test_a_process_that_has_asked_cuda_before_is_no_longer_shown_one_gpu(
    two_gpus: Driver, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    """NVML would count one."""
    monkeypatch.delenv(VISIBLE) if visible is None else monkeypatch.setenv(VISIBLE, visible)
    two_gpus.ask()
    with pytest.raises(Failed, match="CUDA shows cuda:1 beside other GPUs") as refused:
        see_alone("cuda:1")
    assert refused.value.body().received.startswith("GPU-0a in place of ")  # type: ignore[union-attr]  # it has one


def test_another_gpu_that_cuda_shows_alone_is_not_taken_for_the_wanted_one(
    two_gpus: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, "GPU-0a")
    two_gpus.ask()
    monkeypatch.setenv(VISIBLE, "GPU-1a,GPU-0a")
    with pytest.raises(Failed, match="CUDA shows cuda:0 beside other GPUs"):
        see_alone("cuda:0")


@pytest.mark.parametrize("visible", [None, "0,1", "GPU-0a,GPU-1a"])
def test_without_nvml_the_first_gpu_serves_and_others_are_refused(
    two_gpus: Driver, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    """torch then counts by CUDA, which shows from there on what it has shown."""
    monkeypatch.delenv(VISIBLE) if visible is None else monkeypatch.setenv(VISIBLE, visible)
    two_gpus.nvml = False
    with pytest.raises(Failed, match="CUDA shows cuda:1 beside other GPUs") as refused:
        see_alone("cuda:1")
    assert str(refused.value.body().accepted).startswith("cuda:0 where there is no NVML")
    monkeypatch.delenv(VISIBLE) if visible is None else monkeypatch.setenv(VISIBLE, visible)
    assert see_alone("cuda:0") == "cuda:0"


@pytest.mark.usefixtures("two_gpus")
async def test_a_claimed_gpu_is_told_as_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "")
    [told] = await gpus_told(DeviceConfig(device="cuda", device_claims=tmp_path))
    assert told == GPUS[0].model_copy(update={"claimed": True})


async def test_a_gpu_that_was_claimed_after_cuda_was_asked_is_an_error(
    two_gpus: Driver, tmp_path: Path
) -> None:
    two_gpus.ask()
    with (
        lock_gpus(tmp_path, ServiceName.DENOISER, "d2", GPUS[:1], 1),
        pytest.raises(Failed, match="CUDA shows another GPU than the claimed one") as refused,
    ):
        await gpus_told(DeviceConfig(device="cuda", device_claims=tmp_path), host_device)
    assert (refused.value.body().received, refused.value.body().accepted) == ("GPU-0a", "GPU-1a")


@pytest.mark.usefixtures("two_gpus")
async def test_a_pool_of_numbered_gpus_leaves_them_to_its_ranks() -> None:
    assert await gpus_told(DenoiserConfig(model="m", devices="cuda:0,cuda:1")) == ()


@pytest.mark.parametrize("claims_", [False, True])
async def test_a_named_gpu_that_is_not_seen_is_an_error_and_no_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, claims_: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # NVML still counts what CUDA cannot use

    async def none() -> tuple[HostDevice, ...]:
        return ()

    config = DeviceConfig(device="cuda", device_claims=tmp_path if claims_ else None)
    with pytest.raises(Failed, match="GIORNATA_DEVICE names a GPU that torch does not see") as refused:
        async with gpus_of(ServiceName.DENOISER, config, seen=none):
            pass
    body = refused.value.body()
    assert body.received == f"cuda, where torch {torch.__version__} sees no GPU"
    assert body.accepted == "cpu, auto"
    async with gpus_of(ServiceName.DENOISER, DenoiserConfig(model="m", device="cuda", devices="cpu,cpu")) as (
        _,
        found,
    ):
        assert found == (), "a pool computes on its own devices"


@pytest.mark.usefixtures("two_gpus")
def test_a_number_that_no_gpu_has_is_refused() -> None:
    with pytest.raises(Failed) as refused:
        DeviceConfig(device="cuda:2").torch_device()
    assert refused.value.body().accepted == "cpu, auto, cuda:0, cuda:1"
    assert "sees 2 GPUs" in str(refused.value)


# What processes of a host state of a GPU's memory: seen by the others, and gone with the process.


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
