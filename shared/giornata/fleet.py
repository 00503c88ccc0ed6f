"""The fleet: who is alive and what they can do, known from telemetry alone. Pure: time is an argument, in seconds.

Silence is counted in time over which this process listened (:class:`ListeningClock`), so that a process that stood
still or fell behind takes no one for dead.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from typing import Final, Generic, TypeVar

from giornata.wire.models import ModelCard
from giornata.wire.workers import ServiceName, ServiceState

SILENCE_S: Final = 3.0
"""What telemetry, which comes 2-4 times a second, has not mentioned for this long is lost."""

COUNTED_S: Final = 1.0
"""What an interval between two ticks counts at most: less than telemetry may be late by, far less than silence."""

K = TypeVar("K", bound=Hashable)


class ListeningClock:
    """Time over which this process has heard what there was to hear, in seconds. It goes on at its ticks only."""

    def __init__(self) -> None:
        self.listened_s = 0.0
        self._ticked_s: float | None = None

    def tick(self, now: float) -> None:
        """Everything that was sent to this process before `now` has been handled.

        The time since the last tick counts, but not all of a long interval: this process, or the whole machine with
        the senders on it, may have stood still. An overloaded process ticks late each time; its clock goes on more
        slowly, and never stops.
        """
        if self._ticked_s is not None:
            self.listened_s += max(0.0, min(now - self._ticked_s, COUNTED_S))
        self._ticked_s = now

    def pause(self) -> None:
        """Nothing can be heard: the time until the next tick does not count."""
        self._ticked_s = None


class LastSeenTimes(Generic[K]):
    """The times at which telemetry last mentioned several things: instances, rows at workers, questions to prepost."""

    def __init__(self) -> None:
        self._heard_s: dict[K, float] = {}
        self._listens_since_s = -math.inf

    def hear(self, name: K, now: float) -> None:
        """Telemetry mentions `name`, or it begins to be watched."""
        self._heard_s[name] = now

    def forget(self, name: K) -> None:
        """Stop watching `name`, if it is watched."""
        self._heard_s.pop(name, None)

    def listen(self, now: float) -> None:
        """Count silence from now on: nothing could be heard until now."""
        self._listens_since_s = now

    def is_silent(self, name: K, now: float) -> bool:
        """Return whether `name` was not mentioned for longer than :data:`SILENCE_S`."""
        return now - max(self._heard_s[name], self._listens_since_s) > SILENCE_S

    def silent(self, now: float) -> list[K]:
        """Everything that is silent."""
        return [name for name in self._heard_s if self.is_silent(name, now)]

    def heard_s(self, name: K) -> float | None:
        """Return when `name` was mentioned last; None where it is not watched."""
        return self._heard_s.get(name)


class Fleet(LastSeenTimes[str]):
    """The latest telemetry of every live instance."""

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[str, ServiceState] = {}
        self._order: list[tuple[ServiceName, str]] = []
        """Service and name of every instance."""

    def observe(self, state: ServiceState, now: float) -> None:
        """Take in one telemetry message."""
        known = self._states.get(state.instance)
        if known is None or known.service is not state.service:
            self.forget(state.instance)
            insort(self._order, (state.service, state.instance))
        self._states[state.instance] = state
        self.hear(state.instance, now)

    def expire(self, now: float) -> list[ServiceState]:
        """Forget and return the instances that have been silent for too long."""
        silent = [self._states[name] for name in self.silent(now)]
        for state in silent:
            self.forget(state.instance)
        return silent

    def forget(self, name: str) -> None:
        """Drop an instance that is known to be gone."""
        gone = self._states.pop(name, None)
        if gone is not None:
            del self._order[bisect_left(self._order, (gone.service, name))]
        super().forget(name)

    def get(self, instance: str) -> ServiceState | None:
        """The latest state of an instance; None for one that is not alive."""
        return self._states.get(instance)

    def all(self) -> list[ServiceState]:
        """Every live instance, ordered by service and name."""
        return [self._states[name] for _, name in self._order]

    def ready(self, service: ServiceName) -> list[ServiceState]:
        """Instances of `service` that take work now, ordered by name."""
        return [s for s in self.all() if s.service is service and s.ready and s.active and not s.draining]

    def missing(self, services: Iterable[ServiceName]) -> list[ServiceName]:
        """The ones of `services` that have no ready instance."""
        return [service for service in services if not self.ready(service)]

    def cards(self) -> dict[str, ModelCard]:
        """The models that can be asked for, by name; see :func:`served_models`."""
        return served_models(self.all())


def served_models(states: Iterable[ServiceState]) -> dict[str, ModelCard]:
    """Models that a ready denoiser and a ready prepost of `states` serve with the same digest, by name.

    Of step caches a card tells those that all denoisers of the model have.
    """
    ready = [state for state in states if state.ready and state.active and not state.draining]
    prepost = {(c.name, c.digest) for s in ready if s.service is ServiceName.PREPOST for c in s.models}
    denoisers = (state for state in ready if state.service is ServiceName.DENOISER)
    found: dict[str, ModelCard] = {}
    for card in (card for state in denoisers for card in state.models if (card.name, card.digest) in prepost):
        other = found.get(card.name, card)
        of_all = tuple(each for each in card.step_caches if each in other.step_caches)
        alike = card.digest != other.digest or of_all == card.step_caches
        found[card.name] = card if alike else card.model_copy(update={"step_caches": of_all})
    return found
