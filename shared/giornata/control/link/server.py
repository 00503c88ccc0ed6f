"""The instance's end of the data path: who connects, and what is asked."""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

import structlog
import torch
from torch import Tensor

from giornata.control.link import (
    MAX_MESSAGE_BYTES,
    MAX_OPENING_BYTES,
    encode_frame,
    read_from_denoiser,
    slabs,
)
from giornata.control.link.slabs import DTYPES
from giornata.frames import FramedConnection, MalformedFrame, PeerEnded
from giornata.wire.controlnets import (
    CancelStep,
    ControlNetStepFailed,
    DataPath,
    LinkOpened,
    OpenLink,
    ResidualReady,
    ResidualsRequest,
    StepCancelled,
)

CODE_CHARS, MESSAGE_CHARS = 64, 2000
OPENING_S: Final = 5
"""How long a connection may take to say who it is."""
MAX_STEPS: Final = 1024
"""Steps of one denoiser under way."""
MAX_LINKS: Final = 256
"""Connections at a time; more are closed at once."""
BACKLOG: Final = 64

log = structlog.get_logger(__name__)


class ControlStepRequest:
    """A step that a denoiser wants. A listener makes it; any thread may use it.

    What is told after the denoiser has gone, or has let go of the step, is dropped.
    """

    def __init__(self, ask: ResidualsRequest, token: str, latents: Tensor, peer: ControlLinkHandler) -> None:
        self.token = token
        """Which the denoiser opened its data path with; a secret."""
        self.row = ask.row
        """Its key, as the control plane opened it."""
        self.step = ask.step
        self.level = ask.level
        """Noise level."""
        self.whole = ask.whole
        """Whether samples of all tokens are wanted."""
        self.latents = latents
        """(tokens, channels) in host memory or on the denoiser's device; anything, once the step is `gone`."""
        self.shapes = tuple(zip(ask.tokens[1:], ask.channels[1:], strict=True))
        """(tokens, channels) of each sample."""
        self.dtype: torch.dtype = DTYPES[ask.dtype]
        """Dtype of the samples."""
        self._ask, self._peer = ask, peer
        self._left = set(range(len(self.shapes)))
        """Samples that have not been answered; none when the step has ended."""
        self._writing = threading.Lock()
        """Held while the slab is written to, so that nothing is once :meth:`let_go` has returned."""

    @property
    def gone(self) -> bool:
        """Whether nobody waits for it any more: the denoiser is gone or has let go of it, or it has been answered."""
        return not self._left or self._peer.lost

    def answer(self, index: int, sample: Tensor) -> None:
        """Copy sample `index`, (tokens, channels) of any dtype and on any device, to its place and tell the denoiser.

        Raises:
            ValueError: another shape, or a sample that was answered, or not asked for.
        """
        with self._writing:
            if self.gone:
                return
            if index not in self._left:
                raise ValueError(f"sample {index} is answered or unknown; {len(self.shapes)} were asked for")
            if tuple(sample.shape) != self.shapes[index]:
                raise ValueError(f"sample {index} is {tuple(sample.shape)}, not {self.shapes[index]}")
            self._peer.give(self._ask, index, sample)
            self._left.remove(index)
            if not self._left:
                self._peer.forget(self._ask.number)

    def fail(self, code: str, message: str) -> None:
        """Tell the denoiser by a stable code, and why, that what has not been answered will not come."""
        with self._writing:
            if not self.gone:
                self._left.clear()
                self._peer.give_up(self._ask, code[:CODE_CHARS], message[:MESSAGE_CHARS])
                self._peer.forget(self._ask.number)

    def let_go(self) -> None:
        """Nothing is written any more when this returns: the denoiser has asked for that, or is gone."""
        with self._writing:
            self._left.clear()


