"""How what a template keeps gets to the engine's device. Pure.

On a CPU nothing moves: templates are in its memory. :mod:`giornata_denoiser.blocks.accelerator` has the other way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from torch import Tensor

from giornata_denoiser.rows.stored import Stored


class Arrival(Protocol):
    """Tells when something is there."""

    @property
    def here(self) -> bool:
        """Whether it is now."""

    def finish(self) -> None:
        """Let the calling thread wait for it."""

    def wait(self, *tensors: Tensor) -> None:
        """Let the current stream wait for it; `tensors` are read there."""


class Device(Protocol):
    """Where slabs are gathered."""

    @property
    def shares(self) -> bool:
        """Whether what was brought stays for others: rows of one entry move it once."""

    def bring(self, stored: Stored) -> Stored:
        """`stored` on the device; called while :meth:`loading`."""

    def moved_bytes(self, stored: Stored, slab_bytes: int) -> int:
        """What has to move for `slab_bytes` that are gathered from it now."""

    def reads(self, *tensors: Tensor) -> None:
        """Loading reads these, which were made elsewhere: their memory is not to be given away before it has."""

    @contextmanager
    def loading(self) -> Iterator[Arrival]:
        """What is done within runs beside the computing; the arrival is of all of it, once it is left."""
        yield Here()


class Here:
    """The arrival of what is there already."""

    here: Final = True

    def finish(self) -> None:
        """At once."""

    def wait(self, *tensors: Tensor) -> None:
        """At once."""


class Host:
    """The device of an engine on a CPU."""

    shares: Final = False
    """Gathering is the load."""

    def bring(self, stored: Stored) -> Stored:
        """As it is."""
        return stored

    def moved_bytes(self, stored: Stored, slab_bytes: int) -> int:  # noqa: ARG002 - protocol
        """What is gathered."""
        return slab_bytes

    def reads(self, *tensors: Tensor) -> None:
        """Nothing happens later than it is written."""

    @contextmanager
    def loading(self) -> Iterator[Arrival]:
        """In the caller's thread."""
        yield Here()
