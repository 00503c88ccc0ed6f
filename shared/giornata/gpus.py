"""The GPUs of a host: which one a process sees, which one it claims, and what services state of its memory.

A process computes on one GPU and sees no other: events and Triton's launches go to the current device of their thread,
which is the first one. One that has asked torch for GPUs sees them until it ends. So a service that is to see one of
them asks a program first: ``python -m giornata.gpus`` tells those that torch sees here, as JSON. Imports torch.

A claim is a lock on a file, named for a service and a GPU, in a folder that the replicas of a host share. It is
advisory: a process that does not ask can use the GPU all the same. Different services may have one GPU: each states in
a ledger what it needs of its memory, before it takes that.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from uuid import uuid4

import structlog
import torch
from pydantic import TypeAdapter, ValidationError

from giornata.control.networks import device_id
from giornata.scratch import exclusive_lock, lock_if_free
from giornata.wire.errors import Failed, NoFreeDevice
from giornata.wire.workers import HostDevice, ServiceName

if TYPE_CHECKING:
    from giornata.checkpoints import DeviceConfig

log = structlog.get_logger(__name__)

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def host_device(device: torch.device) -> HostDevice:
    """A GPU that this process may use, as its host knows it. Asks CUDA, which then sees the same GPUs until the end."""
    return HostDevice(device=f"{device.type}:{device.index or 0}", id=f"GPU-{device_id(device)}")


def visible_alone(device: str, visible: str | None) -> str:
    """The value of :data:`VISIBLE` that shows ``cuda:N`` alone, of the GPUs that the value `visible` shows in order."""
    index = int(device.removeprefix("cuda:"))
    return str(index) if visible is None else "".join(visible.split(",")[index : index + 1]).strip()


def see_alone(device: str) -> str:
    """Have CUDA show this process the GPU ``cuda:N`` alone, before it asks CUDA for any; its name from then on.

    A device without a number is left as it is, and so is a number that no GPU has. Without NVML torch asks CUDA itself
    to count its GPUs, and then sees them until the end: of those ``cuda:0`` needs no restriction, being the first.

    Raises:
        Failed: this process has asked CUDA before, or there is no NVML, and the GPU is not the first that CUDA shows.
    """
    if not device.startswith("cuda:") or (index := int(device[5:])) >= torch.cuda.device_count():
        return device
    own = os.environ[VISIBLE] = visible_alone(device, os.environ.get(VISIBLE))
    first = host_device(torch.device("cuda", 0)).id  # from here on the count is CUDA's own
    if (index and torch.cuda.device_count() != 1) or (own.startswith("GPU-") and not first.startswith(own)):
        message = f"CUDA shows {device} beside other GPUs. Set {VISIBLE} to it, and GIORNATA_DEVICE to cuda."
        raise Failed(message, received=f"{first} in place of {own}", accepted="cuda:0 where there is no NVML")
    return "cuda:0"


# A GPU for each replica: claimed when an instance starts, and kept while it runs.


ASKING_S: Final = 120.0
"""Most that telling the GPUs may take: it loads torch and wakes the driver."""
SUFFIX: Final = ".memory"
"""Of the files in a ledger, which may lie in the folder of the claims."""
DEVICES: Final = TypeAdapter(tuple[HostDevice, ...])

C = TypeVar("C", bound="DeviceConfig")


async def visible_gpus() -> tuple[HostDevice, ...]:
    """The GPUs that this process may use, told by another one: this one must not meet CUDA before it is restricted.

    A torch that was built for the CPU sees none, and is not asked.

    Raises:
        Failed: they cannot be told.
    """
    if torch.version.cuda is None:
        return ()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "giornata.gpus"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(ASKING_S):
            told, errors = await process.communicate()
        return DEVICES.validate_json(told)
    except TimeoutError:
        raise Failed(f"torch did not tell the GPUs of this host within {ASKING_S:.0f} s.") from None
    except ValidationError as error:
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise Failed(f"torch could not tell the GPUs of this host: {reason}") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@asynccontextmanager
async def gpus_of(
    service: ServiceName,
    config: C,
    *,
    seen: Callable[[], Awaitable[Sequence[HostDevice]]] = visible_gpus,
    named: Callable[[torch.device], HostDevice] = host_device,
) -> AsyncIterator[tuple[C, tuple[HostDevice, ...]]]:
    """`config` of a process that sees no GPU but its own, and the GPUs that the instance computes on.

    They are those that it claims (:func:`claim_gpus`), or the one that it is told; none on a CPU, and none of a pool
    that claims nothing: its ranks tell theirs. `named` asks CUDA for a GPU's name.

    Raises:
        NoFreeDevice: other instances of `service` have too many of them.
        Failed: the configuration names a GPU that torch does not see; or as :func:`claim_gpus`.
    """
    async with claim_gpus(
        service, config.instance, config.device_claims, config.gpus_wanted, seen=seen
    ) as found:
        alone = config.seeing_alone()
        own = [named(device) for device in alone.own_devices() if device.type == "cuda"]
        if found and own and own[0].id != found[0].id:
            message = "CUDA shows another GPU than the claimed one: this process has asked it before."
            raise Failed(message, received=own[0].id, accepted=found[0].id)
        if alone.device != config.device:  # told by the number that it was given
            own = [gpu.model_copy(update={"device": config.device}) for gpu in own]
        yield alone, found or tuple(own)


@asynccontextmanager
async def claim_gpus(
    service: ServiceName,
    instance: str,
    folder: Path | None,
    wanted: int,
    *,
    seen: Callable[[], Awaitable[Sequence[HostDevice]]] = visible_gpus,
) -> AsyncIterator[tuple[HostDevice, ...]]:
    """Claim so many GPUs and show CUDA no others, from ``cuda:0`` on; nothing without a `folder`, or without any GPU.

    It is entered before this process asks torch for a GPU. `seen` tells the GPUs that there are.

    Raises:
        NoFreeDevice: other instances of `service` have too many of them.
        Failed: the GPUs cannot be told, or the folder is no folder that this user may write.
    """
    gpus = await seen() if folder is not None and wanted else ()
    if folder is None or not gpus:
        yield ()
        return
    with lock_gpus(folder, service, instance, gpus, wanted) as found:
        if len(found) < len(gpus):
            os.environ[VISIBLE] = ",".join(gpu.id for gpu in found)
        log.info("devices_claimed", devices=[f"{gpu.device} {gpu.id}" for gpu in found])
        yield tuple(gpu.model_copy(update={"claimed": True}) for gpu in found)


@contextmanager
def lock_gpus(
    folder: Path, service: str, instance: str, gpus: Sequence[HostDevice], wanted: int
) -> Iterator[tuple[HostDevice, ...]]:
    """Hold the first `wanted` of `gpus` that no other instance of `service` holds: all of them, or none.

    Raises:
        NoFreeDevice: fewer are free; says who has the others.
        Failed: the folder is no folder that this user may write.
    """
    found: list[HostDevice] = []
    others: list[str] = []
    with ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with exclusive_lock(folder):  # of two that want several, one shall have them
                for gpu in gpus:
                    holder = stack.enter_context(_claim(folder / f"{service}-{gpu.id}", instance))
                    if holder is None:
                        found.append(gpu)
                    else:
                        others.append(f"{gpu.device} by {holder}")
                    if len(found) == wanted:
                        break
        except OSError as error:
            raise Failed(f"No GPU can be claimed in {folder}: {error.strerror or error}.") from error
        if len(found) < wanted:
            raise NoFreeDevice(
                f"Too few GPUs of this host are free for another {service}. Taken: {', '.join(others) or 'none'}.",
                received=f"{wanted} wanted, {len(found)} of {len(gpus)} free",
                accepted="as many replicas on a host as it has GPUs for, or a GPU by its number, which is not claimed",
            )
        yield tuple(found)


@contextmanager
def _claim(path: Path, instance: str) -> Iterator[str | None]:
    """Take the file at `path` for `instance`; None, or who has it."""
    with lock_if_free(path) as handle:
        if handle is None:
            yield path.read_text(encoding="utf-8", errors="replace")[:128] or "another instance"
        else:
            os.ftruncate(handle, 0)
            os.pwrite(handle, instance.encode(), 0)
            yield None


class GpuMemoryClaim(NamedTuple):
    """A living process's claim on the memory of its GPU."""

    gpu: str
    service: str
    size_bytes: int


