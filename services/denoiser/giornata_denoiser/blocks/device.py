"""How what a template keeps gets to the engine's device.

On a CPU nothing moves: templates are in its memory. :mod:`giornata_denoiser.engine.loading` has the other way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from giornata_denoiser.rows.stored import StoredTensor


class TransferHandle:
    """Tells when what was loaded is there: at once, where nothing moves."""

    @property
    def here(self) -> bool:
        """Whether it is there now."""
        return True

    def finish(self) -> None:
        """Let the calling thread wait for it."""

    def wait(self, *tensors: Tensor) -> None:
        """Let the current stream wait for it; `tensors` are read there."""


class Device:
    """Where slabs are gathered: a CPU, unless a subclass says otherwise."""

    shares = False
    """Whether what was brought stays for other rows: rows of one entry move it once."""
    keeps = True
    """Whether slabs are gathered once and kept. Otherwise they stay as they are stored, and blocks gather them."""

    def bring(self, stored: StoredTensor) -> StoredTensor:
        """`stored` on the device; called within :meth:`loading`."""
        return stored

    def moved_bytes(self, stored: StoredTensor, slab_bytes: int) -> int:  # noqa: ARG002 - subclasses move `stored`
        """What has to move for `slab_bytes` that are gathered from `stored` now."""
        return slab_bytes

    def give_back(self) -> None:
        """Keep nothing that was brought: memory is out."""

    def produced(self) -> None:
        """What loading reads was made on the current stream: it comes after this point."""

    @contextmanager
    def loading(self) -> Iterator[TransferHandle]:
        """What is done within runs beside the computing; the arrival is of all of it, once the context is left."""
        yield TransferHandle()
