"""The fleet as this gateway hears it: telemetry into :class:`giornata.fleet.Fleet`."""

from __future__ import annotations

import math
import time

from giornata.fleet import Fleet, ListeningClock
from giornata.wire.models import ModelCard
from giornata.wire.workers import FleetView, ServiceName, ServiceState
from giornata_gateway.views.catalog import NEEDED
from giornata_gateway.views.fleet import StepRates, fleet_view


class FleetListener:
    """Live instances and what they serve. :meth:`look` forgets the silent ones.

    The router may be away for `bridged_s` without being missed, since submissions are tried again meanwhile.
    """

    def __init__(self, bridged_s: float) -> None:
        self._fleet = Fleet()
        self.clock = ListeningClock()
        """Counts the time over which telemetry was heard; its owner ticks it."""
        self._bridged_s = bridged_s
        self._led_s = -math.inf
        """When a router last said that it leads."""
        self._rates = StepRates()

    def hear(self, state: ServiceState) -> None:
        """Take in one telemetry message."""
        now = time.monotonic()
        self._fleet.observe(state, self.clock.listened_s)
        self._rates.observe(state, now)
        if state.service is ServiceName.ROUTER and state.ready and state.active:
            self._led_s = now

    def states(self) -> list[ServiceState]:
        """Every live instance."""
        return self._fleet.all()

    def cards(self) -> dict[str, ModelCard]:
        """Served models by name."""
        return self._fleet.cards()

    def view(self) -> FleetView:
        """What the fleet is doing."""
        return fleet_view(self.states(), self._rates, time.monotonic())

    def missing(self) -> list[ServiceName]:
        """Services that an edit needs and that have no ready instance, but not a router that is being replaced."""
        missing = self._fleet.missing(NEEDED)
        bridged = time.monotonic() - self._led_s < self._bridged_s
        return [service for service in missing if not (bridged and service is ServiceName.ROUTER)]

    def has_another(self, gateway: str) -> bool:
        """Whether a gateway other than `gateway` takes requests."""
        return any(state.instance != gateway for state in self._fleet.ready(ServiceName.GATEWAY))

    def look(self) -> None:
        """Forget the instances that are silent."""
        for state in self._fleet.expire(self.clock.listened_s):
            self._rates.forget(state.instance)
