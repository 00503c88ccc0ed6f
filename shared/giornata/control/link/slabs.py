"""Memory that one process owns and another may write to, and which of its bytes are taken."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from giornata import frames
from giornata.frames import MalformedFrame
from giornata.wire.controlnets import ALIGNMENT_BYTES, DataPath, DeviceMemory, Dtype, OpenLink


def align_up(size_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class SlabAllocator:
    """Places of any length in `size_bytes` bytes, each in the first gap that has room, given back in any order."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._taken: list[tuple[int, int]] = []
        """(start, end) of each place, in order."""

    def take(self, size_bytes: int) -> int | None:
        """The offset of a new place, a multiple of the alignment; None where there is no room.

        Raises:
            ValueError: a place of less than one byte.
        """
        if size_bytes < 1:
            raise ValueError(f"a place has at least one byte, not {size_bytes}")
        length = align_up(size_bytes)
        begins = [0, *(end for _, end in self._taken)]
        ends = [*(start for start, _ in self._taken), self.size_bytes]
        for index, (start, end) in enumerate(zip(begins, ends, strict=True)):
            if start + length <= end:
                self._taken.insert(index, (start, start + length))
                return start
        return None

    def give_back(self, offset: int) -> None:
        """The place at `offset` may be taken again.

        Raises:
            ValueError: no place begins there.
        """
        for index, (start, _) in enumerate(self._taken):
            if start == offset:
                del self._taken[index]
                return
        raise ValueError(f"no place begins at byte {offset}")


# A slab is one tensor of bytes. The denoiser's end makes it, and describes it in its first message; the
# instance's end opens it. Its memory goes with the last view of it, in each process.


DTYPES: Final = {dtype: getattr(torch, dtype.value) for dtype in Dtype}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(eq=False)
class SharedSlab:
    """The denoiser's memory."""

    memory: Tensor
    """(bytes,) uint8"""
    descriptor: int | None = None
    """Descriptor of the file that goes with the first message; the slab's until :meth:`sent`."""
    device_memory: DeviceMemory | None = None

    def sent(self) -> None:
        """The instance has the file, or will never have it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def left(self) -> None:
        """The instance will not write any more, and may have died without saying that it has let go.

        torch keeps shared device memory until its reader has counted itself out. A second count does no harm.
        """
        if (shared := self.device_memory) is not None:
            self.device_memory = None
            storage: Any = self.memory.untyped_storage()
            device = self.memory.device.index
            with suppress(RuntimeError):  # the reader has counted itself out, and the counter is gone
                storage._release_ipc_counter(shared.counter, shared.counter_offset, device=device)  # noqa: SLF001


def make_slab(path: DataPath, size_bytes: int, device: torch.device) -> SharedSlab:
    """A slab of `size_bytes`, all of it touched.

    Device memory lies on `device`, where the denoiser computes, and memory for TCP is pinned where that is a GPU.

    Raises:
        OSError: there is not so much memory.
    """
    with torch.inference_mode(mode=False):  # else only who infers could write to it
        return _MAKING[path](size_bytes, device)


def open_slab(opening: OpenLink, descriptor: int | None, device: torch.device) -> Tensor | None:
    """The memory that a denoiser describes, (bytes,) uint8; None where it stays its own, for TCP.

    The caller closes the `descriptor` of the file that came along with its first message.

    Raises:
        MalformedFrame: it is not what the path takes, or cannot be opened.
    """
    shared = opening.memory
    if (descriptor is not None) != (opening.path is DataPath.UNIX):
        raise MalformedFrame(
            f"the path {opening.path} comes {'without' if descriptor is None else 'with'} a file"
        )
    if (shared is not None) != (opening.path is DataPath.CUDA):
        raise MalformedFrame(f"the path {opening.path} comes {'with' if shared else 'without'} device memory")
    if descriptor is not None:
        return _mapped(descriptor, opening.slab_bytes)
    if shared is not None:
        return _device_memory(shared, opening.slab_bytes, device)
    return None


def tensor_at(slab: Tensor, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The tensor of this shape at byte `offset` of a slab: a view."""
    size_bytes = shape[0] * shape[1] * dtype.itemsize
    return slab[offset : offset + size_bytes].view(dtype).view(shape)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _shared_memory(size_bytes: int, _device: torch.device) -> SharedSlab:
    descriptor = frames.allocate_memory("giornata-control", size_bytes)
    try:
        return SharedSlab(_map(descriptor, size_bytes).zero_(), descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _mapped(descriptor: int, size_bytes: int) -> Tensor:
    """MalformedFrame where the file could shrink, which would end a process that writes to it, or is too short."""
    try:
        sealed, found = frames.is_sealed(descriptor), os.fstat(descriptor).st_size
        if not sealed or found != size_bytes:
            raise MalformedFrame(
                f"a slab of {size_bytes} bytes in {'a' if sealed else 'an unsealed'} file of {found}"
            )
        return _map(descriptor, size_bytes)
    except OSError as error:
        raise MalformedFrame(f"the slab's file cannot be mapped: {error}") from error


def _map(descriptor: int, size_bytes: int) -> Tensor:
    return torch.frombuffer(frames.map_memory(descriptor, size_bytes), dtype=torch.uint8)


def _own_memory(size_bytes: int, device: torch.device) -> SharedSlab:
    return SharedSlab(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda").zero_())


def _own_device_memory(size_bytes: int, device: torch.device) -> SharedSlab:
    memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    storage: Any = memory.untyped_storage()
    _, handle, _, offset, counter, counter_offset, event, event_sync = storage._share_cuda_()
    shared = DeviceMemory(
        device=_unique(memory.device.index),
        handle=handle,
        offset_bytes=offset,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        event_sync=event_sync,
    )
    return SharedSlab(memory, device_memory=shared)


def _device_memory(shared: DeviceMemory, size_bytes: int, device: torch.device) -> Tensor:
    if device.type != "cuda":
        raise MalformedFrame(f"device memory is offered, and this instance computes on {device}")
    indices = {_unique(index): index for index in range(torch.cuda.device_count())}
    if shared.device not in indices:
        raise MalformedFrame(f"device memory of {shared.device}, which this instance does not see")
    storage: Any = torch.UntypedStorage
    try:
        opened_storage = storage._new_shared_cuda(  # noqa: SLF001 - torch has no public way
            indices[shared.device],
            shared.handle,
            size_bytes,
            shared.offset_bytes,
            shared.counter,
            shared.counter_offset,
            shared.event,
            shared.event_sync,
        )
    except RuntimeError as error:
        raise MalformedFrame(f"the device memory cannot be opened: {error}") from error
    where = torch.device("cuda", indices[shared.device])
    return torch.empty(0, dtype=torch.uint8, device=where).set_(opened_storage)


def _unique(index: int) -> str:
    """A device's name that all processes of a host share; their indices may differ."""
    return str(torch.cuda.get_device_properties(index).uuid)


_MAKING: Final[dict[DataPath, Callable[[int, torch.device], SharedSlab]]] = {
    DataPath.UNIX: _shared_memory,
    DataPath.CUDA: _own_device_memory,
    DataPath.TCP: _own_memory,
}
