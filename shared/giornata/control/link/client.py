"""The denoiser's end of the data path: its memory, the steps that it waits for, and how it is opened."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Final, Self

import torch
from torch import Tensor

from giornata.control.link import (
    MAX_MESSAGE_BYTES,
    ControlFailed,
    LinkLate,
    LinkLost,
    encode_frame,
    read_from_instance,
    slabs,
)
from giornata.control.link.slabs import SharedSlab, SlabAllocator, align_up
from giornata.frames import FramedConnection, MalformedFrame
from giornata.wire.controlnets import (
    CancelStep,
    ControlNetStepFailed,
    DataPath,
    FromInstance,
    LinkOpened,
    OpenLink,
    ResidualReady,
    ResidualsRequest,
    StepCancelled,
)

CONNECT_S: Final = 5.0
"""How long an instance may take to be reached, and again to admit this denoiser."""
ROOM_S: Final = 10.0
"""How long a step waits for others to make room."""
PARTING_S: Final = 2.0
"""How long an instance may take to let go of this denoiser's memory."""


class ControlStepHandle:
    """A step that was asked for; a context that ends with its release. Any thread may use it."""

    def __init__(self, steps: ControlStepTable, ask: ResidualsRequest, start: int) -> None:
        self._steps = steps
        self.ask, self.start = ask, start
        """What was asked, and the byte at which its place begins."""
        self.here = set[int]()
        """Indices of the samples that have come."""
        self.failed: tuple[str, str] | None = None
        """Code and message, where the instance will not compute the rest."""
        self.released = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()

    @property
    def count(self) -> int:
        """Return how many samples it has."""
        return len(self.ask.offsets) - 1

    @property
    def arrived(self) -> int:
        """Return how many samples are here."""
        return len(self.here)

    @property
    def under_way(self) -> bool:
        """Return whether the instance may still write to its place."""
        return self.failed is None and len(self.here) < self.count

    def sample(self, index: int, timeout_s: float) -> Tensor:
        """Sample `index`, when it has come. One that is here can be had after a loss or a failure, too.

        Returns:
            (tokens, channels) in the dtype that was asked for: a view of the slab, until :meth:`release`.

        Raises:
            LinkLost: the connection is down.
            LinkLate: it has not come within `timeout_s` seconds.
            ControlFailed: the instance refused the step, or failed in it.
            IndexError: the step has no such sample.
            ValueError: the step has been released.
        """
        if not 0 <= index < self.count:
            raise IndexError(f"sample {index} of a step with {self.count}")
        return self._steps.sample(self, index, timeout_s)

    def release(self) -> None:
        """Let other steps have the place of this one; what reads its samples, on a GPU too, has to be done.

        A step that is under way is cancelled first. Its place is free when the instance has acknowledged that.
        """
        self._steps.release(self)


