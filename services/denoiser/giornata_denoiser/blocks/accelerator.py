"""What of the templates is on a CUDA device, and how it gets there.

Whole tensors are copied from pinned host memory, as they are stored, on a stream of their own beside the computing one;
rows of one template gather from the copy, which stays while its budget lasts.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from giornata_denoiser.blocks.device import Arrival, Device, Host
from giornata_denoiser.blocks.ledger import Ledger
from giornata_denoiser.rows.stored import Stored

HIT: Final = "device"
MOVED: Final = "moved"


class Event:
    """The arrival of what a copy stream has been given."""

    def __init__(self) -> None:
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's is not typed

    def record(self, stream: Any) -> None:
        """Everything that `stream` was given until now."""
        self._event.record(stream)

    @property
    def here(self) -> bool:
        """Whether the stream has got that far."""
        return bool(self._event.query())

    def finish(self) -> None:
        """Of this stream alone."""
        self._event.synchronize()

    def wait(self, *tensors: Tensor) -> None:
        """No synchronisation with the host. The allocator is told of the second stream that uses the memory."""
        stream = torch.cuda.current_stream(tensors[0].device)
        stream.wait_event(self._event)
        for tensor in tensors:
            tensor.record_stream(stream)


class Accelerator:
    """The device of an engine on a GPU. One thread loads at a time.

    Attributes:
        shares: see :class:`giornata_denoiser.blocks.device.Device`.

    Args:
        device: a CUDA device.
        budget_bytes: of what is kept there as it is stored, least recently used out first.
    """

    shares: Final = True

    def __init__(self, device: torch.device, budget_bytes: int) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # likewise
        self._lock = threading.Lock()
        self._ledger = Ledger(budget_bytes)
        self._here: dict[str, tuple[Stored, Stored]] = {}
        """By name: on the host, which keeps the name its own, and on the device."""
        self.counters: Counter[str] = Counter()

    def bring(self, stored: Stored) -> Stored:
        """From the device's tier, or by an asynchronous copy into it."""
        name = str(id(stored))
        if name in self._here:
            self._ledger.use(name)
            self.counters[HIT] += 1
            return self._here[name][1]
        copy = stored.to(self._device)
        self.counters[MOVED] += stored.size_bytes
        self._here[name] = stored, copy
        for gone in self._ledger.add(name, copy.size_bytes):
            del self._here[gone]
        return copy

    def moved_bytes(self, stored: Stored, slab_bytes: int) -> int:  # noqa: ARG002 - protocol
        """All of it, or nothing where it is there; gathering on the device takes next to no time."""
        return 0 if str(id(stored)) in self._here else stored.size_bytes

    def reads(self, *tensors: Tensor) -> None:
        """On the copy stream."""
        for tensor in tensors:
            tensor.record_stream(self._stream)

    @contextmanager
    def loading(self) -> Iterator[Arrival]:
        """On the copy stream."""
        arrival = Event()
        with self._lock, torch.cuda.stream(self._stream):
            yield arrival
            arrival.record(self._stream)


def device_for(device: torch.device, budget_bytes: int) -> Device:
    """The one for an engine's device."""
    return Accelerator(device, budget_bytes) if device.type == "cuda" else Host()
