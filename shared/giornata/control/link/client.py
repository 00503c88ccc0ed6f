"""The denoiser's end of the data path: its memory, the steps that it waits for, and how it is opened."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Self

import torch
from torch import Tensor

from giornata.control.link import slabs
from giornata.control.link.messages import MAX_MESSAGE_BYTES, LinkLost, encode_frame, read_from_instance
from giornata.control.link.slabs import SharedSlab
from giornata.control.link.steps import ControlStepTable, InFlightControlStep
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

# How a denoiser's end is opened.


CONNECT_S: Final = 5.0
"""How long an instance may take to be reached, and again to admit this denoiser."""


def connect_link(path: DataPath, address: str, token: str, slab: SharedSlab) -> FramedConnection:
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


# The denoiser's end of the data path: its own memory, and the steps that it waits for.


ROOM_S: Final = 10.0
"""How long a step waits for others to make room."""
PARTING_S: Final = 2.0
"""How long an instance may take to let go of this denoiser's memory."""


class ControlStepHandle:
    """A step that was asked for; a context that ends with its release. Any thread may use it."""

    def __init__(
        self, steps: ControlStepTable, step: InFlightControlStep, slab: Tensor, cancel: Callable[[int], None]
    ) -> None:
        self._steps, self._step, self._slab, self._cancel = steps, step, slab, cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()

    @property
    def arrived(self) -> int:
        """Return how many samples are here."""
        return len(self._step.here)

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
        ask, count = self._step.ask, self._step.count
        if not 0 <= index < count:
            raise IndexError(f"sample {index} of a step with {count}")
        self._steps.wait(self._step, index, timeout_s)
        shape = (ask.tokens[index + 1], ask.channels[index + 1])
        return slabs.tensor_at(self._slab, ask.offsets[index + 1], shape, slabs.DTYPES[ask.dtype])

    def release(self) -> None:
        """Let other steps have the place of this one; what reads its samples, on a GPU too, has to be done.

        A step that is under way is cancelled first. Its place is free when the instance has acknowledged that.
        """
        if self._steps.release(self._step):
            self._cancel(self._step.ask.number)


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
        self._address = address
        self._bytes = slabs.tensor_bytes(self._slab.memory) if path is DataPath.TCP else None
        """Bytes of the slab, where tensors' bytes follow their messages; None elsewhere."""
        self._steps = ControlStepTable(slab_bytes, room_s)
        try:
            self._connection = connect_link(path, address, token, self._slab)
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
        return self._steps.lost

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

        Args:
            row: its key, as it was opened.
            step: of the row.
            level: noise level.
            latents: (tokens, channels) float32, float16 or bfloat16, on any device.
            tokens: of each sample.
            channels: of each sample.
            dtype: of the samples: one of the same three.
            whole: whether samples of all tokens are wanted.

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
        entered = self._steps.enter(described)
        asked = ControlStepHandle(self._steps, entered, self._slab.memory, self._cancel)
        try:
            self._tell(entered.ask, latents)
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

    def _tell(self, ask: ResidualsRequest, latents: Tensor) -> None:
        """Put the latents into their place, and ask."""
        shape = (latents.shape[0], latents.shape[1])
        place = slabs.tensor_at(self._slab.memory, ask.offsets[0], shape, latents.dtype)
        place.copy_(latents.detach())
        if place.is_cuda:
            torch.cuda.current_stream(place.device).synchronize()
        self._send(ask, self._bytes_at(ask, 0))

    def _send(self, message: ResidualsRequest | CancelStep, data: memoryview | None = None) -> None:
        try:
            self._connection.send(encode_frame(message), behind=data)
        except OSError as error:
            reason = f"the ControlNet instance at {self._address} takes nothing in: {error}"
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
            self._steps.lose(f"the ControlNet instance at {self._address} is gone: {error}")
            self._parted = True
        except MalformedFrame as error:
            self._steps.lose(f"the ControlNet instance at {self._address} is not understood: {error}")
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
