"""Who is alive and what they can do, known from telemetry alone. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from giornata.wire.models import ModelCard
from giornata.wire.workers import ServiceName, ServiceState

SILENCE_S = 2.0
"""An instance not heard of for this long is dead; telemetry comes 2-4 times a second."""


@dataclass(frozen=True)
class LastHeard:
    """An instance's latest state and when it was heard, in seconds of the observer's monotonic clock."""

    state: ServiceState
    seen_s: float


class Fleet:
    """The instances that were heard of lately.

    Example::

        fleet.observe(state, now)       # on every telemetry message
        for state in fleet.expire(now): # now and then: who fell silent
            ...
    """

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._members: dict[str, LastHeard] = {}

    def observe(self, state: ServiceState, now: float) -> None:
        """Take in one telemetry message."""
        self._members[state.instance] = LastHeard(state, now)

    def expire(self, now: float) -> list[ServiceState]:
        """Forget and return the instances that have been silent for too long."""
        silent = [m.state for m in self._members.values() if now - m.seen_s > self._silence_s]
        for state in silent:
            del self._members[state.instance]
        return silent

    def forget(self, instance: str) -> None:
        """Drop an instance that is known to be gone."""
        self._members.pop(instance, None)

    def get(self, instance: str) -> ServiceState | None:
        """The latest state of an instance, if it is alive."""
        member = self._members.get(instance)
        return member.state if member else None

    def all(self) -> list[ServiceState]:
        """Every live instance, ordered by service and name."""
        return sorted((m.state for m in self._members.values()), key=lambda s: (s.service, s.instance))

    def ready(self, service: ServiceName) -> list[ServiceState]:
        """Instances of `service` that take work now, ordered by name."""
        states = (m.state for m in self._members.values())
        able = [s for s in states if s.service is service and s.ready and s.active and not s.draining]
        return sorted(able, key=lambda s: s.instance)

    def missing(self, services: Iterable[ServiceName]) -> list[ServiceName]:
        """Which of `services` have no ready instance."""
        return [service for service in services if not self.ready(service)]

    def cards(self) -> dict[str, ModelCard]:
        """Models that a ready denoiser and a ready prepost serve with the same digest, by name."""
        prepost = {(c.name, c.digest) for s in self.ready(ServiceName.PREPOST) for c in s.models}
        return {
            card.name: card
            for state in self.ready(ServiceName.DENOISER)
            for card in state.models
            if (card.name, card.digest) in prepost
        }