class DeviceLedger:
    """The memory needs of all processes of a host, in `folder`, as one of `service` on `gpu` sees them.

    A statement is a locked file, as a claim is: it ends with its process. Without a folder, or a GPU, there are none.

    Raises:
        Failed: the folder is no folder that this user may write.
    """

    def __init__(self, folder: Path | None = None, gpu: str | None = None, service: str = "") -> None:
        self.folder, self.gpu = folder if gpu else None, gpu
        if self.folder is None:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with exclusive_lock(self.folder):  # nobody takes it for a dead one's before it is locked
                self._own = self.folder / f"{gpu}@{service}@{uuid4().hex}{SUFFIX}"
                self._handle = os.open(
                    self._own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
                )  # until the end
                fcntl.flock(self._handle, fcntl.LOCK_EX)
        except OSError as error:
            raise Failed(f"No memory can be stated in {folder}: {error.strerror or error}.") from error

    def state(self, size_bytes: int) -> None:
        """State what this process needs, in place of what it has stated before."""
        if self.folder is not None:
            os.pwrite(self._handle, f"{size_bytes:020}".encode(), 0)

    def others(self) -> list[GpuMemoryClaim]:
        """Return what others have stated. Of two that state first and then look here, at least one sees the other."""
        found: list[GpuMemoryClaim] = []
        if self.folder is None:
            return found
        with exclusive_lock(self.folder):
            for path in set(self.folder.glob(f"*{SUFFIX}")) - {self._own}:
                with lock_if_free(path) as of_the_dead:
                    gpu, service, _ = path.name.split("@")
                    if of_the_dead is None:
                        found.append(GpuMemoryClaim(gpu, service, int(path.read_text(encoding="ascii") or 0)))
                    else:
                        path.unlink()
        return found

    def others_bytes(self) -> int:
        """Return what others need of the GPU of this process."""
        return sum(one.size_bytes for one in self.others() if one.gpu == self.gpu)


if __name__ == "__main__":
    seen = [host_device(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    sys.stdout.buffer.write(DEVICES.dump_json(tuple(seen)))