class ControlStepTable:
    """The steps of one link, by number. An instance's word is checked before anything is done about it.

    Any thread may use it.

    `slab`, (bytes,) uint8, has their places, for which a step waits `room_s` at most. `cancel` asks the instance to let
    go of a step.
    """

    def __init__(self, slab: Tensor, room_s: float, cancel: Callable[[int], None]) -> None:
        self._slab, self._places = slab, SlabAllocator(len(slab))
        self._room_s, self._cancel = room_s, cancel
        self._steps: dict[int, ControlStepHandle] = {}
        self._next = 0
        self.lost: str | None = None
        """Why the link is down."""
        self._changed = threading.Condition()
        """Guards all that is above, and tells of every change."""

    def enter(self, described: ResidualsRequest) -> ControlStepHandle:
        """Give a step, which is `described` without them, its number and its place; waits for that.

        Raises:
            ValueError: it has more bytes than the slab.
            LinkLost: the link is down.
            LinkLate: others have not made room in time.
        """
        sizes = [align_up(size) for size in described.sizes_bytes]
        size_bytes, until_s = sum(sizes), time.monotonic() + self._room_s
        if size_bytes > self._places.size_bytes:
            raise ValueError(
                f"a step of {size_bytes} bytes, {sizes[0]} of latents and {sizes[1:]} of samples; the slab has "
                f"{self._places.size_bytes}"
            )
        with self._changed:
            self._raise_if_lost()
            while (start := self._places.take(size_bytes)) is None:
                if not self._changed.wait(max(until_s - time.monotonic(), 0)):
                    raise LinkLate(f"no room for a step of {size_bytes} bytes within {self._room_s} s")
                self._raise_if_lost()
            offsets = tuple(accumulate(sizes[:-1], initial=start))
            placed = described.model_copy(update={"number": self._next, "offsets": offsets})
            self._next += 1
            step = self._steps[placed.number] = ControlStepHandle(self, placed, start)
            return step

    def sample(self, step: ControlStepHandle, index: int, timeout_s: float) -> Tensor:
        """See :meth:`ControlStepHandle.sample`."""

        def settled() -> bool:
            return step.released or index in step.here or step.failed is not None or self.lost is not None

        with self._changed:
            self._changed.wait_for(settled, timeout_s)
            if step.released:
                raise ValueError("the step has been released")
            if index not in step.here:
                if step.failed is not None:
                    raise ControlFailed(*step.failed)
                self._raise_if_lost()
                raise LinkLate(f"sample {index} of row {step.ask.row} has not come within {timeout_s} s")
        ask = step.ask
        shape = (ask.tokens[index + 1], ask.channels[index + 1])
        return slabs.tensor_at(self._slab, ask.offsets[index + 1], shape, slabs.DTYPES[ask.dtype])

    def release(self, step: ControlStepHandle) -> None:
        """Give back a step's place, at once or when the instance has :meth:`cancelled` it."""
        with self._changed:
            if step.released:
                return
            step.released = True
            self._changed.notify_all()
            if self.lost is not None:
                return
            if not step.under_way:
                self._forget(step)
                return
        self._cancel(step.ask.number)

    def expected(self, number: int, index: int) -> ControlStepHandle:
        """The step whose sample `index` comes now; MalformedFrame where none is to."""
        with self._changed:
            step = self._steps.get(number)
            if step is None or not step.under_way or index >= step.count or index in step.here:
                raise MalformedFrame(f"sample {index} of step {number}, which was not to come")
            return step

    def came(self, step: ControlStepHandle, index: int) -> None:
        """Sample `index` lies at its place."""
        with self._changed:
            step.here.add(index)
            self._changed.notify_all()

    def failed(self, number: int, code: str, message: str) -> None:
        """The instance will not compute the rest of a step; MalformedFrame where there is no such step."""
        with self._changed:
            step = self._steps.get(number)
            if step is None or not step.under_way:
                raise MalformedFrame(f"step {number} failed, and was not under way")
            step.failed = (code, message)
            self._changed.notify_all()

    def cancelled(self, number: int) -> None:
        """The instance writes no more to the place of a released step; MalformedFrame where there is none."""
        with self._changed:
            step = self._steps.get(number)
            if step is None or not step.released:
                raise MalformedFrame(f"step {number} was cancelled, and nobody asked for that")
            self._forget(step)
            self._changed.notify_all()

    def lose(self, reason: str) -> None:
        """The link is down; the first reason is told. No place is given away any more, so what has come stays."""
        with self._changed:
            self.lost = self.lost or reason
            self._changed.notify_all()

    def _forget(self, step: ControlStepHandle) -> None:
        del self._steps[step.ask.number]
        self._places.give_back(step.start)

    def _raise_if_lost(self) -> None:
        if self.lost is not None:
            raise LinkLost(self.lost)


