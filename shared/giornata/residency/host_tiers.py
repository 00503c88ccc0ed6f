"""The host tiers of the LoRA stores, as a listener knows them from snapshots and numbered changes. Pure.

Telemetry may be lost, doubled and late. Changes are applied in the order of their numbers; a change that comes early
waits. Where one is missing, the tier is named by :meth:`HostTiers.gaps`, and a snapshot makes up for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from giornata.wire.loras import HostTier, TierChange, TierSnapshot

KEPT: Final = 4096
"""Changes of one tier that may wait for earlier ones; more are let go, and a snapshot is needed."""


@dataclass
class _HostTierState:
    """One tier of one process."""

    epoch: int
    instance: str
    told: HostTier | None = None
    number: int | None = None
    """Number of the latest change in `held`; None before the first snapshot, unless all changes came."""
    latest: int = 0
    """The latest number that was told."""
    held: dict[str, int] = field(default_factory=dict)
    early: dict[int, TierChange] = field(default_factory=dict)

    def settle(self) -> None:
        """Apply the changes that have come in turn."""
        if self.number is None:
            return
        while change := self.early.pop(self.number + 1, None):
            self.number += 1
            if change.size_bytes is None:
                self.held.pop(change.sha256, None)
            else:
                self.held[change.sha256] = change.size_bytes

    @property
    def complete(self) -> bool:
        return self.number is not None and self.number >= self.latest


class HostTiers:
    """The host tiers of a cluster, by name."""

    def __init__(self) -> None:
        self._known: dict[str, _HostTierState] = {}

    def observe(self, instance: str, told: HostTier) -> None:
        """Take in telemetry of a store. What an earlier process of the tier says late is passed over."""
        known = self._of(told.name, told.epoch, instance)
        if known is None:
            return
        if known.told is None or told.number >= known.told.number:
            known.told = told
        known.latest = max(known.latest, told.number)
        if known.number is None and known.latest == len(told.changes):  # all there ever were
            known.number = 0
        known.early |= {
            change.number: change for change in told.changes if change.number > (known.number or 0)
        }
        while len(known.early) > KEPT:
            del known.early[next(iter(known.early))]
        known.settle()

    def snapshot(self, instance: str, snapshot: TierSnapshot) -> None:
        """Take in a snapshot; one that is older than what is known changes nothing."""
        known = self._of(snapshot.name, snapshot.epoch, instance)
        if known is None:
            return
        known.latest = max(known.latest, snapshot.number)
        if known.number is not None and snapshot.number <= known.number:
            return
        known.number, known.held = snapshot.number, snapshot.held
        known.early = {number: change for number, change in known.early.items() if number > snapshot.number}
        known.settle()

    def forget(self, instance: str) -> None:
        """The store has left, or fell silent: its tier is filled by nobody."""
        for name in [name for name, known in self._known.items() if known.instance == instance]:
            del self._known[name]

    def keep(self, instances: Collection[str]) -> None:
        """Forget the tiers of all other stores."""
        self._known = {name: known for name, known in self._known.items() if known.instance in instances}

    def gaps(self) -> dict[str, str]:
        """Instances to ask for a snapshot, by the name of their tier."""
        return {name: known.instance for name, known in self._known.items() if not known.complete}

    def names(self) -> tuple[str, ...]:
        """All tiers."""
        return tuple(self._known)

    def told(self, name: str) -> HostTier | None:
        """The latest telemetry of a tier."""
        known = self._known.get(name)
        return known.told if known else None

    def held(self, name: str) -> Mapping[str, int]:
        """Bytes of each file of a tier, by digest, as far as it is known."""
        known = self._known.get(name)
        return known.held if known else {}

    def has(self, name: str | None, digest: str) -> bool:
        """Return whether a tier has a file."""
        known = None if name is None else self._known.get(name)
        return known is not None and digest in known.held

    def _of(self, name: str, epoch: int, instance: str) -> _HostTierState | None:
        known = self._known.get(name)
        if known is not None and known.epoch > epoch:
            return None
        if known is None or known.epoch < epoch:
            known = self._known[name] = _HostTierState(epoch, instance)
        return known
