"""A denoiser's steps that are under way: their places, what has come, and who waits."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

from giornata.control.link.messages import ControlFailed, LinkLate, LinkLost
from giornata.control.link.slabs import RingAllocator, align_up
from giornata.frames import MalformedFrame
from giornata.wire.controlnets import ResidualsRequest


@dataclass(eq=False)
class InFlightControlStep:
    """A step that was asked for."""

    ask: ResidualsRequest
    start: int
    """Byte at which its place begins."""
    here: set[int] = field(default_factory=set)
    """Indices of the samples that have come."""
    failed: tuple[str, str] | None = None
    """Code and message, where the instance will not compute the rest."""
    released: bool = False

    @property
    def count(self) -> int:
        """Return how many samples it has."""
        return len(self.ask.offsets) - 1

    @property
    def under_way(self) -> bool:
        """Return whether the instance may still write to its place."""
        return self.failed is None and len(self.here) < self.count


class ControlStepTable:
    """The steps of one link, by number. Any thread may use it.

    Args:
        slab_bytes: for places.
        room_s: how long a step may wait for its place.
    """

    def __init__(self, slab_bytes: int, room_s: float) -> None:
        self._ring, self._room_s = RingAllocator(slab_bytes), room_s
        self._steps: dict[int, InFlightControlStep] = {}
        self._next = 0
        self._lost: str | None = None
        self._waiting: deque[object] = deque()
        """Those without a place, in the order in which they get theirs."""
        self._changed = threading.Condition()
        """Guards all that is above, and tells of every change."""

    @property
    def lost(self) -> bool:
        """Return whether the link is down."""
        return self._lost is not None

    def enter(self, described: ResidualsRequest) -> InFlightControlStep:
        """Give a step its number and its place, waiting for it behind those that came before.

        Args:
            described: without either.

        Raises:
            ValueError: it has more bytes than the slab.
            LinkLost: the link is down.
            LinkLate: others have not made room in time.
        """
        sizes = [align_up(size) for size in described.sizes_bytes]
        size_bytes, ticket, until_s = sum(sizes), object(), time.monotonic() + self._room_s
        if size_bytes > self._ring.size_bytes:
            raise ValueError(
                f"a step of {size_bytes} bytes, {sizes[0]} of latents and {sizes[1:]} of samples; the slab has "
                f"{self._ring.size_bytes}"
            )
        with self._changed:
            self._waiting.append(ticket)
            try:
                while (start := self._place(ticket, size_bytes)) is None:
                    if not self._changed.wait(max(until_s - time.monotonic(), 0)):
                        raise LinkLate(f"no room for a step of {size_bytes} bytes within {self._room_s} s")
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
            offsets = tuple(accumulate(sizes[:-1], initial=start))
            placed = described.model_copy(update={"number": self._next, "offsets": offsets})
            self._next += 1
            step = self._steps[placed.number] = InFlightControlStep(placed, start)
            return step

    def wait(self, step: InFlightControlStep, index: int, timeout_s: float) -> None:
        """Until sample `index` has come.

        Raises:
            LinkLost: the link is down, and it had not come.
            LinkLate: it has not come in time.
            ControlFailed: the instance will not compute it.
            ValueError: the step has been released.
        """

        def settled() -> bool:
            return step.released or index in step.here or step.failed is not None or self.lost

        with self._changed:
            self._changed.wait_for(settled, timeout_s)
            if step.released:
                raise ValueError("the step has been released")
            if index in step.here:
                return
            if step.failed is not None:
                raise ControlFailed(*step.failed)
            self._raise_if_lost()
            raise LinkLate(f"sample {index} of row {step.ask.row} has not come within {timeout_s} s")

    def release(self, step: InFlightControlStep) -> bool:
        """Give back the step's place, at once or when :meth:`cancelled` is called; whether that has to be asked for."""
        with self._changed:
            if step.released:
                return False
            step.released = True
            self._changed.notify_all()
            if self.lost:
                return False
            if not step.under_way:
                self._forget(step)
                return False
            return True

    def expected(self, number: int, index: int) -> InFlightControlStep:
        """The step whose sample `index` comes now; Malformed where none is to."""
        with self._changed:
            step = self._steps.get(number)
            if step is None or not step.under_way or index >= step.count or index in step.here:
                raise MalformedFrame(f"sample {index} of step {number}, which was not to come")
            return step

    def came(self, step: InFlightControlStep, index: int) -> None:
        """Sample `index` lies at its place."""
        with self._changed:
            step.here.add(index)
            self._changed.notify_all()

    def failed(self, number: int, code: str, message: str) -> None:
        """The instance will not compute the rest of a step; Malformed where there is no such step."""
        with self._changed:
            step = self._steps.get(number)
            if step is None or not step.under_way:
                raise MalformedFrame(f"step {number} failed, and was not under way")
            step.failed = (code, message)
            self._changed.notify_all()

    def cancelled(self, number: int) -> None:
        """The instance does not write to the place of a released step any more; Malformed where there is none."""
        with self._changed:
            step = self._steps.get(number)
            if step is None or not step.released:
                raise MalformedFrame(f"step {number} was cancelled, and nobody asked for that")
            self._forget(step)
            self._changed.notify_all()

    def lose(self, reason: str) -> None:
        """The link is down; the first reason is told. No place is given away any more, so what has come stays."""
        with self._changed:
            self._lost = self._lost or reason
            self._changed.notify_all()

    def _place(self, ticket: object, size_bytes: int) -> int | None:
        self._raise_if_lost()
        return self._ring.take(size_bytes) if self._waiting[0] is ticket else None

    def _forget(self, step: InFlightControlStep) -> None:
        del self._steps[step.ask.number]
        self._ring.give_back(step.start)

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise LinkLost(self._lost)