class ControlLinkHandler:
    """Serves one denoiser: reads what it asks for in :meth:`run`, in a thread of its own.

    It owns the connection that a listener has taken, over which only `paths` may be used; `name` is for logs.
    """

    def __init__(
        self, listener: Listener, connection: FramedConnection, name: str, paths: frozenset[DataPath]
    ) -> None:
        self._listener, self._connection, self._name, self._paths = listener, connection, name, paths
        self._slab: Tensor | None = None
        self._steps: dict[int, ControlStepRequest] = {}
        self._lock = threading.Lock()
        self.lost = False
        """Whether the denoiser is gone."""

    def run(self) -> None:
        """Read until the denoiser goes, says what it must not, or :meth:`interrupt` is called."""
        opening = None
        try:
            opening = self._open()
            self._listener.count(opening.token, 1)
            while True:
                self._take(read_from_denoiser(self._connection.receive()), opening)
        except PeerEnded as ended:
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
                self._listener.count(opening.token, -1)

    def interrupt(self) -> None:
        """Wake the thread, which then ends. The denoiser hears of it when nothing is written to its memory any more."""
        self.lost = True
        self._connection.stop_reading()

    def give(self, ask: ResidualsRequest, index: int, sample: Tensor) -> None:
        """Write a sample to its place, and tell the denoiser."""
        shape, dtype = (ask.tokens[index + 1], ask.channels[index + 1]), slabs.DTYPES[ask.dtype]
        told = ResidualReady(number=ask.number, index=index)
        if self._slab is None:
            self._send(told, slabs.tensor_bytes(sample.to("cpu", dtype).contiguous()))
            return
        place = slabs.tensor_at(self._slab, ask.offsets[index + 1], shape, dtype)
        place.copy_(sample.detach())
        _wait_for(place.device, sample.device)
        self._send(told)

    def give_up(self, ask: ResidualsRequest, code: str, message: str) -> None:
        """Tell the denoiser that a step will not be computed."""
        self._send(ControlNetStepFailed(number=ask.number, code=code, message=message))

    def forget(self, number: int) -> None:
        """The step has ended here."""
        with self._lock:
            self._steps.pop(number, None)

    def _open(self) -> OpenLink:
        """Admit the denoiser, and map its memory only then."""
        data, descriptor = self._connection.receive_first(MAX_OPENING_BYTES, OPENING_S)
        try:
            opening = read_from_denoiser(data)
            if not isinstance(opening, OpenLink):
                raise MalformedFrame(f"the first message is of kind {opening.kind!r}; accepted: 'open'")
            if not self._listener.admits(opening.token):
                raise MalformedFrame("the token is not one that opens this data path")
            if opening.path not in self._paths:
                raise MalformedFrame(f"path {opening.path}; accepted here: {', '.join(sorted(self._paths))}")
            self._slab = slabs.open_slab(opening, descriptor, self._listener.device)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._connection.send(encode_frame(LinkOpened()))
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
                self._connection.send(encode_frame(StepCancelled(number=message.number)))
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
        self._listener.asked(step)

    def _latents(self, ask: ResidualsRequest) -> Tensor:
        """(tokens, channels); of a slab on the device a copy, so that nothing here keeps the denoiser's memory."""
        shape, dtype = (ask.tokens[0], ask.channels[0]), slabs.DTYPES[ask.latents_dtype]
        if self._slab is None:
            latents = torch.empty(shape, dtype=dtype)
            self._connection.receive_into(slabs.tensor_bytes(latents))
            return latents
        place = slabs.tensor_at(self._slab, ask.offsets[0], shape, dtype)
        if not place.is_cuda:
            return place
        latents = place.clone()
        _wait_for(place.device)
        return latents

    def _send(self, message: ResidualReady | ControlNetStepFailed, data: memoryview | None = None) -> None:
        """From a thread that computes, which serves others too: a denoiser that is gone is only noted."""
        try:
            self._connection.send(encode_frame(message), behind=data)
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


def is_known_token(token: str, tokens: Iterable[str]) -> bool:
    """Return whether `token` is one of `tokens`, in a time that does not tell which, or how much of it is right."""
    found = False
    for each in tokens:
        found |= hmac.compare_digest(token.encode(), each.encode())
    return found


