"""When rows that a move costs something have their own devices again, and whether to wait for that. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from giornata.scheduling.degrees.candidates import CandidateRow
from giornata.scheduling.degrees.frontier import EPS
from giornata.scheduling.degrees.pool import Devices


@dataclass(frozen=True, slots=True)
class _DeviceReservation:
    devices: frozenset[int]
    due_s: float
    step_ends_s: float
    ends_s: float
    """When the last of its steps ends, if it goes on as it is."""


class DeviceReservations:
    """Which rows have which devices, from the steps in flight on."""

    def __init__(self, now_s: float, running: Iterable[CandidateRow]) -> None:
        self._now_s = now_s
        self._claims: list[_DeviceReservation] = []
        for each in running:
            self._add(each, each.row.devices, each.start_s(now_s))

    def keep(self, each: CandidateRow) -> None:
        """Count a row that begins a step on its own devices now."""
        self._add(each, each.row.devices, self._now_s + each.shape.step_s[each.kept], begun=1)

    def free(self, each: CandidateRow) -> bool:
        """Whether a row's own devices are free."""
        own = set(each.row.devices)
        return not any(own & claim.devices for claim in self._claims)

    def awaits(self, each: CandidateRow, degree: int) -> bool:
        """Whether a row should wait for its own devices rather than begin a step of `degree` on others.

        It should where it is in time even so, or ends sooner. Rows of earlier deadlines go before it there.
        """
        if not each.stays or self.free(each):
            return False
        left, shape = each.row.left, each.shape
        ends_s = self._freed_s(each) + left * shape.step_s[each.kept]
        moving_s = self._now_s + shape.moved_s[degree] + (left - 1) * shape.step_s[degree]
        return ends_s <= max(each.row.due_s if each.row.promised else 0.0, moving_s) + EPS

    def _freed_s(self, each: CandidateRow) -> float:
        latest_s = self._now_s
        for device in each.row.devices:
            freed_s = self._now_s
            for claim in self._claims:
                if device in claim.devices:
                    ends_s = claim.ends_s if claim.due_s <= each.row.due_s else claim.step_ends_s
                    freed_s += ends_s - self._now_s
            latest_s = max(latest_s, freed_s)
        return latest_s

    def _add(self, each: CandidateRow, devices: Devices, step_ends_s: float, begun: int = 0) -> None:
        step_s = each.shape.step_s.get(len(devices), each.shape.ladder.fastest_s)
        ends_s = step_ends_s + (each.row.left - begun) * step_s
        self._claims.append(_DeviceReservation(frozenset(devices), each.row.due_s, step_ends_s, ends_s))
