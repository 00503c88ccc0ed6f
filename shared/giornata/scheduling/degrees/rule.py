"""The rule: all is planned again at every arrival and end of a step; nothing is bound beyond the steps that begin.

1. Free devices over time: all of them, less what steps in flight hold.
2. Rows by deadline, each given the least device-time that meets it (:mod:`giornata.scheduling.degrees.packing`).
3. Rows at a step boundary begin the degree that is planned for now, or wait where a wider one ends sooner.
4. Idle devices widen promised rows, by gain for a device.
5. Then rows that cannot be in time, least work first, in short steps. An old one comes before widening.

Rows without deadline follow in the line's order, and age likewise; template runs come last. TetriServe (section 4)
chooses in rounds instead. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from giornata.scheduling.degrees.candidates import CandidateRow, candidate
from giornata.scheduling.degrees.choosing import DegreeChoice
from giornata.scheduling.degrees.claims import DeviceReservations
from giornata.scheduling.degrees.packing import pack
from giornata.scheduling.degrees.pool import DEGREES, Devices, PoolDecision, PoolRow, SharedStepTime
from giornata.scheduling.degrees.sharing import SharedStep, alone, share
from giornata.scheduling.degrees.spans import FreeDeviceSpans
from giornata.scheduling.degrees.subsets import DeviceRequest, DeviceSubsets, family

AGES_S: Final = 30.0
CAP_S: Final = 0.25
OVERDUE_S: Final = 1e-3
"""When a step ends that should have ended."""


@dataclass(frozen=True, slots=True)
class ReplanningOptions:
    """Parts of the rule, each of which can be turned off."""

    waits: bool = True
    """Whether a row waits for wider devices."""
    widens: bool = True
    """Whether idle devices widen rows."""
    shares: bool = True
    """Whether rows share a step, where it is known how long that takes."""
    ages_s: float = AGES_S
    """How old a row without promise is when it comes before widening; infinite for never."""
    cap_s: float = CAP_S
    """How long a step may take of a row without promise, where one of its degrees allows; infinite for any time."""
    degrees: tuple[int, ...] = DEGREES
    """Those that are used, if the pool and the row have them."""


class ReplanningRule:
    """A :class:`~giornata.scheduling.degrees.pool.PoolRule` that plans all rows anew at every decision.

    Args:
        devices: that the pool has when none is lost.
        switches: which of its parts are on.
        together: how long rows take that share a step; without it none do.
        groups: subsets of the devices that may compute a step together; default the family of so many.

    Raises:
        ValueError: there is no family of groups for so many devices.
    """

    def __init__(
        self,
        devices: int,
        switches: ReplanningOptions | None = None,
        *,
        together: SharedStepTime | None = None,
        groups: Sequence[Devices] | None = None,
    ) -> None:
        self._switches = switches or ReplanningOptions()
        self._together = together if self._switches.shares else None
        used = [group for group in groups or family(devices) if len(group) in self._switches.degrees]
        if not used:
            raise ValueError(f"{devices} devices need one of the degrees 1 to {devices}; received {switches}")
        self._subsets = DeviceSubsets(used)

    def decide(self, now_s: float, rows: Sequence[PoolRow], free: AbstractSet[int]) -> PoolDecision:
        """See :class:`~giornata.scheduling.degrees.pool.PoolRule`."""
        held = {row.devices: max(row.until_s, now_s + OVERDUE_S) for row in rows if row.until_s is not None}
        there = frozenset(free).union(*held)
        degrees = self._subsets.degrees(there)
        found = [each for row in rows if (each := candidate(row, degrees, there)) is not None]
        ready = [each for each in found if each.row.boundary]
        if not ready or not free:
            return PoolDecision()
        spans = FreeDeviceSpans.of(
            now_s, len(there), [(until_s, len(held_)) for held_, until_s in held.items()]
        )
        choice = self._choice(now_s, found, ready, spans, len(free))
        self._take_turns(choice)
        if not choice.degrees and not held:
            choice.begin_any()
        return PoolDecision(tuple(step.begin() for step in self._steps(choice, free)))

    def _choice(
        self,
        now_s: float,
        found: Sequence[CandidateRow],
        ready: Sequence[CandidateRow],
        spans: FreeDeviceSpans,
        free: int,
    ) -> DegreeChoice:
        """What is planned, and nothing chosen yet."""
        switches = self._switches
        hopeless = {each.row.key for each in found if each.hopeless(now_s)}
        wishes = [
            each.wish(now_s)
            for each in found
            if each.row.promised and each.row.left and each.row.key not in hopeless
        ]
        mixed = any(each.row.promised for each in found)
        return DegreeChoice(
            now_s,
            ready,
            pack(wishes, spans),
            DeviceReservations(now_s, [each for each in found if not each.row.boundary]),
            free,
            cap_s=switches.cap_s if mixed else math.inf,
        )

    def _take_turns(self, choice: DegreeChoice) -> None:
        switches = self._switches
        choice.begin_promised(waits=switches.waits)
        if math.isfinite(switches.ages_s):
            choice.begin_aged(switches.ages_s)
        if switches.widens:
            choice.widen_promised()
        choice.begin_late()
        choice.begin_line(widens=switches.widens)
        choice.begin_templates()

    def _steps(self, choice: DegreeChoice, free: AbstractSet[int]) -> list[SharedStep]:
        """The chosen degrees on devices, with rows that share them."""
        chosen = {each.row.key: each for each in choice.ready if each.row.key in choice.degrees}
        seats = [
            DeviceRequest(
                key, choice.degrees[key], each.shape.step_s.keys(), each.row.devices, each.shape.pays
            )
            for key, each in chosen.items()
        ]
        owned = [
            each.row.devices
            for each in choice.ready
            if each.kept and each.shape.pays and each.row.key not in chosen
        ]
        placed = self._subsets.place(seats, free, owned)
        steps = [alone(chosen[key], devices) for key, devices in placed.items()]
        if self._together is None:
            return steps
        return share(choice.now_s, steps, choice.waiting(), self._together, self._switches.cap_s)