class ControlLink:
    """A connection to one instance, for all rows of one denoiser. Any thread may use it; a context.

    Args:
        path: how tensors travel; one that the instance offers.
        address: of the instance: a socket's path, or ``host:port``.
        token: opens it; a secret.
        slab_bytes: most bytes of steps at a time, latents and samples.
        device: where this denoiser computes. The slab is its memory with `DataPath.CUDA`; else host memory, pinned for
            it with `DataPath.TCP`.
        room_s: how long a step may wait for others to make room in the slab.

    Raises:
        LinkLost: there is no instance, or it does not admit this denoiser.
        OSError: there is not so much memory.
    """

    def __init__(
        self,
        path: DataPath,
        address: str,
        token: str,
        *,
        slab_bytes: int,
        device: torch.device,
        room_s: float = ROOM_S,
    ) -> None:
        self._slab = slabs.make_slab(path, slab_bytes, device)
        self._instance = f"the ControlNet instance at {address}"
        self._bytes = slabs.tensor_bytes(self._slab.memory) if path is DataPath.TCP else None
        """Bytes of the slab, where tensors' bytes follow their messages; None elsewhere."""
        self._steps = ControlStepTable(self._slab.memory, room_s, self._cancel)
        try:
            self._connection = _connect(path, address, token, self._slab)
        except LinkLost:
            self._slab.left()
            raise
        finally:
            self._slab.sent()
        self._parted = False
        self._reader = threading.Thread(target=self._read, name=f"control-link {address}")
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def lost(self) -> bool:
        """Return whether the connection is closed or broken; that stays so."""
        return self._steps.lost is not None

    def ask(
        self,
        *,
        row: str,
        step: int,
        level: float,
        latents: Tensor,
        tokens: Sequence[int],
        channels: Sequence[int],
        dtype: torch.dtype,
        whole: bool,
    ) -> ControlStepHandle:
        """Ask for the samples of a row's step. Waits where others have to make room first.

        `row` is its key, as it was opened, and `level` a noise level. `latents` are (tokens, channels) float32, float16
        or bfloat16, on any device; `tokens` and `channels` are of each sample, and `dtype` of all is one of the same
        three. `whole`: samples of all tokens are wanted.

        Raises:
            LinkLost: the connection is down.
            LinkLate: others have not made room in time.
            ValueError: the step cannot fit into the slab at all, or is of a shape or dtype that is not taken.
        """
        if latents.ndim != 2 or latents.dtype not in slabs.NAMES or dtype not in slabs.NAMES:
            raise ValueError(
                f"latents {tuple(latents.shape)} {latents.dtype}, samples {dtype}; accepted: latents of two "
                f"dimensions, {', '.join(slabs.NAMES.values())}"
            )
        described = ResidualsRequest(
            number=0,
            row=row,
            step=step,
            level=level,
            whole=whole,
            latents_dtype=slabs.NAMES[latents.dtype],
            dtype=slabs.NAMES[dtype],
            offsets=(0,) * (len(tokens) + 1),
            tokens=(latents.shape[0], *tokens),
            channels=(latents.shape[1], *channels),
        )
        asked = self._steps.enter(described)
        shape = (latents.shape[0], latents.shape[1])
        try:
            place = slabs.tensor_at(self._slab.memory, asked.start, shape, latents.dtype)
            place.copy_(latents.detach())
            if place.is_cuda:
                torch.cuda.current_stream(place.device).synchronize()
            self._send(asked.ask, self._bytes_at(asked.ask, 0))
        except BaseException:
            asked.release()
            raise
        return asked

    def close(self) -> None:
        """Wake whoever waits, with LinkLost, and wait for the thread. Samples that have come stay as they are."""
        self._steps.lose("this denoiser has closed its data path")
        self._connection.finish()
        self._reader.join(PARTING_S)  # it ends when the instance closes, which has then let go of the memory
        if self._parted:
            self._slab.left()
        self._connection.interrupt()
        self._reader.join()
        self._connection.close()

    def _send(self, message: ResidualsRequest | CancelStep, data: memoryview | None = None) -> None:
        try:
            self._connection.send(encode_frame(message), behind=data)
        except OSError as error:
            reason = f"{self._instance} takes nothing in: {error}"
            self._steps.lose(reason)
            self._connection.finish()
            raise LinkLost(reason) from error

    def _cancel(self, number: int) -> None:
        with suppress(LinkLost):  # the place is of no use then, and the next one who asks is told
            self._send(CancelStep(number=number))

    def _read(self) -> None:
        """The thread: ends when the connection does."""
        try:
            while True:
                self._take(read_from_instance(self._connection.receive()))
        except OSError as error:
            self._steps.lose(f"{self._instance} is gone: {error}")
            self._parted = True
        except MalformedFrame as error:
            self._steps.lose(f"{self._instance} is not understood: {error}")
            self._connection.finish()

    def _take(self, message: FromInstance) -> None:
        match message:
            case ResidualReady():
                step = self._steps.expected(message.number, message.index)
                if (data := self._bytes_at(step.ask, message.index + 1)) is not None:
                    self._connection.receive_into(data)
                self._steps.came(step, message.index)
            case ControlNetStepFailed():
                self._steps.failed(message.number, message.code, message.message)
            case StepCancelled():
                self._steps.cancelled(message.number)
            case LinkOpened():
                raise MalformedFrame("the data path was opened twice")

    def _bytes_at(self, ask: ResidualsRequest, place: int) -> memoryview | None:
        """Bytes of the latents, place 0, or sample `place` - 1, if they follow their message; else None."""
        if self._bytes is None:
            return None
        return self._bytes[ask.offsets[place] : ask.offsets[place] + ask.sizes_bytes[place]]


def _connect(path: DataPath, address: str, token: str, slab: SharedSlab) -> FramedConnection:
    """A connection to the instance at `address`, which has admitted this denoiser and has its slab.

    Raises:
        LinkLost: no instance is there, or it refuses.
    """
    try:
        connection = FramedConnection(_socket(path, address), MAX_MESSAGE_BYTES)
    except (OSError, ValueError) as error:
        raise LinkLost(f"no ControlNet instance can be reached at {address}: {error}") from error
    opening = OpenLink(token=token, path=path, slab_bytes=len(slab.memory), memory=slab.device_memory)
    try:
        connection.send(encode_frame(opening), () if slab.descriptor is None else (slab.descriptor,))
        _wait_until_opened(connection)
    except (OSError, MalformedFrame) as error:
        connection.close()
        raise LinkLost(
            f"the ControlNet instance at {address} does not open the data path: {error}"
        ) from error
    return connection


def _wait_until_opened(connection: FramedConnection) -> None:
    data, descriptor = connection.receive_first(MAX_MESSAGE_BYTES, CONNECT_S)
    if descriptor is not None:
        os.close(descriptor)
    message = read_from_instance(data)
    if not isinstance(message, LinkOpened):
        raise MalformedFrame(f"the first message is of kind {message.kind!r}; accepted: 'opened'")


def _socket(path: DataPath, address: str) -> socket.socket:
    if path is DataPath.TCP:
        host, _, port = address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
    found = socket.socket(socket.AF_UNIX)
    try:
        found.settimeout(CONNECT_S)
        found.connect(address)
    except BaseException:
        found.close()
        raise
    return found
