"""Small rows that wait share the steps that begin, where all deadlines still hold and no degree changes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from giornata.scheduling.degrees.candidates import CandidateRow
from giornata.scheduling.degrees.frontier import EPS
from giornata.scheduling.degrees.pool import Devices, SharedStepTime, StepStart


@dataclass(frozen=True, slots=True)
class SharedStep:
    """Rows that are about to begin a step on the same devices."""

    rows: tuple[CandidateRow, ...]
    devices: Devices
    seconds: float

    def begin(self) -> StepStart:
        """As a decision says it."""
        return StepStart(tuple(each.row.key for each in self.rows), self.devices)


def alone(each: CandidateRow, devices: Devices) -> SharedStep:
    """The step of one row."""
    return SharedStep((each,), devices, each.step_on_s(devices))


def share(
    now_s: float,
    steps: Sequence[SharedStep],
    waiting: Iterable[CandidateRow],
    together: SharedStepTime,
    longest_s: float,
) -> list[SharedStep]:
    """`steps` with rows of `waiting` among theirs, each where it adds least device-time.

    A joined step takes at most `longest_s`, and no longer than its rows would take one after the other. A row that
    moving costs something joins on its own devices alone: elsewhere it would be bound to devices that another row is
    bound to, which planning does not see (measured: it loses more deadlines than it saves). Without a deadline it may
    begin so, among others without.
    """
    found = list(steps)
    for each in sorted(waiting, key=lambda each: (each.row.due_s, each.row.place)):
        best: tuple[float, int, SharedStep] | None = None
        for place, step in enumerate(found):
            joined = _joined(now_s, step, each, together, longest_s)
            if joined is not None:
                more = (joined.seconds - step.seconds) * len(step.devices)
                if best is None or more < best[0]:
                    best = more, place, joined
        if best is not None:
            found[best[1]] = best[2]
    return found


def _joined(
    now_s: float, step: SharedStep, each: CandidateRow, together: SharedStepTime, longest_s: float
) -> SharedStep | None:
    degree = len(step.devices)
    if degree not in each.shape.step_s or not _welcome(step, each):
        return None
    rows = (*step.rows, each)
    shared_s = together([one.row for one in rows], degree)
    if shared_s is None:
        return None
    moves_s = sum(one.step_on_s(step.devices) - one.shape.step_s[degree] for one in rows)
    alone_s = sum(one.step_on_s(step.devices) for one in rows)
    if shared_s + moves_s > min(longest_s, alone_s) + EPS:
        return None
    if any(now_s + moves_s + one.row.left * shared_s > one.row.due_s + EPS for one in rows):
        return None
    return SharedStep(rows, step.devices, shared_s + moves_s)


def _welcome(step: SharedStep, each: CandidateRow) -> bool:
    if any(one.row.promised != each.row.promised or one.row.background for one in step.rows):
        return False
    if not each.shape.pays or each.row.devices == step.devices:
        return True
    return not each.row.promised and not each.kept
