"""Which workers can have a job's ControlNets computed: by themselves, or by instances of their service. Pure."""

from __future__ import annotations

from collections.abc import Collection

from giornata.wire.adapters import ControlCard
from giornata.wire.controlnets import ControlBase
from giornata.wire.workers import ServiceState


def fits(card: ControlCard, base: ControlBase) -> bool:
    """Whether a ControlNet is one of such a network, as far as its card tells: its weights tell the rest."""
    return card.kind is base.kind and card.text_channels == base.text_channels


class ControlOffers:
    """The ControlNets of every instance of the service that takes rows."""

    def __init__(self) -> None:
        self._offers: dict[str, frozenset[str]] = {}

    def observe(self, state: ServiceState) -> None:
        """Take in an instance's telemetry."""
        if state.ready and not state.draining:
            self._offers[state.instance] = frozenset(card.digest for card in state.controlnets)
        else:
            self.forget(state.instance)

    def forget(self, instance: str) -> None:
        """It is gone, if it was one."""
        self._offers.pop(instance, None)

    def has(self, digests: Collection[str]) -> bool:
        """Whether one instance has them all: a row's ControlNets are summed where they are computed."""
        return any(offer.issuperset(digests) for offer in self._offers.values())
