"""The instance's end of one connection."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

import structlog
import torch
from torch import Tensor

from giornata.control.link import slabs
from giornata.control.link.asking import ControlStepRequest
from giornata.control.link.frames import MAX_OPENING_BYTES, MalformedFrame, read_from_denoiser
from giornata.control.link.sockets import FramedConnection, LinkEnded
from giornata.wire.control_steps import (
    CancelStep,
    ControlNetStepFailed,
    LinkOpened,
    OpenLink,
    ResidualReady,
    ResidualsRequest,
    StepCancelled,
)
from giornata.wire.controlnets import DataPath

OPENING_S: Final = 5
"""How long a connection may take to say who it is."""
MAX_STEPS: Final = 1024
"""Steps of one denoiser under way."""

log = structlog.get_logger(__name__)


class ControlLinkHandler:
    """Serves one denoiser: reads what it asks for in :meth:`run`, in a thread of its own.

    Args:
        connection: with the denoiser, from now on this object's.
        name: of the connection, for logs.
        paths: which of them may be used over it.
        admits: whether a token is known.
        asked: takes a step; it only puts it into a queue.
        device: where this instance computes.
        counted: is told the token, and 1, when the denoiser is admitted; and -1 when it has gone after that.
    """

    def __init__(
        self,
        connection: FramedConnection,
        name: str,
        paths: frozenset[DataPath],
        admits: Callable[[str], bool],
        asked: Callable[[ControlStepRequest], None],
        *,
        device: torch.device,
        counted: Callable[[str, int], None] = lambda _, __: None,
    ) -> None:
        self._connection, self._name, self._paths = connection, name, paths
        self._admits, self._asked, self._device, self._counted = admits, asked, device, counted
        self._slab: Tensor | None = None
        self._steps: dict[int, ControlStepRequest] = {}
        self._lock = threading.Lock()
        self.lost = False
        """See :class:`giornata.control.link.asking.DenoiserPeer`."""

    def run(self) -> None:
        """Read until the denoiser goes, says what it must not, or :meth:`interrupt` is called."""
        opening = None
        try:
            opening = self._open()
            self._counted(opening.token, 1)
            while True:
                self._take(read_from_denoiser(self._connection.receive()), opening)
        except LinkEnded as ended:
            log.info("control_link_ended", peer=self._name, reason=str(ended))
        except MalformedFrame as error:
            log.error("control_link_refused", peer=self._name, error=str(error))
        except OSError as error:
            log.warning("control_link_broken", peer=self._name, error=str(error))
        except Exception as error:
            log.exception("control_link_failed", peer=self._name, error=repr(error))
        finally:
            self._leave()
            if opening is not None:
                self._counted(opening.token, -1)

    def interrupt(self) -> None:
        """Wake the thread, which then ends. The denoiser hears of it when nothing is written to its memory any more."""
        self.lost = True
        self._connection.stop_reading()

    def give(self, ask: ResidualsRequest, index: int, sample: Tensor) -> None:
        """See :class:`giornata.control.link.asking.DenoiserPeer`."""
        shape, dtype = (ask.tokens[index + 1], ask.channels[index + 1]), slabs.DTYPES[ask.dtype]
        told = ResidualReady(number=ask.number, index=index)
        if self._slab is None:
            self._send(told, slabs.bytes_of(sample.to("cpu", dtype).contiguous()))
            return
        place = slabs.at(self._slab, ask.offsets[index + 1], shape, dtype)
        place.copy_(sample.detach())
        _wait_for(place.device, sample.device)
        self._send(told)

    def give_up(self, ask: ResidualsRequest, code: str, message: str) -> None:
        """See :class:`giornata.control.link.asking.DenoiserPeer`."""
        self._send(ControlNetStepFailed(number=ask.number, code=code, message=message))

    def forget(self, number: int) -> None:
        """See :class:`giornata.control.link.asking.DenoiserPeer`."""
        with self._lock:
            self._steps.pop(number, None)

    def _open(self) -> OpenLink:
        """Admit the denoiser, and map its memory only then."""
        data, descriptor = self._connection.receive_opening(MAX_OPENING_BYTES, OPENING_S)
        try:
            opening = read_from_denoiser(data)
            if not isinstance(opening, OpenLink):
                raise MalformedFrame(f"the first message is of kind {opening.kind!r}; accepted: 'open'")
            if not self._admits(opening.token):
                raise MalformedFrame("the token is not one that opens this data path")
            if opening.path not in self._paths:
                raise MalformedFrame(f"path {opening.path}; accepted here: {', '.join(sorted(self._paths))}")
            self._slab = slabs.opened(opening, descriptor, self._device)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._connection.send(LinkOpened())
        return opening

    def _take(self, message: OpenLink | ResidualsRequest | CancelStep, opening: OpenLink) -> None:
        match message:
            case ResidualsRequest():
                self._ask(message, opening)
            case CancelStep():
                with self._lock:
                    step = self._steps.pop(message.number, None)
                if step is not None:
                    step.let_go()
                self._connection.send(StepCancelled(number=message.number))
            case OpenLink():
                raise MalformedFrame("the data path was opened twice")

    def _ask(self, ask: ResidualsRequest, opening: OpenLink) -> None:
        if not ask.fits(opening.slab_bytes):
            raise MalformedFrame(
                f"places of a step overlap, or lie outside of the slab of {opening.slab_bytes} bytes"
            )
        step = ControlStepRequest(ask, opening.token, self._latents(ask), self)
        with self._lock:
            if ask.number in self._steps or len(self._steps) >= MAX_STEPS:
                raise MalformedFrame(f"step {ask.number} comes twice, or {MAX_STEPS} are under way")
            self._steps[ask.number] = step
        self._asked(step)

    def _latents(self, ask: ResidualsRequest) -> Tensor:
        """(tokens, channels); of a slab on the device a copy, so that nothing here keeps the denoiser's memory."""
        shape, dtype = (ask.tokens[0], ask.channels[0]), slabs.DTYPES[ask.latents_dtype]
        if self._slab is None:
            latents = torch.empty(shape, dtype=dtype)
            self._connection.receive_into(slabs.bytes_of(latents))
            return latents
        place = slabs.at(self._slab, ask.offsets[0], shape, dtype)
        if not place.is_cuda:
            return place
        latents = place.clone()
        _wait_for(place.device)
        return latents

    def _send(self, message: ResidualReady | ControlNetStepFailed, data: memoryview | None = None) -> None:
        """From a thread that computes, which serves others too: a denoiser that is gone is only noted."""
        try:
            self._connection.send(message, data)
        except OSError as error:
            log.warning("control_link_broken", peer=self._name, error=str(error))
            self.interrupt()

    def _leave(self) -> None:
        """Let go of the denoiser's memory, and only then of the connection, which tells it."""
        self.lost = True
        with self._lock:
            steps, self._steps = list(self._steps.values()), {}
        for step in steps:
            step.let_go()
        self._slab = None
        self._connection.interrupt()
        self._connection.close()


def _wait_for(*devices: torch.device) -> None:
    """Until what this thread has asked of GPUs is done."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
