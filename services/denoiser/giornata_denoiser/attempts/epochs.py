"""Which router a worker obeys. Pure."""

from __future__ import annotations

from giornata.wire.messages import Epoch


class EpochFence:
    """The highest epoch that this worker has heard of; a router of a lower one was superseded."""

    def __init__(self) -> None:
        self._highest: Epoch | None = None

    def admits(self, epoch: Epoch | None) -> bool:
        """Whether a router of `epoch` is obeyed. None is one whose version sends no epoch: it always is."""
        if epoch is None:
            return True
        if self._highest is not None and epoch < self._highest:
            return False
        self._highest = epoch
        return True