class Listener:
    """Takes connections of denoisers from entering to leaving the context, each in a thread of its own.

    Args:
        admits: whether a token opens a data path; compares as :func:`is_known_token` does. Asked in any thread.
        asked: takes each step in the thread that reads the connection, and only puts it into a queue.
        unix: path of the Unix socket; a file that is there is replaced. The folder should be this user's alone.
        tcp: host and port to listen at; port 0 is any that is free.
        device: where this instance computes. Where it is a GPU, denoisers may offer memory of theirs.
        left: is told, in any thread, of a token whose last connection has ended.
    """

    def __init__(
        self,
        admits: Callable[[str], bool],
        asked: Callable[[ControlStepRequest], None],
        *,
        unix: Path | None,
        tcp: tuple[str, int] | None,
        device: torch.device,
        left: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.admits, self.asked, self.device, self._left = admits, asked, device, left
        self._connected: Counter[str] = Counter()
        """Connections by token."""
        self._counting = threading.Lock()
        self._unix, self._tcp = unix, tcp
        self._addresses: dict[DataPath, str] = {}
        self._serving: list[tuple[threading.Thread, ControlLinkHandler]] = []
        self._thread = threading.Thread(target=self._run, name="control-links")
        self._stack = ExitStack()

    @property
    def addresses(self) -> Mapping[DataPath, str]:
        """Return where to connect, by path: a socket's path, or ``host:port`` with the host that was given."""
        return MappingProxyType(self._addresses)

    def __enter__(self) -> Self:
        """Listen.

        Raises:
            OSError: at an address nothing can be listened to.
        """
        with ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            wakes, self._wake = (stack.enter_context(each) for each in socket.socketpair())
            self._selector.register(wakes, selectors.EVENT_READ, None)
            if self._unix is not None:
                self._listen_unix(self._unix, stack)
            if self._tcp is not None:
                self._listen_tcp(self._tcp, stack)
            self._stack = stack.pop_all()
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Close all connections and wait for all threads. What denoisers still wait for is lost to them."""
        self._wake.send(b"x")
        self._thread.join()
        for _, serving in self._serving:
            serving.interrupt()
        for thread, _ in self._serving:
            thread.join()
        self._stack.close()

    def _listen_unix(self, path: Path, stack: ExitStack) -> None:
        path.unlink(missing_ok=True)
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(str(path))
        stack.callback(path.unlink, missing_ok=True)
        path.chmod(0o600)
        listening.listen(BACKLOG)
        paths = {DataPath.UNIX} | ({DataPath.CUDA} if self.device.type == "cuda" else set())
        self._addresses |= dict.fromkeys(paths, str(path))
        self._watch(listening, paths)

    def _listen_tcp(self, where: tuple[str, int], stack: ExitStack) -> None:
        host, port = where
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = stack.enter_context(socket.create_server((host, port), family=family, backlog=BACKLOG))
        shown = f"[{host}]" if ":" in host else host
        self._addresses[DataPath.TCP] = f"{shown}:{listening.getsockname()[1]}"
        self._watch(listening, {DataPath.TCP})

    def _watch(self, listening: socket.socket, paths: set[DataPath]) -> None:
        listening.settimeout(0)  # who connected may be gone again when it is taken
        self._selector.register(listening, selectors.EVENT_READ, (listening, frozenset(paths)))

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                listening, paths = key.data
                self._accept(listening, paths)

    def _accept(self, listening: socket.socket, paths: frozenset[DataPath]) -> None:
        try:
            connected, address = listening.accept()
        except OSError as error:
            log.warning("control_link_not_accepted", error=str(error))
            return
        self._serving = [(thread, serving) for thread, serving in self._serving if thread.is_alive()]
        if len(self._serving) >= MAX_LINKS:
            log.error("control_link_refused", peer=str(address), error=f"there are {MAX_LINKS} connections")
            connected.close()
            return
        connected.settimeout(None)
        name = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "unix"
        serving = ControlLinkHandler(self, FramedConnection(connected, MAX_MESSAGE_BYTES), name, paths)
        thread = threading.Thread(target=serving.run, name=f"control-link {name}")
        thread.start()
        self._serving.append((thread, serving))

    def count(self, token: str, change: int) -> None:
        """A connection with this token was opened, or has ended."""
        with self._counting:
            self._connected[token] += change
            last = not self._connected[token]
            self._connected += Counter()  # drops zeros
        if last:
            self._left(token)
